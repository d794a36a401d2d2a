"""Opens inputs for random reads and puts their failures into words.

A file that cannot be read is a dead letter, never the end of a job. Only a fault of the machine itself (no file
descriptors left, no memory) is raised on.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import os
import stat
from collections.abc import Iterator
from typing import Protocol

from transforms.elements import Input

_REASONS = {
    errno.ENOENT: "not_found",
    errno.ENOTDIR: "not_found",
    errno.EACCES: "permission_denied",
    errno.EPERM: "permission_denied",
    errno.ELOOP: "symlink_loop",
    errno.EIO: "io_error",
    errno.ESTALE: "io_error",
    errno.EISDIR: "not_a_file",
    errno.ENXIO: "not_a_file",
}
_MACHINE_FAULTS = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC}
_COPIED_BYTES = 8 << 20


class InputChangedError(OSError):
    """The file is not the one that was planned."""


class MachineFaultError(OSError):
    """Not the input is at fault but what reads it: no valid credentials, no room to copy to."""


class RandomAccessFile(Protocol):
    """An input that is open for reading.

    Attributes:
        size: Bytes.
    """

    size: int

    def read_at(self, position: int, num_bytes: int) -> bytes:
        """Returns `num_bytes` from `position`, fewer only at the end of the file."""

    def close(self) -> None:
        """Gives the file back."""


class LocalFile:
    """A file of this machine, read with positioned reads."""

    def __init__(self, source: Input) -> None:
        # O_NONBLOCK: opening a pipe that stands among the inputs must not wait for a writer.
        self._fd = os.open(os.fsencode(source.name), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            info = os.fstat(self._fd)
            _check_unchanged(source, info)
        except BaseException:
            os.close(self._fd)
            raise
        self.size = info.st_size

    def read_at(self, position: int, num_bytes: int) -> bytes:
        """Returns `num_bytes` from `position`, fewer only at the end of the file."""
        data = os.pread(self._fd, num_bytes, position)
        if len(data) == num_bytes or not data:
            return data
        pieces = [data]
        missing = num_bytes - len(data)
        while missing:
            data = os.pread(self._fd, missing, position + num_bytes - missing)
            if not data:
                break
            pieces.append(data)
            missing -= len(data)
        return b"".join(pieces)

    def close(self) -> None:
        """Closes the file descriptor."""
        os.close(self._fd)


def _check_unchanged(source: Input, info: os.stat_result) -> None:
    if not stat.S_ISREG(info.st_mode):
        is_folder = stat.S_ISDIR(info.st_mode)
        raise OSError(errno.ENXIO, "a folder; name a file in it" if is_folder else "not a regular file")
    if info.st_size != source.size or info.st_mtime_ns != source.mtime_ns:
        raise InputChangedError(
            errno.ESTALE,
            f"the file changed after it was listed: {source.size} bytes of {_utc(source.mtime_ns)} then, "
            f"{info.st_size} of {_utc(info.st_mtime_ns)} now; convert it again once nothing writes to it",
        )


def _utc(time_ns: int) -> str:
    seconds, ns = divmod(time_ns, 10**9)
    return f"{datetime.datetime.fromtimestamp(seconds, datetime.UTC):%Y-%m-%d %H:%M:%S}.{ns:09} UTC"


def open_input(source: Input) -> RandomAccessFile:
    """Opens a listed input.

    Args:
        source: The input as it was listed.

    Returns:
        The open file; the caller closes it.

    Raises:
        OSError: It cannot be opened, or is no longer the file that was listed; see `explain_error`.
    """
    if "://" not in source.name:
        return LocalFile(source)
    if source.name.startswith("gs://"):
        from transforms.gcs_reader import ObjectReader

        return ObjectReader(source.name, source.size, source.mtime_ns)
    from transforms.beam_source import BeamFile

    return BeamFile(source)


def will_read(file: RandomAccessFile, end: int) -> None:
    """Says where reading of an open input will end, so that nothing behind it is fetched ahead."""
    tell = getattr(file, "will_read", None)
    if tell is not None:
        tell(end)


def look_up(name: str) -> Input:
    """Returns a file as it is now, as an input.

    Args:
        name: Path or URL.

    Raises:
        OSError: There is no such file.
    """
    if "://" not in name:
        info = os.stat(os.fsencode(name))
        return Input(0, name, info.st_size, info.st_mtime_ns)
    from transforms.remote_inputs import ListingError, find_object  # It needs what stands above.

    try:
        found = find_object(name)
    except ListingError as error:
        raise OSError(errno.EINVAL, str(error)) from error
    if found is None:
        raise FileNotFoundError(errno.ENOENT, f"there is no {name}")
    return Input(0, name, found.size, found.version, crc32c=found.crc32c)


@contextlib.contextmanager
def local_path(file: RandomAccessFile, source: Input) -> Iterator[str]:
    """Gives a path to read an open input from, for libraries that know only paths: its own, or that of a copy.

    Args:
        file: The open input.
        source: The same as it was listed.

    Raises:
        MachineFaultError: There is no room for a copy.
        OSError: It cannot be read.
    """
    if "://" not in source.name:
        yield source.name
        return
    from transforms.spool import SpoolFile
    from transforms.store import OutputError

    try:
        copy = SpoolFile(file.size)
    except OutputError as error:
        raise MachineFaultError(errno.ENOSPC, str(error)) from error
    with contextlib.closing(copy):
        with open(copy.path, "wb") as out:
            for position in range(0, file.size, _COPIED_BYTES):
                out.write(file.read_at(position, _COPIED_BYTES))
        yield copy.path


def explain_error(error: OSError) -> tuple[str, str]:
    """Returns (reason code, text) of a failure to read an input.

    Raises:
        OSError: The same error, when the machine and not the input is at fault.
    """
    if error.errno in _MACHINE_FAULTS or isinstance(error, MachineFaultError):
        raise error
    if isinstance(error, InputChangedError):
        return "input_changed", str(error.strerror)
    reason = _REASONS.get(error.errno or 0, "os_error")
    return reason, f"{error.strerror or error} (errno {error.errno})"
