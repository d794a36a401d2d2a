"""The ledger: what it keeps, when it counts, and that one attempt wins."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes import WorstStore, make_spec, make_task
from transforms.books import SourceRow
from transforms.elements import JobSpec, Span
from transforms.ledger import (
    Ledger,
    StoredFile,
    commit,
    find_ledger,
    ledger_name,
    published_name,
    read_published,
)
from transforms.store import LocalStore, Store

numbers = st.integers(0, 1 << 53)
spans = st.builds(Span, numbers, numbers, st.none() | numbers, st.none() | numbers)
rows = st.builds(
    SourceRow,
    numbers,
    numbers,
    numbers,
    st.none() | spans,
    numbers,
    numbers,
    numbers,
    numbers,
    numbers,
    numbers,
    numbers,
)
files = st.builds(
    StoredFile, st.text(min_size=1), numbers, st.text("0123456789abcdef", min_size=8, max_size=8), numbers
)
reasons = st.dictionaries(st.text(min_size=1, max_size=20), numbers, max_size=4)
ledgers = st.builds(
    Ledger,
    st.text(),
    numbers,
    st.lists(files, max_size=3).map(tuple),
    st.none() | files,
    st.none() | files,
    st.lists(rows, max_size=3).map(tuple),
    reasons,
    reasons,
    st.none() | numbers,
)


@pytest.fixture(params=["local", "worst"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return LocalStore(str(tmp_path / "out")) if request.param == "local" else WorstStore()


@pytest.fixture
def spec(store: Store) -> JobSpec:
    return make_spec(store.root)


def write_attempt(store: Store, attempt: str, *, plan_id: str = "plan-a", shard: int = 0) -> Ledger:
    """Stores the files of an attempt and returns its ledger, not yet committed."""
    folder = f"_gristmill/attempts/{shard:05d}-{attempt}/"
    contents = {"part-00000": b"records of " + attempt.encode(), "dead.jsonl": b"lines", "dead.payloads": b"payloads!"}
    stored = []
    for name, content in contents.items():
        store.put(folder + name, content)
        stored.append(StoredFile(folder + name, len(content), "0badcafe", 3))
    row = SourceRow(0, 1, 1000, Span(0, 1000, 0, 1000), read=4, written=3, added=0, dropped=0, dead=1)
    return Ledger(plan_id, shard, (stored[0],), stored[1], stored[2], (row,), {}, {"data_checksum": 1})


def is_refused(entry: bytes) -> bool:
    """Whether an entry is no ledger, which is the one thing that reading it may say."""
    try:
        Ledger.from_json(entry)
    except ValueError:
        return True
    return False


class TestJson:
    @given(ledgers)
    def test_comes_back_as_it_went_in(self, ledger: Ledger) -> None:
        assert Ledger.from_json(ledger.to_json()) == ledger

    @given(ledgers, st.data())
    @settings(max_examples=50)
    def test_any_cut_of_it_is_refused(self, ledger: Ledger, data: st.DataObject) -> None:
        whole = ledger.to_json()
        cut = whole[: data.draw(st.integers(0, len(whole) - 1))]
        assert is_refused(cut)

    @pytest.mark.parametrize(
        "entry",
        [b"", b"\0" * 100, b"null", b"[]", b"{}", b'"text"', b'{"gristmill_ledger": 1}', b"\xff\xfe", b"7"],
    )
    def test_what_is_no_ledger_is_refused(self, entry: bytes) -> None:
        assert is_refused(entry)

    @pytest.mark.parametrize(
        "field", ["plan_id", "shard", "parts", "dead_lines", "sources", "dead_by_reason", "start_at"]
    )
    def test_missing_field_is_refused(self, field: str) -> None:
        fields = json.loads(write_attempt(WorstStore(), "a").to_json())
        del fields[field]
        assert is_refused(json.dumps(fields).encode())

    def test_other_version_is_refused_with_both_numbers(self) -> None:
        fields = json.loads(write_attempt(WorstStore(), "a").to_json())
        fields["gristmill_ledger"] = 2
        with pytest.raises(ValueError, match="version 2, expected 1"):
            Ledger.from_json(json.dumps(fields).encode())

    def test_books_add_the_rows_and_the_bytes_of_the_parts(self) -> None:
        ledger = write_attempt(WorstStore(), "a")
        assert ledger.books() == {
            "records_read": 4,
            "records_written": 3,
            "records_added": 0,
            "records_dropped": 0,
            "records_dead": 1,
            "records_dead_estimate": 1,
            "bytes_read": 0,
            "bytes_written": 12,
            "bytes_dead": 0,
            "files_read": 1,
            "files_empty": 0,
            "files_dead": 0,
        }
        assert json.loads(ledger.to_json())["books"] == ledger.books()


class TestNames:
    def test_ledgers_sort_as_their_shards_count(self) -> None:
        spec = make_spec("/out", num_shards=123_456)
        names = [ledger_name(spec, shard) for shard in (0, 9, 10, 99_999, 100_000, 123_455)]
        assert names == sorted(names)
        assert names[0] == "_gristmill/shards/000000.json"


class TestFindLedger:
    def test_nothing_committed_is_none(self, store: Store, spec: JobSpec) -> None:
        assert find_ledger(store, spec, 0) is None

    def test_committed_one_counts(self, store: Store, spec: JobSpec) -> None:
        mine = write_attempt(store, "a")
        commit(store, spec, mine)
        found = find_ledger(store, spec, 0)
        assert found is not None
        assert found.ledger == mine

    @pytest.mark.parametrize("entry", [b"", b"{", b"\0" * 64, b"[1, 2]"])
    def test_malformed_one_counts_as_none(self, store: Store, spec: JobSpec, entry: bytes) -> None:
        store.put(ledger_name(spec, 0), entry)
        found = find_ledger(store, spec, 0)
        assert found is not None
        assert found.ledger is None

    def test_one_of_another_plan_does_not_count(self, store: Store, spec: JobSpec) -> None:
        store.put(ledger_name(spec, 0), write_attempt(store, "a", plan_id="plan-b").to_json())
        found = find_ledger(store, spec, 0)
        assert found is not None
        assert found.ledger is None

    @pytest.mark.parametrize("number", [0, 1, 2])
    def test_one_with_a_missing_file_does_not_count(self, store: Store, spec: JobSpec, number: int) -> None:
        mine = write_attempt(store, "a")
        commit(store, spec, mine)
        store.delete(mine.files()[number].name)
        found = find_ledger(store, spec, 0)
        assert found is not None
        assert found.ledger is None

    @pytest.mark.parametrize("number", [0, 1, 2])
    def test_one_with_a_file_of_another_size_does_not_count(self, store: Store, spec: JobSpec, number: int) -> None:
        mine = write_attempt(store, "a")
        commit(store, spec, mine)
        store.put(mine.files()[number].name, b"cut")
        found = find_ledger(store, spec, 0)
        assert found is not None
        assert found.ledger is None

    def test_published_names_stand_for_the_attempt(self, store: Store, spec: JobSpec) -> None:
        mine = write_attempt(store, "a")
        commit(store, spec, mine)
        finals = {file.name: f"final-{number}" for number, file in enumerate(mine.files())}
        for name, final in finals.items():
            store.copy(name, final)
            store.delete(name)
        store.put(published_name(spec, 0), json.dumps(finals).encode())
        assert read_published(store, spec, 0) == finals
        found = find_ledger(store, spec, 0)
        assert found is not None
        assert found.ledger == mine

        store.delete("final-1")
        found = find_ledger(store, spec, 0)
        assert found is not None
        assert found.ledger is None


class TestCommit:
    def test_first_wins_and_second_gets_the_ledger_of_the_first(self, store: Store, spec: JobSpec) -> None:
        first, second = write_attempt(store, "a"), write_attempt(store, "b")
        assert commit(store, spec, first) is first
        assert commit(store, spec, second) == first
        found = find_ledger(store, spec, 0)
        assert found is not None
        assert found.ledger == first

    @pytest.mark.parametrize("entry", [b"", b'{"gristmill_ledger": 1, "plan', b"\0" * 64])
    def test_malformed_one_makes_room(self, store: Store, spec: JobSpec, entry: bytes) -> None:
        store.put(ledger_name(spec, 0), entry)
        mine = write_attempt(store, "a")
        assert commit(store, spec, mine) is mine

    def test_one_of_another_plan_makes_room(self, store: Store, spec: JobSpec) -> None:
        store.put(ledger_name(spec, 0), write_attempt(store, "old", plan_id="plan-b").to_json())
        mine = write_attempt(store, "a")
        assert commit(store, spec, mine) is mine

    def test_one_whose_files_are_gone_makes_room(self, store: Store, spec: JobSpec) -> None:
        old = write_attempt(store, "old")
        commit(store, spec, old)
        store.delete(old.parts[0].name)
        mine = write_attempt(store, "a")
        assert commit(store, spec, mine) is mine
        found = find_ledger(store, spec, 0)
        assert found is not None
        assert found.ledger == mine

    def test_shards_do_not_see_each_other(self, store: Store, spec: JobSpec) -> None:
        both = [write_attempt(store, "a", shard=shard) for shard in (0, 1)]
        assert [commit(store, spec, ledger) for ledger in both] == both


def test_info_has_what_the_job_needs_and_no_more() -> None:
    first = SourceRow(7, 1, 500, Span(100, 500, 110, 500), read=2, written=2, num_bytes=390)
    whole = SourceRow(8, 3, 50, None)
    last = SourceRow(11, 1, 900, Span(0, 300, 0, 310), read=5, written=4, dead=1, num_bytes=310, dead_bytes=20)
    ledger = dataclasses.replace(write_attempt(WorstStore(), "a"), rows=(first, whole, last))
    info = ledger.to_info(make_task(3))
    assert (info.task, info.num_parts) == (make_task(3), 1)
    assert info.first is not None
    assert (info.first.index, info.first.span, info.first.read) == (7, first.span, 2)
    assert info.last is not None
    assert (info.last.index, info.last.span, info.last.dead) == (11, last.span, 1)
    assert info.books["records_read"] == 7
    assert info.books["files_empty"] == 3
    assert info.books["files_read"] == 0
