"""One writer an output directory: a lock with a heartbeat, taken put-if-absent."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from types import TracebackType
from typing import Any

from transforms.store import OutputError, Store, Version

LOCK_NAME = "_gristmill/lock.json"
HEARTBEAT_SECS = 15.0
_STALE_SECS = 8 * HEARTBEAT_SECS


class LockedError(RuntimeError):
    """Another job writes to the directory; the message says who."""


class JobLock:
    """Holds the lock of an output directory while the job runs.

    A lock whose process is gone, or whose heartbeat has stopped, is taken over; a holder on another machine is listened
    to for two beats before that, since its clock may be wrong.

    Args:
        store: The output directory.
        heartbeat_secs: How often the lock is renewed.

    Raises:
        LockedError: On entering, when somebody else holds it.
    """

    def __init__(self, store: Store, heartbeat_secs: float = HEARTBEAT_SECS) -> None:
        self._store = store
        self._heartbeat_secs = heartbeat_secs
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._token = f"{socket.gethostname()}-{os.getpid()}-{time.time_ns()}"

    def __enter__(self) -> JobLock:
        while not self._store.put_if_absent(LOCK_NAME, self._entry()):
            found = read_lock(self._store)
            if found is None:
                continue
            holder, version = found
            if not is_stale(holder) or self._beats(holder):
                raise LockedError(f"{self._store.root} is being written by {describe(holder)}")
            self._store.delete(LOCK_NAME, version)
        self._thread = threading.Thread(target=self._beat, name="gristmill-lock", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        found = read_lock(self._store)
        if found is not None and found[0].get("token") == self._token:
            self._store.delete(LOCK_NAME, found[1])

    def _beats(self, holder: dict[str, Any]) -> bool:
        """Whether a holder elsewhere renews its lock although its last heartbeat looks old: clocks differ and jump."""
        if not holder.get("host") or holder["host"] == socket.gethostname():
            return False
        deadline = time.monotonic() + 2 * self._heartbeat_secs
        while time.monotonic() < deadline:
            time.sleep(self._heartbeat_secs / 10)
            found = read_lock(self._store)
            if found is not None and found[0].get("heartbeat") != holder.get("heartbeat"):
                return True
        return False

    def _entry(self) -> bytes:
        entry = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "pid_started": _process_start(os.getpid()),
            "token": self._token,
            "heartbeat": time.time(),
        }
        return json.dumps(entry).encode()

    def _beat(self) -> None:
        while not self._stop.wait(self._heartbeat_secs):
            # A full disk must not end a job that may just be freeing it; the next beat tries again.
            with contextlib.suppress(OutputError, OSError):
                found = read_lock(self._store)
                if found is None or found[0].get("token") != self._token:
                    return  # Somebody took the lock over; it is theirs.
                self._store.put(LOCK_NAME, self._entry())


def read_lock(store: Store) -> tuple[dict[str, Any], Version] | None:
    """Returns (holder, version) of the lock, None when nobody holds it."""
    found = store.get(LOCK_NAME)
    if found is None:
        return None
    try:
        holder = json.loads(found[0])
    except ValueError:
        holder = {}
    return holder if isinstance(holder, dict) else {}, found[1]


def is_stale(holder: dict[str, Any]) -> bool:
    """Whether the holder is certainly gone: its process on this host, or its heartbeat elsewhere."""
    if holder.get("host") == socket.gethostname() and holder.get("pid"):
        return _process_start(int(holder["pid"])) != holder.get("pid_started")
    return time.time() - _heartbeat(holder) > _STALE_SECS


def describe(holder: dict[str, Any]) -> str:
    """Returns who holds the lock, in words."""
    age = max(0, round(time.time() - _heartbeat(holder)))
    return f"process {holder.get('pid')} on {holder.get('host')} (last heartbeat {age} s ago)"


def _heartbeat(holder: dict[str, Any]) -> float:
    beat = holder.get("heartbeat")
    return float(beat) if isinstance(beat, int | float) else 0.0


def _process_start(pid: int) -> str | None:
    """Returns when a process began, in ticks since boot; None when there is none. Numbers are used again."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[19].decode()
    except (OSError, IndexError):
        return None
