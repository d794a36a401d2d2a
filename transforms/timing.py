"""How long the steps of a job take: they are tried on a few records before the job is planned. No Beam here.

The trial runs in a child process that a timer of the kernel ends, so that a step may hang, crash or take all memory and
the planner goes on without knowing. Steps are called a few times more than there are records, as they are after a kill
or when a runner tries a shard again: what a step does must bear repeating anyway.
"""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import time
from collections.abc import Iterator
from typing import Any

from transforms.child_call import ChildCall
from transforms.elements import Input, JobSpec
from transforms.shard_reader import read_input
from transforms.steps.chain import StepChain
from transforms.steps.in_flight import max_in_flight
from transforms.steps.job_chain import usual_chain
from transforms.steps.load import BUILT_IN, CHEAP, StepError

TRIED_RECORDS = 8
TRIED_SECS = 10.0
"""The bounds of a trial. A step may want fewer records: the attribute `plan_records` of its function or class."""

LOAD_SECS = 20.0
"""What steps may take to load, such as a model, before nothing is tried: the command has loaded them once already."""

LEAST_SECS = 20.0
"""No choice depends on how long a job takes that is shorter: once one record says so, no other is tried."""

LEAST_RECORDS = 32
LEAST_BYTES = 64 << 20
"""A job with less of both is not tried at all: it would begin later for nothing."""

_MAX_FILE_BYTES = 256 << 20

_WAITS_SHARE = 0.5
"""A chain waits when more than this share of its time is no CPU's."""


@dataclasses.dataclass(frozen=True)
class Timing:
    """What the steps take.

    Attributes:
        secs: Seconds of a record, one after the other.
        cpu_secs: Of these, seconds of a CPU.
        in_flight: Records that a worker has in the chain at a time.
        records: Records that were tried; 0 where the user says what they take.
        at_least: Whether the trial ended before its first record did, so that it may be any number more.
        max_per_sec: Calls a second that the whole job may make, None for any number.
    """

    secs: float
    cpu_secs: float
    in_flight: int = 1
    records: int = 0
    at_least: bool = False
    max_per_sec: float | None = None

    def waits(self) -> bool:
        """Whether the steps spend their time waiting, so that more processes would wait as well."""
        return self.secs - self.cpu_secs > _WAITS_SHARE * self.secs

    def worker_secs(self, num_records: int) -> float:
        """Returns what one worker takes for so many records."""
        return num_records * (self.cpu_secs + max(0.0, self.secs - self.cpu_secs) / self.in_flight)

    def total_secs(self, num_records: int, num_workers: int) -> float:
        """Returns what so many workers take, however much they may call."""
        secs = self.worker_secs(num_records) / max(1, num_workers)
        return secs if self.max_per_sec is None else max(secs, num_records / self.max_per_sec)


def is_cheap(spec: JobSpec) -> bool:
    """Whether all steps are of ours and known to take no time worth a trial."""
    return all(step.get("use") in CHEAP and step["use"] in BUILT_IN for step in spec.steps)


def given_timing(spec: JobSpec, secs: float) -> Timing:
    """Returns what the user says that a record takes; steps with calls in flight wait, others compute.

    Raises:
        StepError: A step cannot be loaded.
    """
    with contextlib.closing(usual_chain(spec)) as chain:
        in_flight, max_per_sec = max_in_flight(chain.steps), _least_rate(chain)
    return Timing(secs, 0.0 if in_flight > 1 else secs, in_flight, max_per_sec=max_per_sec)


def time_steps(
    spec: JobSpec, inputs: list[Input], payloads: list[bytes], num_records: int, tried_secs: float = TRIED_SECS
) -> Timing | None:
    """Tries the steps on a few records.

    Args:
        spec: The job.
        inputs: Where to take records from, a few of each.
        payloads: Whole records that are at hand already, taken instead where there are any.
        num_records: Records of the job.
        tried_secs: When the trial ends.

    Returns:
        What they take; None where it cannot be told: no record passes, or the steps cannot run here.
    """
    trial = _Trial()
    arguments = {"spec": spec, "inputs": inputs, "payloads": payloads}
    child = ChildCall("transforms.timing:try_steps", num_records=num_records, tried_secs=tried_secs, **arguments)
    with contextlib.suppress(OSError):
        for event in child.items():
            trial.take(event)
    return trial.timing(tried_secs if child.death == signal.SIGALRM.name else None)


