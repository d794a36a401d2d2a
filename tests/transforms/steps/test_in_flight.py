"""Chains with many records in flight: the same batches as in the plain chain, whatever the threads do."""

from __future__ import annotations

import collections
import os
import random
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from fakes import make_batch, make_letter, make_spec, run_python, toy_records
from transforms.dead_letters import BadRecordError, JobInterrupted
from transforms.elements import BATCH_MAX_RECORDS, RecordBatch, Span
from transforms.steps import Drop, in_flight
from transforms.steps.aside import aside
from transforms.steps.chain import StepChain
from transforms.steps.in_flight import ConcurrentChain
from transforms.steps.job_chain import usual_chain
from transforms.steps.load import Step

MAX_RECORD_BYTES = 1_000_000
TIMEOUT_SECS = 20
"""What only a defect reaches."""


@pytest.fixture
def chain_of() -> Iterator[Callable[..., ConcurrentChain]]:
    """Makes chains, and closes them."""
    made: list[ConcurrentChain] = []

    def make(call: Callable[[Any], Any], threads: int = 4) -> ConcurrentChain:
        made.append(ConcurrentChain([Step("wait", call)], MAX_RECORD_BYTES, threads))
        return made[-1]

    yield make
    for chain in made:
        chain.close()


def shard_of(batches: Iterable[RecordBatch]) -> list[RecordBatch]:
    """The batches, numbered and closed as the reader does it."""
    numbered = list(batches)
    for sequence, batch in enumerate(numbered):
        batch.sequence = sequence
    return [*numbered, make_batch(sequence=len(numbered), source=None, last=True)]


def singles(count: int) -> list[RecordBatch]:
    """A shard of batches of one record."""
    return shard_of(make_batch([record]) for record in toy_records(count))


def apply(chain: StepChain, batches: Iterable[RecordBatch]) -> list[RecordBatch]:
    return [out for batch in batches for out in chain.apply(batch)]


def records_of(batches: Iterable[RecordBatch]) -> list[bytes]:
    return [record for batch in batches for record in batch.records]


def read_meanwhile(
    chain: ConcurrentChain, batches: list[RecordBatch], goes_on: threading.Event
) -> tuple[int, list[RecordBatch]]:
    """How many batches are read until the chain waits for one; and all that comes out once it goes on."""
    read, out = [], []

    def consume() -> None:
        for batch in batches:
            read.append(batch)
            out.extend(chain.apply(batch))

    consumer = threading.Thread(target=consume, daemon=True)
    consumer.start()
    consumer.join(0.5)
    count = len(read)
    goes_on.set()
    consumer.join(TIMEOUT_SECS)
    return count, out


def upper(record: bytes) -> bytes:
    return record.upper()


