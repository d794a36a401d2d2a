"""The budget: when totals break it, at the end and early, and how a job is called off."""

from __future__ import annotations

from pathlib import Path

import pytest

from transforms.budget import AbortWatch, Budget, RunningTotals, call_off, called_off
from transforms.store import LocalStore

MIB = 1 << 20


def totals(**changes: int) -> dict[str, int]:
    sound = {"records_read": 10_000, "records_dead": 0, "bytes_read": 100 * MIB, "bytes_dead": 0}
    return {**sound, "files_read": 100, "files_empty": 0, "files_dead": 0, **changes}


class TestAtTheEnd:
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"records_dead": 1_001}, "10.01% of records are dead; dead_letters.max_fraction allows 10.00%"),
            ({"bytes_dead": 11 * MIB}, "11.00% of bytes are dead; dead_letters.max_fraction allows 10.00%"),
            ({"files_dead": 25}, "20.00% of files are dead; dead_letters.max_fraction allows 10.00%"),
        ],
    )
    def test_each_fraction_breaks_it(self, changes: dict[str, int], message: str) -> None:
        assert Budget(0.1).broken(totals(**changes), {}) == message

    @pytest.mark.parametrize("changes", [{}, {"records_dead": 1_000}, {"bytes_dead": 10 * MIB}, {"files_dead": 11}])
    def test_what_is_allowed_does_not(self, changes: dict[str, int]) -> None:
        assert Budget(0.1).broken(totals(**changes), {}) is None

    def test_counts_break_it_whatever_the_fraction(self) -> None:
        assert Budget(1.0, max_count=5).broken(totals(records_dead=6), {}) == (
            "6 dead letters; dead_letters.max_count allows 5"
        )
        by_reason = Budget(1.0, max_count_by_reason={"timeout": 2, "truncated": 0})
        assert by_reason.broken(totals(records_dead=9), {"timeout": 2, "exception": 7}) is None
        assert by_reason.broken(totals(records_dead=9), {"timeout": 3}) == (
            "3 dead letters for timeout; dead_letters.max_count_by_reason allows 2"
        )


class TestEarly:
    BUDGET = Budget(0.1, planned_bytes=1000 * MIB, planned_files=1000)

    @pytest.mark.parametrize(
        ("changes", "key"),
        [({"records_dead": 2_000}, "records"), ({"bytes_dead": 20 * MIB}, "bytes"), ({"files_dead": 30}, "files")],
    )
    def test_each_fraction_breaks_it_once_a_tenth_was_read(self, changes: dict[str, int], key: str) -> None:
        message = self.BUDGET.broken_early(totals(**changes), {})
        assert message is not None
        assert f"% of the {key} that were read are dead" in message

    @pytest.mark.parametrize(
        "changes",
        [
            {"records_dead": 1_800},  # Worse than allowed, but the rest may be better.
            {"records_dead": 9_000, "bytes_read": 99 * MIB},  # Too little was read.
            {"records_dead": 900, "records_read": 999},
            {"files_dead": 9, "files_read": 0},
        ],
    )
    def test_too_little_does_not_break_it(self, changes: dict[str, int]) -> None:
        assert self.BUDGET.broken_early(totals(**changes), {}) is None

    def test_a_gib_is_enough_of_any_job(self) -> None:
        huge = Budget(0.1, planned_bytes=1 << 50, planned_files=10)
        assert huge.broken_early(totals(records_dead=9_000, bytes_read=1 << 30), {}) is not None

    @pytest.mark.parametrize("changes", [{"bytes_dead": 101 * MIB}, {"files_dead": 101, "files_read": 900}])
    def test_more_than_the_whole_job_may_lose_breaks_it(self, changes: dict[str, int]) -> None:
        lenient = {"bytes_read": 5000 * MIB, **changes}
        assert self.BUDGET.broken_early(totals(**lenient), {}) is not None

    def test_counts_break_it_at_once(self) -> None:
        running = RunningTotals(Budget(1.0, max_count=2))
        books = {"records_read": 1, "records_dead": 1, "bytes_read": 1, "bytes_dead": 0}
        books |= {"files_read": 1, "files_empty": 0, "files_dead": 0}
        assert [running.add(books, {"x": 1}) is None for _ in range(3)] == [True, True, False]
        assert running.totals["records_read"] == 3


class TestCallingOff:
    def test_the_first_reason_stands(self, tmp_path: Path) -> None:
        store = LocalStore(str(tmp_path))
        assert called_off(store) is None
        call_off(store, "too many")
        call_off(store, "later")
        assert called_off(store) == "too many"

    def test_tasks_look_at_the_start_and_then_now_and_then(self, tmp_path: Path) -> None:
        store = LocalStore(str(tmp_path))
        seldom, often = AbortWatch(store, look_secs=1e9), AbortWatch(store, look_secs=0)
        call_off(store, "too many")
        assert not seldom.is_off()
        assert often.is_off()
        assert AbortWatch(store, look_secs=1e9).is_off()
