"""Local files on their way to or from a store that has no paths, within what the disk has free.

They lie in the folder for temporary files (`TMPDIR`), each in a folder of its own with a lock on it. The system gives
the lock up when the process dies, however it dies, so that the next job can tell what nobody needs any more.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator

from transforms.store import OutputError

_PREFIX = "gristmill-spool-"
_LOCK = "lock"
_RESERVE_BYTES = 64 << 20
"""What a spool leaves free for everybody else."""


class SpoolFile:
    """A local file that goes when nobody holds it any more.

    Args:
        num_bytes: What it will probably take.

    Attributes:
        path: Where to write; nothing is there yet.

    Raises:
        OutputError: The disk has no room for it.
    """

    def __init__(self, num_bytes: int = 0) -> None:
        check_room(num_bytes)
        try:
            folder = tempfile.mkdtemp(prefix=_PREFIX)
            self._lock = os.open(os.path.join(folder, _LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        except OSError as error:
            raise OutputError(f"cannot write to the folder for temporary files: {error}") from error
        self.path = os.path.join(folder, "data")
        self._remove = weakref.finalize(self, _remove, folder, self._lock, os.getpid())

    def close(self) -> None:
        """Deletes the file now."""
        self._remove()


def _remove(folder: str, lock: int, pid: int) -> None:
    if os.getpid() == pid:  # A forked child has a copy of us, not the file.
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def check_room(num_bytes: int) -> None:
    """Checks that the folder for temporary files has room for so many bytes.

    Raises:
        OutputError: It has not.
    """
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    if free < num_bytes + _RESERVE_BYTES:
        raise OutputError(
            f"{num_bytes + _RESERVE_BYTES:,} bytes are needed for a while in {folder}, where {free:,} are free; "
            "make room, or set TMPDIR to a folder that has some"
        )


class UploadSpool:
    """A local file that becomes one of a store's when it is sealed; it stays until the spool goes away.

    Args:
        upload: Makes a local file durable in the store, and checks what arrived.
    """

    def __init__(self, upload: Callable[[str], None]) -> None:
        self._upload = upload
        self._file = SpoolFile()
        self.path = self._file.path

    def seal(self) -> int:
        """Uploads the file and returns its bytes."""
        check_room(0)
        self._upload(self.path)
        return os.path.getsize(self.path)


@contextlib.contextmanager
def spooled(num_bytes: int) -> Iterator[str]:
    """Gives the path of a local file for as long as the context lasts."""
    file = SpoolFile(num_bytes)
    try:
        yield file.path
    finally:
        file.close()


def delete_left_over() -> None:
    """Deletes what processes that were killed have left."""
    for folder in glob.iglob(os.path.join(glob.escape(tempfile.gettempdir()), f"{_PREFIX}*")):
        with contextlib.suppress(OSError):  # Another user's, or another process is faster.
            _delete_if_left(folder)


def _delete_if_left(folder: str) -> None:
    lock = os.open(os.path.join(folder, _LOCK), os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)
