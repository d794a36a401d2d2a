"""Isolated steps: a chain that runs in a process which can be killed, so that whatever a step does costs one record.

The whole chain runs there, so that only source bytes go in and bytes come out. A record whose process ends, or is ended
after a timeout, becomes a dead letter; the records behind it go on in a new process. No record runs twice, but for
`retries` after a timeout. No Beam here.
"""

from __future__ import annotations

import dataclasses
import logging
import re
import threading
import time
from collections.abc import Iterator, Sequence

from transforms.child_call import status_name
from transforms.dead_letters import MAX_ERROR_CHARS, MAX_TRACEBACK_CHARS, Failure, JobInterrupted, safe_text
from transforms.elements import JobSpec, RecordBatch
from transforms.machine import count_memory_kills
from transforms.shard_journal import JournalHome, pack_origins
from transforms.steps.chain import Outcome, gather
from transforms.steps.child_process import ChildEndedError, ChildProcess, Ending
from transforms.steps.exchange import BEGUN, DONE, FILLED, STARTED_NS, STEP, OutcomeReader, pack_batch
from transforms.steps.fit import pause_secs
from transforms.steps.load import step_name
from transforms.steps.options import split_options

_LOGGER = logging.getLogger("gristmill")

_MAX_STRIKES = 3
"""So often may the process end without having begun a record, before the next record is held responsible."""

_SAID_CHARS = 1_000
_ASK_AGAIN_SECS = 1.0
_MAX_WAIT_SECS = 3600.0
_STOP_NOTICE_SECS = 1.0
_STOP_SIGNALS = {"SIGTERM", "SIGINT", "SIGHUP"}
_OUT_OF_MEMORY = re.compile(
    r"bad_alloc|MemoryError|out of memory|cannot allocate memory|memory allocation of \d+ bytes failed", re.IGNORECASE
)

_stopping = threading.Event()


def note_stop(stopping: bool = True) -> None:
    """Notes that the job is being stopped, so that processes that end from now on are nobody's fault."""
    if stopping:
        _stopping.set()
    else:
        _stopping.clear()


