"""Two states of one process: ours, and the one in which the steps left it. No Beam here.

A step may change what belongs to its whole process: the umask, the working folder, the environment, limits, signal
handlers, functions of the standard library. It finds all that again at its next batch, but what reads and writes goes
on as if nothing had been. States are exchanged once a batch, not once a record.
"""

from __future__ import annotations

import builtins
import contextlib
import fcntl
import gc
import io
import json
import locale
import logging
import os
import random
import resource
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NoReturn

from transforms.dead_letters import BadRecordError
from transforms.store import OutputError

SPOILED_STATUS = 87
"""Exit status of a worker whose state cannot be put right: the pipeline's process is started anew."""

_LIMITS = (
    ("RLIMIT_NOFILE", "RLIMIT_FSIZE", "RLIMIT_AS", "RLIMIT_DATA", "RLIMIT_CPU", "RLIMIT_STACK", "RLIMIT_NPROC")
    if sys.platform == "linux"
    else ("RLIMIT_NOFILE", "RLIMIT_FSIZE")
)
_MODULES: tuple[ModuleType, ...] = (builtins, os, os.path, io, time, json, socket, threading, signal, random, uuid)
"""What our code and its libraries call all the time; steps put functions of their own into them."""
_NOT_FUNCTIONS = ("_", "environ", "environb")
"""Names in those modules that change by themselves, or are states of their own."""
_WATCH_SECS = 0.1
_HIGH_FD = 300
"""Where nothing else opens a file by chance: the lowest numbers are taken first."""


class SpoiledError(OutputError):
    """Steps have changed their process beyond repair; in another one, isolated, they do no harm."""


