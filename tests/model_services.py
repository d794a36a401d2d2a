"""Services as arithmetic, and clients that call them by the rule of the limit: everything in simulated time."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
import random
from collections.abc import Callable

from transforms.steps.overload import Began, LimitRule


@dataclasses.dataclass(frozen=True)
class Reply:
    """What a service will say to a call.

    Attributes:
        at: When.
        failed: Whether the call fails.
        pause_secs: How long the service asks to be left alone.
    """

    at: float
    failed: bool = False
    pause_secs: float = 0.0


class Model:
    """A service that answers in `secs`; calls beyond `capacity` are refused at once, or wait for their turn.

    Attributes:
        capacity: Calls that it works on at a time, by the time.
        noise: Share of calls that it fails for no reason, at once.
        queues: Whether calls beyond its capacity wait instead of being refused.
        seen: The times of all calls.
        refused: The times of those that were too many.
    """

    def __init__(
        self,
        secs: float | Callable[[random.Random], float] = 0.05,
        *,
        capacity: Callable[[float], float] = lambda now: math.inf,
        noise: float = 0.0,
        pause_secs: float = 0.0,
        queues: bool = False,
        seed: int = 7,
    ) -> None:
        self._random = random.Random(seed)
        self._secs = secs
        self.capacity = capacity
        self.noise = noise
        self.pause_secs = pause_secs
        self.queues = queues
        self._busy: list[float] = []  # When each call that it works on is done.
        self.seen: list[float] = []
        self.refused: list[float] = []

    def call(self, now: float) -> Reply:
        """Takes a call."""
        self.seen.append(now)
        while self._busy and self._busy[0] <= now:
            heapq.heappop(self._busy)
        secs = self._secs(self._random) if callable(self._secs) else self._secs
        if self._random.random() < self.noise:
            return Reply(now + 0.001, True, self.pause_secs)
        start = now
        if len(self._busy) >= self.capacity(now):
            if not self.queues or self.capacity(now) < 1:
                self.refused.append(now)
                return Reply(now + 0.001, True, self.pause_secs)
            start = sorted(self._busy)[len(self._busy) - int(self.capacity(now))]
        heapq.heappush(self._busy, start + secs)
        return Reply(start + secs)


@dataclasses.dataclass
class Run:
    """What a simulation found.

    Attributes:
        answered: The times of all answers.
        limits: (time, limit) after each end of a call.
    """

    answered: list[float] = dataclasses.field(default_factory=list)
    limits: list[tuple[float, int]] = dataclasses.field(default_factory=list)

    def rate(self, start: float, end: float) -> float:
        """Answers a second in a span of time."""
        return sum(start <= at < end for at in self.answered) / (end - start)

    def mean_limit(self, start: float, end: float) -> float:
        """The mean of the limits in a span of time."""
        found = [limit for at, limit in self.limits if start <= at < end]
        return sum(found) / len(found)


def simulate(rule: LimitRule, model: Model, secs: float) -> Run:
    """Calls as soon as the rule allows it, without end of work, for so long."""
    run, now = Run(), 0.0
    ends: list[tuple[float, int, Began, Reply]] = []
    numbers = itertools.count()
    while now < secs:
        wait = rule.wait_secs(now)
        if wait <= 0:
            reply = model.call(now)
            heapq.heappush(ends, (reply.at, next(numbers), rule.begin(now), reply))
            continue
        at = ends[0][0] if ends else math.inf
        if now + wait < at:
            now = max(now + wait, math.nextafter(now, math.inf))
            continue
        now, _, began, reply = heapq.heappop(ends)
        if reply.failed:
            rule.fail(began, now, reply.pause_secs)
        else:
            rule.answer(began, now)
            run.answered.append(now)
        run.limits.append((now, rule.limit))
    return run
