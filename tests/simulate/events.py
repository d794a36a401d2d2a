"""A discrete-event simulation of a fleet that converts planned shards: who is at which shard, when.

A shard is the smallest piece of work: nothing splits it, and what a lost worker had of it is done again elsewhere, once
the loss was noticed. So what is simulated is what the runner does with whole shards:

- `dealt`: every worker is given a list at the start (Beam's local runner);
- otherwise a worker that is free asks for the next one (Dataflow, when it balances as well as it can).
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from collections import deque
from collections.abc import Sequence

import numpy as np

from simulate.flags import assumed


@dataclasses.dataclass(frozen=True)
class Worker:
    """One worker.

    Attributes:
        speed: Its speed; 1 takes a shard the seconds that it takes.
        ready_at: When it has started.
        lost_at: When it dies; never, when infinite.
    """

    speed: float = 1.0
    ready_at: float = 0.0
    lost_at: float = math.inf


@dataclasses.dataclass(frozen=True)
class Trouble:
    """What the fleet suffers, drawn from the seed."""

    spread: float = assumed(0.1, "standard deviation of the logarithm of the speeds")
    stragglers: float = assumed(0.02, "share of the workers that are slow")
    straggler_speed: float = assumed(0.25, "their speed, of that of the others")
    lost: float = assumed(0.01, "share of the workers that die, at a moment within the ideal time")
    start_secs: float = assumed(90.0, "when the first worker is ready")
    start_spread_secs: float = assumed(60.0, "how much later the last one is")


def make_fleet(count: int, trouble: Trouble, within_secs: float, seed: int) -> list[Worker]:
    """Returns workers.

    Args:
        count: How many.
        trouble: What they suffer. The same seed draws the same workers, whatever is left out.
        within_secs: The time in which those that are lost die.
        seed: Decides everything.
    """
    rng = np.random.default_rng(seed)
    speeds = np.exp(rng.standard_normal(count) * trouble.spread - trouble.spread**2 / 2)
    starts = trouble.start_secs + rng.random(count) * trouble.start_spread_secs
    ranks, deaths = rng.permutation(count), rng.random(count) * within_secs
    speeds[ranks < round(trouble.stragglers * count)] *= trouble.straggler_speed
    deaths[ranks < count - round(trouble.lost * count)] = math.inf
    return [Worker(*map(float, worker)) for worker in zip(speeds, starts, deaths, strict=True)]


@dataclasses.dataclass(frozen=True)
class Attempt:
    """One worker at one shard.

    Attributes:
        shard: The shard.
        worker: The worker.
        started: When.
        ended: When it was committed, or lost.
        done: Whether it was committed.
    """

    shard: int
    worker: int
    started: float
    ended: float
    done: bool


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What happened.

    Attributes:
        attempts: Every attempt, in order of their starts.
        num_workers: Workers.
        ideal_secs: All work divided by the workers, as if all were of speed 1, ready at once, and shards of sand.
    """

    attempts: list[Attempt]
    num_workers: int
    ideal_secs: float

    @property
    def makespan(self) -> float:
        """When the last shard was committed."""
        return max(attempt.ended for attempt in self.attempts)

    @property
    def lost_secs(self) -> float:
        """Worker seconds of attempts that came to nothing."""
        return sum(attempt.ended - attempt.started for attempt in self.attempts if not attempt.done)

    @property
    def num_repeated(self) -> int:
        """Shards that were begun more than once."""
        return len(self.attempts) - len({attempt.shard for attempt in self.attempts})

    @property
    def utilisation(self) -> float:
        """Share of all workers' time up to the end that went into shards that were committed."""
        useful = sum(attempt.ended - attempt.started for attempt in self.attempts if attempt.done)
        return useful / (self.num_workers * self.makespan)

    @property
    def tail_secs(self) -> float:
        """From when the first worker had nothing left to do to the end."""
        last: dict[int, Attempt] = {attempt.worker: attempt for attempt in self.attempts}
        return self.makespan - min(attempt.ended for attempt in last.values() if attempt.done)

    def done_at(self, share: float) -> float:
        """Returns when that share of the shards was committed."""
        ends = sorted(attempt.ended for attempt in self.attempts if attempt.done)
        return ends[math.ceil(share * len(ends)) - 1]


class WorkersGoneError(RuntimeError):
    """All workers are lost, and shards are left."""


def simulate(
    secs: Sequence[float], order: Sequence[int], workers: Sequence[Worker], detect_secs: float, *, dealt: bool
) -> Outcome:
    """Has workers convert shards.

    Args:
        secs: Seconds of each shard at speed 1.
        order: Shards as the plan hands them out; -1 stands for nothing.
        workers: The fleet.
        detect_secs: From the loss of a worker to when its shards are handed out again.
        dealt: Whether element i of the order belongs to worker i modulo their number.

    Raises:
        WorkersGoneError: There is nobody left to do the rest.
    """
    return _Simulation(secs, order, workers, detect_secs, dealt=dealt).run()


class _Simulation:
    """The state at a moment. Events are (time, number, shards that come back, worker that is free)."""

    def __init__(
        self, secs: Sequence[float], order: Sequence[int], workers: Sequence[Worker], detect_secs: float, *, dealt: bool
    ) -> None:
        self._secs, self._workers, self._detect_secs = secs, workers, detect_secs
        count = len(workers)
        hands = [order[number::count] if dealt else [] for number in range(count)]
        self._hands = [deque(shard for shard in hand if shard >= 0) for hand in hands]
        self._shared = deque() if dealt else deque(shard for shard in order if shard >= 0)
        self._waiting: deque[int] = deque()
        self._numbers = itertools.count()
        self._events: list[tuple[float, int, list[int], int]] = []
        self._attempts: list[Attempt] = []

    def run(self) -> Outcome:
        for number, worker in enumerate(self._workers):
            self._at(worker.ready_at, [], number)
        while self._events:
            now, _, returned, worker = heapq.heappop(self._events)
            if worker >= 0:
                self._give(worker, now)
                continue
            self._shared.extendleft(reversed(returned))
            while self._shared and self._waiting:
                self._give(self._waiting.popleft(), now)
        if self._shared or any(self._hands):
            raise WorkersGoneError
        return Outcome(self._attempts, len(self._workers), sum(self._secs) / len(self._workers))

    def _at(self, time: float, returned: list[int], worker: int = -1) -> None:
        heapq.heappush(self._events, (time, next(self._numbers), returned, worker))

    def _give(self, number: int, now: float) -> None:
        """Gives a free worker its next shard, and foresees how that ends."""
        worker, hand = self._workers[number], self._hands[number]
        if now >= worker.lost_at:
            self._lose(number, [])
            return
        if not hand and not self._shared:
            self._waiting.append(number)
            return
        shard = (hand or self._shared).popleft()
        end = now + self._secs[shard] / worker.speed
        done = end <= worker.lost_at
        self._attempts.append(Attempt(shard, number, now, min(end, worker.lost_at), done))
        if done:
            self._at(end, [], number)
        else:
            self._lose(number, [shard])

    def _lose(self, number: int, shards: list[int]) -> None:
        """Hands out again what a lost worker had, once that is noticed."""
        shards += self._hands[number]
        self._hands[number].clear()
        if shards:
            self._at(self._workers[number].lost_at + self._detect_secs, shards)
