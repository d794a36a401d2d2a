"""Chains that wait: records go through the steps in threads, many at a time, and come out in order. No Beam here.

A batch of large records holds one or two of them, so the records in flight belong to several batches: a batch is
handed on once enough of the batches after it have been read. The last batch of a shard brings out all that is left.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
import weakref
from collections.abc import Callable, Iterator

from transforms.elements import RecordBatch
from transforms.steps.chain import Outcome, StepChain, gather
from transforms.steps.load import Step

MAX_WAITING_BYTES = 64 << 20
"""Records read ahead, and beside them results that wait for one before them, may take this much each. It is what 16
calls with pictures of 4 MB need."""


def max_in_flight(steps: list[Step]) -> int:
    """Returns how many records the steps want to have in flight: the largest `max_in_flight` of their objects."""
    found = [step.attribute("max_in_flight") for step in steps]
    return max([number for number in found if isinstance(number, int)], default=1)


class ConcurrentChain(StepChain):
    """A chain whose steps wait for something else than this process; used like any other by one thread.

    Its steps run in several threads at once. The batches that come out are those of `StepChain`, in the same order,
    but later: those of a shard are complete only when its last batch was put in.

    Args:
        steps: In order.
        max_record_bytes: As for `StepChain`.
        num_threads: How many records are in flight.
    """

    def __init__(self, steps: list[Step], max_record_bytes: int, num_threads: int) -> None:
        super().__init__(steps, max_record_bytes)
        self._num_threads = num_threads
        # The threads know only the plain chain, so that this object can go away, and they with it.
        self._pool = _Pool(StepChain(steps, max_record_bytes).run, num_threads)
        self._end_threads = weakref.finalize(self, self._pool.close)
        self._batches: collections.deque[_Waiting] = collections.deque()
        self._given_up = False

    def apply(self, batch: RecordBatch) -> Iterator[RecordBatch]:
        """Takes a batch, and yields what became of earlier ones; with the last batch of the shard, of all.

        Raises:
            RuntimeError: The consumer stopped in the middle of a shard and then goes on with it.
        """
        if batch.sequence == 0:
            self._give_up()  # What is left of a shard that nobody ended is not part of this one.
            self._given_up = False
        if self._given_up:
            raise RuntimeError(f"shard {batch.task.shard} was given up before batch {batch.sequence}")
        if batch.not_run:
            self._give_up()  # Nothing of the shard counts, so nobody waits for it.
        self._given_up = True
        self._batches.append(_Waiting(batch, self._pool.submit([] if batch.applied else batch.records)))
        try:
            while self._batches and (batch.last or self._is_full()):
                yield from self._finish(self._batches.popleft())
            self._given_up = False
        finally:
            if self._given_up:
                self._give_up()

    def close(self) -> None:
        """Ends the threads; calls that hang are left to themselves."""
        self._give_up()
        self._end_threads()
        super().close()

    def _is_full(self) -> bool:
        """Whether it is time to wait for the oldest batch: those behind it keep all threads busy meanwhile."""
        if not self._batches[0].slots:
            return True  # There is nothing to wait for.
        behind = sum(len(waiting.slots) for waiting in self._batches) - len(self._batches[0].slots)
        num_bytes = sum(waiting.num_bytes for waiting in self._batches)
        # Batches without records count as well: damage comes in such, and there may be any number of them.
        is_long = max(behind, len(self._batches) - 1) >= self._num_threads
        return len(self._batches) > 1 and (is_long or num_bytes > MAX_WAITING_BYTES)

    def _finish(self, waiting: _Waiting) -> Iterator[RecordBatch]:
        if not waiting.slots:
            yield waiting.batch
        else:
            yield from gather(waiting.batch, map(self._pool.take, waiting.slots))

    def _give_up(self) -> None:
        self._batches.clear()
        self._pool.forget()
        self._given_up = True


@dataclasses.dataclass(slots=True)
class _Slot:
    """A record on its way through the chain."""

    record: bytes
    outcome: Outcome | None = None
    error: BaseException | None = None


class _Waiting:
    """A batch whose records are on their way."""

    def __init__(self, batch: RecordBatch, slots: list[_Slot]) -> None:
        self.batch = batch
        self.slots = slots
        self.num_bytes = sum(map(len, batch.records)) + sum(len(letter.payload or b"") for letter in batch.dead)


class _Shard:
    """The records of one shard: what no thread has taken yet, and what is finished but not taken out."""

    def __init__(self) -> None:
        self.queue: collections.deque[_Slot] = collections.deque()
        self.num_started = 0
        self.num_taken = 0
        self.held_bytes = 0

    def may_start(self) -> bool:
        """Whether a record may start: results must not pile up, but the one that is waited for must come."""
        return bool(self.queue) and (self.held_bytes <= MAX_WAITING_BYTES or self.num_started == self.num_taken)


class _Pool:
    """Threads that put records through a function.

    They are daemons, other than those of concurrent.futures: a process must be able to end while a call hangs.
    """

    def __init__(self, run: Callable[[bytes], Outcome], num_threads: int) -> None:
        self._run = run
        self._num_threads = num_threads
        self._changed = threading.Condition()
        self._shard = _Shard()
        self._started = self._closed = False

    def submit(self, records: list[bytes]) -> list[_Slot]:
        slots = [_Slot(record) for record in records]
        with self._changed:
            self._shard.queue.extend(slots)
            self._changed.notify_all()
        if slots and not self._started:
            self._started = True
            for number in range(self._num_threads):
                threading.Thread(target=self._work, name=f"gristmill-call-{number}", daemon=True).start()
        return slots

    def take(self, slot: _Slot) -> Outcome:
        """Waits for the outcome of a record; to be called for each, in the order in which they were submitted."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or slot.outcome is not None or slot.error is not None)
            if slot.error is not None:
                raise slot.error
            if slot.outcome is None:
                raise RuntimeError("the chain was closed")
            self._shard.num_taken += 1
            self._shard.held_bytes -= _num_bytes(slot.outcome)
            self._changed.notify_all()
            outcome, slot.outcome = slot.outcome, None
            return outcome

    def forget(self) -> None:
        """Starts anew; records in flight come to an end that nobody looks at."""
        with self._changed:
            self._shard = _Shard()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._shard = _Shard()
            self._changed.notify_all()

    def _work(self) -> None:
        while (started := self._start()) is not None:
            shard, slot = started
            outcome, error = None, None
            try:
                outcome = self._run(slot.record)
            except BaseException as raised:  # The thread that waits for it raises it.
                error = raised
            with self._changed:
                slot.outcome, slot.error = outcome, error
                shard.held_bytes += _num_bytes(outcome)
                self._changed.notify_all()

    def _start(self) -> tuple[_Shard, _Slot] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._shard.may_start())
            if self._closed:
                return None
            self._shard.num_started += 1
            return self._shard, self._shard.queue.popleft()


def _num_bytes(outcome: Outcome | None) -> int:
    return 0 if outcome is None else sum(map(len, outcome.outputs))
