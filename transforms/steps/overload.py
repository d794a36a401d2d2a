"""Tells a service that has too much to do from one that fails at random, and sets the calls in flight by that.

It is arithmetic on what calls tell; times come from outside, so that it can be simulated. No Beam, no threads here.

The parts are known; each is named with its source:

- Calls are judged in cohorts: the calls that began one after another under one limit, all of them, so that quick
  refusals do not outweigh slow answers. The share of failures counts, not the single one, and what a client may ask for
  in vain is bounded by what it is granted, as in client-side throttling (Google, Site Reliability Engineering,
  "Handling Overload").
- A share beyond the usual one is a suspicion. The limit goes to the number of calls that were granted, and the next
  cohort is the trial: if it fails less, the load was the cause and the limit stays; if it fails as often, the failures
  are noise, their share is the usual one from now on, and the limit is what it was. A share beyond `MAX_NOISE` is never
  taken for noise: it may be the load of others. Experiments instead of fixed rules are the idea of PCC (Dong et al.,
  NSDI 2015).
- Answers that take longer because there are too many of them: with half as many calls they take half as long, and the
  throughput stays (Little's law, on which Vegas and Gradient of Netflix' concurrency-limits rest). So now and then half
  the calls are tried. Absolute times would not do: how long an answer takes depends on the record.
- The limit rises in steps that double from cohort to cohort, and by one with each answer after a collapse (TCP's slow
  start). Where it was found to be too high, it is tried again after ever more cohorts (as BBR spaces its probes).
- A service that answered before and stopped is asked by one call now and then, ever less often, with jitter (a circuit
  breaker; Nygard, Release It!). So retries need no budget of their own: they are calls like others.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
import random
from collections.abc import Callable

MAX_NOISE = 0.25
"""A larger share of failures lowers the limit whatever the trial says: it may be the load of others, where a thousand
workers share the service and none can change its load alone."""

MAX_USELESS = 0.5
"""Beyond this share the limit is lowered further and further: at most every other call may be for nothing."""

HELPS = 2 / 3
"""A trial that leaves less than this of a share of failures has helped."""

MIN_FAILURES = 3
"""Fewer failures in a cohort beyond the usual ones mean nothing."""

MIN_COHORT = 20
"""Calls in a cohort at least, so that a share says something."""

ROUNDS = 4
"""Calls in a cohort for each in flight: one call too many is then refused four times, which is beyond
`MIN_FAILURES`."""

MAX_CALM = 16
"""Cohorts after which a limit that was too high is tried again at the latest."""

LATENCY_EVERY = 64
"""Cohorts between two trials of half the calls: they cost an unloaded service 1 % of its throughput."""

FEW = 4
"""So few calls are not halved for the sake of latency: they load nobody, and one that hangs must not stop all."""

MIN_GAIN = 1.2
"""Twice the calls must bring so many times the answers (it would be 2, and 1 where the service is saturated)."""

MIN_ROW = 8
"""So many failures in a row, without an answer for two usual answers' time, and a service is down. At a noise of 20 %
eight in a row come once in 400,000 calls, and cost one pause."""

MIN_GAP_SECS = 0.1
"""Who wants retries without a wait still leaves a service that is down alone for so long."""

MAX_GAP_SECS = 30.0
"""A service that is down is asked this often at least."""


@dataclasses.dataclass(slots=True, eq=False)
class Cohort:
    """Calls that began one after another under the same limit.

    Attributes:
        epoch: The limits count up; this is the number of theirs.
        size: How many calls there will be.
        begun: How many there are.
        ended: How many have ended.
        failed: How many failed.
        refused: How many of these said how long to wait.
        answered_secs: What the answered ones took together.
        refused_until: The latest time until which any was told to wait.
    """

    epoch: int
    size: int
    begun: int = 0
    ended: int = 0
    failed: int = 0
    refused: int = 0
    answered_secs: float = 0.0
    refused_until: float = 0.0

    @property
    def share(self) -> float:
        """Share of failures; calls in flight count as answered."""
        return self.failed / self.begun if self.begun else 0.0

    @property
    def mean_secs(self) -> float | None:
        """What an answer took in the mean, None where there was none."""
        answered = self.ended - self.failed
        return self.answered_secs / answered if answered else None


@dataclasses.dataclass(slots=True, eq=False)
class Began:
    """A call in flight.

    Attributes:
        cohort: The calls that it is judged with.
        at: When it began.
    """

    cohort: Cohort
    at: float


@dataclasses.dataclass(slots=True)
class _Trial:
    """A lower limit that has to show whether it helps.

    Attributes:
        before: The limit before it.
        cohort: What it is compared with.
        of_latency: Whether half the calls are tried for the sake of latency.
    """

    before: float
    cohort: Cohort
    of_latency: bool = False


class LimitRule:
    """How many calls may be in flight, and when the next one may begin.

    Each call stands between `begin` and one of `answer`, `fail` and `forget`.

    Args:
        max_in_flight: The limit to begin with, and the largest.
        first_gap_secs: A service that went down is asked again after at most this; the time doubles.
        jitter: Returns numbers from 0 to 1.
    """

    def __init__(
        self, max_in_flight: int, first_gap_secs: float = 1.0, jitter: Callable[[], float] = random.random
    ) -> None:
        self._max = max_in_flight
        self._limit = float(max_in_flight)
        self._first_gap = max(first_gap_secs, MIN_GAP_SECS)
        self._jitter = jitter
        self._active = 0
        self._held: list[float] = []
        self._paused_until = 0.0
        self._typical = 0.0  # What an answer takes, a moving mean of 16.
        self._answers = 0
        # What the limit is based on.
        self._cohort = Cohort(0, self._cohort_size())
        self._usual = 0.0
        self._trial: _Trial | None = None
        self._step = 1.0
        self._slow_until = 0.0  # Below it the limit rises with each answer.
        self._calm = self._needed = 1
        self._to_latency = 1
        self._is_saturated = False  # Latency has shown that more calls bring nothing.
        # Whether the service is there at all.
        self._row = 0
        self._answered_at = -math.inf
        self._row_limit = self._limit
        self._gap: float | None = None

    @property
    def limit(self) -> int:
        """Calls that may be in flight now."""
        return int(self._limit + 1e-9)

    @property
    def settled_limit(self) -> int:
        """The limit, were it not that half the calls are tried."""
        trial = self._trial
        return int(trial.before + 1e-9) if trial is not None and trial.of_latency else self.limit

    @property
    def is_down(self) -> bool:
        """Whether the service answers no call."""
        return self._gap is not None

    @property
    def gets_nothing(self) -> bool:
        """Whether the service answers no call, be it down or not there at all."""
        return self.is_down or (self._row >= MIN_ROW and self._answers < MIN_ROW)

    @property
    def usual_share(self) -> float:
        """Share of failures that is taken for noise."""
        return self._usual

    def wait_secs(self, now: float) -> float:
        """Returns how long it is until a call may begin: 0 for now, infinity for when another has ended."""
        while self._held and self._held[0] <= now:
            heapq.heappop(self._held)
        if now < self._paused_until:
            return self._paused_until - now
        if self.is_down:
            return math.inf if self._active else 0.0
        if self._active + len(self._held) < self.limit:
            return 0.0
        return self._held[0] - now if self._held else math.inf

    def begin(self, now: float) -> Began:
        """Begins a call."""
        if self._cohort.begun >= self._cohort.size:
            self._cohort = Cohort(self._cohort.epoch, self._cohort_size())
        self._cohort.begun += 1
        self._active += 1
        return Began(self._cohort, now)

    def forget(self, call: Began) -> None:
        """Ends a call that says nothing of the service."""
        self._active -= 1
        call.cohort.begun -= 1
        call.cohort.size -= 1
        self._judge(call.cohort)

    def answer(self, call: Began, now: float) -> None:
        """Ends a call that the service answered."""
        took = now - call.at
        self._active -= 1
        self._answers = min(self._answers + 1, 16)
        self._typical += (took - self._typical) / self._answers
        self._row, self._answered_at = 0, now
        call.cohort.ended += 1
        call.cohort.answered_secs += took
        if self.is_down:
            self._gap = None
            self._set(1.0)
            self._slow_until = self._row_limit / 2
        elif call.cohort.epoch == self._cohort.epoch and self._limit < self._slow_until:
            self._limit = min(self._limit + 1, self._slow_until)
        self._judge(call.cohort)

    def fail(self, call: Began, now: float, pause_secs: float = 0.0) -> None:
        """Ends a call that the service failed on.

        Args:
            call: The call.
            now: The time.
            pause_secs: How long the service asked to be left alone; that is this call's affair until many are told so.
        """
        cohort = call.cohort
        self._active -= 1
        self._hold(call, now)
        self._note(cohort, now, pause_secs)
        if self._row == 0:
            self._row_limit = self._limit
        self._row += 1
        if self.is_down or self._seems_down(now):
            self._ask_later(now, pause_secs, asked=cohort.epoch == self._cohort.epoch)
        elif self._trial is not None and cohort is self._trial.cohort and not self._trial.of_latency:
            # Late failures of the calls that brought the limit down tell how far it has to go.
            self._limit = min(self._limit, self._granted(self._trial.before, cohort))
        elif cohort.epoch == self._cohort.epoch and self._is_too_much(cohort):
            self._cut(cohort)
        self._judge(cohort)

    def _note(self, cohort: Cohort, now: float, pause_secs: float) -> None:
        cohort.ended += 1
        cohort.failed += 1
        if pause_secs:
            cohort.refused += 1
            cohort.refused_until = max(cohort.refused_until, now + pause_secs)
            if cohort.refused >= MIN_FAILURES and cohort.refused > MAX_NOISE * cohort.begun:
                self._paused_until = max(self._paused_until, cohort.refused_until)

    def _hold(self, call: Began, now: float) -> None:
        """Keeps the place of a call that was refused at once, or refusals would come faster than answers."""
        until = call.at + self._typical
        if until > now:
            heapq.heappush(self._held, until)

    def _seems_down(self, now: float) -> bool:
        """Whether a service that has answered no longer does.

        One that never has may not exist: its records are not kept waiting for longer than their own retries.
        """
        if self._answers < MIN_ROW or self._row < MIN_ROW:
            return False
        return now - self._answered_at >= 2 * self._typical

    def _ask_later(self, now: float, pause_secs: float, asked: bool) -> None:
        """Sets when the service is asked again; calls from before it went down say nothing new."""
        if self._gap is None:
            self._set(1.0)
            self._trial = None
            self._gap = self._first_gap
        elif asked:
            self._gap = min(MAX_GAP_SECS, 2 * self._gap)
        else:
            return
        gap = self._gap * (1 + self._jitter()) / 2
        self._paused_until = max(self._paused_until, now + max(gap, pause_secs))

    def _is_too_much(self, cohort: Cohort) -> bool:
        """Whether more calls failed than chance explains: three, and twice the spread, beyond what is usual."""
        usual = cohort.begun * (MAX_USELESS if self._in_failure_trial() else self._usual)
        return cohort.failed >= MIN_FAILURES + usual + 2 * math.sqrt(usual)

    def _in_failure_trial(self) -> bool:
        return self._trial is not None and not self._trial.of_latency

    def _granted(self, before: float, cohort: Cohort) -> float:
        """Returns how many of the calls in flight the service would have taken, noise apart."""
        granted = before * (1 - cohort.share) / (1 - self._usual)
        # What still runs has been taken: refusals come before the answers, and the calls before these count as well.
        return max(1.0, min(before - 1, max(granted, self._active)))

    def _cut(self, cohort: Cohort) -> None:
        """Lowers the limit to what the service granted."""
        before = self._limit
        self._set(self._granted(before, cohort))
        self._trial = _Trial(before, cohort)
        self._step = 1.0
        self._slow_until = before / 2 if self._limit < before / 4 else 0.0

    def _judge(self, cohort: Cohort) -> None:
        """Draws conclusions from a cohort that is complete."""
        if cohort.ended < cohort.size or cohort.begun < cohort.size or cohort.epoch != self._cohort.epoch:
            return
        if not cohort.size:
            return
        trial, self._trial = self._trial, None
        if trial is None:
            self._go_on(cohort)
        elif trial.of_latency:
            self._judge_latency(trial, cohort)
        else:
            self._judge_failures(trial, cohort)

    def _judge_failures(self, trial: _Trial, cohort: Cohort) -> None:
        """Tells by the trial whether the load was the cause; in any case it shows what is usual."""
        share, before = cohort.share, trial.cohort.share
        if share > MAX_USELESS or (share > MAX_NOISE and share < 0.9 * before):
            self._cut(cohort)
            return
        self._usual = share
        if share <= MAX_NOISE and share > HELPS * before:
            self._slow_until = 0.0
            self._set(trial.before)
        else:
            self._calm = self._needed = min(MAX_CALM, 2 * self._calm)
            self._set(self._limit)

    def _judge_latency(self, trial: _Trial, cohort: Cohort) -> None:
        """Tells by the trial whether more calls at a time bring more answers."""
        before, after = trial.cohort.mean_secs, cohort.mean_secs
        is_more = self._limit > trial.before
        gain = self._limit / trial.before * before / after if before and after else 1.0 if is_more else 0.0
        if (is_more and gain < MIN_GAIN) or gain < 1 / MIN_GAIN:
            self._set(trial.before)
            return
        self._is_saturated = not is_more
        self._to_latency = 1 if self._is_saturated else LATENCY_EVERY  # Perhaps even less will do.
        self._needed = LATENCY_EVERY if self._is_saturated else 1
        self._set(self._limit)

    def _go_on(self, cohort: Cohort) -> None:
        """After a cohort like others: tries less for the sake of latency, or more."""
        if cohort.share < self._usual:
            self._usual += (cohort.share - self._usual) / 8
        self._to_latency -= 1
        self._needed -= 1
        if self._to_latency <= 0 and self._limit >= max(2 * FEW, self._slow_until):
            self._to_latency = LATENCY_EVERY
            self._try(self._limit // 2, cohort)
        elif self._needed <= 0 and self._limit < self._max:
            if self._is_saturated:
                self._needed = LATENCY_EVERY
                self._try(2 * self._limit, cohort)
                return
            self._needed, self._calm = 1, max(1, self._calm // 2)
            limit, self._step = self._limit + self._step, 2 * self._step
            self._set(limit)

    def _try(self, limit: float, cohort: Cohort) -> None:
        before = self._limit
        self._set(limit)
        self._trial = _Trial(before, cohort, of_latency=True)

    def _set(self, limit: float) -> None:
        """Sets the limit; calls that begin from now on are judged by themselves."""
        self._limit = max(1.0, min(float(self._max), limit))
        self._cohort = Cohort(self._cohort.epoch + 1, self._cohort_size())

    def _cohort_size(self) -> int:
        return max(MIN_COHORT, ROUNDS * self.limit)
