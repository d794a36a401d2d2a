"""The limit of calls in flight among threads: who waits, who is woken, what is told."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import pytest

from fakes import run_together
from transforms.steps.adaptive import LOG_EVERY_SECS, AdaptiveLimit, CallsEndedError


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


class TestCalls:
    def test_never_more_than_allowed_among_threads(self) -> None:
        limit = AdaptiveLimit("step", 3)
        lock, in_flight, peak = threading.Lock(), 0, 0

        def calls() -> None:
            nonlocal in_flight, peak
            for _ in range(20):
                call = limit.acquire()
                with lock:
                    in_flight += 1
                    peak = max(peak, in_flight)
                time.sleep(0.001)
                with lock:
                    in_flight -= 1
                limit.answer(call)

        run_together([calls] * 8)
        assert peak == 3

    @pytest.mark.parametrize("end", ["answer", "forget"])
    def test_one_waits_for_another_to_end(self, end: str) -> None:
        limit = AdaptiveLimit("step", 1)
        call = limit.acquire()
        thread = waits(limit.acquire)
        assert thread.is_alive()
        getattr(limit, end)(call)
        assert has_ended(thread)

    def test_a_call_that_fails_lets_the_next_one_begin(self) -> None:
        limit = AdaptiveLimit("step", 1)
        call = limit.acquire()
        thread = waits(limit.acquire)
        limit.fail(call, "http_503")
        assert has_ended(thread)

    def test_begin_in_the_order_in_which_they_waited(self) -> None:
        limit = AdaptiveLimit("step", 1)
        call = limit.acquire()
        order: list[int] = []

        def begin(number: int) -> None:
            mine = limit.acquire()
            order.append(number)
            limit.answer(mine)

        threads = []
        for number in range(5):
            threads.append(waits(lambda number=number: begin(number)))
            while len(limit._waiting) <= number:
                time.sleep(0.001)
        limit.answer(call)
        assert all(map(has_ended, threads))
        assert order == [0, 1, 2, 3, 4]


class TestPauses:
    def test_of_many_calls_hold_back_every_call(self) -> None:
        limit = AdaptiveLimit("step", 4)
        asked = time.monotonic()
        for call in [limit.acquire() for _ in range(4)]:
            limit.fail(call, "http_429", pause_secs=0.2)
        run_together([limit.acquire])
        assert time.monotonic() - asked >= 0.2

    @pytest.mark.parametrize("pause_secs", [0.0, 1000.0])
    def test_closing_ends_all_waiting(self, pause_secs: float) -> None:
        limit = AdaptiveLimit("step", 3)
        calls = [limit.acquire() for _ in range(3)]
        if pause_secs:
            for call in calls:
                limit.fail(call, "http_429", pause_secs)
        ended = []

        def wait(call: Callable[[], object]) -> None:
            with pytest.raises(CallsEndedError, match="step makes no more calls"):
                call()
            ended.append(call)

        threads = [waits(lambda: wait(limit.acquire)) for _ in range(2)]
        threads.append(waits(lambda: wait(lambda: limit.sleep(1000))))
        limit.close()
        assert all(map(has_ended, threads))
        assert len(ended) == 3


class TestLog:
    def test_tells_once_in_a_while_that_the_limit_went_down(self, caplog: pytest.LogCaptureFixture) -> None:
        now = [0.0]
        limit = AdaptiveLimit("Post on example.org", 16, clock=lambda: now[0])
        for now[0] in (0.0, LOG_EVERY_SECS - 1, LOG_EVERY_SECS + 1):
            for call in [limit.acquire() for _ in range(limit.limit)]:
                limit.fail(call, "http_429")
        assert caplog.messages == [
            "Post on example.org: http_429: from 16 to 8 calls at a time",
            "Post on example.org: http_429: from 8 to 1 calls at a time",
        ]

    def test_tells_nothing_of_single_failures(self, caplog: pytest.LogCaptureFixture) -> None:
        now = [0.0]
        limit = AdaptiveLimit("step", 16, clock=lambda: now[0])
        for number in range(2000):
            call = limit.acquire()
            now[0] += 0.05
            if number % 20:
                limit.answer(call)
            else:
                limit.fail(call, "http_503")
        assert (caplog.messages, limit.limit) == ([], 16)

    def test_tells_that_a_service_is_down_and_that_it_is_back(self, caplog: pytest.LogCaptureFixture) -> None:
        now = [0.0]
        limit = AdaptiveLimit("step", 4, clock=lambda: now[0])

        def call(end: Callable[..., None], *arguments: str) -> None:
            call = limit.acquire()
            now[0] += 1
            end(call, *arguments)

        for _ in range(10):
            call(limit.answer)
        while not limit.is_down:
            call(limit.fail, "http_connection")
        now[0] += 100
        call(limit.answer)
        with caplog.at_level(logging.WARNING, "gristmill"):
            assert caplog.messages[-2:] == [
                "step: http_connection, and no answer any more; it is asked again now and then",
                "step: answers again",
            ]
