"""Runs a command and measures its whole process tree: wall time, CPU time and peak memory.

CPU time comes from the kernel's accounts of ended children, so no process is too short or too
quiet to be counted: the benchmark makes itself the reaper of orphans, waits for everything that
a command left behind, and only then reads how much its children have used. Memory is sampled:
the sum of the tree's proportional set sizes, in which a page that processes share counts once.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

SAMPLE_SECONDS = 0.05
GROWTH = 1.01  # How much a tree's resident pages grow before its memory is read again at once.
GROWING_SHARE = 0.10  # The most of one core that reading may take while a tree grows ...
STEADY_SHARE = 0.02  # ... and while it does not.
LINGER_SECONDS = 10.0

_PR_SET_CHILD_SUBREAPER = 36
_LOG_TAIL_BYTES = 1500


class CommandFailed(Exception):
    """A measured command failed, or its output is not what it should be."""


@dataclasses.dataclass(frozen=True)
class Measurement:
    """What one run of a command took.

    Attributes:
        wall: Seconds from the start of the command to its end.
        cpu: User and system seconds of the command and of all its descendants.
        peak_bytes: The largest sum of proportional set sizes seen over the tree.
    """

    wall: float
    cpu: float
    peak_bytes: int


def become_subreaper() -> None:
    """Makes orphaned descendants children of this process, so that it can wait for them."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def run_command(command: Sequence[str], log: Path) -> Measurement:
    """Runs a command to its end and measures it; needs `become_subreaper` first.

    Args:
        command: The command and its arguments.
        log: The file that takes the command's output.

    Raises:
        CommandFailed: If the command cannot be started or does not exit with 0.
    """
    before = _children_cpu()
    with log.open("wb") as out:
        started = time.perf_counter()
        process = _start(command, out.fileno())
        sampler = _MemorySampler(process.pid)
        sampler.start()
        status = _wait(process.pid)
        wall = time.perf_counter() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    peak_bytes = sampler.stop()
    _reap_rest()
    cpu = _children_cpu() - before
    if process.returncode != 0:
        raise CommandFailed(f"exit status {process.returncode}:\n{_tail(log)}")
    return Measurement(wall, cpu, peak_bytes)


def _start(command: Sequence[str], out: int) -> subprocess.Popen[bytes]:
    """Starts a command in a session of its own, its output going to an open file.

    Modules compiled in the warm-up are kept for the runs that count, whatever the caller's
    environment says.
    """
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env=env,
            start_new_session=True,
        )
    except OSError as error:
        raise CommandFailed(f"cannot start {command[0]}: {error.strerror}") from error


def _wait(pid: int) -> int:
    """Waits for a command; returns its status. Ends its session if that is interrupted."""
    try:
        return os.waitpid(pid, 0)[1]
    except BaseException:
        os.killpg(pid, signal.SIGKILL)
        raise


def _children_cpu() -> float:
    """Returns the CPU seconds of all descendants that have been waited for."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _reap_rest() -> None:
    """Waits for every process that a command left behind; ends those that stay too long."""
    deadline = time.monotonic() + LINGER_SECONDS
    killed = False
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            if time.monotonic() > deadline and not killed:
                killed = True
                _kill_children()
            time.sleep(0.01)


def _kill_children() -> None:
    """Ends the children of this process, which the subreaper took over from a command."""
    for pid in _pids():
        if _parent(pid) == os.getpid():
            print(f"ending process {pid}, left behind by a command", file=sys.stderr)
            os.kill(pid, signal.SIGKILL)


def _pids() -> list[int]:
    """Returns the ids of all processes, in order."""
    return sorted(int(name) for name in os.listdir("/proc") if name.isdecimal())


def _parent(pid: int) -> int | None:
    """Returns the id of a process's parent, or None if the process is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[1])


def _resident_pages(pid: int) -> int:
    """Returns the pages that a process has in memory, shared ones too; 0 if it is gone."""
    try:
        with open(f"/proc/{pid}/statm", "rb", buffering=0) as file:
            return int(file.read(256).split()[1])
    except (OSError, IndexError):
        return 0


def _pss_bytes(pid: int) -> int:
    """Returns the proportional set size of a process, 0 if it is gone."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb", buffering=0) as file:
            fields = file.read(4096).split()
        return int(fields[fields.index(b"Pss:") + 1]) * 1024
    except (OSError, ValueError):
        return 0


def _tail(log: Path) -> str:
    """Returns the end of a log."""
    return log.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace")


class _MemorySampler(threading.Thread):
    """Samples the memory of a process and its descendants until it is stopped.

    Reading proportional set sizes walks the page tables of a process, 7 ms for 200 MB. So each
    sample counts resident pages, which is cheap, and the rest is read when those have grown, or
    when the last reading is long enough ago for what it cost.
    """

    def __init__(self, root: int) -> None:
        super().__init__(daemon=True)
        self._tree = {root}
        self._others: set[int] = set()
        self._peak_bytes = 0
        self._peak_pages = 0
        self._read_at = 0.0
        self._read_cost = 0.0
        self._stopped = threading.Event()

    def stop(self) -> int:
        """Ends the sampling; returns the peak in bytes."""
        self._stopped.set()
        self.join()
        return self._peak_bytes

    def run(self) -> None:
        """Takes a sample at every interval."""
        while not self._stopped.wait(SAMPLE_SECONDS):
            self._find_descendants()
            pages = sum(map(_resident_pages, self._tree))
            share = GROWING_SHARE if pages > GROWTH * self._peak_pages else STEADY_SHARE
            if time.monotonic() >= self._read_at + self._read_cost / share:
                self._peak_pages = max(self._peak_pages, pages)
                self._read()

    def _read(self) -> None:
        """Reads the memory of the tree, and notes what the reading cost."""
        started = time.thread_time()
        self._peak_bytes = max(self._peak_bytes, sum(map(_pss_bytes, self._tree)))
        self._read_cost = time.thread_time() - started
        self._read_at = time.monotonic()

    def _find_descendants(self) -> None:
        """Adds new descendants to the tree; each process's parent is looked up once.

        A process whose parent is this one is an orphan of the tree.
        """
        pids = _pids()
        parents = self._tree | {os.getpid()}
        for pid in pids:
            if pid in self._tree or pid in self._others:
                continue
            if _parent(pid) in parents:
                self._tree.add(pid)
                parents.add(pid)
            else:
                self._others.add(pid)
        self._tree.intersection_update(pids)
        self._others.intersection_update(pids)