class TestSameAsPlain:
    @staticmethod
    def step(record: bytes) -> Any:
        time.sleep(random.random() / 500)
        number = int(record[-6:])
        if number % 7 == 1:
            raise BadRecordError("seventh", f"number {number}")
        if number % 7 == 2:
            return Drop("second")
        if number % 7 == 3:
            return None
        if number % 7 == 4:
            return iter([record, Drop("inner"), record + b"!"])
        return record * (number % 7)

    def shard(self) -> list[RecordBatch]:
        letters = [make_letter(number) for number in range(3)]
        return shard_of(
            [
                make_batch(toy_records(30), dead=letters),
                make_batch(dead=letters, num_bytes=17),
                make_batch(toy_records(1, first=30), span=Span(0, 10, 0, 12)),
                *(make_batch(toy_records(1, first=number)) for number in range(31, 50)),
                make_batch(span=Span(1, 2, None, None)),
                make_batch(toy_records(5, first=50), rolls=True),
                make_batch(
                    toy_records(2, first=55),
                    origins=[make_letter(number) for number in range(2)],
                    span=Span(1, 2, 1, 2),
                ),
            ]
        )

    @pytest.mark.parametrize("threads", [2, 4, 16])
    def test_every_batch_is_equal_and_in_order(self, threads: int, chain_of: Callable[..., ConcurrentChain]) -> None:
        plain = apply(StepChain([Step("wait", self.step)], MAX_RECORD_BYTES), self.shard())
        chain = chain_of(self.step, threads)
        assert apply(chain, self.shard()) == plain
        assert apply(chain, self.shard()) == plain  # The next shard of the same worker.
        assert [batch.last for batch in plain].count(True) == 1
        assert sum(batch.records_read for batch in plain) == 57 + 6

    def test_a_batch_that_grows_is_cut(self, chain_of: Callable[..., ConcurrentChain]) -> None:
        batches = shard_of([make_batch(toy_records(3))])
        out = apply(chain_of(lambda record: iter([record] * BATCH_MAX_RECORDS)), batches)
        assert [len(batch.records) for batch in out] == [2 * BATCH_MAX_RECORDS, BATCH_MAX_RECORDS, 0]
        assert [batch.last for batch in out] == [False, False, True]

    def test_a_shard_that_is_committed_passes(self, chain_of: Callable[..., ConcurrentChain]) -> None:
        batch = make_batch(last=True, committed=True)
        assert list(chain_of(upper).apply(batch)) == [batch]

    def test_a_job_that_is_called_off_waits_for_nothing(self, chain_of: Callable[..., ConcurrentChain]) -> None:
        hangs = threading.Event()
        chain = chain_of(lambda record: hangs.wait(TIMEOUT_SECS))
        [first, *_] = singles(1)
        assert list(chain.apply(first)) == []
        off = make_batch(sequence=1, last=True, not_run=True)
        assert list(chain.apply(off)) == [off]
        hangs.set()


