"""Runs a local job in a process of its own, and starts it again when that process or a worker of it dies.

What a dying process was at stands in the marks of `transforms.tries`; the next try at those shards takes precautions.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import logging
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pipelines
from pipelines import local_runner
from pipelines.handlers import handled
from pipelines.job_process import Order
from pipelines.local_runner import worker_environment
from pipelines.signals import end_children
from transforms.elements import JobSpec
from transforms.generations import base_of, unfenced
from transforms.ledger import LEDGERS
from transforms.machine import count_memory_kills, describe_memory
from transforms.steps.options import split_options
from transforms.steps.surroundings import SPOILED_STATUS
from transforms.store import LocalStore, OutputError, Store
from transforms.tries import Mark, forget_marks, list_marks

_LOGGER = logging.getLogger("gristmill")
_MAX_DEATHS_BY_SHARD = 5
_MAX_DEATHS_WITHOUT_PROGRESS = 5
_MANY_DEATHS = 10
"""From so many on, all steps get processes of their own: each start of the pipeline costs seconds."""
_OF_DISKS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""Errors that no step's process has to itself."""
_PIECE_BYTES = 1 << 16


class JobProcess:
    """A process that loads Beam while the command plans, then runs one pipeline. Ends with its context."""

    def __init__(self) -> None:
        self._answer, answer_end = os.pipe()
        command = [sys.executable, "-P", "-m", "pipelines.job_process", str(answer_end)]
        # From its first moment it ignores Ctrl-C, as it inherits; the command ends it.
        with worker_environment(), handled((signal.SIGINT,), signal.SIG_IGN):
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=[answer_end],
                env=_environment(),
            )
        os.close(answer_end)
        self._relays = [_relay(self._process.stdout, sys.stdout), _relay(self._process.stderr, sys.stderr)]

    def __enter__(self) -> JobProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        os.close(self._answer)
        for relay in self._relays:
            relay.join(timeout=1)  # A process of the user's may hold the other end for ever.

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid

    def run(self, order: Order) -> dict[str, Any]:
        """Has the pipeline run and returns how it ended; "died" when the process did."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin:
            self._process.stdin.write(pickle.dumps(order))
        with os.fdopen(os.dup(self._answer), "rb") as answer:
            line = answer.readline()
        if line:
            self._process.wait()
            return dict(json.loads(line))
        end_children(self._process.pid)
        status = self._process.wait()
        return {"died": f"signal {-status}" if status < 0 else f"exit status {status}"}


def _environment() -> dict[str, str]:
    """Returns the environment in which the process and its workers find this very package."""
    found = str(Path(pipelines.__file__).parents[1])
    if found.endswith("-packages"):
        return dict(os.environ)
    paths = [found, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def _relay(source: IO[bytes] | None, target: IO[str]) -> threading.Thread:
    """Copies what a process says to where we say things, which may be a terminal that is gone."""
    assert source is not None

    def copy() -> None:
        with source:
            while data := os.read(source.fileno(), _PIECE_BYTES):
                with contextlib.suppress(OSError, ValueError):
                    target.write(data.decode("utf-8", "replace"))
                    target.flush()

    thread = threading.Thread(target=copy, name="gristmill-relay", daemon=True)
    thread.start()
    return thread


def run_supervised(store: Store, order: Order, process: JobProcess) -> None:
    """Runs a pipeline to its end, through deaths of its processes.

    Args:
        store: The output directory, as the job's generation sees it.
        order: The pipeline.
        process: The first process to run it in.

    Raises:
        OutputError: The job could not finish; the message is the cause.
    """
    deaths = _Deaths(store)
    for attempt in _processes(process):
        kills = count_memory_kills()
        outcome = attempt.run(order)
        if "done" in outcome:
            return
        if "error" in outcome:
            order = _told_apart(store, order, outcome)
            continue
        short_of_memory = count_memory_kills() > kills
        deaths.add(outcome, attempt.pid, order, short_of_memory=short_of_memory)
        store.clean()  # All processes have ended; what they were writing has no name.
        if short_of_memory and not order.num_workers:
            break
        if short_of_memory:
            order = _with_fewer_workers(order)
        elif may_isolate(order.spec) and (deaths.count >= _MANY_DEATHS or _is_spoiled(outcome)):
            order = _isolated(order, _what_died(outcome))
    _LOGGER.warning("the kernel ended the process of the pipeline, which goes on in the command: %s", describe_memory())
    local_runner.run_pipeline(order.spec, order.flags, 1)


def _told_apart(store: Store, order: Order, outcome: dict[str, Any]) -> Order:
    """Returns the order for another try after a failure that steps may have caused in their process.

    Raises:
        OutputError: It is none, or isolated steps did not help.
    """
    if may_isolate(order.spec) and may_be_of_steps(store, outcome["error"], outcome["unexplained"]):
        forget_marks(store)
        store.clean()
        return _isolated(order, outcome["error"])
    raise OutputError(outcome["error"])


def may_isolate(spec: Any) -> bool:
    """Whether a job has steps of the user's that share a process with what reads and writes."""
    steps = spec.steps if isinstance(spec, JobSpec) else ()
    return any("call" in step for step in steps) and not any(split_options(step)[0].isolate for step in steps)


