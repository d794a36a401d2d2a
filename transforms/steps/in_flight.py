"""Chains that wait: records go through the steps in threads, many at a time, and come out in order. No Beam here.

A batch of large records holds one or two of them, so the records in flight belong to several batches: a batch is
handed on once enough of the batches after it have been read. The last batch of a shard brings out all that is left.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator

from transforms.elements import RecordBatch
from transforms.shard_journal import ShardJournal
from transforms.steps.answers import Answers, Place
from transforms.steps.aside import giving_way
from transforms.steps.chain import Outcome, StepChain, gather
from transforms.steps.load import Step

MAX_WAITING_BYTES = 64 << 20
"""Records read ahead, and beside them results that wait for one before them, may take this much each. It is what 16
calls with pictures of 4 MB need, and 50,000 short texts that wait behind one."""

SLOT_BYTES = 1000
"""What a record in flight costs beside its bytes, its result included, so that short ones are not without number."""

MAX_ASIDE = 512
"""Records that wait for a retry, each with a thread that sleeps and takes about 22 KB. At 5 % failures and 600 calls a
second 30 wait at a time for one second each; beyond the bound a record that waits keeps its place."""


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
        answers: As for `StepChain`.
    """

    def __init__(
        self, steps: list[Step], max_record_bytes: int, num_threads: int, answers: Answers | None = None
    ) -> None:
        super().__init__(steps, max_record_bytes, answers)
        self._num_threads = num_threads
        # The threads know only the plain chain, so that this object can go away, and they with it.
        self._pool = _Pool(StepChain(steps, max_record_bytes, answers).run, num_threads)
        self._end_threads = weakref.finalize(self, self._pool.close)
        self._batches: collections.deque[_Waiting] = collections.deque()
        self._num_records = self._num_bytes = 0  # Of these batches.
        self._given_up = False

    def apply(self, batch: RecordBatch, journal: ShardJournal | None = None) -> Iterator[RecordBatch]:
        """Takes a batch, and yields what became of earlier ones; with the last batch of the shard, of all.

        Args:
            batch: The batch.
            journal: The journal of its shard, None where nothing is to be kept.

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
        records = [] if batch.applied else batch.records
        places = self.places(batch, journal) if records else ()
        self._append(_Waiting(batch, self._pool.submit(records, places)))
        try:
            while self._batches and (batch.last or self._is_full()):
                yield from self._finish(self._pop())
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
        """Whether it is time to wait for the oldest batch; if not, the next one is to be read."""
        oldest = self._batches[0]
        if not oldest.slots:
            return True  # There is nothing to wait for.
        if len(self._batches) > 1 and self._num_bytes > MAX_WAITING_BYTES:
            return True
        behind = self._num_records - len(oldest.slots)
        # Batches without records count as well: damage comes in such, and there may be any number of them.
        if max(behind, len(self._batches) - 1) < self._num_threads:
            return False
        return self._pool.wait_for(oldest.slots)

    def _append(self, waiting: _Waiting) -> None:
        self._batches.append(waiting)
        self._num_records += len(waiting.slots)
        self._num_bytes += waiting.num_bytes

    def _pop(self) -> _Waiting:
        waiting = self._batches.popleft()
        self._num_records -= len(waiting.slots)
        self._num_bytes -= waiting.num_bytes
        return waiting

    def _finish(self, waiting: _Waiting) -> Iterator[RecordBatch]:
        if not waiting.slots:
            yield waiting.batch
        else:
            yield from gather(waiting.batch, map(self._pool.take, waiting.slots))

    def _give_up(self) -> None:
        self._batches.clear()
        self._num_records = self._num_bytes = 0
        self._pool.forget()
        self._given_up = True


@dataclasses.dataclass(slots=True)
class _Slot:
    """A record on its way through the chain."""

    record: bytes
    place: Place | None = None
    outcome: Outcome | None = None
    error: BaseException | None = None
    is_finished: bool = False


class _Waiting:
    """A batch whose records are on their way."""

    def __init__(self, batch: RecordBatch, slots: list[_Slot]) -> None:
        self.batch = batch
        self.slots = slots
        payloads = sum(len(letter.payload or b"") for letter in batch.dead)
        count = len(batch.records) + len(batch.dead) + 1
        self.num_bytes = sum(map(len, batch.records)) + payloads + SLOT_BYTES * count


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

    They are daemons, other than those of concurrent.futures: a process must be able to end while a call hangs. A
    record that steps aside keeps its thread, which sleeps; another thread takes its place among those that run.
    """

    def __init__(self, run: Callable[[bytes, Place | None], Outcome], num_threads: int) -> None:
        self._run = run
        self._num_threads = num_threads
        lock = threading.Lock()
        # One for each kind of waiting, so that nobody is woken in vain.
        self._to_start, self._to_return, self._finished = (threading.Condition(lock) for _ in range(3))
        self._lock = lock
        self._shard = _Shard()
        self._closed = False
        self._threads = self._idle = self._running = self._returning = 0
        self._shard_of: dict[int, _Shard] = {}  # By thread.

    def submit(self, records: list[bytes], places: Iterable[Place | None]) -> list[_Slot]:
        slots = [_Slot(record, place) for record, place in zip(records, places, strict=True)]
        with self._lock:
            self._shard.queue.extend(slots)
            while slots and self._threads < self._num_threads and self._start_thread():
                pass
            self._to_start.notify(len(slots))
        return slots

    def wait_for(self, slots: list[_Slot]) -> bool:
        """Waits until some records are finished, or the threads run out of work; returns whether they are finished."""
        number = 0

        def are_finished() -> bool:
            nonlocal number
            while number < len(slots) and slots[number].is_finished:
                number += 1
            return number == len(slots)

        with self._lock:
            self._finished.wait_for(lambda: self._closed or are_finished() or self._wants_more())
            return self._closed or are_finished()

    def take(self, slot: _Slot) -> Outcome:
        """Waits for the outcome of a record; to be called for each, in the order in which they were submitted."""
        with self._lock:
            self._finished.wait_for(lambda: self._closed or slot.is_finished)
            if slot.error is not None:
                raise slot.error
            if slot.outcome is None:
                raise RuntimeError("the chain was closed")
            self._shard.num_taken += 1
            self._shard.held_bytes -= _num_bytes(slot.outcome)
            self._to_start.notify()  # It wakes the next one, if there is room for more than one.
            outcome, slot.outcome = slot.outcome, None
            return outcome

    def forget(self) -> None:
        """Starts anew; records in flight come to an end that nobody looks at."""
        with self._lock:
            self._shard = _Shard()
            self._to_return.notify_all()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._shard = _Shard()
            for waiting in (self._to_start, self._to_return, self._finished):
                waiting.notify_all()

    def step_aside(self) -> bool:
        """See `aside.Host`."""
        with self._lock:
            if not self._idle and not self._start_thread():
                return False
            self._running -= 1
            self._let_in()
            return True

    def come_back(self) -> None:
        """See `aside.Host`."""
        shard = self._shard_of[threading.get_ident()]
        with self._lock:
            self._returning += 1
            self._to_return.wait_for(
                lambda: self._closed or shard is not self._shard or self._running < self._num_threads
            )
            self._returning -= 1
            self._running += 1
            if self._closed or shard is not self._shard:
                raise RuntimeError("nobody waits for this record any more")

    def _wants_more(self) -> bool:
        """Whether records that are read now would run before those that run are finished."""
        return len(self._shard.queue) < self._num_threads and self._shard.held_bytes <= MAX_WAITING_BYTES

    def _start_thread(self) -> bool:
        if self._threads >= self._num_threads + MAX_ASIDE:
            return False
        thread = threading.Thread(target=self._work, name=f"gristmill-call-{self._threads}", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # The machine has no more of them; those that are there must do.
            if not self._threads:
                raise
            return False
        self._threads += 1
        return True

    def _work(self) -> None:
        with giving_way(self):
            while (started := self._start()) is not None:
                shard, slot = started
                outcome, error = None, None
                try:
                    outcome = self._run(slot.record, slot.place)
                except BaseException as raised:  # The thread that waits for it raises it.
                    error = raised
                self._finish(shard, slot, outcome, error)

    def _start(self) -> tuple[_Shard, _Slot] | None:
        """Waits for a record to run; None when this thread is to end."""
        with self._lock:
            if self._idle < self._num_threads:  # Else enough wait for work already: others have stepped aside before.
                self._idle += 1
                self._to_start.wait_for(lambda: self._closed or self._may_start())
                self._idle -= 1
                if not self._closed:
                    self._running += 1
                    self._shard.num_started += 1
                    self._shard_of[threading.get_ident()] = self._shard
                    slot = self._shard.queue.popleft()
                    if self._may_start():
                        self._to_start.notify()
                    if self._wants_more():
                        self._finished.notify()
                    return self._shard, slot
            self._threads -= 1
            self._shard_of.pop(threading.get_ident(), None)
            return None

    def _may_start(self) -> bool:
        """Whether a record may start; those that come back go first."""
        return self._running + self._returning < self._num_threads and self._shard.may_start()

    def _finish(self, shard: _Shard, slot: _Slot, outcome: Outcome | None, error: BaseException | None) -> None:
        with self._lock:
            slot.outcome, slot.error, slot.is_finished = outcome, error, True
            shard.held_bytes += _num_bytes(outcome)
            self._running -= 1
            self._finished.notify()
            self._let_in()

    def _let_in(self) -> None:
        """Gives a place that has become free to one that comes back, or else to the next record."""
        if self._returning:
            self._to_return.notify()
        else:
            self._to_start.notify()


def _num_bytes(outcome: Outcome | None) -> int:
    return 0 if outcome is None else sum(map(len, outcome.outputs))
