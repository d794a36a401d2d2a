"""Ends a process that waits for workers that are gone: Beam's runner alone would wait for ever."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

DEAD_WORKER = 3
TOO_LATE = 4
_LOOK_SECS = 0.5
_GRACE_SECS = 6.0  # For the runner's own message, and for a worker that ends badly though the work is done.


def watch(secs: float) -> None:
    """Watches, in a thread, the containers and the clock; this process ends when one of them runs out.

    Args:
        secs: How long this process may run.
    """
    folder = Path(os.environ["CONTAINERS"])
    threading.Thread(target=_watch, args=(folder, time.monotonic() + secs), daemon=True).start()


def _watch(folder: Path, deadline: float) -> None:
    while time.monotonic() < deadline:
        time.sleep(_LOOK_SECS)
        for place in sorted(folder.iterdir()):
            status = _exit_status(place)
            if status not in (None, "0", "killed"):
                time.sleep(_GRACE_SECS)
                log = (place / "log").read_text(errors="replace")
                print(f"worker {place.name} ended with {status}\n{log[-3000:]}", file=sys.stderr, flush=True)
                os._exit(DEAD_WORKER)
    print("the job takes too long", file=sys.stderr, flush=True)
    os._exit(TOO_LATE)


def _exit_status(place: Path) -> str | None:
    try:
        return (place / "exit_status").read_text()
    except FileNotFoundError:
        return None