def may_be_of_steps(store: Store, error: str, unexplained: bool) -> bool:
    """Whether what a step did to its process may be behind an error that ended a pipeline.

    Args:
        store: The output directory.
        error: The message.
        unexplained: Whether it is none that our code foresees.
    """
    if any(os.strerror(number) in error for number in _OF_DISKS):
        return False
    return unexplained or (isinstance(base_of(unfenced(store)), LocalStore) and "steps[" not in error)


def isolated_spec(spec: JobSpec) -> JobSpec:
    """Returns the job with its steps in processes of their own; the plan and the bytes are the same."""
    return dataclasses.replace(spec, steps=tuple({**step, "isolate": True} for step in spec.steps))


def _isolated(order: Order, what: str) -> Order:
    assert isinstance(order.spec, JobSpec)
    _LOGGER.warning("%s; in case that steps did this to their process, they get processes of their own", what)
    return dataclasses.replace(order, spec=isolated_spec(order.spec))


def _is_spoiled(outcome: dict[str, Any]) -> bool:
    return re.search(rf"(status|code) {SPOILED_STATUS}\b", _what_died(outcome)) is not None


def _with_fewer_workers(order: Order) -> Order:
    """Returns the order for half the worker processes; none from one on, since the pipeline has a process already."""
    count = order.num_workers // 2
    _LOGGER.warning(
        "the kernel ended a process for want of memory; going on with %s: %s",
        f"fewer worker processes, {count} instead of {order.num_workers}" if count else "no worker processes",
        describe_memory(),
    )
    return dataclasses.replace(order, num_workers=count, flags=local_runner.local_flags(order.flags, count))


def run_once(order: Order) -> None:
    """Runs a pipeline that leaves nothing behind to go on from, in a process of its own.

    Raises:
        OutputError: It could not finish; the message is the cause.
    """
    with JobProcess() as process:
        outcome = process.run(order)
    if "done" not in outcome:
        raise OutputError(outcome.get("error") or _what_died(outcome))


def _what_died(outcome: dict[str, Any]) -> str:
    return str(outcome.get("lost") or f"the job's process died ({outcome.get('died')})")


def _processes(first: JobProcess) -> Iterator[JobProcess]:
    yield first
    while True:
        with JobProcess() as following:
            yield following


class _Deaths:
    """Finds out which shards were to blame, and when to give up."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.count = 0
        self._by_shard: Counter[str] = Counter()
        self._without_progress = 0
        self._committed = self._count_committed()

    def add(self, outcome: dict[str, Any], pid: int, order: Order, *, short_of_memory: bool) -> None:
        """Takes note of a death and logs it.

        Args:
            outcome: As `JobProcess.run` returns it.
            pid: The process of the pipeline.
            order: The pipeline.
            short_of_memory: Whether the kernel has ended processes for want of memory.

        Raises:
            OutputError: It makes no sense to try again.
        """
        self.count += 1
        blamed = self._blame(outcome, pid, order, short_of_memory=short_of_memory)
        self._by_shard.update(mark.shard_key for mark in blamed)
        committed = self._count_committed()
        self._without_progress = 0 if committed > self._committed or blamed else self._without_progress + 1
        self._committed = committed
        shards = ", ".join(sorted({mark.shard_key for mark in blamed})) or "none"
        what = _what_died(outcome)
        _LOGGER.warning("%s while at shards %s; starting again from what is committed", what, shards)
        for shard, count in self._by_shard.items():
            if count >= _MAX_DEATHS_BY_SHARD:
                raise OutputError(
                    f"{count} processes died while at shard {shard}, also with its steps and its reader in "
                    f"processes of their own ({what}); is there enough memory? {describe_memory()}"
                )
        if self._without_progress >= _MAX_DEATHS_WITHOUT_PROGRESS:
            raise OutputError(f"{self._without_progress} times in a row {what}")

    def _blame(self, outcome: dict[str, Any], pid: int, order: Order, *, short_of_memory: bool) -> list[Mark]:
        """Takes away the marks of processes that did not die by themselves, and returns the others.

        Where memory is short and there are no steps, what is done about it is fewer workers: processes for the reader
        would take more of it.
        """
        if short_of_memory and order.num_workers and isinstance(order.spec, JobSpec) and not order.spec.steps:
            forget_marks(self._store)
        elif "lost" in outcome:
            forget_marks(self._store, set(outcome["living"]))
        elif order.num_workers:
            forget_marks(self._store, {mark.pid for mark in list_marks(self._store)} - {pid})
        return list(list_marks(self._store))

    def _count_committed(self) -> int:
        return sum(1 for _ in self._store.list(LEDGERS))