class IsolatedChain:
    """A chain of steps in a process of its own, which is started for the first batch and kept for the next ones.

    Args:
        spec: The job.
    """

    def __init__(self, spec: JobSpec) -> None:
        options = [split_options(step)[0] for step in spec.steps]
        self._spec = spec
        self._names = [step_name(step) for step in spec.steps]
        self._retries = [option.retries for option in options]
        self._timeouts = [option.timeout_secs for option in options]  # As the config has them.
        self._child: ChildProcess | None = None

    def apply(self, batch: RecordBatch, journal: JournalHome | None = None) -> Iterator[RecordBatch]:
        """Yields the batch with every record put through the chain, as `StepChain.apply` does.

        Args:
            batch: The batch.
            journal: Where the journal of its shard is, None where nothing is to be kept.

        Raises:
            StepError: The steps cannot be loaded in the process.
            JobInterrupted: The job is being stopped.
        """
        if batch.applied:
            yield batch
            return
        yield from gather(batch, self._run_all(batch.records, _Notes(batch, journal)))

    def close(self) -> None:
        """Ends the process."""
        if self._child is not None:
            self._child.close()
            self._child = None

    def _run_all(self, records: Sequence[bytes], notes: _Notes) -> Iterator[Outcome]:
        """Yields what becomes of each record, in order."""
        progress = _Progress()
        while progress.done < len(records):
            start, kills = progress.done, count_memory_kills()
            try:
                for outcome in self._run_in_child(records[start:], notes.since(start)):
                    progress.advance()
                    for level, text in outcome.logged:
                        _LOGGER.log(level, "%s", text)
                    yield outcome
            except ChildEndedError as ended:
                self._check_stop(ended.ending)
                outcome_of_culprit = self._judge(ended.ending, start, progress, count_memory_kills() > kills)
                if outcome_of_culprit is not None:
                    progress.advance()
                    yield outcome_of_culprit

    def _run_in_child(self, records: Sequence[bytes], note: bytes) -> Iterator[Outcome]:
        """Yields outcomes as the process tells them.

        Raises:
            ChildEndedError: It ended before the last one; what it finished has been yielded.
        """
        child = self._ready_child()
        reader = OutcomeReader()
        event: bytes | None = None
        try:
            child.send(pack_batch(records, note))
            while event != DONE:
                event = self._wait(child)
                yield from reader.feed(child.exchange.arena[: child.exchange.slots[FILLED]])
                if event != DONE:
                    child.go_on()
        except ChildEndedError:
            yield from reader.feed(child.exchange.arena[: child.exchange.slots[FILLED]])
            raise
        finally:
            if event != DONE:  # It ended, or whoever reads the outcomes has given up.
                self.close()

    def _ready_child(self) -> ChildProcess:
        """Returns a process that waits for a batch; one that was killed while it had nothing to do is replaced."""
        if self._child is not None and not self._child.is_alive():
            self.close()
        if self._child is None:
            self._child = ChildProcess(self._spec)
        slots = self._child.exchange.slots
        slots[BEGUN] = slots[FILLED] = 0
        return self._child

    def _wait(self, child: ChildProcess) -> bytes:
        """Returns the next event; meanwhile has the process ended when a step runs for too long."""
        pause: float | None = self._secs_left(child)
        while (event := child.wait(None if pause is None else min(pause, _MAX_WAIT_SECS))) is None:
            pause = self._secs_left(child)
            if pause is not None and pause <= 0:
                child.ask_to_end()
                pause = _ASK_AGAIN_SECS
        return event

    def _secs_left(self, child: ChildProcess) -> float | None:
        """Returns how long it is until a step can have run for too long; None if no step is bounded."""
        bounds = [bound for bound in child.timeouts if bound is not None]
        if not bounds:
            return None
        slots = child.exchange.slots
        step, started_ns = slots[STEP], slots[STARTED_NS]
        bound = child.timeouts[step]
        if not started_ns or bound is None:
            return min(bounds)
        return bound - (time.monotonic_ns() - started_ns) / 1e9

    def _check_stop(self, ending: Ending) -> None:
        """Raises if the process was ended with the job."""
        if status_name(ending.status) in _STOP_SIGNALS:
            # Sent to all processes at once, such a signal stops the job too: the job may only not know it yet.
            _stopping.wait(_STOP_NOTICE_SECS)
        if _stopping.is_set():
            raise JobInterrupted("the job is being stopped")

    def _judge(self, ending: Ending, start: int, progress: _Progress, killed_for_memory: bool) -> Outcome | None:
        """Returns the outcome of the record that ended the process; None if there is none, or it is tried again."""
        if start + ending.begun <= progress.done:
            progress.strikes += 1
            if progress.strikes < _MAX_STRIKES:
                return None
        elif ending.timed_out and self._is_tried_again(ending, progress):
            return None
        return Outcome(failure=self._failure(ending, killed_for_memory))

    def _is_tried_again(self, ending: Ending, progress: _Progress) -> bool:
        """Decides about a record whose step ran for too long; what had returned an iterator is not called again."""
        if ending.item or progress.timeouts >= self._retries[ending.step or 0]:
            return False
        progress.timeouts += 1
        time.sleep(pause_secs(progress.timeouts))
        return True

    def _failure(self, ending: Ending, killed_for_memory: bool) -> Failure:
        step = ending.step or 0
        reason, error_type, error = self._verdict(ending, step, killed_for_memory)
        where = f" (at item {ending.item} of its iterator)" if ending.item and ending.step is not None else ""
        said = ending.stderr.strip()[-_SAID_CHARS:]
        said = f"; it said: {said}" if said and not ending.timed_out else ""
        trace = ending.trace.partition("\n\n")[2] if ending.timed_out else ending.trace  # It was made to abort.
        trace = safe_text(trace, MAX_TRACEBACK_CHARS)
        return Failure(self._names[step], reason, error_type, safe_text(error + where + said, MAX_ERROR_CHARS), trace)

    def _verdict(self, ending: Ending, step: int, killed_for_memory: bool) -> tuple[str, str, str]:
        """Returns (reason, error type, text)."""
        if ending.timed_out:
            return "timeout", "TimeoutError", f"the step ran for longer than timeout_secs, {self._timeouts[step]:g} s"
        name = status_name(ending.status)
        if name == "SIGKILL" and killed_for_memory:
            return "memory", name, "the kernel killed the step's process because memory ran out"
        if name == "SIGABRT" and _OUT_OF_MEMORY.search(ending.stderr):
            return "memory", name, "the step's process gave up because memory ran out"
        what = "the step" if ending.step is not None else "something"
        return "process_died", name, f"{what} ended its process with {name}"


@dataclasses.dataclass
class _Notes:
    """What the process must know of a batch beside its records.

    Attributes:
        batch: The batch.
        journal: Where its journal is, None where nothing is kept.
    """

    batch: RecordBatch
    journal: JournalHome | None

    def since(self, start: int) -> bytes:
        """Returns the note on the records from one of them on."""
        batch = self.batch
        if self.journal is None or batch.source is None or len(batch.positions) != len(batch.records):
            return b""
        return pack_origins(self.journal, batch.source.index, batch.positions[start:])


@dataclasses.dataclass
class _Progress:
    """How far a batch is.

    Attributes:
        done: Records whose fate is known.
        timeouts: How often the next record ran for too long.
        strikes: How often the process ended without having begun the next record.
    """

    done: int = 0
    timeouts: int = 0
    strikes: int = 0

    def advance(self) -> None:
        self.done += 1
        self.timeouts = self.strikes = 0
