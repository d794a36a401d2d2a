"""Locks of a folder (flock), by which processes that change what is in it keep out of each other's way.

The kernel takes a lock away when its process ends, however that happens; a process that is suspended keeps it. Some
network file systems have no such locks, or keep them within one machine: there `folder_lock` says that it excludes
nobody, and callers fall back on what they see.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterator

WAIT_SECS = 60.0
"""Longer than any change of a folder takes, but for copies of very large files where there are no hard links."""

_LOOK_SECS = 0.005
_UNKNOWN = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL, errno.EBADF)
"""What file systems without locks say; EBADF is NFS, which locks only what is open for writing."""


class FolderBusyError(OSError):
    """Somebody has held a folder's lock for too long, perhaps because it is suspended."""


@contextlib.contextmanager
def folder_lock(folder: str, *, shared: bool = False, wait_secs: float = WAIT_SECS) -> Iterator[bool]:
    """Holds the lock of a folder.

    Args:
        folder: The folder, which must exist.
        shared: Whether others may hold it as well that say so too.
        wait_secs: How long to wait for others.

    Returns:
        Whether it excludes others: False where the file system has no locks.

    Raises:
        FolderBusyError: Others held it all the time.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        yield _take(descriptor, folder, fcntl.LOCK_SH if shared else fcntl.LOCK_EX, wait_secs)
    finally:
        os.close(descriptor)


def _take(descriptor: int, folder: str, kind: int, wait_secs: float) -> bool:
    deadline = time.monotonic() + wait_secs
    while True:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                text = f"another process has been changing it for {wait_secs:.0f} s; is it suspended?"
                raise FolderBusyError(errno.EBUSY, text, folder) from None
            time.sleep(_LOOK_SECS)
        except OSError as error:
            if error.errno not in _UNKNOWN:
                raise
            return False
