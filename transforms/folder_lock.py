"""Locks of a folder (flock), by which processes that change what is in it keep out of each other's way.

The kernel takes a lock away when its process ends, however that happens; a process that is suspended keeps it. Some
network file systems have no such locks, or keep them within one machine: there `folder_lock` excludes nobody, and what
is left is a moment between a look and a change.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterator

WAIT_SECS = 30.0
"""Far longer than a change takes, which is one call to the file system."""

_LOOK_SECS = 0.005
_UNKNOWN = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL, errno.EBADF)
"""What file systems without locks say; EBADF is NFS, which locks only what is open for writing."""


class FolderBusyError(OSError):
    """Somebody has held a folder's lock for too long, perhaps because it is suspended."""


@contextlib.contextmanager
def folder_lock(folder: str, *, shared: bool = False, wait_secs: float = WAIT_SECS) -> Iterator[None]:
    """Holds the lock of a folder, where it has one.

    Args:
        folder: The folder, which must exist.
        shared: Whether others may hold it as well that say so too.
        wait_secs: How long to wait for others.

    Raises:
        FolderBusyError: Others held it all the time.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        _take(descriptor, folder, fcntl.LOCK_SH if shared else fcntl.LOCK_EX, wait_secs)
        yield
    finally:
        os.close(descriptor)


def _take(descriptor: int, folder: str, kind: int, wait_secs: float) -> None:
    deadline = time.monotonic() + wait_secs
    while True:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                text = f"another process has been in the middle of a change for {wait_secs:.0f} s; is it suspended?"
                raise FolderBusyError(errno.EBUSY, text, folder) from None
            time.sleep(_LOOK_SECS)
        except OSError as error:
            if error.errno not in _UNKNOWN:
                raise
            return
