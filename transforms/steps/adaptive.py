"""How many calls a service gets at a time: more while it answers, half as many when it asks for less.

This is the rule by which TCP shares a line (additive increase, multiplicative decrease). No Beam here.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

_LOGGER = logging.getLogger("gristmill")

LOG_EVERY_SECS = 30.0
"""A service that is at its limit for hours is told of this often, not at each of its answers."""


class CallsEndedError(Exception):
    """The limit was closed: no further call may begin."""


class AdaptiveLimit:
    """Bounds calls in flight; used by many threads.

    Each call stands between `acquire` and one of `succeed`, `back_off` and `release`.

    Args:
        name: Who calls, for the log.
        max_in_flight: The limit to begin with, and the largest.
        clock: Seconds of a clock that never goes back.
    """

    def __init__(self, name: str, max_in_flight: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._max = max_in_flight
        self._limit = float(max_in_flight)
        self._clock = clock
        self._changed = threading.Condition()
        self._in_flight = 0
        self._round = 0
        self._paused_until = 0.0
        self._closed = False
        self._logged_at: float | None = None

    @property
    def limit(self) -> int:
        """Calls that may be in flight now."""
        return int(self._limit)

    def acquire(self) -> int:
        """Waits until a call may begin.

        Returns:
            The round in which it begins, to be handed back at its end.

        Raises:
            CallsEndedError: The limit is closed.
        """
        with self._changed:
            while not self._closed:
                pause = self._paused_until - self._clock()
                if pause <= 0 and self._in_flight < self.limit:
                    self._in_flight += 1
                    return self._round
                self._changed.wait(pause if pause > 0 else None)
        raise CallsEndedError(f"{self._name} makes no more calls")

    def succeed(self) -> None:
        """Ends a call that the service answered: the limit grows by one in as many calls as it allows."""
        with self._changed:
            self._limit = min(self._max, self._limit + 1 / self._limit)
            self._leave()

    def release(self) -> None:
        """Ends a call that says nothing of the load on the service."""
        with self._changed:
            self._leave()

    def back_off(self, started: int, why: str, pause_secs: float = 0.0) -> None:
        """Ends a call by which the service asks for less.

        Args:
            started: What `acquire` returned. Calls that began before the limit was halved tell of the load that
                it was halved for, so they do not halve it again.
            why: For the log.
            pause_secs: How long the service wants no call at all.
        """
        with self._changed:
            self._paused_until = max(self._paused_until, self._clock() + pause_secs)
            if started == self._round and not self._closed:  # Calls that are cut off at the end say nothing.
                self._round += 1
                before, self._limit = self.limit, max(1.0, self._limit / 2)
                self._log(before, why, pause_secs)
            self._leave()

    def sleep(self, secs: float) -> None:
        """Waits for one call's own sake.

        Raises:
            CallsEndedError: The limit is closed.
        """
        with self._changed:
            if self._changed.wait_for(lambda: self._closed, secs):
                raise CallsEndedError(f"{self._name} makes no more calls")

    def close(self) -> None:
        """Ends all waiting, for good."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _leave(self) -> None:
        self._in_flight -= 1
        self._changed.notify_all()

    def _log(self, before: int, why: str, pause_secs: float) -> None:
        now = self._clock()
        if self._logged_at is not None and now - self._logged_at < LOG_EVERY_SECS:
            return
        self._logged_at = now
        pause = f", none for {pause_secs:,.0f} s" if pause_secs else ""
        _LOGGER.warning("%s: %s: from %d to %d calls at a time%s", self._name, why, before, self.limit, pause)