class Surroundings:
    """The two states of the process, for one chain; ours is what the process has when this is made."""

    def __init__(self) -> None:
        self._ours = _shared.ours or _take()
        self._changes: dict[str, Any] = {}

    @contextlib.contextmanager
    def of_steps(self) -> Iterator[None]:
        """Gives the process the state of the steps for as long as the context lasts.

        Where threads overlap, the first one brings the steps' state and the last one brings ours back.

        Raises:
            SpoiledError: What they did cannot be put right.
        """
        with _shared.lock:
            _shared.inside += 1
            if _shared.inside == 1:
                _shared.ours = self._ours
                with contextlib.suppress(OSError, ValueError):  # Their folder may be gone meanwhile.
                    _give(self._changes, self._ours)
                if not _shared.ends_process:
                    os._exit = _refuse_to_exit(os.getpid())  # type: ignore[assignment]
        try:
            yield
        finally:
            with _shared.lock:
                _shared.inside -= 1
                if not _shared.inside:
                    _shared.ours = None
                    self._come_back()

    def _come_back(self) -> None:
        if getattr(os._exit, "__name__", "") == "refuse":
            os._exit = _exit
        if not _is_whole():
            _spoiled("a step closed files that are not its own")
        theirs = _take()
        if theirs == self._ours:
            self._changes = {}
            return
        self._changes = {name: value for name, value in theirs.items() if value != self._ours.get(name)}
        try:
            _give({name: self._ours[name] for name in self._changes if name in self._ours}, theirs)
        except (OSError, ValueError) as error:
            _spoiled(f"a step changed its process, which cannot be put right: {error}")

    def guard(self, make: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Yields what steps make; they run in their own state, whoever takes it in ours.

        Args:
            make: Returns what steps make of a batch.
        """
        with self.of_steps():
            batches = make()
        while True:
            with self.of_steps():
                out = next(batches, None)
            if out is None:
                return
            yield out


class _Shared:
    """What all chains of a process share.

    Attributes:
        inside: Threads that run steps.
        ours: Our state while one does.
        ends_process: Whether a process that is spoiled ends, because another one takes its place: a worker's.
        sentinel: A file of ours and its identity.
        umask: Ours.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.inside = 0
        self.ours: dict[str, Any] | None = None
        self.ends_process = True
        self.sentinel = _open_sentinel()
        self.umask = os.umask(0o022)  # There is no other way to read it everywhere.
        os.umask(self.umask)


def end_when_spoiled() -> None:
    """Has this process, which another one can replace, end as soon as steps have spoiled it.

    One whose files a step has closed ends also while the step runs: gRPC's threads would say millions of times that
    theirs are gone.
    """
    _shared.ends_process = True
    wait, end = threading.Event().wait, os._exit

    def watch() -> None:
        while _is_whole():
            wait(_WATCH_SECS)
        end(SPOILED_STATUS)

    threading.Thread(target=watch, name="gristmill-files", daemon=True).start()


def stay_alive() -> None:
    """Has this process, which is the command, raise `SpoiledError` instead; nor may steps end it by `os._exit`."""
    _shared.ends_process = False


def _is_whole() -> bool:
    """Whether the files of this process are still open."""
    number, identity = _shared.sentinel
    try:
        found = os.fstat(number)
    except OSError:
        return False
    return (found.st_dev, found.st_ino) == identity


def _spoiled(what: str) -> NoReturn:
    if _shared.ends_process:
        with contextlib.suppress(OSError):
            os.write(2, f"gristmill: {what}\n".encode())
        _exit(SPOILED_STATUS)
    _shared.sentinel = _open_sentinel()
    raise SpoiledError(f"{what}; isolate=true keeps it away from the job")


_exit = os._exit
"""Ours, whatever steps put in its place."""


def _refuse_to_exit(pid: int) -> Callable[[int], NoReturn]:
    """Returns what steps find as `os._exit` where the job runs in the command: its end must not pass for the job's."""

    def refuse(status: int) -> NoReturn:
        if os.getpid() != pid:
            _exit(status)  # A process that the step has forked.
        raise BadRecordError("process_died", f"the step would have ended its process with exit status {status}")

    return refuse


def _open_sentinel() -> tuple[int, tuple[int, int]]:
    """Opens a file that nobody else has, so that one under its number later is told from it."""
    read_fd, write_fd = os.pipe()
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    number = fcntl.fcntl(read_fd, fcntl.F_DUPFD_CLOEXEC, min(_HIGH_FD, max(10, soft - 20)))
    os.close(write_fd)
    os.close(read_fd)
    found = os.fstat(number)
    return number, (found.st_dev, found.st_ino)


_shared = _Shared()


def _take() -> dict[str, Any]:
    """Returns the state of the process."""
    umask = os.umask(_shared.umask)  # Other threads may make files meanwhile.
    os.umask(umask)
    state: dict[str, Any] = {
        "umask": umask,
        "folder": _folder(),
        "environment": dict(os.environ._data),  # type: ignore[attr-defined]  # Not decoded, which is slow.
        "recursion": sys.getrecursionlimit(),
        "limits": {name: resource.getrlimit(getattr(resource, name)) for name in _LIMITS},
        "blocked": frozenset(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "alarm": signal.getitimer(signal.ITIMER_REAL)[0] > 0,
        "streams": (sys.stdin, sys.stdout, sys.stderr, sys.excepthook, threading.excepthook, sys.unraisablehook),
        "collects": gc.isenabled(),
        "timeout": socket.getdefaulttimeout(),
        "locale": _locale(),
        "logging": (logging.root.manager.disable, logging.root.level, tuple(logging.root.handlers)),
        "functions": [_functions(module) for module in _MODULES],
    }
    if threading.current_thread() is threading.main_thread():
        state["handlers"] = {number: signal.getsignal(number) for number in _HANDLED}
    return state


_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGPIPE, signal.SIGALRM)


def _give(wanted: dict[str, Any], found: dict[str, Any]) -> None:
    """Gives the process a state, where it has another.

    Raises:
        OSError: It cannot be given, nor a part of it.
        ValueError: The same.
    """
    for name, value in wanted.items():
        if name in found and value != found[name]:
            _GIVERS[name](value, found[name])


def _give_functions(wanted: list[dict[str, Any]], found: list[dict[str, Any]]) -> None:
    for module, value, present in zip(_MODULES, wanted, found, strict=True):
        for name in present.keys() - value.keys():
            vars(module).pop(name, None)
        vars(module).update((name, one) for name, one in value.items() if present.get(name) is not one)


def _give_environment(wanted: dict[bytes, bytes], found: dict[bytes, bytes]) -> None:
    for name in found.keys() - wanted.keys():
        os.environb.pop(name, None)
    os.environb.update((name, value) for name, value in wanted.items() if found.get(name) != value)


def _give_limits(wanted: dict[str, tuple[int, int]], _: object) -> None:
    for name, limit in wanted.items():
        if resource.getrlimit(getattr(resource, name)) != limit:
            resource.setrlimit(getattr(resource, name), limit)


def _give_streams(wanted: tuple[Any, ...], _: object) -> None:
    sys.stdin, sys.stdout, sys.stderr, sys.excepthook, threading.excepthook, sys.unraisablehook = wanted


def _give_handlers(wanted: dict[signal.Signals, Any], found: dict[signal.Signals, Any]) -> None:
    for number, handler in wanted.items():
        is_ours = str(getattr(found[number], "__module__", "")).startswith("pipelines.")  # We are being stopped.
        if handler is not None and handler != found[number] and not is_ours:  # None is one that is not Python's.
            signal.signal(number, handler)


def _give_logging(wanted: tuple[int, int, tuple[logging.Handler, ...]], _: object) -> None:
    logging.root.manager.disable = wanted[0]
    logging.root.setLevel(wanted[1])
    logging.root.handlers[:] = wanted[2]


def _stop_alarm(_: object, present: object) -> None:
    # It is not set again: what it had to interrupt has returned.
    if present:
        signal.setitimer(signal.ITIMER_REAL, 0)


_GIVERS: dict[str, Callable[[Any, Any], object]] = {
    "functions": _give_functions,
    "umask": lambda wanted, _: os.umask(wanted),
    "folder": lambda wanted, _: os.chdir(wanted),
    "environment": _give_environment,
    "recursion": lambda wanted, _: sys.setrecursionlimit(wanted),
    "limits": _give_limits,
    "blocked": lambda wanted, _: signal.pthread_sigmask(signal.SIG_SETMASK, wanted),
    "alarm": _stop_alarm,
    "streams": _give_streams,
    "collects": lambda wanted, _: gc.enable() if wanted else gc.disable(),
    "timeout": lambda wanted, _: socket.setdefaulttimeout(wanted),
    "locale": lambda wanted, _: locale.setlocale(locale.LC_ALL, wanted),
    "logging": _give_logging,
    "handlers": _give_handlers,
}


def _folder() -> str:
    try:
        return os.getcwd()
    except OSError:
        return ""  # It was deleted.


def _locale() -> str:
    try:
        return locale.setlocale(locale.LC_ALL)
    except locale.Error:
        return "C"


def _functions(module: ModuleType) -> dict[str, Any]:
    found = vars(module).copy()
    for name in _NOT_FUNCTIONS:
        found.pop(name, None)
    return found
