"""Counts by reason: a bounded table that depends on the order of records alone, and in which nothing is lost."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes import make_batch, make_letter, make_spec, make_task
from transforms import dead_letters, reasons
from transforms.elements import JobSpec, RecordBatch
from transforms.ledger import Ledger, find_ledger
from transforms.reasons import MAX_REASONS, OTHER_REASONS, ReasonCounts, committed_info, dead_by_reason
from transforms.shard_writer import ShardWriter
from transforms.steps import Drop
from transforms.steps import chain as chain_module
from transforms.steps.chain import StepChain
from transforms.steps.load import Step
from transforms.store import LocalStore


def counted(names: list[str], named: tuple[str, ...] = (), limit: int = 2) -> dict[str, int]:
    counts = ReasonCounts(named, limit)
    for name in names:
        counts.add(name)
    return counts.to_fields()


class TestCounts:
    def test_the_first_are_counted_by_themselves_and_the_others_together(self) -> None:
        assert counted(["b", "a", "c", "b", "d", "c"]) == {"b": 2, "a": 1, OTHER_REASONS: 3}

    def test_what_is_named_is_counted_beside_them_whenever_it_comes(self) -> None:
        assert counted(["b", "a", "c", "n", "n"], ("n",)) == {"b": 1, "a": 1, OTHER_REASONS: 1, "n": 2}
        assert counted(["n", "b", "a", "c"], ("n",)) == {"n": 1, "b": 1, "a": 1, OTHER_REASONS: 1}

    def test_a_reason_that_is_called_so_is_among_the_others_and_takes_no_place(self) -> None:
        assert counted([OTHER_REASONS, "b", "a", "c"]) == {OTHER_REASONS: 2, "b": 1, "a": 1}

    def test_a_thousand_is_the_limit(self) -> None:
        counts = counted([f"r{number}" for number in range(5_000)], limit=MAX_REASONS)
        assert list(counts) == [*(f"r{number}" for number in range(1_000)), OTHER_REASONS]
        assert counts[OTHER_REASONS] == 4_000

    def test_tables_are_added_in_their_order(self) -> None:
        counts = ReasonCounts(limit=2)
        counts.update({"b": 1, OTHER_REASONS: 5})
        counts.update({"c": 2, "a": 3, "b": 1})
        assert counts.to_fields() == {"b": 2, OTHER_REASONS: 8, "c": 2}

    def test_what_is_taken_off_and_has_no_row_comes_off_the_others(self) -> None:
        counts = ReasonCounts(limit=2)
        counts.update({"a": 3, "b": 1, "c": 4})
        counts.subtract({"a": 4, "c": 1, "b": 1, OTHER_REASONS: 1})
        assert counts.to_fields() == {OTHER_REASONS: 1}

    @given(st.lists(st.sampled_from("abcdefgh"), max_size=30), st.sets(st.sampled_from("gh")), st.integers(0, 4))
    def test_nothing_is_lost(self, names: list[str], named: set[str], limit: int) -> None:
        counts = counted(names, tuple(named), limit)
        assert sum(counts.values()) == len(names)
        assert len(counts) <= limit + len(named) + 1


def drop_each(record: bytes) -> Drop:
    return Drop(record.decode())


def drop_parts(record: bytes) -> object:
    return (Drop(part) for part in record.decode().split())


def write(store: LocalStore, spec: JobSpec, batches: list[RecordBatch], step: object = None) -> Ledger:
    """Writes and commits a shard, its records put through a step."""
    chain = StepChain([Step("step", step)] if step else [], 1 << 20)  # type: ignore[arg-type]
    writer = ShardWriter(store, spec, make_task())
    for batch in batches:
        for out in chain.apply(batch):
            writer.add(out)
    writer.commit()
    found = find_ledger(store, spec, 0)
    assert found is not None
    assert found.ledger is not None
    return found.ledger


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> int:
    """Makes the limit three."""
    for module in (dead_letters, reasons, chain_module):
        monkeypatch.setattr(module, "MAX_REASONS", 3)
    monkeypatch.setattr(ReasonCounts.__init__, "__defaults__", ((), 3))
    return 3


@pytest.mark.usefixtures("few")
class TestShards:
    @settings(max_examples=25, deadline=None)
    @given(cuts=st.sets(st.integers(1, 11)))
    def test_the_table_does_not_depend_on_where_batches_are_cut(
        self, tmp_path_factory: pytest.TempPathFactory, cuts: set[int]
    ) -> None:
        store = LocalStore(str(tmp_path_factory.mktemp("out")))
        records = [b"c", b"a", b"c", b"d", b"b", b"e", b"a", b"f", b"d", b"g", b"h", b"e"]
        edges = [0, *sorted(cuts), len(records)]
        batches = [make_batch(records[start:end]) for start, end in itertools.pairwise(edges)]
        ledger = write(store, make_spec(store.root), batches, drop_each)
        assert list(ledger.dropped_by_reason.items()) == [("c", 2), ("a", 2), ("d", 2), (OTHER_REASONS, 6)]
        assert ledger.books()["records_dropped"] == 12

    def test_one_record_with_many_reasons_is_bounded_as_well(self, tmp_path: Path) -> None:
        store = LocalStore(str(tmp_path))
        record = " ".join(f"r{number % 500}" for number in range(1_000)).encode()
        outs = list(StepChain([Step("step", drop_parts)], 1 << 20).apply(make_batch([record])))
        assert [out.dropped for out in outs if out.records_read] == [{"r0": 2, "r1": 2, "r2": 2, OTHER_REASONS: 994}]
        ledger = write(store, make_spec(store.root), [make_batch([record])], drop_parts)
        assert sum(ledger.dropped_by_reason.values()) == ledger.books()["records_dropped"] == 1_000

    def test_batches_are_cut_before_their_tables_grow(self) -> None:
        records = [b"%d" % number for number in range(100)]
        outs = list(StepChain([Step("step", drop_each)], 1 << 20).apply(make_batch(records)))
        assert max(len(out.dropped) for out in outs) == 4
        assert sum(out.records_read for out in outs) == 100

    def test_reasons_of_dead_letters_are_bounded_and_those_in_the_budget_are_kept(self, tmp_path: Path) -> None:
        store = LocalStore(str(tmp_path))
        spec = make_spec(store.root, max_count_by_reason={"r8": 5})
        ledger = write(store, spec, [make_batch([], dead=letters(10))])
        assert ledger.dead_by_reason == {"r0": 1, "r1": 1, "r2": 1, OTHER_REASONS: 6, "r8": 1}
        assert committed_info(store, spec, make_task(), frozenset(["r8"])).dead_by_reason == {"r8": 1}

    @pytest.mark.parametrize("named", ["r8", "r1", "never"])
    def test_a_reason_that_a_later_budget_names_is_counted_in_the_lines(self, tmp_path: Path, named: str) -> None:
        store = LocalStore(str(tmp_path))
        spec = make_spec(store.root)
        ledger = write(store, spec, [make_batch([], dead=letters(10) + letters(10))])
        assert ledger.dead_by_reason == {"r0": 2, "r1": 2, "r2": 2, OTHER_REASONS: 14}
        later = dataclasses.replace(spec, max_count_by_reason={named: 1})
        found = dead_by_reason(store, later, ledger, [named])
        assert found.get(named, 0) == (0 if named == "never" else 2)
        assert sum(found.values()) == 20

    def test_ledgers_of_before_are_read_as_they_stand(self, tmp_path: Path) -> None:
        store = LocalStore(str(tmp_path))
        spec = make_spec(store.root)
        ledger = write(store, spec, [make_batch([], dead=letters(10))])
        old = dataclasses.replace(ledger, dead_by_reason={f"r{number}": 1 for number in range(10)})
        again = Ledger.from_json(json.dumps(json.loads(old.to_json())).encode())
        assert dead_by_reason(store, spec, again, ["r8", "never"]) == old.dead_by_reason


def letters(count: int) -> list[dead_letters.DeadLetter]:
    return [dataclasses.replace(make_letter(number), reason=f"r{number}") for number in range(count)]
