"""What this process may use of the machine: cores and memory, as control groups (containers) and limits leave them.

Control groups of both versions are read, with all those around: the least counts. No Beam here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import mmap
import os
import re
import resource
import threading
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

_MIB = 1 << 20
_NO_RESERVE = 0x4000
"""MAP_NORESERVE of Linux: only numbers of addresses are taken."""
READER_THREADS = 66
"""What ArrayRecord's reader starts, whatever the number of cores, and two more."""
_READER_ROOM_BYTES = 1 << 30
"""What its threads reserve beside their stacks, mostly arenas of malloc: 1.5 GiB in all were seen."""
_UNLIMITED = 1 << 60
"""What version 1 says for no limit is about 2 ** 63, rounded down to pages."""


@dataclasses.dataclass(frozen=True)
class Group:
    """A control group.

    Attributes:
        path: Its folder.
        version: 1 or 2.
    """

    path: Path
    version: int

    def read(self, name: str) -> str:
        """Returns a file of the group, "" where it has none."""
        with contextlib.suppress(OSError):
            return (self.path / name).read_text().strip()
        return ""

    def number(self, name: str) -> int | None:
        """Returns the number in a file, None where there is none, as for `max`."""
        text = self.read(name)
        return int(text) if re.fullmatch("[0-9]+", text) else None

    def entry(self, name: str, key: str) -> int:
        """Returns the number that stands behind a key in a file, 0 where it does not."""
        found = re.search(rf"^{key} ([0-9]+)$", self.read(name), re.MULTILINE)
        return int(found[1]) if found else 0


@dataclasses.dataclass(frozen=True)
class MemoryLimit:
    """A bound on the memory of this process.

    Attributes:
        max_bytes: The bound.
        free_bytes: What is left below it, with what the kernel can take back at once.
        where: Who says so, for messages.
    """

    max_bytes: int
    free_bytes: int
    where: str


def num_cores(root: str = "/") -> int:
    """Returns how many cores this process may keep busy, at least 1.

    Args:
        root: Folder that stands for the root of the file system.
    """
    cores = len(os.sched_getaffinity(0))  # A cpuset is in it already.
    for group in _groups("cpu", root):
        quota = _quota(group)
        if quota is not None:
            cores = min(cores, max(1, math.ceil(quota)))
    return cores


def _quota(group: Group) -> float | None:
    """Returns the cores that a group may use in the mean."""
    if group.version == 2:
        quota, _, period = group.read("cpu.max").partition(" ")
    else:
        quota, period = group.read("cpu.cfs_quota_us"), group.read("cpu.cfs_period_us")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(period) else None


def available_bytes(root: str = "/") -> int:
    """Returns the memory that this process and new ones can still take; 2 ** 40 where nobody knows.

    Args:
        root: See `num_cores`.
    """
    with contextlib.suppress(OSError):
        found = re.search(r"MemAvailable:\s+(\d+) kB", (Path(root) / "proc/meminfo").read_text())
        of_machine = int(found[1]) << 10 if found else 1 << 40
        return min([of_machine, *(limit.free_bytes for limit in _memory_limits(root))])
    return 1 << 40


def tightest_memory_limit(root: str = "/") -> MemoryLimit | None:
    """Returns the limit with the least left, None where only the machine bounds memory.

    Args:
        root: See `num_cores`.
    """
    return min(_memory_limits(root), key=lambda limit: limit.free_bytes, default=None)


