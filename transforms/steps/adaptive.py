"""How many calls a service gets at a time, for many threads: the rule is that of `overload`. No Beam here."""

from __future__ import annotations

import collections
import logging
import math
import threading
import time
from collections.abc import Callable

from transforms.steps.overload import Began, LimitRule

_LOGGER = logging.getLogger("gristmill")

LOG_EVERY_SECS = 30.0
"""A service that is at its limit for hours is told of this often, not at each of its answers."""


class CallsEndedError(Exception):
    """The limit was closed: no further call may begin."""


class AdaptiveLimit:
    """Bounds calls in flight; used by many threads.

    Each call stands between `acquire` and one of `answer`, `fail` and `forget`. Whoever waits first begins first.

    Args:
        name: Who calls, for the log.
        max_in_flight: The limit to begin with, and the largest.
        first_gap_secs: A service that went down is asked again after at most this; the time doubles.
        clock: Seconds of a clock that never goes back.
    """

    def __init__(
        self,
        name: str,
        max_in_flight: int,
        first_gap_secs: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self._rule = LimitRule(max_in_flight, first_gap_secs)
        self._clock = clock
        self._lock = threading.Lock()
        self._waiting: collections.deque[threading.Condition] = collections.deque()
        self._closed = threading.Event()
        self._told = max_in_flight
        self._told_at = -math.inf

    @property
    def limit(self) -> int:
        """Calls that may be in flight now."""
        return self._rule.limit

    @property
    def is_down(self) -> bool:
        """Whether the service answers no call."""
        return self._rule.is_down

    @property
    def gets_nothing(self) -> bool:
        """Whether the service answers no call, be it down or not there at all."""
        return self._rule.gets_nothing

    def acquire(self) -> Began:
        """Waits until a call may begin, and begins it.

        Raises:
            CallsEndedError: The limit is closed.
        """
        with self._lock:
            mine = threading.Condition(self._lock)
            self._waiting.append(mine)
            try:
                while not self._closed.is_set():
                    wait = self._rule.wait_secs(self._clock()) if self._waiting[0] is mine else math.inf
                    if wait <= 0:
                        return self._rule.begin(self._clock())
                    mine.wait(None if math.isinf(wait) else wait)
            finally:
                self._waiting.remove(mine)
                self._wake()
        raise CallsEndedError(f"{self._name} makes no more calls")

    def answer(self, call: Began) -> None:
        """Ends a call that the service answered."""
        with self._lock:
            was_down = self._rule.is_down
            self._rule.answer(call, self._clock())
            if was_down:
                _LOGGER.warning("%s: answers again", self._name)
            self._tell("more calls at a time bring no more answers", was_down)
            self._wake()

    def forget(self, call: Began) -> None:
        """Ends a call that says nothing of the service."""
        with self._lock:
            self._rule.forget(call)
            self._wake()

    def fail(self, call: Began, why: str, pause_secs: float = 0.0) -> None:
        """Ends a call that the service failed on.

        Args:
            call: What `acquire` returned.
            why: For the log.
            pause_secs: How long the service asked to be left alone.
        """
        with self._lock:
            if self._closed.is_set():  # Calls that are cut off at the end say nothing.
                self._rule.forget(call)
            else:
                was_down = self._rule.is_down
                self._rule.fail(call, self._clock(), pause_secs)
                self._tell(why, was_down)
            self._wake()

    def sleep(self, secs: float) -> None:
        """Waits for one call's own sake.

        Raises:
            CallsEndedError: The limit is closed.
        """
        if self._closed.wait(secs):
            raise CallsEndedError(f"{self._name} makes no more calls")

    def close(self) -> None:
        """Ends all waiting, for good."""
        with self._lock:
            self._closed.set()
            for waiting in self._waiting:
                waiting.notify()

    def _wake(self) -> None:
        """Only the first in the queue has anything to look at: hundreds that all wake up would cost more than calls."""
        if self._waiting:
            self._waiting[0].notify()

    def _tell(self, why: str, was_down: bool) -> None:
        """Logs what changed for the worse by much; what is tried for a moment is nobody's concern."""
        limit = self._rule.settled_limit
        self._told = max(self._told, limit)
        if self._rule.is_down and not was_down:
            _LOGGER.warning("%s: %s, and no answer any more; it is asked again now and then", self._name, why)
            self._told = limit
        elif limit <= self._told / 2 and self._clock() - self._told_at >= LOG_EVERY_SECS:
            _LOGGER.warning("%s: %s: from %d to %d calls at a time", self._name, why, self._told, limit)
            self._told, self._told_at = limit, self._clock()
