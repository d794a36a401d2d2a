"""The chain of a job: runs each batch where the options of its steps want it to run. No Beam here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from transforms.elements import JobSpec, RecordBatch
from transforms.journal import JobJournals, OpenJournal
from transforms.steps.answers import Answers, may_keep
from transforms.steps.chain import StepChain
from transforms.steps.fit import fit_steps
from transforms.steps.in_flight import ConcurrentChain, max_in_flight
from transforms.steps.isolate import IsolatedChain
from transforms.steps.load import load_steps, must_isolate
from transforms.steps.surroundings import Surroundings
from transforms.store import Store


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
        store: The output directory as the job sees it, where the journals of the shards are; None to keep none.

    Raises:
        StepError: A step does not exist, or does not take its parameters.
    """

    def __init__(self, spec: JobSpec, store: Store | None = None) -> None:
        self._spec = spec
        self._isolated = IsolatedChain(spec)
        self._around = Surroundings()
        self._has_others = any("call" in step for step in spec.steps)  # Ours do no harm.
        with self._around.of_steps():
            is_isolated = must_isolate(spec.steps, spec.import_paths)
            self._usual = None if is_isolated else usual_chain(spec)
        keeps = store is not None and any(map(may_keep, spec.steps))
        self._journals = JobJournals(store, spec) if store is not None and keeps else None
        self._journal: OpenJournal | None = None

    def apply(self, batch: RecordBatch) -> Iterator[RecordBatch]:
        """Yields the batch with every record put through the chain, cut where it grows."""
        if not self._spec.steps:
            yield batch
            return
        if batch.sequence == 0:
            self._open_journal(batch)
        for out in self._run(batch):
            if out.last and self._journal is not None:
                self._journal.close()
                out.journalled = self._journal.stands
            yield out

    def close(self) -> None:
        """Ends what the chain has started."""
        with self._around.of_steps():
            if self._usual is not None:
                self._usual.close()
        self._isolated.close()
        self._close_journal()

    def _run(self, batch: RecordBatch) -> Iterator[RecordBatch]:
        journal, usual = self._journal, self._usual
        if usual is None or batch.isolated:
            return self._isolated.apply(batch, None if journal is None else journal.shared())
        own = None if journal is None else journal.own()
        if not self._has_others:
            return usual.apply(batch, own)
        return self._around.guard(lambda: usual.apply(batch, own))

    def _open_journal(self, batch: RecordBatch) -> None:
        """Opens the journal of the shard that begins with a batch."""
        self._close_journal()
        if self._journals is not None and not batch.last:  # Otherwise there is nothing in it, or it is done already.
            surely_used = self._usual is None or self._usual.answers.keep
            self._journal = self._journals.open(batch.task, batch.try_number, surely_used=surely_used)

    def _close_journal(self) -> None:
        if self._journal is not None:
            self._journal.close()
            self._journal = None


def usual_chain(spec: JobSpec) -> StepChain:
    """Returns what runs the batches of shards on which no worker has died: record by record, or many in flight."""
    steps = fit_steps(load_steps(spec.steps, spec.import_paths), spec)
    answers = Answers(steps, spec.steps)
    if (in_flight := max_in_flight(steps)) > 1:
        return ConcurrentChain(steps, spec.max_record_bytes, in_flight, answers)
    return StepChain(steps, spec.max_record_bytes, answers)


def load_chain(spec: JobSpec, store: Store | None = None) -> Chain:
    """Returns the chain of a job's steps; close it when done.

    Args:
        spec: The job.
        store: See `JobChain`.
    """
    return JobChain(spec, store)
