"""The chain: source records are atomic, depth first, and every record has its place in the books."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes import WorstStore, make_batch, make_letter, make_spec, make_task, toy_records
from transforms.dead_letters import BadRecordError
from transforms.elements import BATCH_MAX_BYTES, BATCH_MAX_RECORDS, RecordBatch, Span
from transforms.ledger import find_ledger
from transforms.shard_writer import ShardWriter
from transforms.steps import Drop
from transforms.steps.chain import StepChain
from transforms.steps.load import Step

MAX_RECORD_BYTES = 10_000_000


def chain_of(*calls: Callable[[Any], Any], max_record_bytes: int = MAX_RECORD_BYTES) -> StepChain:
    """A chain whose steps are called step-0, step-1, ..."""
    return StepChain([Step(f"step-{number}", call) for number, call in enumerate(calls)], max_record_bytes)


def apply(chain: StepChain, records: Iterable[bytes], **changes: Any) -> list[RecordBatch]:
    """The batches that become of one."""
    return list(chain.apply(make_batch(records, **changes)))


def records_of(batches: list[RecordBatch]) -> list[bytes]:
    return [record for batch in batches for record in batch.records]


def dead_of(batches: list[RecordBatch]) -> list[tuple[str, str]]:
    """(step, reason) of every dead letter."""
    return [(letter.step, letter.reason) for batch in batches for letter in batch.dead]


def books_of(batches: list[RecordBatch]) -> tuple[int, int, int, int, int]:
    """(read, added, written, dropped, dead), which must balance."""
    read = sum(batch.records_read for batch in batches)
    added = sum(batch.records_added for batch in batches)
    written = sum(len(batch.records) for batch in batches)
    dropped = sum(sum(batch.dropped.values()) for batch in batches)
    dead = sum(len(batch.dead) for batch in batches)
    assert read + added == written + dropped + dead
    return read, added, written, dropped, dead


def fail_on(content: bytes) -> Callable[[bytes], bytes]:
    """A step that fails on one record."""

    def step(record: bytes) -> bytes:
        if record == content:
            raise ValueError("bad")
        return record

    return step


def split_words(record: bytes) -> Iterator[bytes]:
    yield from record.split()


class TestOutcomes:
    def test_no_steps_pass_the_batch_itself(self) -> None:
        batch = make_batch(toy_records(5), dead=[make_letter(0)])
        [out] = StepChain([], MAX_RECORD_BYTES).apply(batch)
        assert out is batch

    def test_functions_run_in_order(self) -> None:
        batches = apply(chain_of(lambda x: x + b"1", lambda x: x + b"2"), [b"a", b"b"])
        assert records_of(batches) == [b"a12", b"b12"]
        assert books_of(batches) == (2, 0, 2, 0, 0)

    def test_values_between_steps_may_be_anything(self) -> None:
        batches = apply(chain_of(int, lambda x: {"twice": 2 * x}, lambda x: b"%d" % x["twice"]), [b"4", b"5"])
        assert records_of(batches) == [b"8", b"10"]

    def test_none_drops_with_its_own_reason(self) -> None:
        [batch] = apply(chain_of(lambda x: None if x == b"b" else x, fail_on(b"b")), [b"a", b"b", b"c"])
        assert (batch.records, batch.dropped) == ([b"a", b"c"], {"returned_none": 1})

    def test_drop_counts_under_its_reason(self) -> None:
        [batch] = apply(chain_of(lambda x: Drop(f"is_{x.decode()}") if x in b"bc" else x), [b"a", b"b", b"c", b"b"])
        assert (batch.records, batch.dropped) == ([b"a"], {"is_b": 2, "is_c": 1})

    def test_iterator_fans_out_depth_first(self) -> None:
        order: list[bytes] = []

        def log(value: bytes) -> bytes:
            order.append(value)
            return value

        def twice(value: bytes) -> Iterator[bytes]:
            for number in (1, 2):
                order.append(b"make %s%d" % (value, number))
                yield b"%s%d" % (value, number)

        batches = apply(chain_of(split_words, twice, log), [b"a b", b"c"])
        assert records_of(batches) == [b"a1", b"a2", b"b1", b"b2", b"c1", b"c2"]
        assert order[:6] == [b"make a1", b"a1", b"make a2", b"a2", b"make b1", b"b1"]
        assert books_of(batches) == (2, 4, 6, 0, 0)

    def test_empty_iterator_drops_the_record(self) -> None:
        batches = apply(chain_of(split_words), [b"a b", b"  "])
        assert records_of(batches) == [b"a", b"b"]
        assert (batches[0].dropped, books_of(batches)) == ({"no_outputs": 1}, (2, 1, 2, 1, 0))

    @pytest.mark.parametrize("following", [[], [lambda x: x + b"."]], ids=["last step", "step before another"])
    def test_none_and_drop_that_an_iterator_yields_drop_that_output_alone(self, following: list[Any]) -> None:
        def step(record: bytes) -> Iterator[bytes | Drop | None]:
            yield from (record, None, Drop("short"), record + b"!")

        batches = apply(chain_of(step, *following), [b"a"])
        assert [record.rstrip(b".") for record in records_of(batches)] == [b"a", b"a!"]
        assert (batches[0].dropped, books_of(batches)) == ({"returned_none": 1, "short": 1}, (1, 3, 2, 2, 0))

    @pytest.mark.parametrize(
        "value", [bytearray(b"x"), memoryview(b"x"), "text", 7, [b"a"], (b"a",), {"a": 1}, True, object()]
    )
    def test_last_step_must_return_bytes(self, value: Any) -> None:
        batches = apply(chain_of(lambda x: value if x == b"b" else x), [b"a", b"b"])
        assert records_of(batches) == [b"a"]
        assert dead_of(batches) == [("step-0", "not_bytes")]
        assert type(value).__name__ in batches[0].dead[0].error

    def test_empty_bytes_are_a_record(self) -> None:
        assert records_of(apply(chain_of(lambda x: b""), [b"a"])) == [b""]


class TestAtomicity:
    def test_one_failing_output_discards_all_and_keeps_the_source_record(self) -> None:
        batches = apply(chain_of(split_words, fail_on(b"bad")), [b"a b", b"c bad d", b"e"])
        assert records_of(batches) == [b"a", b"b", b"e"]
        [letter] = batches[0].dead
        assert (letter.step, letter.reason, letter.position, letter.payload) == ("step-1", "exception", 1, b"c bad d")
        assert books_of(batches) == (3, 1, 3, 0, 1)

    def test_drops_of_a_failing_record_do_not_count(self) -> None:
        def step(record: bytes) -> Iterator[Any]:
            yield Drop("short")
            yield None
            raise ValueError("bad")

        batches = apply(chain_of(step), [b"a"])
        assert (batches[0].dropped, books_of(batches)) == ({}, (1, 0, 0, 0, 1))

    def test_iterator_that_fails_at_its_end_discards_all(self) -> None:
        def step(record: bytes) -> Iterator[bytes]:
            yield from (b"1", b"2")
            if record == b"bad":
                raise KeyError("end")

        batches = apply(chain_of(step, lambda x: x), [b"a", b"bad"])
        assert records_of(batches) == [b"1", b"2"]
        assert dead_of(batches) == [("step-0", "exception")]

    @pytest.mark.parametrize(("bad_step", "expected"), [(0, "step-0"), (1, "step-1"), (2, "step-2")])
    def test_dead_letter_names_the_step_that_failed(self, bad_step: int, expected: str) -> None:
        def fan_out(value: bytes) -> Iterator[bytes]:
            yield value
            yield value

        calls: list[Callable[[Any], Any]] = [fan_out, fan_out, lambda x: x]
        inner = calls[bad_step]
        count = 0

        def failing(value: bytes) -> Any:
            nonlocal count
            count += 1
            if count == 2 or bad_step == 0:
                raise BadRecordError("my_reason", "why")
            return inner(value)

        calls[bad_step] = failing
        assert dead_of(apply(chain_of(*calls), [b"a"])) == [(expected, "my_reason")]


class BaseOnlyError(BaseException):
    """Not an Exception."""


class ReasonlessError(BadRecordError):
    def __init__(self) -> None:
        pass


class TestWhateverIsRaised:
    @pytest.mark.parametrize(
        "error",
        [
            ValueError("x"),
            SystemExit(0),
            KeyboardInterrupt(),
            GeneratorExit(),
            StopIteration(7),
            BaseOnlyError("x"),
            MemoryError(),
            AssertionError(),
            BaseExceptionGroup("several", [KeyboardInterrupt()]),
            ReasonlessError(),
            BadRecordError(404),  # type: ignore[arg-type]
        ],
        ids=lambda error: type(error).__name__,
    )
    @pytest.mark.parametrize("inside_iterator", [False, True])
    def test_costs_that_record_alone(self, error: BaseException, inside_iterator: bool) -> None:
        def raises(record: bytes) -> bytes:
            if record == b"bad":
                raise error
            return record

        def yields(record: bytes) -> Iterator[bytes]:
            yield raises(record)

        batches = apply(chain_of(yields if inside_iterator else raises), [b"a", b"bad", b"c"])
        assert records_of(batches) == [b"a", b"c"]
        assert len(batches[0].dead) == 1
        assert batches[0].dead[0].payload == b"bad"

    def test_endless_recursion_costs_that_record_alone(self) -> None:
        def step(record: bytes) -> bytes:
            return record if record == b"a" else step(record)

        batches = apply(chain_of(step), [b"a", b"bad", b"a"])
        assert records_of(batches) == [b"a", b"a"]
        assert batches[0].dead[0].error_type == "RecursionError"
        assert len(batches[0].dead[0].traceback) <= 8000

    @pytest.mark.parametrize("reason", ["short", 7, None, ("a", 1), ["list"], "half\ud83d", "x" * 10_000_000])
    def test_reason_of_any_kind_can_be_committed(self, reason: Any) -> None:
        """A job must not end because of what a user's step gives as a reason."""

        def step(record: bytes) -> Any:
            if record == b"drop":
                return Drop(reason)
            if record == b"fail":
                raise BadRecordError(reason, "text")
            return record if record == b"a" else Drop("plain")

        store = WorstStore()
        spec = make_spec(store.root)
        writer = ShardWriter(store, spec, make_task())
        for batch in apply(chain_of(step), [b"a", b"drop", b"fail", b"other", b"a"]):
            writer.add(batch)
        info = writer.commit()
        assert [info.books[f"records_{name}"] for name in ("read", "written")] == [5, 2]
        assert info.books["records_dropped"] + info.books["records_dead"] == 3
        found = find_ledger(store, spec, 0)
        assert found is not None
        assert found.ledger is not None
        assert found.ledger.dead_lines is not None
        assert len(store.tree()[found.ledger.dead_lines.name]) < 100_000


