"""The whole flow as Beam transforms: plan -> shards -> names -> report.

Work is spread by grouping under keys that the elements bring along, not by `Reshuffle`: the keys are in the order in
which the plan wants them handed out, and the graph stays small enough to start in under a second.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import apache_beam as beam
from apache_beam.pvalue import PBegin, PCollection

from transforms.elements import JobSpec, ShardInfo, ShardTask
from transforms.generations import open_job_store
from transforms.job_lock import keep_lock
from transforms.pieces import PIECES_NAME
from transforms.publish import CollectShards, Publish
from transforms.read import ReadPlan, ReadRecords
from transforms.repeat import find_apart, repeat_shard
from transforms.steps.apply import ApplySteps
from transforms.steps.job_chain import load_chain
from transforms.write import WriteShards


@dataclasses.dataclass
class ConvertShards(beam.PTransform):
    """Reads, cleans and commits planned shards; one shard is the work of one bundle.

    Input: PCollection[ShardTask]. Output: PCollection[ShardInfo], metadata only.

    Attributes:
        spec: The job.
    """

    spec: JobSpec

    def expand(self, tasks: PCollection[ShardTask]) -> PCollection[ShardInfo]:
        return (
            tasks
            | "ReadRecords" >> ReadRecords(self.spec)  # RecordBatch (bytes)
            | "ApplySteps" >> ApplySteps(self.spec)  # RecordBatch (bytes)
            | "WriteShards" >> WriteShards(self.spec)  # ShardInfo
        )


@dataclasses.dataclass
class ConvertPieces(beam.PTransform):
    """Reads, cleans and commits the pieces of shards whose steps are slow, so that the shards are made of them.

    Output: PCollection[int], their number as one element once all are done.

    Attributes:
        spec: The job; its pieces stand in the output directory.
        num_workers: See `ReadPlan`.
    """

    spec: JobSpec
    num_workers: int = 1

    def expand(self, begin: PBegin) -> PCollection[int]:
        return (
            begin
            | "ReadPlan" >> ReadPlan(self.spec, self.num_workers, PIECES_NAME)  # ShardTask
            | "ConvertShards" >> ConvertShards(self.spec)  # ShardInfo
            | "Count" >> beam.CombineGlobally(beam.combiners.CountCombineFn()).without_defaults()
        )


@dataclasses.dataclass
class RepeatShards(beam.PTransform):
    """Reads shards again whose range began at a false boundary (framing nested in a payload).

    Input: PCollection[list[ShardInfo]], the one list of all shards. Output: PCollection[ShardInfo], the shards that
    were read again; nearly always none.

    Attributes:
        spec: The job.
    """

    spec: JobSpec

    def expand(self, collected: PCollection[list[ShardInfo]]) -> PCollection[ShardInfo]:
        return (
            collected
            | "FindApart" >> beam.FlatMap(_keyed_tasks)  # (shard, ShardTask)
            | "Spread" >> beam.GroupByKey()
            | "Repeat" >> beam.ParDo(_RepeatShardFn(self.spec))  # ShardInfo
        )


def _keyed_tasks(infos: list[ShardInfo]) -> Iterator[tuple[int, ShardTask]]:
    return ((task.shard, task) for task in find_apart(infos, 1))


class _RepeatShardFn(beam.DoFn):
    def __init__(self, spec: JobSpec) -> None:
        self._spec = spec

    def setup(self) -> None:
        self._store = open_job_store(self._spec)
        self._chain = load_chain(self._spec, self._store)

    def process(self, element: tuple[int, Iterable[ShardTask]]) -> Iterator[ShardInfo]:
        for task in element[1]:
            with keep_lock(self._store, self._spec.lock_token):
                yield repeat_shard(self._store, self._spec, self._chain, task)

    def teardown(self) -> None:
        if hasattr(self, "_chain"):
            self._chain.close()


@dataclasses.dataclass
class ConvertCorpus(beam.PTransform):
    """Converts a planned corpus and publishes it.

    Output: PCollection[dict], the report. The plan must stand in the output directory.

    Attributes:
        spec: The job.
        num_workers: See `ReadPlan`.
    """

    spec: JobSpec
    num_workers: int = 1

    def expand(self, begin: PBegin) -> PCollection[dict[str, Any]]:
        start: PBegin | PCollection[int] = begin
        if self.spec.num_pieces:
            start = begin | "ConvertPieces" >> ConvertPieces(self.spec, self.num_workers)
        infos = (
            start
            | "ReadPlan" >> ReadPlan(self.spec, self.num_workers)  # ShardTask
            | "ConvertShards" >> ConvertShards(self.spec)  # ShardInfo
        )
        repeated = (
            infos
            | "CollectShards" >> beam.CombineGlobally(CollectShards()).without_defaults()  # list[ShardInfo]
            | "RepeatShards" >> RepeatShards(self.spec)  # ShardInfo
        )
        return (
            (infos, repeated)
            | "Together" >> beam.Flatten()
            | "CollectAll" >> beam.CombineGlobally(CollectShards()).without_defaults()  # list[ShardInfo]
            | "Publish" >> Publish(self.spec)  # the report
        )
