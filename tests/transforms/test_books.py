"""The books: sums, files that several shards share, ranges that do not meet, and what the budget allows."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes import make_task
from transforms.books import (
    BYTES,
    COUNTS,
    FILES,
    JobBooks,
    SourceRow,
    add_rows,
    add_up,
    append_row,
    edges_of,
    file_outcome,
    is_balanced,
    judge,
)
from transforms.budget import ESTIMATE, Budget, dead_fraction
from transforms.elements import Input, ShardInfo, Span
from transforms.plan import cut_shards


def info_of(shard: int, rows: list[SourceRow]) -> ShardInfo:
    """What the writer makes of the rows of a shard."""
    first, last = edges_of(rows)
    return ShardInfo(make_task(shard), 1, {**add_rows(rows), "bytes_written": 10}, first, last)


def edge_row(index: int, size: int, *span: int | None, read: int = 1, dead: int = 0) -> SourceRow:
    """A row of a shared input: span is asked start, asked end, start, end."""
    return SourceRow(index, 1, size, Span(*span), read=read, written=read - dead, dead=dead)  # type: ignore[arg-type]


@dataclasses.dataclass
class ToyFile:
    """A file of records of known sizes, some of them dead."""

    records: list[tuple[int, bool]]  # (bytes, whether it is dead)

    @property
    def size(self) -> int:
        return sum(size for size, _ in self.records)

    def read(self, index: int, start: int, end: int) -> SourceRow:
        """What a reader that follows the rules finds in [start, end)."""
        inside = []
        position = 0
        for size, dead in self.records:
            if start <= position < end:
                inside.append((position, size, dead))
            position += size
        span = Span(start, end, None, None)
        if inside:
            span = Span(start, end, inside[0][0], inside[-1][0] + inside[-1][1])
        elif self.size == 0:
            return SourceRow(index, 1, 0, None)
        num_dead = sum(dead for _, _, dead in inside)
        dead_bytes = sum(size for _, size, dead in inside if dead)
        num_bytes = sum(size for _, size, _ in inside)
        return SourceRow(
            index,
            1,
            self.size,
            span,
            len(inside),
            len(inside) - num_dead,
            dead=num_dead,
            num_bytes=num_bytes,
            dead_bytes=dead_bytes,
        )


toy_files = st.lists(
    st.builds(ToyFile, st.lists(st.tuples(st.integers(1, 30), st.booleans()), max_size=12)), min_size=1, max_size=8
)


def read_in_shards(files: list[ToyFile], num_shards: int) -> list[ShardInfo]:
    """Plans the files as equal byte ranges and reads each of them."""
    inputs = [(index, Input(index, f"/in/{index}", file.size, 0)) for index, file in enumerate(files)]
    total = sum(file.size for file in files)
    infos = []
    for task in cut_shards(inputs, total, num_shards, lambda source: source.size, lambda _: True):
        rows: list[SourceRow] = []
        for index in range(task.first_offset, task.last_offset + 1):
            start = task.start if index == task.first_offset else 0
            end = task.end if index == task.last_offset else files[index].size
            append_row(rows, files[index].read(index, start, end))
        infos.append(dataclasses.replace(info_of(task.shard, rows), task=task))
    return infos


class TestAddUp:
    @given(toy_files, st.integers(1, 30))
    @settings(max_examples=300)
    def test_shared_files_are_counted_once_whatever_the_number_of_shards(
        self, files: list[ToyFile], num_shards: int
    ) -> None:
        books = add_up(read_in_shards(files, num_shards))
        whole = add_up(read_in_shards(files, 1))
        assert books.apart == []
        for name in (*COUNTS, "bytes_read", "bytes_dead", *FILES):
            assert books.totals[name] == whole.totals[name]
        records = [dead for file in files for _, dead in file.records]
        assert (books.totals["records_read"], books.totals["records_dead"]) == (len(records), sum(records))
        assert books.totals["files_empty"] == sum(not file.records for file in files)
        dead_files = [file for file in files if file.records and all(dead for _, dead in file.records)]
        assert books.totals["files_dead"] == len(dead_files)
        assert sum(books.totals[name] for name in FILES) == len(files)

    @given(toy_files, st.integers(2, 30), st.data())
    @settings(max_examples=300)
    def test_any_wrong_boundary_is_found(self, files: list[ToyFile], num_shards: int, data: st.DataObject) -> None:
        infos = read_in_shards(files, num_shards)
        begins = [
            number for number, info in enumerate(infos) if info.first is not None and info.first.span.start is not None
        ]
        if not begins:
            return
        number = data.draw(st.sampled_from(begins))
        info, first = infos[number], infos[number].first
        assert first is not None
        assert first.span.start is not None
        wrong = dataclasses.replace(first, span=dataclasses.replace(first.span, start=first.span.start + 1))
        last = wrong if info.last == first else info.last
        infos[number] = dataclasses.replace(info, first=wrong, last=last)
        assert add_up(infos).apart == [(infos[number], first.span.start)]

    def test_nothing_adds_up_to_zeros(self) -> None:
        assert add_up([]) == JobBooks(dict.fromkeys((*COUNTS, ESTIMATE, *BYTES, *FILES), 0), [])

    def test_file_that_spans_whole_shards_is_one_file(self) -> None:
        rows = [edge_row(5, 100, 25 * n, 25 * n + 25, 25 * n, 25 * n + 25) for n in range(4)]
        books = add_up(info_of(n, [row]) for n, row in enumerate(rows))
        assert (books.totals["files_read"], books.totals["records_read"], books.apart) == (1, 4, [])

    def test_file_is_dead_only_if_all_its_shards_say_so(self) -> None:
        dead = [edge_row(0, 100, 0, 50, 0, 50, dead=1), edge_row(0, 100, 50, 100, 50, 100, dead=1)]
        assert add_up(info_of(n, [row]) for n, row in enumerate(dead)).totals["files_dead"] == 1
        half = [dead[0], edge_row(0, 100, 50, 100, 50, 100)]
        totals = add_up(info_of(n, [row]) for n, row in enumerate(half)).totals
        assert (totals["files_dead"], totals["files_read"]) == (0, 1)

    def test_shard_that_ends_one_file_and_begins_the_next_counts_for_both(self) -> None:
        infos = [
            info_of(0, [edge_row(0, 100, 0, 50, 0, 60)]),
            info_of(1, [edge_row(0, 100, 50, 100, 60, 100), SourceRow(1, 3, 10, None), edge_row(4, 100, 0, 30, 0, 30)]),
            info_of(2, [edge_row(4, 100, 30, 100, 30, 100)]),
        ]
        books = add_up(infos)
        assert (books.totals["files_read"], books.totals["files_empty"], books.apart) == (2, 3, [])


class TestApart:
    def ranges(self, *spans: tuple[int, int, int | None, int | None]) -> list[ShardInfo]:
        """One file of 400 bytes, a range a shard."""
        return [info_of(number, [edge_row(0, 400, *span)]) for number, span in enumerate(spans)]

    def apart(self, *spans: tuple[int, int, int | None, int | None]) -> list[tuple[int, int]]:
        return [(info.task.shard, boundary) for info, boundary in add_up(self.ranges(*spans)).apart]

    def test_ranges_that_meet(self) -> None:
        assert self.apart((0, 100, 0, 120), (100, 200, 120, 200), (200, 400, 200, 400)) == []

    @pytest.mark.parametrize("start", [105, 119, 121, 199])
    def test_range_that_begins_elsewhere(self, start: int) -> None:
        assert self.apart((0, 100, 0, 120), (100, 200, start, 230), (200, 400, 230, 400)) == [(1, 120)]

    def test_range_that_found_no_beginning_before_its_end(self) -> None:
        assert self.apart((0, 100, 0, 120), (100, 200, None, None), (200, 400, 210, 400)) == [(1, 120), (2, 120)]

    def test_record_over_whole_ranges_leaves_them_empty(self) -> None:
        assert self.apart((0, 100, 0, 350), (100, 200, None, None), (200, 300, None, None), (300, 400, 350, 400)) == []

    def test_range_inside_a_record_that_found_a_false_beginning(self) -> None:
        assert self.apart((0, 100, 0, 350), (100, 200, 150, 220), (200, 300, None, None), (300, 400, 350, 400)) == [
            (1, 350)
        ]

    def test_false_beginning_that_hid_another(self) -> None:
        assert self.apart((0, 100, 0, 120), (100, 200, 110, 210), (200, 400, 230, 400)) == [(1, 120), (2, 210)]

    def test_unknown_end_is_met_by_any_beginning(self) -> None:
        assert self.apart((0, 100, 0, None), (100, 200, 120, 200), (200, 400, 200, 400)) == []

    def test_next_file_begins_afresh(self) -> None:
        infos = [info_of(0, [edge_row(0, 400, 0, 200, 0, 210)]), info_of(1, [edge_row(0, 400, 200, 400, 210, 400)])]
        infos += [info_of(2, [edge_row(1, 400, 0, 200, 0, 250)]), info_of(3, [edge_row(1, 400, 200, 400, 250, 400)])]
        assert add_up(infos).apart == []


class TestRows:
    @given(
        st.lists(
            st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(0, 1), st.integers(0, 50), st.booleans()),
            max_size=40,
        )
    )
    def test_joined_rows_keep_every_sum(self, facts: list[tuple[int, int, int, int, bool]]) -> None:
        singles: list[SourceRow] = []
        joined: list[SourceRow] = []
        for index, (written, dropped, dead, num_bytes, gap) in enumerate(facts):
            row = SourceRow(
                index * 2 if gap else index, 1, num_bytes, None, written + dropped + dead, written, 0, dropped, dead
            )
            row.num_bytes, row.dead_bytes = num_bytes, 5 * dead
            singles.append(dataclasses.replace(row))
            append_row(joined, row)
        assert add_rows(joined) == add_rows(singles)
        assert sum(row.count for row in joined) == len(singles)
        assert [row for row in joined if row.dead or row.dropped] == [row for row in singles if row.dead or row.dropped]

    def test_twenty_thousand_like_inputs_are_one_row(self) -> None:
        rows: list[SourceRow] = []
        for index in range(20_000):
            append_row(rows, SourceRow(index, 1, 100, Span(0, 100, 0, 100), read=1, written=1, num_bytes=100))
        [row] = rows
        assert (row.index, row.count, row.num_bytes) == (0, 20_000, 2_000_000)

    def test_shared_inputs_keep_their_rows(self) -> None:
        rows: list[SourceRow] = []
        append_row(rows, edge_row(0, 100, 50, 100, 50, 100))
        append_row(rows, SourceRow(1, 1, 10, Span(0, 10, 0, 10), read=1, written=1))
        append_row(rows, edge_row(2, 100, 0, 50, 0, 50))
        first, last = edges_of(rows)
        assert len(rows) == 3
        assert first is not None
        assert last is not None
        assert (first.index, last.index) == (0, 2)

    def test_whole_inputs_have_no_edges(self) -> None:
        assert edges_of([SourceRow(0, 1, 10, Span(0, 10, 0, 10), read=1, written=1), SourceRow(1, 1, 0, None)]) == (
            None,
            None,
        )

    @pytest.mark.parametrize(
        ("read", "dead", "outcome"), [(0, 0, "files_empty"), (3, 3, "files_dead"), (3, 2, "files_read")]
    )
    def test_outcome_of_a_file(self, read: int, dead: int, outcome: str) -> None:
        assert file_outcome(read, dead) == outcome


def books(**changes: Any) -> JobBooks:
    """1,000 records of 10 files and 100,000 bytes, all written."""
    totals = dict.fromkeys((*COUNTS, *BYTES, *FILES), 0)
    totals.update(records_read=1000, records_written=1000, files_read=10, bytes_read=100_000)
    totals.update(changes)
    totals["records_written"] = totals["records_read"] - totals["records_dead"] - totals["records_dropped"]
    return JobBooks(totals, [])


class TestJudge:
    def test_clean_job_is_done(self) -> None:
        verdict = judge(books(), Budget(0.1, None))
        assert (verdict.status, verdict.message) == ("done", "")
        assert verdict.dead_fraction == {"records": 0.0, "bytes": 0.0, "files": 0.0}

    @pytest.mark.parametrize(
        ("changes", "status", "kind"),
        [
            ({"records_dead": 100}, "done", "records"),
            ({"records_dead": 101}, "over_budget", "records"),
            ({"records_dead": 1, "bytes_dead": 10_000}, "done", "bytes"),
            ({"records_dead": 1, "bytes_dead": 10_001}, "over_budget", "bytes"),
            ({"records_dead": 1, "files_dead": 1, "files_read": 9}, "done", "files"),
            ({"records_dead": 2, "files_dead": 2, "files_read": 9}, "over_budget", "files"),
        ],
    )
    def test_the_worst_of_records_bytes_and_files_counts(self, changes: dict[str, int], status: str, kind: str) -> None:
        verdict = judge(books(**changes), Budget(0.1, None))
        assert verdict.status == status
        if status == "over_budget":
            assert f"of {kind} are dead" in verdict.message
            assert "allows 10.00%" in verdict.message

    @pytest.mark.parametrize(("dead", "status"), [(0, "done"), (5, "done"), (6, "over_budget")])
    def test_count_of_dead_letters(self, dead: int, status: str) -> None:
        verdict = judge(books(records_dead=dead), Budget(1.0, 5))
        assert verdict.status == status
        assert status == "done" or verdict.message == "6 dead letters; dead_letters.max_count allows 5"

    def test_count_of_zero_allows_none(self) -> None:
        assert judge(books(records_dead=1), Budget(1.0, 0)).status == "over_budget"

    def test_fraction_of_one_allows_all_but_nothing_written_is_no_success(self) -> None:
        assert judge(books(records_dead=1000), Budget(1.0, None)).status == "nothing_written"
        assert judge(books(records_dropped=1000), Budget(1.0, None)).status == "nothing_written"
        assert (
            judge(books(records_read=0, files_read=0, files_empty=10, bytes_read=0), Budget(0.1, None)).status
            == "nothing_written"
        )

    @pytest.mark.parametrize("name", COUNTS)
    def test_books_that_do_not_balance_are_no_success_whatever_the_budget(self, name: str) -> None:
        unbalanced = books()
        unbalanced.totals[name] += 1
        assert not is_balanced(unbalanced.totals)
        verdict = judge(unbalanced, Budget(1.0, None))
        assert verdict.status == "unbalanced"
        assert str(unbalanced.totals[name]) in verdict.message

    def test_ranges_apart_are_no_success(self) -> None:
        apart = books()
        apart.apart.append((info_of(7, []), 120))
        verdict = judge(apart, Budget(1.0, None))
        assert verdict.status == "unbalanced"
        assert "[7]" in verdict.message

    def test_added_records_balance_against_what_was_written(self) -> None:
        totals = books().totals
        totals["records_added"] += 500
        totals["records_written"] += 500
        assert is_balanced(totals)

    def test_fraction_of_nothing_is_zero(self) -> None:
        assert dead_fraction(dict.fromkeys((*COUNTS, *BYTES, *FILES), 0)) == {
            "records": 0.0,
            "bytes": 0.0,
            "files": 0.0,
        }
