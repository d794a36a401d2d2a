"""Requests run ahead: in order, within bounds, with the error of the first one that fails."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator

import pytest

import gcs_emulator
from gcs_emulator import Emulator
from transforms.ahead import call_ahead, map_ahead
from transforms.gcs_store import GcsStore
from transforms.store import OutputError

WAIT_SECS = 60


class TestMapAhead:
    def test_results_are_in_order_though_calls_end_in_another(self) -> None:
        second_ended = threading.Event()

        def double(number: int) -> int:
            if number == 0:
                assert second_ended.wait(WAIT_SECS)  # Only possible while the next one runs.
            if number == 1:
                second_ended.set()
            return 2 * number

        assert list(map_ahead(double, range(100), 4)) == [2 * number for number in range(100)]

    @pytest.mark.parametrize(("items", "threads"), [([1, 2, 3], 1), ([1], 8), ([], 8)])
    def test_nothing_runs_in_a_thread_without_need(self, items: list[int], threads: int) -> None:
        where = list(map_ahead(lambda _: threading.current_thread(), items, threads))
        assert where == [threading.current_thread()] * len(items)

    def test_one_at_a_time_takes_no_item_before_the_last_result_is_used(self) -> None:
        taken = []

        def items() -> Iterator[int]:
            for number in range(3):
                taken.append(number)
                yield number

        results = map_ahead(str, items(), 1)
        assert next(results) == "0"
        assert taken == [0]

    def test_items_are_taken_ahead_within_bounds(self) -> None:
        taken = itertools.count()
        results = map_ahead(str, (next(taken) for _ in range(10_000)), 4)
        assert [next(results) for _ in range(100)] == [str(number) for number in range(100)]
        assert next(taken) <= 100 + 2 * 4
        results.close()  # type: ignore[attr-defined]

    def test_the_error_of_the_first_item_that_fails_is_raised_and_nothing_is_begun_after_it(self) -> None:
        begun = []

        def fail(number: int) -> int:
            begun.append(number)
            if number >= 10:
                raise ValueError(f"item {number}")
            return number

        results = map_ahead(fail, range(10_000), 4)
        assert list(itertools.islice(results, 10)) == list(range(10))
        with pytest.raises(ValueError, match="item 10"):
            next(results)
        assert max(begun) <= 10 + 2 * 4
        assert not [thread for thread in threading.enumerate() if "gristmill-ahead" in thread.name]

    def test_who_stops_early_waits_for_what_runs(self) -> None:
        running = threading.Barrier(3)
        ended = []

        def call(number: int) -> int:
            if number:
                running.wait(WAIT_SECS)
            ended.append(number)
            return number

        results = map_ahead(call, range(3), 3)
        assert next(results) == 0
        threading.Timer(0.1, running.wait, [WAIT_SECS]).start()
        results.close()  # type: ignore[attr-defined]
        assert sorted(ended) == [0, 1, 2]


class TestRequests:
    @pytest.fixture
    def store(self, emulator: Emulator) -> GcsStore:
        store = GcsStore(emulator.new_bucket() + "/out")
        call_ahead(lambda number: store.put(f"n{number:02d}", b"%d" % number), range(40), 8)
        emulator.be_well()
        return store

    def test_as_many_as_threads_are_open_at_a_time(self, emulator: Emulator, store: GcsStore) -> None:
        emulator.fail("GET .*out%2Fn", *gcs_emulator.together(32))  # None is answered before all 32 are open.
        names = [f"n{number:02d}" for number in range(40)]
        found = list(map_ahead(store.get, names, store.requests_at_once))
        assert [one and one[0] for one in found] == [b"%d" % number for number in range(40)]
        assert emulator.most_open == store.requests_at_once == 32

    def test_connections_are_kept(self, emulator: Emulator, store: GcsStore) -> None:
        for _ in range(4):
            emulator.fail("GET .*out%2Fn", *gcs_emulator.together(32))
            call_ahead(store.get, [f"n{number:02d}" for number in range(32)], 32)
        assert len(emulator.seen) == 4 * 32
        assert len(emulator.clients) <= 32 + 8  # Some of before, which the fixture has used.

    def test_slow_answers_do_not_change_the_order(self, emulator: Emulator, store: GcsStore) -> None:
        emulator.fail("GET .*out%2Fn(00|05|06)", *[gcs_emulator.slow(0.3)] * 3)
        sizes = list(map_ahead(store.size, ["n00", "none", "n05", "n06", "n10"], 4))
        assert sizes == [1, None, 1, 1, 2]
        assert emulator.most_open > 1

    def test_a_refusal_comes_through_and_ends_the_rest(self, emulator: Emulator, store: GcsStore) -> None:
        emulator.fail("GET .*out%2Fn03", gcs_emulator.status(403))
        names = [f"n{number:02d}" for number in range(40)] * 10
        with pytest.raises(OutputError, match=r"out/n03: .*403"):
            list(map_ahead(store.get, names, 4))
        assert len(emulator.seen) <= 3 + 1 + 2 * 4
