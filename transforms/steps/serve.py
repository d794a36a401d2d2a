"""Runs isolated steps: takes batches from the worker and tells record by record what became of them.

What runs is written into the shared memory before every call into a step and taken back after it, so that the worker
knows the culprit when a step does not return. No Beam here.
"""

from __future__ import annotations

import collections
import dataclasses
import fcntl
import functools
import itertools
import json
import logging
import os
import pickle
import resource
import time
from collections.abc import Callable, Iterator
from typing import Any

from transforms.dead_letters import Failure
from transforms.elements import JobSpec
from transforms.shard_journal import ShardJournal, unpack_origins
from transforms.steps.answers import Answers, Place
from transforms.steps.chain import PASS_ON_SECS, StepChain
from transforms.steps.exchange import (
    BEGUN,
    DONE,
    FULL,
    ITEM,
    READY,
    REFUSED,
    STARTED_NS,
    STEP,
    Exchange,
    OutcomeWriter,
    read_batch,
)
from transforms.steps.fit import fit_steps
from transforms.steps.load import Step, StepError, load_steps
from transforms.steps.surroundings import SPOILED_STATUS

_HIGH_FD = 400
_MAX_LOGGED = 100  # Lines that a single record has us log; the last ones count.


def serve(exchange: Exchange, input_fd: int, signal_fd: int) -> None:
    """Runs the steps on all batches that come.

    Args:
        exchange: Memory shared with the worker.
        input_fd: Pipe with the job (a pickled `JobSpec`) and then batches.
        signal_fd: Pipe to the worker, a byte an event.
    """
    logged = _take_logs()
    source, signal_fd = os.fdopen(_move_away(input_fd), "rb"), _move_away(signal_fd)
    spec: JobSpec = pickle.load(source)
    slots = exchange.slots
    tell = _end_without(functools.partial(os.write, signal_fd))

    def wait_for_room() -> None:
        tell(FULL)
        if not source.read(1):
            os._exit(0)  # The worker is gone.

    writer = OutcomeWriter(exchange, wait_for_room)
    try:
        chain = GuardedChain(spec, slots)
    except StepError as error:
        exchange.put_text(str(error))
        tell(REFUSED)
        return
    exchange.put_text(json.dumps([step.options.timeout_secs for step in chain.steps]))
    tell(READY)
    journals = _Journals(chain)
    next_batch = _end_without(functools.partial(read_batch, source))
    while (received := next_batch()) is not None:
        records, note = received
        writer.restart()
        told = time.monotonic()
        for number, (record, place) in enumerate(zip(records, journals.places(note), strict=False), 1):
            if time.monotonic() - told > PASS_ON_SECS:  # What is done already shows how far the shard is.
                wait_for_room()
                writer.restart()
                told = time.monotonic()
            slots[BEGUN] = number
            outcome = chain.run(record, place)
            if logged:
                outcome.logged = [logged.popleft() for _ in range(len(logged))]
            writer.write(outcome)
        tell(DONE)


def _end_without(call: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a call that ends the process where a step has closed the file it needs; what was told stays told."""

    def checked(*arguments: Any) -> Any:
        try:
            return call(*arguments)
        except OSError:
            os._exit(SPOILED_STATUS)

    return checked


def _move_away(fd: int) -> int:
    """Gives a file a high number, so that a step that closes files and opens its own does not come by it."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, min(_HIGH_FD, max(10, soft - 20)))
    os.close(fd)
    return moved


def _take_logs() -> collections.deque[tuple[int, str]]:
    """Returns where what we log from now on is put, for the worker: it must not count as what the step has said."""
    logged: collections.deque[tuple[int, str]] = collections.deque(maxlen=_MAX_LOGGED)

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            logged.append((record.levelno, record.getMessage()))

    logger = logging.getLogger("gristmill")
    logger.addHandler(Handler())
    logger.propagate = False
    return logged


class _Journals:
    """The journal of the shard at which the worker is."""

    def __init__(self, chain: StepChain) -> None:
        self._chain = chain
        self._journal: ShardJournal | None = None

    def places(self, note: bytes) -> Iterator[Place | None]:
        """Yields for each record of a batch where it comes from, as the note on it says."""
        if not note:
            return itertools.repeat(None)
        home, source, positions = unpack_origins(note)
        if self._journal is None or self._journal.home != home:
            self._journal = ShardJournal(home)
        return self._chain.answers.places(source, positions, self._journal)


class _Notes:
    """What runs, as the shared memory has it.

    Attributes:
        stray: Whether this process was forked by a step. It ends where it returns from the step: it must not go on as
            a second one of us.
    """

    def __init__(self, slots: memoryview) -> None:
        self._slots = slots
        self.stray = False
        os.register_at_fork(after_in_child=self._mark_stray)

    def _mark_stray(self) -> None:
        self.stray = True

    def begin(self, number: int, item: int = 0) -> None:
        slots = self._slots
        slots[STEP] = number
        slots[ITEM] = item
        slots[STARTED_NS] = time.monotonic_ns()

    def end(self) -> None:
        if self.stray:
            os._exit(0)
        self._slots[STARTED_NS] = 0


class GuardedChain(StepChain):
    """A chain that keeps the worker informed of what runs.

    Args:
        spec: The job.
        slots: Numbers of the shared memory.
    """

    def __init__(self, spec: JobSpec, slots: memoryview) -> None:
        self._notes = _Notes(slots)
        steps = load_steps(spec.steps, spec.import_paths)
        guarded = [_guard(self._notes, number, step) for number, step in enumerate(steps)]
        fitted = fit_steps(guarded, spec)
        super().__init__(fitted, spec.max_record_bytes, Answers(fitted, spec.steps))

    def describe(self, error: BaseException, at: int) -> Failure:
        """Puts a failure into words; whatever the text of an exception does counts as the step's doing."""
        self._notes.begin(at)
        try:
            return super().describe(error, at)
        finally:
            self._notes.end()


def _guard(notes: _Notes, number: int, step: Step) -> Step:
    """Returns the step with notes around its calls, and its memory bounded."""
    max_bytes = step.options.max_memory_bytes
    call = _limit(step.call, max_bytes)

    def guarded(value: Any) -> Any:
        notes.begin(number)
        try:
            result = call(value)
        finally:
            notes.end()
        if type(result) is not bytes and isinstance(result, Iterator):
            return _Items(_limit(result.__next__, max_bytes), notes, number)
        return result

    return dataclasses.replace(step, call=guarded)


class _Items:
    """An iterator that a step returned; the step works whenever it is asked for the next item."""

    def __init__(self, make_next: Callable[[], Any], notes: _Notes, number: int) -> None:
        self._make_next = make_next
        self._notes = notes
        self._number = number
        self._count = 0

    def __iter__(self) -> _Items:
        return self

    def __next__(self) -> Any:
        self._count += 1
        self._notes.begin(self._number, self._count)
        try:
            return self._make_next()
        finally:
            self._notes.end()


def _limit(call: Callable[..., Any], max_bytes: int | None) -> Callable[..., Any]:
    """Returns the call with the memory of the process bounded while it runs.

    It is the data that is bounded (RLIMIT_DATA), not the address space, of which TensorFlow reserves far more than it
    uses. Afterwards there is memory again to tell what happened.
    """
    if max_bytes is None:
        return call
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    bound = max_bytes if hard == resource.RLIM_INFINITY else min(max_bytes, hard)

    def limited(*arguments: Any) -> Any:
        resource.setrlimit(resource.RLIMIT_DATA, (bound, hard))
        try:
            return call(*arguments)
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))

    return limited
