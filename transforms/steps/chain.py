"""Runs a chain of steps over records and batches. No Beam here."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from transforms.dead_letters import (
    MAX_REASONS,
    OTHER_REASONS,
    BadRecordError,
    Failure,
    JobInterrupted,
    from_failure,
    reason_code,
    to_failure,
)
from transforms.elements import BATCH_MAX_BYTES, BATCH_MAX_RECORDS, DeadLetter, RecordBatch
from transforms.shard_journal import ShardJournal
from transforms.steps import Drop
from transforms.steps.answers import Answers, KnownFailureError, Place
from transforms.steps.load import Step

PASS_ON_SECS = 1.0
"""A batch is cut when its steps take so long, so that others see how far the shard is."""


@dataclasses.dataclass(slots=True)
class Outcome:
    """What became of one source record: outputs and drops, or a failure and nothing else.

    Attributes:
        outputs: What is to be written.
        drops: Dropped values by reason.
        failure: Why it failed, None when it did not.
        logged: (level, text) of what an isolated process has logged since the record before.
    """

    outputs: list[bytes] = dataclasses.field(default_factory=list)
    drops: dict[str, int] = dataclasses.field(default_factory=dict)
    failure: Failure | None = None
    logged: Sequence[tuple[int, str]] = ()


_NO_DROPS: dict[str, int] = {}
"""Shared by all records of which nothing is dropped."""


class StepChain:
    """A chain of steps; source records are atomic. May be used by several threads if its steps may.

    Args:
        steps: In order.
        max_record_bytes: Bound of all outputs of one source record together, which must stand in memory until the
            last of them is known to be good.
        answers: What is kept of what the steps return, None for nothing.
    """

    def __init__(self, steps: list[Step], max_record_bytes: int, answers: Answers | None = None) -> None:
        self.steps = steps
        self.answers = answers or Answers([], [])
        self._calls = [step.call for step in steps]
        self._max_record_bytes = max_record_bytes

    def apply(self, batch: RecordBatch, journal: ShardJournal | None = None) -> Iterator[RecordBatch]:
        """Yields the batch with every record put through the chain, cut where it grows.

        The yielded batches together carry the books of the batch once; their sequence numbers are the caller's.

        Args:
            batch: The batch.
            journal: The journal of its shard, None where nothing is to be kept.
        """
        if not self.steps or not batch.records or batch.applied:
            yield batch
            return
        yield from gather(batch, map(self.run, batch.records, self.places(batch, journal)))

    def places(self, batch: RecordBatch, journal: ShardJournal | None) -> Iterator[Place | None]:
        """Yields for each record of a batch where it comes from; None where none of its answers is kept."""
        if journal is None or batch.source is None or len(batch.positions) != len(batch.records):
            return itertools.repeat(None, len(batch.records))
        return self.answers.places(batch.source.index, batch.positions, journal)

    def run(self, record: bytes, place: Place | None = None) -> Outcome:
        """Puts one source record through the chain.

        Args:
            record: The record.
            place: Where it comes from, if answers of its steps are kept.

        Raises:
            JobInterrupted: Somebody stops the job.
        """
        answers = None if place is None else self.answers.about(place, record)
        walk = _Walk(self._calls if answers is None else answers.calls, self._max_record_bytes)
        try:
            walk.go(record, 0)
        except JobInterrupted:
            raise
        except KnownFailureError as known:
            return Outcome([], _NO_DROPS, known.failure)
        except BaseException as error:  # Any class at all costs this record alone, SystemExit included.
            failure = self.describe(error, walk.at)
            if answers is not None:
                answers.failed(error, failure)
            return Outcome([], _NO_DROPS, failure)
        return Outcome(walk.outputs, walk.drops)

    def describe(self, error: BaseException, at: int) -> Failure:
        """Puts into words what a step raised.

        Args:
            error: Whatever it raised.
            at: Number of the step.
        """
        return to_failure(error, self.steps[at].name)

    def close(self) -> None:
        """Ends what steps hold open: calls the `close` of those that have one."""
        for step in self.steps:
            close = step.attribute("close")
            if callable(close):
                close()


class _Walk:
    """The way of one source record through the steps, depth first."""

    __slots__ = ("_calls", "_max_bytes", "_num_bytes", "at", "drops", "outputs")

    def __init__(self, calls: list[Any], max_bytes: int) -> None:
        self._calls = calls
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self.at = 0  # The step that is running, for the dead letter.
        self.outputs: list[bytes] = []
        self.drops = _NO_DROPS

    def go(self, value: Any, first: int) -> None:
        """Puts one value through the steps from `first` on."""
        for number in range(first, len(self._calls)):
            self.at = number
            value = self._calls[number](value)
            if type(value) is bytes:  # Nearly always, so it is asked first.
                continue
            if value is None or isinstance(value, Drop):
                self._drop(_drop_reason(value))
                return
            if isinstance(value, Iterator):
                self._fan_out(value, number)
                return
        if not isinstance(value, bytes):
            raise BadRecordError("not_bytes", f"the last step must return bytes, got {type(value).__name__}")
        if type(value) is not bytes:
            value = bytes(value)  # Such as numpy.bytes_; what travels on is plain.
        self._num_bytes += len(value)
        if self._num_bytes > self._max_bytes:
            limit = f"source.max_record_bytes allows {self._max_bytes} bytes for all outputs of a record"
            raise BadRecordError("output_too_large", limit)
        self.outputs.append(value)

    def _fan_out(self, values: Iterator[Any], number: int) -> None:
        """Goes on with every item of an iterator; an item counts as if the step had returned it."""
        count = 0
        for value in values:
            count += 1
            if value is None or isinstance(value, Drop):
                self._drop(_drop_reason(value))
            else:
                self.go(value, number + 1)
            self.at = number
        if not count:
            self._drop("no_outputs")

    def _drop(self, reason: str) -> None:
        if self.drops is _NO_DROPS:
            self.drops = {}
        if len(self.drops) >= MAX_REASONS and reason not in self.drops:
            reason = OTHER_REASONS
        self.drops[reason] = self.drops.get(reason, 0) + 1


def _drop_reason(value: Drop | None) -> str:
    return "returned_none" if value is None else reason_code(value.reason)


def gather(batch: RecordBatch, outcomes: Iterable[Outcome]) -> Iterator[RecordBatch]:
    """Yields what became of a batch, cut where it grows.

    Args:
        batch: The batch as it was read.
        outcomes: One for each of its records, in order.
    """
    out = _continued(batch)
    out_bytes = 0
    left, first = batch.num_bytes, 0
    pass_on_at = time.monotonic() + PASS_ON_SECS
    for number, outcome in enumerate(outcomes):
        out.records_read += 1
        if outcome.failure is not None:
            out.dead.append(_to_letter(batch, number, outcome.failure))
            continue
        out.records_added += len(outcome.outputs) - 1
        if outcome.drops:
            out.records_added += sum(outcome.drops.values())
            for reason, count in outcome.drops.items():
                out.dropped[reason] = out.dropped.get(reason, 0) + count
        out.records += outcome.outputs
        out_bytes += sum(map(len, outcome.outputs))
        is_full = out_bytes > BATCH_MAX_BYTES or len(out.records) > BATCH_MAX_RECORDS
        # Whoever adds up the shard decides which reasons count by themselves, so a batch never holds more of them.
        if is_full or len(out.dropped) > MAX_REASONS or time.monotonic() > pass_on_at:
            out.num_bytes = min(left, sum(map(len, batch.records[first : number + 1])))
            left, first = left - out.num_bytes, number + 1
            yield out
            out, out_bytes = _continued(batch), 0
            pass_on_at = time.monotonic() + PASS_ON_SECS
    out.dead += batch.dead
    out.records_read += len(batch.dead)
    out.num_bytes, out.span = left, batch.span
    yield out


def _to_letter(batch: RecordBatch, number: int, failure: Failure) -> DeadLetter:
    record = batch.records[number]
    if batch.origins is not None:
        origin = batch.origins[number]
        fields = dataclasses.asdict(failure)
        return dataclasses.replace(origin, **fields, payload=record, attempts=origin.attempts + 1)
    assert batch.source is not None
    return from_failure(failure, batch.source.name, batch.positions[number], record)


def _continued(batch: RecordBatch) -> RecordBatch:
    return dataclasses.replace(
        batch,
        records=[],
        positions=[],
        dead=[],
        records_read=0,
        num_bytes=0,
        span=None,
        dropped={},
        records_added=0,
        origins=None,
    )