class TestInFlight:
    def test_records_of_several_batches_are_in_flight(self, chain_of: Callable[..., ConcurrentChain]) -> None:
        together = threading.Barrier(4, timeout=TIMEOUT_SECS)

        def step(record: bytes) -> bytes:
            together.wait()  # Breaks unless four records stand here at once.
            return record

        assert records_of(apply(chain_of(step), singles(16))) == toy_records(16)

    def test_never_more_than_allowed(self, chain_of: Callable[..., ConcurrentChain]) -> None:
        lock, now, peak = threading.Lock(), 0, 0

        def step(record: bytes) -> bytes:
            nonlocal now, peak
            with lock:
                now += 1
                peak = max(peak, now)
            time.sleep(0.002)
            with lock:
                now -= 1
            return record

        apply(chain_of(step), singles(60))
        assert peak == 4

    def test_reads_ahead_no_more_than_keeps_the_threads_busy(self, chain_of: Callable[..., ConcurrentChain]) -> None:
        goes_on = threading.Event()
        read, out = read_meanwhile(chain_of(lambda record: goes_on.wait(TIMEOUT_SECS) and record), singles(40), goes_on)
        assert read <= 4 + 4  # As many wait for a thread as run.
        assert records_of(out) == toy_records(40)

    def test_damage_without_records_is_not_read_ahead_without_end(
        self, chain_of: Callable[..., ConcurrentChain], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(in_flight, "MAX_WAITING_BYTES", 50 * in_flight.SLOT_BYTES)
        goes_on = threading.Event()
        damage = [make_batch(dead=[make_letter(number)]) for number in range(400)]
        batches = shard_of([make_batch(toy_records(1)), *damage])
        read, out = read_meanwhile(chain_of(lambda record: goes_on.wait(TIMEOUT_SECS) and record), batches, goes_on)
        assert read <= 26  # A batch and a letter count as a record each.
        assert sum(batch.records_read for batch in out) == 401

    def test_large_records_are_read_ahead_by_their_bytes(
        self, chain_of: Callable[..., ConcurrentChain], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(in_flight, "MAX_WAITING_BYTES", 40)  # Records have 13.
        chain = chain_of(upper, threads=16)
        ahead = 0
        for batch in singles(40)[:-1]:
            ahead += 1 - len(list(chain.apply(batch)))
            assert ahead <= 3

    def test_large_results_do_not_pile_up_behind_a_slow_one(
        self, chain_of: Callable[..., ConcurrentChain], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(in_flight, "MAX_WAITING_BYTES", 1000)
        started: list[bytes] = []
        ended = threading.Event()

        def step(record: bytes) -> bytes:
            started.append(record)
            if record == toy_records(1)[0]:
                ended.wait(TIMEOUT_SECS)  # While the others pass it by, as far as they may.
            return record * 100

        chain = chain_of(step, threads=4)
        [batch, last] = shard_of([make_batch(toy_records(200))])
        assert list(chain.apply(batch)) == []
        time.sleep(0.2)
        assert len(started) <= 1 + 3 + 3  # One waits; of the others, each thread may add one to what was held.
        ended.set()
        assert records_of(chain.apply(last)) == [record * 100 for record in toy_records(200)]
        assert len(started) == 200


class TestAside:
    """Records that wait for a retry."""

    def test_later_records_run_while_one_waits(self, chain_of: Callable[..., ConcurrentChain]) -> None:
        others = threading.Semaphore(0)
        records = toy_records(500)

        def step(record: bytes) -> bytes:
            if record == records[0]:
                with aside():
                    for _ in records[1:]:  # All of them, though one at a time runs, and though they leave after it.
                        assert others.acquire(timeout=TIMEOUT_SECS)
            else:
                others.release()
            return record.upper()

        out = apply(chain_of(step, threads=1), singles(500))
        assert records_of(out) == [record.upper() for record in records]

    @pytest.mark.parametrize("batch_records", [1, 7, 100])
    def test_order_and_number_of_calls_stay_whoever_waits(
        self, batch_records: int, chain_of: Callable[..., ConcurrentChain]
    ) -> None:
        lock = threading.Lock()
        now, peak, calls = 0, 0, collections.Counter[bytes]()
        records = toy_records(400)

        def count(change: int) -> None:
            nonlocal now, peak
            with lock:
                now += change
                peak = max(peak, now)

        def step(record: bytes) -> bytes:
            count(1)
            calls[record] += 1
            if int(record[-6:]) % 3 == 0:
                count(-1)
                with aside():
                    time.sleep(random.random() / 20)
                count(1)
            count(-1)
            return record.upper()

        batches = [make_batch(records[at : at + batch_records]) for at in range(0, 400, batch_records)]
        out = apply(chain_of(step, threads=4), shard_of(batches))
        assert records_of(out) == [record.upper() for record in records]
        assert calls == dict.fromkeys(records, 1)
        assert peak <= 4

    def test_retries_of_a_step_of_ones_own_hold_back_nobody(self, monkeypatch: pytest.MonkeyPatch) -> None:
        records = toy_records(100)
        done = threading.Event()
        left, failed = set(records[2:]), []

        class Retried:
            max_in_flight = 2

            def __call__(self, record: bytes) -> bytes:
                if record in records[:2] and record not in failed:
                    failed.append(record)
                    raise OSError("may pass")
                left.discard(record)
                if not left:
                    done.set()
                return record

        def sleep(secs: float) -> None:
            assert done.wait(TIMEOUT_SECS)

        monkeypatch.setitem(sys.modules, "retried_steps", types.SimpleNamespace(Retried=Retried))
        chain = usual_chain(make_spec("/nowhere", steps=({"call": "retried_steps:Retried", "retries": 1},)))
        monkeypatch.setattr("transforms.steps.aside.time.sleep", sleep)
        assert records_of(apply(chain, singles(100))) == records
        assert sorted(failed) == records[:2]
        chain.close()

    def test_one_that_cannot_be_replaced_keeps_its_place(
        self, chain_of: Callable[..., ConcurrentChain], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(in_flight, "MAX_ASIDE", 3)
        lock, now, peak = threading.Lock(), 0, 0

        def step(record: bytes) -> bytes:
            nonlocal now, peak
            with lock:
                now += 1
                peak = max(peak, now)
            with aside():
                time.sleep(0.01)
            with lock:
                now -= 1
            return record

        assert records_of(apply(chain_of(step, threads=2), singles(60))) == toy_records(60)
        assert peak == 2 + 3

    def test_a_machine_without_further_threads_runs_the_shard_all_the_same(
        self, chain_of: Callable[..., ConcurrentChain], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        start, started = threading.Thread.start, []

        def start_two(thread: threading.Thread) -> None:
            if len(started) == 2:
                raise RuntimeError("can't start new thread")
            started.append(thread)
            start(thread)

        def step(record: bytes) -> bytes:
            with aside():
                time.sleep(0.001)
            return record

        monkeypatch.setattr(threading.Thread, "start", start_two)
        assert records_of(apply(chain_of(step, threads=8), singles(30))) == toy_records(30)
        assert len(started) == 2

    def test_those_of_an_abandoned_shard_are_not_tried_again(self, chain_of: Callable[..., ConcurrentChain]) -> None:
        waits, goes_on, ended = threading.Event(), threading.Event(), threading.Event()
        tried: list[bytes] = []

        def step(record: bytes) -> bytes:
            if record == b"old":
                try:
                    with aside():
                        waits.set()
                        goes_on.wait(TIMEOUT_SECS)
                    tried.append(record)
                finally:
                    ended.set()
            return record

        chain = chain_of(step)
        assert list(chain.apply(make_batch([b"old"]))) == []
        assert waits.wait(TIMEOUT_SECS)
        assert records_of(apply(chain, singles(10))) == toy_records(10)
        goes_on.set()
        assert ended.wait(TIMEOUT_SECS)
        assert tried == []

    def test_what_is_finished_behind_one_that_waits_is_bounded_by_its_bytes(
        self, chain_of: Callable[..., ConcurrentChain], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(in_flight, "MAX_WAITING_BYTES", 50 * in_flight.SLOT_BYTES)
        goes_on = threading.Event()

        def step(record: bytes) -> bytes:
            if record == toy_records(1)[0]:
                with aside():
                    goes_on.wait(TIMEOUT_SECS)
            return record

        chain = chain_of(step)
        read: list[int] = []
        out: list[RecordBatch] = []

        def consume() -> None:
            for number, batch in enumerate(singles(1000)):
                read.append(number)
                out.extend(chain.apply(batch))

        consumer = threading.Thread(target=consume, daemon=True)
        consumer.start()
        consumer.join(0.3)
        assert len(read) <= 50
        goes_on.set()
        consumer.join(TIMEOUT_SECS)
        assert records_of(out) == toy_records(1000)


class TestGivingUp:
    def test_nothing_of_an_abandoned_shard_is_in_the_next(self, chain_of: Callable[..., ConcurrentChain]) -> None:
        hangs = threading.Event()

        def step(record: bytes) -> bytes:
            if record.startswith(b"old"):
                hangs.wait(TIMEOUT_SECS)
            return record

        chain = chain_of(step)
        old = shard_of(make_batch([b"old %d" % number]) for number in range(3))
        assert apply(chain, old[:-1]) == []
        fresh = singles(10)
        out = [out for batch in fresh[:5] for out in chain.apply(batch)]
        hangs.set()  # The old records come to an end in the midst of the new ones.
        out += apply(chain, fresh[5:])
        assert records_of(out) == toy_records(10)
        assert sum(batch.records_read for batch in out) == 10

    def test_a_shard_that_the_consumer_left_does_not_go_on(self, chain_of: Callable[..., ConcurrentChain]) -> None:
        chain = chain_of(upper, threads=2)
        batches = singles(10)
        stream = (out for batch in batches for out in chain.apply(batch))
        next(stream)
        stream.close()
        with pytest.raises(RuntimeError, match="was given up before batch 5"):
            list(chain.apply(batches[5]))
        assert records_of(apply(chain, singles(10))) == [record.upper() for record in toy_records(10)]

    def test_an_interruption_in_a_thread_reaches_the_consumer(self, chain_of: Callable[..., ConcurrentChain]) -> None:
        def step(record: bytes) -> bytes:
            raise JobInterrupted("SIGTERM")

        with pytest.raises(JobInterrupted):
            apply(chain_of(step), singles(3))

    def test_any_other_exception_costs_its_record(self, chain_of: Callable[..., ConcurrentChain]) -> None:
        def step(record: bytes) -> bytes:
            raise SystemExit(3)

        out = apply(chain_of(step), singles(3))
        assert [letter.error_type for batch in out for letter in batch.dead] == ["SystemExit"] * 3

    def test_a_signal_ends_the_wait_for_calls_that_hang(self, chain_of: Callable[..., ConcurrentChain]) -> None:
        hangs = threading.Event()

        def stop(*_: Any) -> None:
            raise JobInterrupted("SIGUSR1")

        before = signal.signal(signal.SIGUSR1, stop)
        try:
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1)).start()
            with pytest.raises(JobInterrupted):
                apply(chain_of(lambda record: hangs.wait(TIMEOUT_SECS)), singles(3))
        finally:
            signal.signal(signal.SIGUSR1, before)
            hangs.set()


class TestEnd:
    def test_closing_ends_the_threads_and_the_steps(self) -> None:
        class Wait:
            closed = False

            def __call__(self, record: bytes) -> bytes:
                return record

            def close(self) -> None:
                self.closed = True

        before = set(threading.enumerate())
        step = Wait()
        chain = ConcurrentChain([Step("wait", step)], MAX_RECORD_BYTES, 4)
        apply(chain, singles(3))
        threads = set(threading.enumerate()) - before
        assert len(threads) == 4
        chain.close()
        for thread in threads:
            thread.join(TIMEOUT_SECS)
        assert [thread.is_alive() for thread in threads] == [False] * 4
        assert step.closed

    def test_a_chain_that_nobody_closes_takes_its_threads_along(self) -> None:
        before = set(threading.enumerate())
        chain = ConcurrentChain([Step("wait", upper)], MAX_RECORD_BYTES, 4)
        apply(chain, singles(3))
        threads = set(threading.enumerate()) - before
        del chain
        for thread in threads:
            thread.join(TIMEOUT_SECS)
        assert [thread.is_alive() for thread in threads] == [False] * 4

    @pytest.mark.parametrize("end", ["chain.close()", "pass"])
    def test_calls_that_hang_do_not_keep_the_process(self, end: str) -> None:
        program = f"""
import threading
from transforms.elements import RecordBatch, ShardTask
from transforms.steps.in_flight import ConcurrentChain
from transforms.steps.load import Step

chain = ConcurrentChain([Step("wait", lambda record: threading.Event().wait())], 100, 4)
assert list(chain.apply(RecordBatch(ShardTask(0, 0, 0, 0, 0, 0, 0), 0, records=[b"a"]))) == []
{end}
print("ended")
"""
        assert run_python(program).stdout == "ended\n"


class Waits:
    """A step of the config that waits for something."""

    def __init__(self, max_in_flight: Any = 3) -> None:
        self.max_in_flight = max_in_flight

    def __call__(self, record: bytes) -> bytes:
        """Waits for nothing."""
        return record


class TestLoading:
    @pytest.fixture(autouse=True)
    def steps_module(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "waiting_steps", types.SimpleNamespace(Waits=Waits))

    def load(self, *steps: dict[str, Any]) -> StepChain:
        return usual_chain(make_spec("/nowhere", steps=steps))

    def test_a_step_that_wants_calls_in_flight_gets_them(self) -> None:
        chain = self.load({"call": "waiting_steps:Waits", "max_in_flight": 5}, {"use": "example.check"})
        assert isinstance(chain, ConcurrentChain)
        assert chain._num_threads == 5

    def test_the_step_that_wants_most_decides(self) -> None:
        chain = self.load({"call": "waiting_steps:Waits"}, {"call": "waiting_steps:Waits", "max_in_flight": 7})
        assert isinstance(chain, ConcurrentChain)
        assert chain._num_threads == 7

    @pytest.mark.parametrize("number", [1, 0, None, "many"])
    def test_other_steps_run_one_by_one(self, number: Any) -> None:
        assert type(self.load({"call": "waiting_steps:Waits", "max_in_flight": number})) is StepChain

    def test_no_steps_run_one_by_one(self) -> None:
        assert type(self.load()) is StepChain
