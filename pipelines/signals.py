"""What signals do to a job: Ctrl-C and SIGTERM stop it, a terminal that goes away does not."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from pipelines.handlers import handled
from transforms.dead_letters import JobInterrupted
from transforms.steps.isolate import note_stop


@contextlib.contextmanager
def stop_on_signals() -> Iterator[None]:
    """Raises `JobInterrupted` in the main thread on SIGINT and SIGTERM while the job runs.

    It is not taken for a failure of the record that is being cleaned. A second one ends the process at once. SIGHUP is
    survived: the job goes on without its terminal.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # Handlers can only be set in the main thread; whoever embeds us has their own.
        return
    note_stop(False)
    with handled(_STOPPING, _stop), handled((signal.SIGHUP,), _detach, only_default=True):
        yield


_STOPPING = (signal.SIGINT, signal.SIGTERM)


def _stop(number: int, _frame: FrameType | None) -> None:
    # Beam waits for its workers to end their bundles, which may be hours; what they have not committed is read again.
    note_stop()
    for stopping in _STOPPING:
        signal.signal(stopping, _stop_at_once)
    end_children(os.getpid())
    raise JobInterrupted(signal.Signals(number).name)


def _stop_at_once(_number: int, _frame: FrameType | None) -> None:
    end_children(os.getpid())
    os._exit(1)


def _detach(_number: int, _frame: FrameType | None) -> None:
    """Lets go of the terminal: writing to one that is gone fails, and steps that print would fail with it."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        with contextlib.suppress(OSError):
            if stat.S_ISCHR(os.fstat(descriptor).st_mode):
                os.dup2(nowhere, descriptor)
    os.close(nowhere)


def end_children(pid: int) -> None:
    """Kills the descendants of a process: the workers that the local runner started, and what these started.

    A worker dies before its own children do, so that it cannot take their end for a failure of the record they have.
    """
    for child in list(_descendants(pid)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


def _descendants(pid: int) -> Iterator[int]:
    """Yields the descendants of a process, each before its own children."""
    for child in children(pid):
        yield child
        yield from _descendants(child)


def children(pid: int) -> list[int]:
    """Returns the children of a process. Linux only; elsewhere none are found."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, path.read_text().split())
    return found