class _Trial:
    """What a trial tells, as far as it came."""

    def __init__(self) -> None:
        self._chain: dict[str, Any] | None = None
        self._tried: list[tuple[float, float]] = []
        self._passed = 0
        self._running = False

    def take(self, event: dict[str, Any]) -> None:
        if "in_flight" in event:
            self._chain = event
        elif "secs" in event:
            self._tried.append((event["secs"], event["cpu_secs"]))
            self._passed += event["passed"]
        self._running = "begins" in event

    def timing(self, ended_after: float | None) -> Timing | None:
        """Returns what was found out; `ended_after` says when the timer ended the trial, None if it did not."""
        if self._chain is None:
            return None
        if not self._tried and self._running and ended_after is not None:
            return Timing(ended_after, 0.0, at_least=True, **self._chain)
        if not self._passed:
            return None
        usual = self._tried[1:] if len(self._tried) > 2 else self._tried  # The first one also loads and connects.
        secs, cpu_secs = (sum(times) / len(usual) for times in zip(*usual, strict=True))
        return Timing(secs, cpu_secs, records=len(self._tried), **self._chain)


def try_steps(
    spec: JobSpec, inputs: list[Input], payloads: list[bytes], num_records: int, tried_secs: float
) -> Iterator[dict[str, Any]]:
    """Runs a trial, in a process of its own that a timer ends.

    Yields:
        What is known of the chain, then for each record that it begins, and what it took.
    """
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, LOAD_SECS)
    try:
        chain = usual_chain(spec)
    except StepError:
        return  # The command has said so, or only the workers have what it takes.
    signal.setitimer(signal.ITIMER_REAL, tried_secs)
    yield {"in_flight": max_in_flight(chain.steps), "max_per_sec": _least_rate(chain)}
    started = time.monotonic()
    wanted = _wanted_records(chain)
    if wanted < 1:
        return
    records = iter(payloads[:wanted]) if payloads else _read_some(spec, inputs, wanted)
    for record in records:
        yield {"begins": True}
        began, cpu, queued = time.monotonic(), time.process_time(), _queued_secs()
        outcome = chain.run(record)
        cpu_secs = time.process_time() - cpu
        secs = max(cpu_secs, time.monotonic() - began - (_queued_secs() - queued))
        yield {"secs": secs, "cpu_secs": cpu_secs, "passed": outcome.failure is None}
        if secs * num_records < LEAST_SECS or time.monotonic() - started > tried_secs / 2:
            return


def _queued_secs() -> float:
    """Returns how long this thread has waited for a CPU that others had: that is not the step's time."""
    try:
        with open("/proc/thread-self/schedstat", encoding="ascii") as numbers:
            return int(numbers.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):  # Not every kernel tells.
        return 0.0


def _wanted_records(chain: StepChain) -> int:
    wishes = [step.attribute("plan_records") for step in chain.steps]
    return min([TRIED_RECORDS, *(wish for wish in wishes if isinstance(wish, int))])


def _least_rate(chain: StepChain) -> float | None:
    rates = [step.options.max_per_sec for step in chain.steps if step.options.max_per_sec is not None]
    return min(rates, default=None)


def _read_some(spec: JobSpec, inputs: list[Input], count: int) -> Iterator[bytes]:
    """Yields whole records, about as many of each input."""
    if spec.format == "files":  # Each is read whole.
        inputs = [source for source in inputs if source.size <= _MAX_FILE_BYTES]
    chosen = inputs[:: max(1, len(inputs) // max(1, count))]
    left = count
    for number, source in enumerate(chosen):
        share = -(-left // (len(chosen) - number))
        chunk = next((chunk for chunk in read_input(spec, source, 0, source.size) if chunk.records), None)
        some = [] if chunk is None else chunk.records[:: max(1, len(chunk.records) // max(1, share))][:share]
        left -= len(some)
        yield from some
