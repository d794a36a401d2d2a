"""The chain of a job: runs each batch where the options of its steps want it to run. No Beam here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from transforms.elements import JobSpec, RecordBatch
from transforms.steps.chain import StepChain
from transforms.steps.fit import fit_steps
from transforms.steps.in_flight import ConcurrentChain, max_in_flight
from transforms.steps.isolate import IsolatedChain
from transforms.steps.load import load_steps, must_isolate
from transforms.steps.surroundings import Surroundings


class Chain(Protocol):
    """What runs batches through steps."""

    def apply(self, batch: RecordBatch) -> Iterator[RecordBatch]:
        """Yields the batch with every record put through the chain, cut where it grows."""
        ...

    def close(self) -> None:
        """Ends what the chain has started."""
        ...


class JobChain:
    """The chain of a job, which picks for each batch where it runs.

    Args:
        spec: The job.

    Raises:
        StepError: A step does not exist, or does not take its parameters.
    """

    def __init__(self, spec: JobSpec) -> None:
        self._spec = spec
        self._isolated = IsolatedChain(spec)
        self._around = Surroundings()
        self._has_others = any("call" in step for step in spec.steps)  # Ours do no harm.
        with self._around.of_steps():
            is_isolated = must_isolate(spec.steps, spec.import_paths)
            self._usual: Chain = self._isolated if is_isolated else usual_chain(spec)

    def apply(self, batch: RecordBatch) -> Iterator[RecordBatch]:
        """Yields the batch with every record put through the chain, cut where it grows."""
        if not self._spec.steps:
            yield batch
            return
        chain = self._isolated if batch.isolated else self._usual
        if chain is self._isolated or not self._has_others:
            yield from chain.apply(batch)
        else:
            yield from self._around.guard(lambda: chain.apply(batch))

    def close(self) -> None:
        """Ends what the chain has started."""
        with self._around.of_steps():
            self._usual.close()
        self._isolated.close()


def usual_chain(spec: JobSpec) -> StepChain:
    """Returns what runs the batches of shards on which no worker has died: record by record, or many in flight."""
    steps = fit_steps(load_steps(spec.steps, spec.import_paths), spec)
    if (in_flight := max_in_flight(steps)) > 1:
        return ConcurrentChain(steps, spec.max_record_bytes, in_flight)
    return StepChain(steps, spec.max_record_bytes)


def load_chain(spec: JobSpec) -> Chain:
    """Returns the chain of a job's steps; close it when done."""
    return JobChain(spec)