def _memory_limits(root: str) -> Iterator[MemoryLimit]:
    for group in _groups("memory", root):
        names: tuple[str, ...]
        if group.version == 2:
            names, usage, cache = ("memory.max", "memory.high"), "memory.current", "inactive_file"
        else:
            names, usage, cache = ("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"
        for name in names:
            bound = group.number(name)
            if bound is not None and bound < _UNLIMITED:
                used = (group.number(usage) or 0) - group.entry("memory.stat", cache)
                yield MemoryLimit(bound, max(0, bound - max(0, used)), f"{name} in {group.path}")


def describe_memory(root: str = "/") -> str:
    """Returns what bounds the memory of this process, in words.

    Args:
        root: See `num_cores`.
    """
    limit = tightest_memory_limit(root)
    if limit is None:
        return f"{available_bytes(root) // _MIB:,} MiB of memory are free on this machine"
    return f"the memory limit here is {limit.max_bytes // _MIB:,} MiB ({limit.where})"


def count_memory_kills(root: str = "/") -> int:
    """Returns how many processes the kernel has killed for want of memory, in the group of this one where it has one.

    Args:
        root: See `num_cores`.
    """
    for group in _groups("memory", root):
        name = "memory.events" if group.version == 2 else "memory.oom_control"
        if re.search("^oom_kill ", group.read(name), re.MULTILINE):
            return group.entry(name, "oom_kill")
    return Group(Path(root) / "proc", 0).entry("vmstat", "oom_kill")


def _groups(controller: str, root: str) -> Iterator[Group]:
    """Yields the control groups of this process that have a controller, from its own to the outermost that is seen."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        own = _own_paths(root)
        for line in (Path(root) / "proc/self/mountinfo").read_text(errors="replace").splitlines():
            mounted, _, file_system = line.partition(" - ")
            kind, options = file_system.split()[0], file_system.split()[-1].split(",")
            is_one = kind == "cgroup" and controller in options
            if not is_one and kind != "cgroup2":
                continue
            path = own.get(controller if is_one else "")
            if path is not None:
                yield from _path_upwards(mounted, path, root, 1 if is_one else 2)


def _own_paths(root: str) -> dict[str, str]:
    """Returns the path of this process's group by controller; "" stands for version 2."""
    found = {}
    for line in (Path(root) / "proc/self/cgroup").read_text(errors="replace").splitlines():
        _, controllers, path = line.split(":", 2)
        found.update(dict.fromkeys(controllers.split(","), path))
    return found


def _path_upwards(mounted: str, path: str, root: str, version: int) -> Iterator[Group]:
    top, mount_point = mounted.split()[3:5]
    mount = Path(root) / mount_point.lstrip("/")
    try:
        below = PurePosixPath(path).relative_to(top)
    except ValueError:  # The mount shows another part: in a container, that of this process.
        below = PurePosixPath()
    if ".." in below.parts:
        below = PurePosixPath()
    for part in (below, *below.parents):
        yield Group(mount / part, version)


def check_threads(count: int = READER_THREADS, room_bytes: int = _READER_ROOM_BYTES) -> str | None:
    """Returns why this process could not start so many threads and take so much address space; None when it can.

    ArrayRecord's reader does not say so when it cannot: it waits for its threads for ever.

    Args:
        count: Threads.
        room_bytes: Address space, beside that of the threads' stacks.
    """
    done = threading.Event()
    threads: list[threading.Thread] = []
    try:
        _reserve(room_bytes).close()
        for _ in range(count):
            thread = threading.Thread(target=done.wait, daemon=True)
            thread.start()
            threads.append(thread)
    except (OSError, RuntimeError, MemoryError, ValueError) as error:
        return (
            f"a process cannot start the threads that reading ArrayRecord takes: {error or type(error).__name__}"
            f"{_describe_limits()}; allow more of them, and bound memory by a control group instead of ulimit -v"
        )
    finally:
        done.set()
        for thread in threads:
            thread.join()
    return None


def _reserve(num_bytes: int) -> mmap.mmap:
    return mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE, mmap.PROT_READ)


def _describe_limits() -> str:
    limits: list[tuple[str, int, Callable[[int], str]]] = [
        ("ulimit -v", resource.RLIMIT_AS, lambda value: f"{value >> 10}"),
        ("ulimit -u", resource.RLIMIT_NPROC, str),
    ]
    words = []
    for name, kind, show in limits:
        value = resource.getrlimit(kind)[0]
        if value != resource.RLIM_INFINITY:
            words.append(f"{name} is {show(value)}")
    pids = [number for group in _groups("pids", "/") if (number := group.number("pids.max")) is not None]
    if pids:
        words.append(f"pids.max is {min(pids)}")
    return f" ({', '.join(words)})" if words else ""
