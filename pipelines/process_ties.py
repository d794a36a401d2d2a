"""What ties the processes of a local job together: none outlives the one that started it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_OOM_SCORE = 300


def end_with_parent() -> None:
    """Has the kernel kill this process when the thread that started it ends. Linux only; elsewhere nothing."""
    parent = os.getppid()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # It ended before we could ask.
        os._exit(1)


def die_before_parent() -> None:
    """Has the kernel take this process and its children before the command when memory runs out. Linux only."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as score:
        score.write(str(_OOM_SCORE))
