"""ApplySteps: the chain of steps as a PTransform."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator

import apache_beam as beam
from apache_beam.metrics import Metrics
from apache_beam.pvalue import PCollection

from transforms.elements import JobSpec, RecordBatch
from transforms.generations import open_job_store
from transforms.steps.job_chain import load_chain


@dataclasses.dataclass
class ApplySteps(beam.PTransform):
    """Puts every record through the chain of steps.

    Input and output: PCollection[RecordBatch]. A record that a step fails on becomes a dead letter of its batch.
    Batches of a shard keep their order; a batch that grows is cut, so the output numbers them anew. What came in with
    one batch may come out with a later one of its shard.

    Attributes:
        spec: The job, for the steps.
    """

    spec: JobSpec

    def expand(self, batches: PCollection[RecordBatch]) -> PCollection[RecordBatch]:
        return batches | "Apply" >> beam.ParDo(_ApplyStepsFn(self.spec)).with_output_types(RecordBatch)


class _ApplyStepsFn(beam.DoFn):
    def __init__(self, spec: JobSpec) -> None:
        self._spec = spec

    def setup(self) -> None:
        self._chain = load_chain(self._spec, open_job_store(self._spec))
        name = "+".join(str(step.get("use", step.get("call"))) for step in self._spec.steps) or "none"
        self._counters = {key: Metrics.counter(name, key) for key in ("read", "written", "added", "dropped", "dead")}
        self._millis = Metrics.counter(name, "milliseconds")
        self._sequence = 0

    def process(self, batch: RecordBatch) -> Iterator[RecordBatch]:
        if batch.sequence == 0:
            self._sequence = 0
        started = time.perf_counter()
        for out in self._chain.apply(batch):
            if not out.applied:  # Those were counted when they were.
                self._count(out)
            out.sequence = self._sequence
            self._sequence += 1
            self._millis.inc(int(1000 * (time.perf_counter() - started)))
            yield out
            started = time.perf_counter()

    def teardown(self) -> None:
        if hasattr(self, "_chain"):
            self._chain.close()

    def _count(self, out: RecordBatch) -> None:
        counters = self._counters
        counters["read"].inc(out.records_read)
        counters["written"].inc(len(out.records))
        if self._spec.steps:
            counters["added"].inc(out.records_added)
            counters["dropped"].inc(sum(out.dropped.values()))
        counters["dead"].inc(len(out.dead))
