"""`max_per_sec`: one limit for all processes and threads of a job on this machine, kept in a locked file."""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_TIME = struct.Struct("<q")
_MAX_WAITERS = 10_000
"""A time further ahead than so many callers can have booked is left over from before the machine started anew."""


class RateLimiter:
    """Hands out the times at which a step may be called, evenly spaced.

    The file holds the next free time on the machine's monotonic clock. Whoever takes one moves it on by the distance
    between calls, under the file's lock, and waits without the lock.

    Args:
        job: Identity of the job.
        step: Number of the step.
        per_sec: Calls a second.

    Raises:
        OSError: The file cannot be used.
    """

    def __init__(self, job: str, step: int, per_sec: float) -> None:
        self._distance_ns = max(1, round(1e9 / per_sec))
        self._path = _path(job, step)
        os.close(self._open())

    def limit(self, call: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Returns a call that waits for its turn."""

        def limited(value: Any) -> Any:
            self.wait()
            return call(value)

        return limited

    def wait(self) -> None:
        """Returns when the caller's turn has come."""
        ahead = self._turn() - time.monotonic_ns()
        if ahead > 0:
            time.sleep(ahead / 1e9)

    def _turn(self) -> int:
        """Takes the next free time."""
        # Opened for each call, since the lock belongs to the opened file: threads exclude one another like processes.
        fd = self._open()
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            now = time.monotonic_ns()
            data = os.pread(fd, _TIME.size, 0)
            turn = max(now, _TIME.unpack(data)[0]) if len(data) == _TIME.size else now
            if turn > now + _MAX_WAITERS * self._distance_ns:
                turn = now
            os.pwrite(fd, _TIME.pack(turn + self._distance_ns), 0)
            return turn
        finally:
            os.close(fd)

    def _open(self) -> int:
        return os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def forget_rates(job: str, num_steps: int) -> None:
    """Deletes the files of a job that has ended."""
    for step in range(num_steps):
        with contextlib.suppress(OSError):
            os.unlink(_path(job, step))


def _path(job: str, step: int) -> Path:
    return Path(tempfile.gettempdir()) / f"gristmill-rate-{os.getuid()}-{job}-{step}"
