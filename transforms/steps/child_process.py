"""The worker's end of the process in which isolated steps run: start it, send it batches, learn how it ended.

No Beam here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import pickle
import select
import signal
import subprocess
import sys
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from transforms.child_call import status_name
from transforms.elements import JobSpec
from transforms.steps import exchange as shared
from transforms.steps.exchange import ARENA_BYTES, Exchange
from transforms.steps.load import StepError

_PROGRAM = Path(__file__).with_name("child.py")
_CLOSE_SECS = 10.0
_LOOK_MS = 20
"""How often to look whether the process lives, where the kernel cannot say so by itself (before Linux 5.3)."""


@dataclasses.dataclass(frozen=True)
class Ending:
    """How the process ended.

    Attributes:
        begun: Records of the batch that it had begun.
        step: The step that ran, None if none did.
        item: The item that the step's iterator was asked for; 0 if it was called.
        timed_out: Whether it was ended because the step ran for too long.
        status: Its exit status, or minus the signal that ended it.
        stderr: The end of what it wrote to standard error.
        trace: Where it was, as its fault handler saw it.
    """

    begun: int
    step: int | None
    item: int
    timed_out: bool
    status: int
    stderr: str
    trace: str


class ChildEndedError(Exception):
    """The process has ended.

    Attributes:
        ending: How.
    """

    def __init__(self, ending: Ending) -> None:
        super().__init__(str(ending))
        self.ending = ending


class ChildProcess:
    """A process that runs the steps of a job; ready when made.

    Args:
        spec: The job.

    Raises:
        StepError: The steps cannot be loaded there, or it cannot be started.

    Attributes:
        exchange: The memory shared with it.
        timeouts: How long each step may run; None where it is not bounded, or keeps to a deadline of its own.
    """

    def __init__(self, spec: JobSpec) -> None:
        with contextlib.ExitStack() as undo:
            memory_fd = shared.make_memory()
            undo.callback(os.close, memory_fd)
            self.exchange = Exchange(memory_fd)
            self._start(memory_fd)
        self._finalizer = weakref.finalize(self, _end, self._process, self._input, self._signals, self._life)
        try:
            self._load(spec)
        except BaseException:
            self.close()
            raise

    def _start(self, memory_fd: int) -> None:
        with contextlib.ExitStack() as theirs, contextlib.ExitStack() as ours:
            input_read, self._input = _open_pipe(theirs, ours)
            self._signals, signal_write = _open_pipe(ours, theirs)
            life_read, self._life = _open_pipe(theirs, ours)
            fds = (input_read, signal_write, life_read, memory_fd)
            command = [sys.executable, "-P", str(_PROGRAM), *map(str, fds), json.dumps(sys.path)]
            try:
                self._process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, pass_fds=fds, start_new_session=True
                )
            except OSError as error:
                raise StepError(f"the process for isolated steps cannot be started: {error}") from error
            ours.pop_all()
        os.set_blocking(self._input, False)
        with contextlib.suppress(OSError):
            fcntl.fcntl(self._input, fcntl.F_SETPIPE_SZ, ARENA_BYTES)  # A batch goes through without a pause.
        self._pidfd = _open_pidfd(self._process.pid)
        self._events = _poll((self._signals, select.POLLIN), (self._pidfd, select.POLLIN))
        self._end = _poll((self._pidfd, select.POLLIN))
        self._space = _poll((self._input, select.POLLOUT), (self._pidfd, select.POLLIN))

    def _load(self, spec: JobSpec) -> None:
        """Lets it load the steps."""
        try:
            self.send([pickle.dumps(spec)])
            event = self.wait(None)
        except ChildEndedError as ended:
            ending = ended.ending
            said = (ending.stderr or ending.trace).strip()[-1000:]
            raise StepError(
                f"the process that loads the steps ended with {status_name(ending.status)}: {said}"
            ) from None
        if event == shared.REFUSED:
            raise StepError(self.exchange.text())
        self.timeouts: list[float | None] = json.loads(self.exchange.text())

    def send(self, parts: Sequence[bytes]) -> None:
        """Sends bytes.

        Raises:
            ChildEndedError: It has ended.
        """
        for part in parts:
            data = memoryview(part)
            while len(data):
                try:
                    data = data[os.write(self._input, data) :]
                except BlockingIOError:
                    self._wait_for(self._space, None)
                except BrokenPipeError:
                    self._await_end()

    def wait(self, timeout_secs: float | None) -> bytes | None:
        """Returns its next event, None if there is none in time.

        Raises:
            ChildEndedError: It has ended.
        """
        if not self._wait_for(self._events, timeout_secs):
            return None
        return os.read(self._signals, 1) or self._await_end()  # Nothing to read means that all writers are gone.

    def go_on(self) -> None:
        """Answers that its frames have been read."""
        self.exchange.slots[shared.FILLED] = 0
        self.send([shared.GO_ON])

    def ask_to_end(self) -> None:
        """Has it ended if it is still where it is now."""
        slots = self.exchange.slots
        with contextlib.suppress(BrokenPipeError):  # It has ended already; the next wait says so.
            os.write(self._life, shared.CHECK.pack(*slots[shared.BEGUN : shared.STARTED_NS + 1]))

    def is_alive(self) -> bool:
        """Whether it can be sent a batch."""
        if self._pidfd is None:
            return self._process.poll() is None
        return not self._end.poll(0)

    def close(self) -> None:
        """Ends it with all its descendants."""
        if self._finalizer():
            if self._pidfd is not None:
                os.close(self._pidfd)
            self.exchange.close()

    def _wait_for(self, poll: select.poll, timeout_secs: float | None) -> bool:
        """Returns whether a file is ready, False after the timeout.

        Raises:
            ChildEndedError: The process has ended, and has said nothing before.
        """
        left = None if timeout_secs is None else max(0, round(1000 * timeout_secs) + 1)
        while True:
            step = left if self._pidfd is not None else min(_LOOK_MS, left if left is not None else _LOOK_MS)
            ready = {fd for fd, _ in poll.poll(step)}
            if self._signals in ready:
                return True
            if self._pidfd in ready or not self.is_alive():
                raise ChildEndedError(self._ending())
            if ready:
                return True
            if left is not None:
                left -= step or 0
                if left <= 0:
                    return False

    def _await_end(self) -> NoReturn:
        """Waits until the warden has told how the process ended, and raises it."""
        self._wait_for(self._end, _CLOSE_SECS)
        raise ChildEndedError(self._ending())

    def _ending(self) -> Ending:
        _kill_group(self._process.pid)
        status = self._process.wait()
        slots = self.exchange.slots
        if slots[shared.ENDED]:
            status = os.waitstatus_to_exitcode(slots[shared.STATUS])
        return Ending(
            begun=slots[shared.BEGUN],
            step=slots[shared.STEP] if slots[shared.STARTED_NS] else None,
            item=slots[shared.ITEM],
            timed_out=bool(slots[shared.TIMED_OUT]),
            status=status,
            stderr=self.exchange.note(shared.STDERR).decode("utf-8", "backslashreplace"),
            trace=self.exchange.note(shared.TRACE).decode("utf-8", "backslashreplace"),
        )


def _open_pipe(read_owner: contextlib.ExitStack, write_owner: contextlib.ExitStack) -> tuple[int, int]:
    """Returns the ends of a new pipe; each is closed with its owner."""
    read_fd, write_fd = os.pipe()
    read_owner.callback(os.close, read_fd)
    write_owner.callback(os.close, write_fd)
    return read_fd, write_fd


def _open_pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def _poll(*files: tuple[int | None, int]) -> select.poll:
    poll = select.poll()
    for fd, event in files:
        if fd is not None:
            poll.register(fd, event)
    return poll


def _kill_group(pid: int) -> None:
    """Kills what the warden may have left behind, if it was killed itself. Its own number is not free before `wait`."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _end(process: subprocess.Popen[bytes], *fds: int) -> bool:
    """Ends the process, without which the worker must not be left, and gives its files back."""
    for fd in fds:
        os.close(fd)  # The last one is the life pipe.
    if process.returncode is None:
        try:
            process.wait(_CLOSE_SECS)
        except subprocess.TimeoutExpired:
            _kill_group(process.pid)
            process.wait()
    return True
