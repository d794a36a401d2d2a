"""Fits steps with their options: the rate at which they may be called, and trying again. No Beam here."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterable
from typing import Any

from transforms.dead_letters import BadRecordError
from transforms.elements import JobSpec
from transforms.steps import aside
from transforms.steps.load import Step, StepError
from transforms.steps.rate import RateLimiter

FIRST_PAUSE_SECS = 0.1
MAX_PAUSE_SECS = 30.0
MAX_ASKED_SECS = 600.0
"""A step that asks for a longer pause is tried again after this."""


def fit_steps(steps: Iterable[Step], spec: JobSpec) -> list[Step]:
    """Returns the steps with `retries` and `max_per_sec` built into their calls.

    Args:
        steps: In order.
        spec: The job.

    Raises:
        StepError: The temporary folder cannot hold the file of a rate.
    """
    return [_fit(spec, number, step) for number, step in enumerate(steps)]


def _fit(spec: JobSpec, number: int, step: Step) -> Step:
    call, options = step.call, step.options
    if options.max_per_sec is not None:
        try:
            call = RateLimiter(spec.plan_id, number, options.max_per_sec * spec.rate_share).limit(call)
        except OSError as error:
            raise StepError(f"steps[{number}]: max_per_sec needs a file: {error}") from error
    if options.retries:
        call = retry(call, options.retries)
    return step if call is step.call else dataclasses.replace(step, call=call)


def retry(call: Callable[[Any], Any], retries: int) -> Callable[[Any], Any]:
    """Returns a call that is tried again when it fails.

    A `BadRecordError` is a verdict on the record and no fault that may pass, so it is raised at once. An iterator that
    fails once it has been returned is not asked again: what it gave before may have been used already. While it waits,
    records behind it go on, where the chain has several in flight.

    Args:
        call: The call.
        retries: How often it is tried again.
    """

    def persistent(value: Any) -> Any:
        try:
            return call(value)
        except Exception as error:
            if not _may_pass(error):
                raise
            return _try_again(call, value, error, retries)

    return persistent


def _may_pass(error: BaseException) -> bool:
    return isinstance(error, Exception) and not isinstance(error, BadRecordError)


def _try_again(call: Callable[[Any], Any], value: Any, error: Exception, retries: int) -> Any:
    """Goes on after the first try, which has failed."""
    import tenacity  # Takes longer to import than most steps do, so only where a call has failed.

    first = [error]

    def attempt() -> Any:
        if first:
            raise first.pop()
        return call(value)

    retrying = tenacity.Retrying(
        stop=tenacity.stop_after_attempt(retries + 1),
        wait=_pause,
        sleep=aside.sleep,
        retry=tenacity.retry_if_exception(_may_pass),
        reraise=True,
    )
    return retrying(attempt)


def _pause(state: Any) -> float:
    """Returns how long to wait: as the error asks for by an attribute `pause_secs`, no shorter than usual."""
    asked = getattr(state.outcome.exception(), "pause_secs", None)
    usual = pause_secs(state.attempt_number)
    if isinstance(asked, int | float) and asked > usual:  # Not for NaN.
        return min(float(asked), MAX_ASKED_SECS)
    return usual


def pause_secs(failures: int) -> float:
    """Returns how long to wait after so many failures: doubling, with jitter so that callers do not keep step."""
    longest = min(MAX_PAUSE_SECS, FIRST_PAUSE_SECS * 2 ** min(failures - 1, 30))
    return longest * random.uniform(0.5, 1.0)
