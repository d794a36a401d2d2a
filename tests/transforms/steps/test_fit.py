"""Retries and rates around a step's call."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import jobs
from fakes import make_spec
from transforms.dead_letters import BadRecordError, JobInterrupted
from transforms.steps import fit
from transforms.steps.fit import fit_steps, pause_secs, retry
from transforms.steps.load import Step
from transforms.steps.options import StepOptions


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses that were made, which take no time."""
    found: list[float] = []
    monkeypatch.setattr(time, "sleep", found.append)
    return found


def failing(times: int, error: BaseException | None = None) -> tuple[Callable[[Any], Any], list[Any]]:
    """A call that fails so many times, and the values that it was called with."""
    calls: list[Any] = []

    def call(value: Any) -> Any:
        calls.append(value)
        if len(calls) <= times:
            raise error or OSError(f"failure {len(calls)}")
        return value + b"!"

    return call, calls


class TestRetry:
    @pytest.mark.parametrize("failures", [0, 1, 3])
    def test_call_is_tried_again_until_it_works(self, failures: int, pauses: list[float]) -> None:
        call, calls = failing(failures)
        assert retry(call, 3)(b"a") == b"a!"
        assert len(calls) == failures + 1
        assert len(pauses) == failures

    def test_last_failure_is_raised_when_tries_are_used_up(self, pauses: list[float]) -> None:
        call, calls = failing(9)
        with pytest.raises(OSError, match="failure 3"):
            retry(call, 2)(b"a")
        assert len(calls) == 3

    @pytest.mark.parametrize("error", [BadRecordError("bad"), SystemExit(1), JobInterrupted()])
    def test_verdicts_and_ends_are_not_tried_again(self, error: BaseException, pauses: list[float]) -> None:
        call, calls = failing(1, error)
        with pytest.raises(type(error)):
            retry(call, 5)(b"a")
        assert (len(calls), pauses) == (1, [])

    def test_verdict_after_a_failure_ends_it(self, pauses: list[float]) -> None:
        errors: Iterator[Exception] = iter([OSError(), BadRecordError("bad")])

        def call(value: bytes) -> bytes:
            raise next(errors)

        with pytest.raises(BadRecordError):
            retry(call, 5)(b"a")

    def test_iterator_that_fails_is_not_asked_again(self, pauses: list[float]) -> None:
        def call(value: bytes) -> Iterator[bytes]:
            yield value
            raise OSError("at the end")

        items = retry(call, 5)(b"a")
        assert next(items) == b"a"
        with pytest.raises(OSError, match="at the end"):
            next(items)
        assert pauses == []

    @pytest.mark.parametrize(
        ("asked", "made"), [(7, 7.0), (7.5, 7.5), (9e9, 600.0), (0, None), (-1, None), ("7", None), (None, None)]
    )
    def test_an_error_may_ask_for_a_longer_pause(self, asked: Any, made: float | None, pauses: list[float]) -> None:
        error = OSError("busy")
        error.pause_secs = asked  # type: ignore[attr-defined]
        call, _ = failing(1, error)
        assert retry(call, 1)(b"a") == b"a!"
        [pause] = pauses
        assert pause == made if made is not None else 0.05 <= pause <= 0.1

    def test_pauses_double_to_half_a_minute_and_vary(self) -> None:
        for failures, longest in [(1, 0.1), (2, 0.2), (3, 0.4), (9, 25.6), (10, 30), (99, 30)]:
            found = {pause_secs(failures) for _ in range(50)}
            assert all(longest / 2 <= pause <= longest for pause in found)
            assert len(found) > 1

    def test_its_library_is_not_imported_before_something_fails(self) -> None:
        program = (
            "import sys; from transforms.steps.fit import retry; retry(bytes, 3)(b''); print('tenacity' in sys.modules)"
        )
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, env=jobs.environment(), capture_output=True, text=True, check=True)
        assert done.stdout == "False\n"


class TestFit:
    def test_step_without_options_stays_as_it_is(self) -> None:
        step = Step("a", bytes)
        assert fit_steps([step], make_spec("/nowhere")) == [step]

    def test_every_try_counts_for_the_rate(self, monkeypatch: pytest.MonkeyPatch, pauses: list[float]) -> None:
        made = []

        class Limiter:
            def __init__(self, job: str, step: int, per_sec: float) -> None:
                made.append((job, step, per_sec))

            def limit(self, call: Callable[[Any], Any]) -> Callable[[Any], Any]:
                return lambda value: (made.append(value), call(value))[1]

        monkeypatch.setattr(fit, "RateLimiter", Limiter)
        call, _ = failing(2)
        steps = [Step("a", bytes), Step("b", call, StepOptions(retries=2, max_per_sec=8.0))]
        spec = make_spec("/nowhere", rate_share=0.25)
        assert fit_steps(steps, spec)[1].call(b"x") == b"x!"
        assert made == [(spec.plan_id, 1, 2.0), b"x", b"x", b"x"]
