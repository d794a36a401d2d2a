"""ReadPlan and ReadRecords: from the plan to record batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import apache_beam as beam
from apache_beam.pvalue import PBegin, PCollection

from transforms.elements import JobSpec, RecordBatch, ShardTask
from transforms.generations import open_job_store
from transforms.job_lock import keep_lock
from transforms.plan import spread
from transforms.plan_file import PLAN_NAME, read_task, read_tasks
from transforms.shard_reader import read_shard


@dataclasses.dataclass
class ReadPlan(beam.PTransform):
    """Reads the plan and spreads its shards over the workers.

    Input: the beginning of the pipeline, or a PCollection of one element, whatever it is, to wait for. Output:
    PCollection[ShardTask], each planned shard once. Only (shard, offset in the plan) is shuffled.

    Attributes:
        spec: The job.
        num_workers: Workers of a runner that deals elements out in turn; 1 for runners that balance by themselves.
        name: Name of the plan; that of the pieces has its form, and is spread piece by piece.
    """

    spec: JobSpec
    num_workers: int = 1
    name: str = PLAN_NAME

    def expand(self, begin: PBegin | PCollection[Any]) -> PCollection[ShardTask]:
        start = begin | "Start" >> beam.Impulse() if isinstance(begin, PBegin) else begin
        return (
            start
            | "ListShards"
            >> beam.FlatMap(_list_for, self.spec, self.num_workers, self.name)  # (turn, (shard, offset in the plan))
            | "Spread" >> beam.GroupByKey()
            | "LoadTask" >> beam.ParDo(_LoadTaskFn(self.spec, self.name))  # ShardTask
        )


def _list_for(_: Any, spec: JobSpec, num_workers: int, name: str) -> Iterator[tuple[int, tuple[int, int]]]:
    return enumerate(list_shards(spec, num_workers, name))


def list_shards(spec: JobSpec, num_workers: int, name: str = PLAN_NAME) -> Iterator[tuple[int, int]]:
    """Yields (shard, offset of its plan line) in the order to hand out; (-1, 0) stands for nothing."""
    with open_job_store(spec).open(name) as plan:
        lines = [(offset, task.planned_bytes) for offset, task in read_tasks(plan)]
    for shard in spread([planned_bytes for _, planned_bytes in lines], num_workers):
        yield (shard, lines[shard][0] if shard >= 0 else 0)


class _LoadTaskFn(beam.DoFn):
    def __init__(self, spec: JobSpec, name: str) -> None:
        self._spec = spec
        self._name = name

    def setup(self) -> None:
        self._store = open_job_store(self._spec)

    def process(self, element: tuple[int, Iterable[tuple[int, int]]]) -> Iterator[ShardTask]:
        for shard, offset in element[1]:
            if shard >= 0:
                with self._store.open(self._name) as plan:
                    yield read_task(plan, offset)


@dataclasses.dataclass
class ReadRecords(beam.PTransform):
    """Reads planned shards.

    Input: PCollection[ShardTask]. Output: PCollection[RecordBatch]; the batches of a shard follow one another, the
    last one marked. Damage arrives as dead letters in the batches.

    Attributes:
        spec: The job.
    """

    spec: JobSpec

    def expand(self, tasks: PCollection[ShardTask]) -> PCollection[RecordBatch]:
        return tasks | "Read" >> beam.ParDo(_ReadRecordsFn(self.spec)).with_output_types(RecordBatch)


class _ReadRecordsFn(beam.DoFn):
    def __init__(self, spec: JobSpec) -> None:
        self._spec = spec

    def setup(self) -> None:
        self._store = open_job_store(self._spec)

    def process(self, task: ShardTask) -> Iterator[RecordBatch]:
        with keep_lock(self._store, self._spec.lock_token):  # Until the last batch is written: the bundle is fused.
            yield from read_shard(self._store, self._spec, task)
