"""One writer an output directory: a lock with a heartbeat, taken put-if-absent.

Every change of the lock is bound to the version that was read before it, so that a heartbeat that comes late never
overwrites the next holder's entry. What a holder may still do that has lost its lock, `transforms.fence` says.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

from transforms.store import BusyError, OutputError, Store, Version

LOCK_NAME = "_gristmill/lock.json"
_LOGGER = logging.getLogger("gristmill")

HEARTBEAT_SECS = 15.0
_STALE_SECS = 8 * HEARTBEAT_SECS
_BEATS = 2
_JOB_BEATS = 16
"""Workers renew the lock of their job when they see that it is a minute or two old, see `keep_lock`."""
JOB_STALE_SECS = 15 * 60.0
"""A job may wait so long for its first worker, if its service cannot be asked whether it still runs."""


class LockedError(RuntimeError):
    """Another job writes to the directory; the message says who."""


class LostLockError(OutputError):
    """This run no longer holds the lock of its output; the message says who does. It must change nothing more."""


class JobLock:
    """Holds the lock of an output directory while the job runs.

    A lock whose process is gone, or whose heartbeat has stopped, is taken over; a holder whose process cannot be looked
    up from here is listened to for two beats before that, since its clock may be wrong. A lock that was handed over to
    a job stays when this process ends: the job's workers renew it, see `keep_lock`, and the job's end releases it.

    Args:
        store: The output directory.
        heartbeat_secs: How often the lock is renewed.
        is_running: Asks the service that runs a job, given the lock's "job", whether it still does; None when it
            cannot tell. Then the heartbeat decides.

    Attributes:
        token: What tells this holder from all others.

    Raises:
        LockedError: On entering, when somebody else holds it.
    """

    def __init__(
        self,
        store: Store,
        heartbeat_secs: float = HEARTBEAT_SECS,
        is_running: Callable[[dict[str, Any]], bool | None] = lambda _: None,
    ) -> None:
        self._store = store
        self._heartbeat_secs = heartbeat_secs
        self._is_running = is_running
        self._stop = threading.Event()
        self._writing = threading.Lock()
        self._thread: threading.Thread | None = None
        self._job: dict[str, Any] | None = None
        self._since = time.time()
        self.token = f"{socket.gethostname()}-{os.getpid()}-{time.time_ns()}"

    def __enter__(self) -> JobLock:
        while True:
            found = read_lock(self._store)
            if found is not None and self._lives(found[0]):
                raise LockedError(f"{self._store.root} is being written by {describe(found[0])}")
            if self._take(found):
                break
        self._thread = threading.Thread(target=self._beat, name="gristmill-lock", daemon=True)
        self._thread.start()
        return self

    def _take(self, found: tuple[dict[str, Any], Version] | None) -> bool:
        """Takes exactly the lock that was found, or none; no act of an earlier holder is under way then."""
        try:
            with self._store.hold():
                version = None if found is None else found[1]
                return self._store.put_if_version(LOCK_NAME, self._entry(), version) is not None
        except BusyError as error:
            who = "a process" if found is None else f"{describe(found[0])},"
            why = "that stands still in the middle of a change: let it go on, or end it"
            raise LockedError(f"{self._store.root} is being written by {who} {why}") from error

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        if self._job is None:
            release_lock(self._store, self.token)

    def hand_over(self, job: dict[str, Any] | None) -> None:
        """Gives the lock to a job that outlives this process, or takes it back with None.

        Args:
            job: What says which job it is: "runner", "name", what its service needs to find it, and "detached" where
                nobody waits for its end.

        Raises:
            LostLockError: Somebody else has the lock by now.
            OutputError: The lock cannot be written.
        """
        with self._writing:
            self._job = job
            while True:
                _, version = check_lock(self._store, self.token)
                if self._store.put_if_version(LOCK_NAME, self._entry(), version) is not None:
                    return

    def check(self) -> None:
        """Checks that the lock is still this holder's; one that was handed over is for the job to check.

        Raises:
            LostLockError: It is not.
        """
        if self._job is None:
            check_lock(self._store, self.token)

    def _lives(self, holder: dict[str, Any]) -> bool:
        if holder.get("job"):
            running = self._is_running(holder["job"])
            if running is not None:
                return running
        elif has_process_here(holder):
            return not is_stale(holder)
        is_ahead = _heartbeat(holder) > time.time() + _STALE_SECS
        return not (is_stale(holder) or is_ahead) or self._beats(holder)

    def _beats(self, holder: dict[str, Any]) -> bool:
        """Whether a holder elsewhere renews its lock although its last heartbeat looks old: clocks differ and jump."""
        if not holder.get("host"):
            return False
        beats = _JOB_BEATS if holder.get("job") else _BEATS
        deadline = time.monotonic() + beats * self._heartbeat_secs
        while time.monotonic() < deadline:
            time.sleep(self._heartbeat_secs / 10)
            found = read_lock(self._store)
            if found is not None and found[0].get("heartbeat") != holder.get("heartbeat"):
                return True
        return False

    def _entry(self) -> bytes:
        entry = {
            **where_processes_are(),
            "pid": os.getpid(),
            "pid_started": _process_start(os.getpid()),
            "token": self.token,
            "since": self._since,
            "heartbeat": time.time(),
            "job": self._job,
        }
        return json.dumps(entry).encode()

    def _beat(self) -> None:
        while not self._stop.wait(self._heartbeat_secs):
            # A full disk must not end a job that may just be freeing it; the next beat tries again.
            with contextlib.suppress(OutputError, OSError), self._writing:
                found = read_lock(self._store)
                if found is None or found[0].get("token") != self.token:
                    _LOGGER.warning("%s; nothing more is changed", _lost(self._store, found))
                    return
                self._store.put_if_version(LOCK_NAME, self._entry(), found[1])


@contextlib.contextmanager
def keep_lock(store: Store, token: str, look_secs: float = 60.0) -> Iterator[None]:
    """Renews the lock of a job from a worker, while there may be no other process that does.

    There may be thousands of workers and one object, so each looks now and then, and the older the heartbeat is the
    likelier it is to renew it.

    Args:
        store: The output directory.
        token: The lock's; "" when the process that holds the lock lives as long as the job.
        look_secs: About how long a worker waits between two looks.
    """
    if not token:
        yield
        return
    stop = threading.Event()
    thread = threading.Thread(
        target=_keep, args=(store, token, look_secs, stop), name="gristmill-keep-lock", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        stop.set()


def _keep(store: Store, token: str, look_secs: float, stop: threading.Event) -> None:
    while not stop.wait(look_secs * random.uniform(0.5, 1.5)):
        with contextlib.suppress(OutputError, OSError):
            found = read_lock(store)
            if found is None or found[0].get("token") != token:
                return
            if time.time() - _heartbeat(found[0]) > look_secs * random.uniform(0.75, 1.75):
                entry = {**found[0], "heartbeat": time.time()}
                store.put_if_version(LOCK_NAME, json.dumps(entry).encode(), found[1])


def check_lock(store: Store, token: str) -> tuple[dict[str, Any], Version]:
    """Returns (holder, version) of the lock if it is that holder's.

    Raises:
        LostLockError: It is not, or there is none.
    """
    found = read_lock(store)
    if found is None or found[0].get("token") != token:
        raise LostLockError(_lost(store, found))
    return found


def _lost(store: Store, found: tuple[dict[str, Any], Version] | None) -> str:
    gone = "whoever took it has ended since, or it was deleted"
    who = gone if found is None else f"now {describe(found[0])} has it"
    return (
        f"this run has lost its lock of {store.root}: {who}. It must have been suspended, or cut off from the output, "
        "for minutes, so that it was taken for dead"
    )


def release_lock(store: Store, token: str) -> None:
    """Takes the lock away if it is still that holder's."""
    found = read_lock(store)
    if found is not None and found[0].get("token") == token:
        store.delete(LOCK_NAME, found[1])