class TestHugeOutputs:
    def test_bound_of_all_outputs_of_a_record_is_exact(self) -> None:
        chain = chain_of(split_words, lambda x: x, max_record_bytes=10)
        batches = apply(chain, [b"12345 12345", b"12345 123456", b"12345678901", b"1 2"])
        assert records_of(batches) == [b"12345", b"12345", b"1", b"2"]
        assert [letter.payload for batch in batches for letter in batch.dead] == [b"12345 123456", b"12345678901"]
        assert {reason for _, reason in dead_of(batches)} == {"output_too_large"}

    def test_endless_iterator_ends_at_the_bound(self) -> None:
        def endless(record: bytes) -> Iterator[bytes]:
            while True:
                yield record

        batches = apply(chain_of(endless, max_record_bytes=1000), [b"0123456789"])
        assert dead_of(batches) == [("step-0", "output_too_large")]

    def test_batch_that_grows_is_cut(self) -> None:
        batches = apply(chain_of(lambda x: x * 1000), toy_records(1000))
        assert records_of(batches) == [record * 1000 for record in toy_records(1000)]
        assert len(batches) > 5
        assert all(sum(map(len, batch.records)) <= BATCH_MAX_BYTES + 13_000 for batch in batches)

    def test_batch_of_many_outputs_is_cut(self) -> None:
        batches = apply(chain_of(lambda x: iter([x] * 100)), toy_records(100))
        assert sum(len(batch.records) for batch in batches) == 10_000
        assert all(len(batch.records) <= BATCH_MAX_RECORDS + 100 for batch in batches)

    def test_batch_whose_steps_are_slow_is_passed_on_record_by_record(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("transforms.steps.chain.PASS_ON_SECS", 0.0)
        seen: list[bytes] = []
        chain = chain_of(lambda value: seen.append(value) or value)  # type: ignore[func-returns-value]
        batches = chain.apply(make_batch(toy_records(5), num_bytes=1_000, sequence=1))
        first = next(batches)
        assert (first.records, first.num_bytes, seen) == (toy_records(1), 13, toy_records(1))
        rest = list(batches)
        assert records_of(rest) == toy_records(4, first=1)
        assert [batch.num_bytes for batch in rest] == [13, 13, 13, 13, 1_000 - 5 * 13]

    def test_bytes_are_told_with_their_records_and_add_up_where_records_are_longer_than_their_place(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("transforms.steps.chain.PASS_ON_SECS", 0.0)
        batches = apply(chain_of(lambda value: value), toy_records(5), num_bytes=30)
        assert [batch.num_bytes for batch in batches] == [13, 13, 4, 0, 0, 0]


class TestBooks:
    def test_cut_batches_carry_what_the_batch_had_once(self) -> None:
        span = Span(0, 100, 0, 100)
        letters = [make_letter(number) for number in range(3)]
        batches = apply(
            chain_of(lambda x: x * 1000),
            toy_records(500),
            dead=letters,
            num_bytes=777,
            span=span,
            rolls=True,
            sequence=4,
        )
        assert books_of(batches) == (503, 0, 500, 0, 3)
        assert sum(batch.num_bytes for batch in batches) == 777
        assert [batch.span for batch in batches] == [None] * (len(batches) - 1) + [span]
        assert [letter for batch in batches for letter in batch.dead] == letters
        assert all(batch.rolls and batch.source == batches[0].source for batch in batches)

    def test_given_batch_is_left_as_it_is(self) -> None:
        batch = make_batch([b"a", b"b b", b"bad"], dead=[make_letter(0)])
        before = dataclasses.replace(
            batch, records=list(batch.records), dead=list(batch.dead), dropped=dict(batch.dropped)
        )
        list(chain_of(split_words, fail_on(b"bad")).apply(batch))
        assert batch == before

    @given(
        records=st.lists(st.binary(max_size=8), max_size=30),
        plans=st.lists(st.integers(0, 1 << 30), min_size=1, max_size=4),
        num_letters=st.integers(0, 3),
    )
    @settings(max_examples=300)
    def test_any_steps_keep_the_identity_and_every_record_has_one_fate(
        self, records: list[bytes], plans: list[int], num_letters: int
    ) -> None:
        calls = [_random_step(plan) for plan in plans]
        letters = [make_letter(number) for number in range(num_letters)]
        batches = apply(chain_of(*calls), records, dead=letters)
        read, _, written, dropped, dead = books_of(batches)
        assert read == len(records) + num_letters
        expected_records, expected_dropped, expected_dead = _oracle(records, calls)
        assert records_of(batches) == expected_records
        assert (written, dropped) == (len(expected_records), expected_dropped)
        payloads = [letter.payload for batch in batches for letter in batch.dead if letter.step != "read"]
        assert (payloads, dead) == (expected_dead, len(expected_dead) + num_letters)


def _random_step(plan: int) -> Callable[[bytes], Any]:
    """A step that does one of many things, chosen by its plan and the record, and always the same for both."""

    def step(value: bytes) -> Any:
        choice = (plan + sum(value) + 31 * len(value)) % 11
        if choice == 0:
            return None
        if choice == 1:
            return Drop("chosen")
        if choice == 2:
            raise ValueError("chosen")
        if choice == 3:
            return iter([])
        if choice == 4:
            return iter([value, value + b"+", value[:-1]])
        if choice == 5:
            return iter([value, None, Drop("one of several")])
        if choice == 6:
            return (_fail() if number == 1 else value for number in range(3))
        return value + b"."

    return step


def _fail() -> bytes:
    raise KeyError("chosen")


def _oracle(records: list[bytes], calls: list[Callable[[bytes], Any]]) -> tuple[list[bytes], int, list[bytes]]:
    """The same by recursion on lists: (outputs, drops, source records that failed)."""

    def fate(value: Any, rest: list[Callable[[bytes], Any]]) -> list[bytes | None]:
        if not rest:
            return [None if value is None or isinstance(value, Drop) else value]
        result = rest[0](value)
        if result is None or isinstance(result, Drop):
            return [None]
        if not isinstance(result, Iterator):
            return fate(result, rest[1:])
        found: list[bytes | None] = []
        for item in result:
            found += [None] if item is None or isinstance(item, Drop) else fate(item, rest[1:])
        return found or [None]

    outputs: list[bytes] = []
    drops, dead = 0, []
    for record in records:
        try:
            fates = fate(record, calls)
        except (ValueError, KeyError):
            dead.append(record)
            continue
        outputs += [value for value in fates if value is not None]
        drops += sum(value is None for value in fates)
    return outputs, drops, dead
