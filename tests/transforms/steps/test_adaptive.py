"""The limit of calls in flight: halves once a round trip, grows by one in as many calls as it allows, pauses all."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import pytest

from fakes import run_together
from transforms.steps.adaptive import LOG_EVERY_SECS, AdaptiveLimit, CallsEndedError


def begin(limit: AdaptiveLimit, count: int) -> list[int]:
    return [limit.acquire() for _ in range(count)]


def waits(call: Callable[[], object]) -> threading.Thread:
    """A thread that does the call, once it is seen to have begun."""
    begun = threading.Event()

    def body() -> None:
        begun.set()
        call()

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    begun.wait(10)
    return thread


def has_ended(thread: threading.Thread) -> bool:
    thread.join(10)
    return not thread.is_alive()


class TestLimit:
    def test_begins_at_the_largest_and_never_exceeds_it(self) -> None:
        limit = AdaptiveLimit("step", 4)
        for _ in range(100):
            limit.acquire()
            limit.succeed()
        assert limit.limit == 4

    def test_halves_down_to_one(self) -> None:
        limit = AdaptiveLimit("step", 16)
        seen = []
        for _ in range(6):
            limit.back_off(limit.acquire(), "http_429")
            seen.append(limit.limit)
        assert seen == [8, 4, 2, 1, 1, 1]

    def test_halves_once_for_all_calls_that_were_in_flight(self) -> None:
        limit = AdaptiveLimit("step", 16)
        for started in begin(limit, 16):
            limit.back_off(started, "http_503")
        assert limit.limit == 8
        limit.back_off(limit.acquire(), "http_503")
        assert limit.limit == 4

    def test_grows_by_one_in_as_many_calls_as_it_allows(self) -> None:
        limit = AdaptiveLimit("step", 16)
        limit.back_off(limit.acquire(), "http_429")
        seen = []
        for _ in range(8 + 9 + 10):
            limit.acquire()
            limit.succeed()
            seen.append(limit.limit)
        assert [seen.count(size) > 0 for size in (8, 9, 10)] == [True] * 3
        assert 10 <= seen[-1] <= 11

    def test_calls_that_say_nothing_change_nothing(self) -> None:
        limit = AdaptiveLimit("step", 8)
        limit.back_off(limit.acquire(), "http_429")
        for _ in range(100):
            limit.acquire()
            limit.release()
        assert limit.limit == 4

    def test_never_more_calls_than_allowed_among_threads(self) -> None:
        limit = AdaptiveLimit("step", 3)
        lock, in_flight, peak = threading.Lock(), 0, 0

        def calls() -> None:
            nonlocal in_flight, peak
            for _ in range(20):
                limit.acquire()
                with lock:
                    in_flight += 1
                    peak = max(peak, in_flight)
                time.sleep(0.001)
                with lock:
                    in_flight -= 1
                limit.succeed()

        run_together([calls] * 8)
        assert peak == 3


class TestWaiting:
    def test_a_call_waits_for_one_to_end(self) -> None:
        limit = AdaptiveLimit("step", 1)
        limit.acquire()
        thread = waits(limit.acquire)
        assert thread.is_alive()
        limit.succeed()
        assert has_ended(thread)

    def test_a_pause_holds_back_every_call(self) -> None:
        limit = AdaptiveLimit("step", 8)
        started = begin(limit, 2)
        asked = time.monotonic()
        limit.back_off(started[0], "http_429", pause_secs=0.2)
        limit.succeed()
        run_together([limit.acquire] * 4)
        assert time.monotonic() - asked >= 0.2

    def test_a_shorter_pause_does_not_end_a_longer_one(self) -> None:
        limit = AdaptiveLimit("step", 8)
        first, second = begin(limit, 2)
        asked = time.monotonic()
        limit.back_off(first, "http_429", pause_secs=0.2)
        limit.back_off(second, "http_429", pause_secs=0.0)
        limit.acquire()
        assert time.monotonic() - asked >= 0.2

    @pytest.mark.parametrize("pause_secs", [0.0, 1000.0])
    def test_closing_ends_all_waiting(self, pause_secs: float) -> None:
        limit = AdaptiveLimit("step", 1)
        if pause_secs:
            limit.back_off(limit.acquire(), "http_429", pause_secs)
        else:
            limit.acquire()
        ended = []

        def wait(call: Callable[[], object]) -> None:
            with pytest.raises(CallsEndedError, match="step makes no more calls"):
                call()
            ended.append(call)

        threads = [waits(lambda: wait(limit.acquire)), waits(lambda: wait(lambda: limit.sleep(1000)))]
        limit.close()
        assert all(map(has_ended, threads))
        assert len(ended) == 2


class TestLog:
    def test_tells_once_in_a_while_that_the_limit_went_down(self, caplog: pytest.LogCaptureFixture) -> None:
        now = [0.0]
        limit = AdaptiveLimit("Post on example.org", 16, clock=lambda: now[0])
        with caplog.at_level(logging.WARNING, "gristmill"):
            for now[0] in (0.0, 1.0, LOG_EVERY_SECS + 1, LOG_EVERY_SECS + 2):
                limit.back_off(limit.acquire(), "http_429")
        assert caplog.messages == [
            "Post on example.org: http_429: from 16 to 8 calls at a time",
            "Post on example.org: http_429: from 4 to 2 calls at a time",
        ]

    def test_names_the_pause(self, caplog: pytest.LogCaptureFixture) -> None:
        limit = AdaptiveLimit("step", 2)
        limit.back_off(limit.acquire(), "http_503", pause_secs=30)
        assert caplog.messages == ["step: http_503: from 2 to 1 calls at a time, none for 30 s"]
