"""The whole flow as Beam transforms: plan -> shards -> names -> report."""

from __future__ import annotations

import dataclasses
from typing import Any

import apache_beam as beam
from apache_beam.pvalue import PBegin, PCollection

from transforms.elements import JobSpec, ShardInfo, ShardTask
from transforms.publish import CollectShards, Publish, tasks_to_repeat
from transforms.read import ReadPlan, ReadRecords
from transforms.steps.apply import ApplySteps
from transforms.write import WriteShards

_REPEAT_ROUNDS = 2
"""One settles every range whose start was mistaken; the second is for a mistake that hid another."""


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
        infos = (
            begin
            | "ReadPlan" >> ReadPlan(self.spec.root, self.num_workers)  # ShardTask
            | "ConvertShards" >> ConvertShards(self.spec)  # ShardInfo
        )
        readings = [infos]
        collected = infos | "CollectShards" >> beam.CombineGlobally(CollectShards())  # list[ShardInfo]
        for number in range(1, _REPEAT_ROUNDS + 1):
            readings.append(self._read_again(collected, number))
            together = tuple(readings) | f"Flatten{number}" >> beam.Flatten()
            collected = together | f"CollectShards{number}" >> beam.CombineGlobally(CollectShards())
        return collected | "Publish" >> Publish(self.spec)

    def _read_again(self, collected: PCollection[list[ShardInfo]], number: int) -> PCollection[ShardInfo]:
        """Reads ranges again that began at a false boundary (framing nested in a payload)."""
        return (
            collected
            | f"FindApart{number}" >> beam.FlatMap(tasks_to_repeat, number)  # ShardTask
            | f"SpreadAgain{number}" >> beam.Reshuffle()
            | f"ConvertAgain{number}" >> ConvertShards(self.spec)
        )
