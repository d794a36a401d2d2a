"""Folders for temporary files (in `TMPDIR`) that the next job can tell from those which nobody needs any more.

Each has a file with a lock on it. The system gives the lock up when the process dies, however it dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import shutil
import stat
import tempfile
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

from transforms.store import OutputError

PREFIX = "gristmill-"
_LOCK = "lock"
_ABANDONED_SECS = 24 * 3600.0
"""How old what has no lock must be: its owner may be about to take one, and rates are booked call by call."""
_LOCAL_FILE_SYSTEMS = {"btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "tmpfs", "xfs", "zfs"}
"""Those that one kernel alone has mounted, so that its locks are all there are."""


class ScratchFolder:
    """A folder of its own that goes when nobody holds it any more.

    Args:
        kind: Put into its name.

    Attributes:
        path: The folder.

    Raises:
        OutputError: It cannot be made.
    """

    def __init__(self, kind: str = "") -> None:
        try:
            self.path, lock = _make_locked(kind)
        except OSError as error:
            raise OutputError(f"cannot write to the folder for temporary files: {error}") from error
        self._remove = weakref.finalize(self, _remove, self.path, lock, os.getpid())

    def close(self) -> None:
        """Deletes it now."""
        self._remove()


@contextlib.contextmanager
def scratch_folder(kind: str = "") -> Iterator[str]:
    """Gives the path of a new folder for as long as the context lasts."""
    folder = ScratchFolder(kind)
    try:
        yield folder.path
    finally:
        folder.close()


def _make_locked(kind: str) -> tuple[str, int]:
    while True:
        folder = tempfile.mkdtemp(prefix=f"{PREFIX}{kind}")
        lock = os.open(os.path.join(folder, _LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.write(lock, _boot_id())
        if os.fstat(lock).st_nlink:
            return folder, lock
        os.close(lock)  # Somebody who cleared up was faster than our lock.


def _remove(folder: str, lock: int, pid: int) -> None:
    if os.getpid() == pid:  # A forked child has a copy of us, not the folder.
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # A step may have closed whatever was open.
            os.close(lock)


def delete_left_over() -> None:
    """Deletes what processes of this user that were killed have left; never what may be in use, here or elsewhere."""
    for path in glob.iglob(os.path.join(glob.escape(tempfile.gettempdir()), f"{PREFIX}*")):
        with contextlib.suppress(OSError):  # Another process is faster.
            _delete_if_left(path)


def _delete_if_left(path: str) -> None:
    found = os.lstat(path)
    if found.st_uid != os.geteuid():
        return
    is_old = time.time() - found.st_mtime > _ABANDONED_SECS
    if stat.S_ISREG(found.st_mode):
        if is_old:
            os.unlink(path)
    elif stat.S_ISDIR(found.st_mode):
        try:
            lock = os.open(os.path.join(path, _LOCK), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            if is_old:
                os.rmdir(path)  # Only where it is empty: killed before it had its lock.
            return
        _delete_unlocked(path, lock)


def _delete_unlocked(folder: str, lock: int) -> None:
    """Deletes a folder whose lock is free, if a lock of another machine would show."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        boot = os.pread(lock, 64, 0)
        if (boot and boot == _boot_id()) or _is_local(os.fstat(lock).st_dev):
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)


def _boot_id() -> bytes:
    """Returns what tells this run of this machine's kernel from all others; empty where nothing does."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
    return b""


def _is_local(device: int) -> bool:
    """Whether a file system is known to be on this machine alone. Some share folders, and not locks, with others."""
    number = f"{os.major(device)}:{os.minor(device)}"
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text(errors="replace").splitlines():
            mounted, _, kind = line.partition(" - ")
            if mounted.split()[2] == number:
                return kind.split()[0] in _LOCAL_FILE_SYSTEMS
    return False