def release_detached(store: Store, token: str) -> None:
    """Takes the lock of a job away that has come to its end, unless its driver is there to do it."""
    found = read_lock(store) if token else None
    if found is not None and found[0].get("token") == token and (found[0].get("job") or {}).get("detached"):
        store.delete(LOCK_NAME, found[1])


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


def has_process_here(holder: dict[str, Any]) -> bool:
    """Whether the holder's process number can be looked up here.

    Containers may share a host's name, and machines too; a number counts only in one PID namespace of one boot.
    """
    here = where_processes_are()
    return bool(holder.get("pid")) and all(here[key] and holder.get(key) == here[key] for key in here)


def where_processes_are() -> dict[str, str]:
    """Returns what process numbers hold for; "" for what cannot be told, which is like nothing else."""
    return {"host": socket.gethostname(), "boot": _boot(), "pid_namespace": _pid_namespace()}


def _boot() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def _pid_namespace() -> str:
    try:
        found = os.stat("/proc/self/ns/pid")
    except OSError:
        return ""
    return f"{found.st_dev}:{found.st_ino}"


def is_stale(holder: dict[str, Any]) -> bool:
    """Whether the holder is certainly gone: its process where it can be looked up, or its heartbeat elsewhere."""
    if holder.get("job"):
        return time.time() - _heartbeat(holder) > JOB_STALE_SECS
    if has_process_here(holder):
        return _process_start(int(holder["pid"])) != holder.get("pid_started")
    return time.time() - _heartbeat(holder) > _STALE_SECS


def describe(holder: dict[str, Any]) -> str:
    """Returns who holds the lock, in words."""
    age = max(0, round(time.time() - _heartbeat(holder)))
    job = holder.get("job")
    if job:
        who = f"the {job.get('runner')} job {job.get('name')}" + (f" ({job['id']})" if job.get("id") else "")
    else:
        who = f"process {holder.get('pid')} on {holder.get('host')}"
    return f"{who} (last heartbeat {age} s ago)"


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
