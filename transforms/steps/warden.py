"""The warden: a small process that watches over the one in which isolated steps run, and clears up after it.

It runs nothing of the user's, so it can be relied on when a step hangs with the GIL held, closes every file or
corrupts memory. It is the reaper of all descendants, also of those that made themselves a session of their own, and
leaves none behind when the process ends or the worker is gone. No Beam here.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from transforms.steps.exchange import (
    BEGUN,
    CHECK,
    ENDED,
    MAX_NOTE_BYTES,
    STARTED_NS,
    STATUS,
    STDERR,
    TIMED_OUT,
    TRACE,
    Exchange,
    make_file,
)

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_OOM_SCORE = "600"
_STOP_SECS = 1.0
"""How long a process may take to stop; one that does not is inside the kernel, and so still where it was."""
_ABORT_SECS = 0.5
"""How long a process may take to say where it hangs."""
_END_SECS = 5.0
"""How long descendants may take to die; one that waits for a dead disk never does."""
_PAUSE_SECS = 0.001


def run_watched(work: Callable[[], None], exchange: Exchange, life_fd: int) -> NoReturn:
    """Runs the work in a process of its own, watches over it and ends.

    Args:
        work: What to run.
        exchange: Memory shared with the worker, in which the end is noted.
        life_fd: Pipe whose other end the worker alone holds; it brings orders, and its end is the order to end.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    wake_fd, trace_fd = _listen_for_children(), make_file("gristmill-trace")
    stderr_fd, write_fd = os.pipe()
    pid = os.fork()
    if pid == 0:
        _become_child(write_fd, trace_fd)
        _work_and_exit(work)
    os.close(write_fd)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # A service manager may signal all processes; this one goes last.
    Warden(pid, exchange, life_fd, wake_fd, stderr_fd, trace_fd).watch()
    os._exit(0)


def _listen_for_children() -> int:
    """Makes the end of a child a byte in a pipe."""
    wake_fd, write_fd = os.pipe()
    os.set_blocking(wake_fd, False)
    os.set_blocking(write_fd, False)
    signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return wake_fd


def _become_child(stderr_fd: int, trace_fd: int) -> None:
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    # The thread that forked is the warden's only one, so this holds exactly as long as the warden lives.
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.dup2(stderr_fd, 2)
    faulthandler.enable(trace_fd)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # A core a bad record would fill the disk.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE)  # Short of memory, the kernel is to take the steps.
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def _work_and_exit(work: Callable[[], None]) -> NoReturn:
    status = 1
    try:
        work()
        status = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(status)


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):  # Not on Linux: descendants in sessions of their own get away.
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


class Warden:
    """Watches over one process until it has ended.

    Args:
        pid: The process, a child of this one.
        exchange: See `run_watched`.
        life_fd: See `run_watched`.
        wake_fd: Readable when a child has ended.
        stderr_fd: What the process writes to its standard error.
        trace_fd: File to which it writes where it was when it died.
    """

    def __init__(self, pid: int, exchange: Exchange, life_fd: int, wake_fd: int, stderr_fd: int, trace_fd: int) -> None:
        self._pid = pid
        self._exchange = exchange
        self._life_fd = life_fd
        self._wake_fd = wake_fd
        self._stderr_fd = stderr_fd
        self._trace_fd = trace_fd
        self._said = b""
        self._status: int | None = None
        self._poll = select.poll()
        for fd in (life_fd, wake_fd, stderr_fd):
            os.set_blocking(fd, False)
            self._poll.register(fd, select.POLLIN)

    def watch(self) -> None:
        """Returns when the process and all its descendants are gone, and its end is noted."""
        while self._status is None:
            ready = {fd for fd, _ in self._poll.poll()}
            if self._stderr_fd in ready:
                self._relay()
            if self._wake_fd in ready:
                os.read(self._wake_fd, 4096)
                self._reap()
            if self._life_fd in ready:
                self._obey()
        self._clear_up()

    def _obey(self) -> None:
        order = os.read(self._life_fd, CHECK.size)
        if self._status is not None:
            return
        if not order:
            self._kill(signal.SIGKILL, _END_SECS)
            self._status = self._status or 0  # Also when it cannot die: then it waits for a disk, and holds no one up.
        elif self._stop():
            self._judge(order)

    def _judge(self, order: bytes) -> None:
        """Ends the stopped process if its step is still the one that has run for too long."""
        if order == CHECK.pack(*self._exchange.slots[BEGUN : STARTED_NS + 1]):
            self._exchange.slots[TIMED_OUT] = 1
            os.kill(self._pid, signal.SIGABRT)  # Its fault handler says where it hangs, whatever holds the GIL.
            if self._kill(signal.SIGCONT, _ABORT_SECS) is None:
                self._kill(signal.SIGKILL, _END_SECS)
                self._status = self._status or 0
        else:
            os.kill(self._pid, signal.SIGCONT)

    def _stop(self) -> bool:
        """Stops the process; False if it has ended."""
        os.kill(self._pid, signal.SIGSTOP)
        deadline = time.monotonic() + _STOP_SECS
        while time.monotonic() < deadline:
            pid, status = os.waitpid(self._pid, os.WUNTRACED | os.WNOHANG)
            if pid and os.WIFSTOPPED(status):
                return True
            if pid:
                self._status = status
                return False
            time.sleep(_PAUSE_SECS)
        return True

    def _kill(self, number: signal.Signals, patience_secs: float) -> int | None:
        """Sends a signal and returns the status of the process, None if it does not end in time."""
        if self._status is None:
            os.kill(self._pid, number)
        deadline = time.monotonic() + patience_secs
        while self._status is None and time.monotonic() < deadline:
            self._relay()
            self._reap()
            time.sleep(_PAUSE_SECS)
        return self._status

    def _reap(self) -> bool:
        """Takes in children that have ended, orphans of the steps among them; False when there are none left."""
        try:
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return True
                if pid == self._pid:
                    self._status = status
        except ChildProcessError:
            return False

    def _relay(self) -> None:
        """Passes on what the process says on standard error, and keeps the end of it."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._stderr_fd, 1 << 16):
                self._said = (self._said + data)[-MAX_NOTE_BYTES:]
                with contextlib.suppress(OSError):
                    os.write(2, data)
            # At its end a pipe is always readable: every holder has closed it.
            with contextlib.suppress(KeyError):
                self._poll.unregister(self._stderr_fd)

    def _clear_up(self) -> None:
        """Ends all descendants and notes the end."""
        deadline = time.monotonic() + _END_SECS
        while self._reap() and time.monotonic() < deadline:
            for pid in _children_of(os.getpid()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)  # Its own children become ours when it is gone.
            time.sleep(_PAUSE_SECS)
        self._relay()
        self._exchange.put_note(STDERR, self._said)
        self._exchange.put_note(TRACE, os.pread(self._trace_fd, MAX_NOTE_BYTES, 0))
        self._exchange.slots[STATUS] = self._status or 0
        self._exchange.slots[ENDED] = 1


def _children_of(pid: int) -> list[int]:
    """Returns the children of a process of one thread."""
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return [int(path.parent.name) for path in Path("/proc").glob("[0-9]*/stat") if _parent_of(path) == pid]


def _parent_of(stat: Path) -> int:
    try:
        return int(stat.read_text().rpartition(")")[2].split()[1])
    except OSError:
        return -1
