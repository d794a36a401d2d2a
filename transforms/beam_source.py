"""Inputs on any file system that Beam knows: s3://, hdfs://, azure and those that a program registers.

Beam's interface has no versions. That a file is still the one that was listed is told by its size and, where the
file system keeps it, the time of its last change, when it is opened.
"""

from __future__ import annotations

import errno
import http.client
from typing import Any

from transforms.elements import Input
from transforms.sources import InputChangedError
from transforms.transient import status_of, try_again


class BeamFile:
    """A file of a file system of Beam's.

    Args:
        source: The input as it was listed.

    Attributes:
        size: Bytes.

    Raises:
        OSError: It cannot be opened, or is no longer the file that was listed.
    """

    def __init__(self, source: Input) -> None:
        self.size = source.size
        self._name = source.name
        self._file: Any = self._call(self._open, source)

    def _open(self, source: Input) -> Any:
        from transforms.beam_files import file_system

        system = file_system(source.name)
        if not system.exists(source.name):
            raise FileNotFoundError(errno.ENOENT, f"there is no {source.name}")
        now = system.metadata(source.name)
        if now.size_in_bytes != source.size or int((now.last_updated_in_seconds or 0) * 1e9) != source.mtime_ns:
            raise InputChangedError(
                errno.ESTALE, f"the file changed after it was listed: {source.size} bytes then, {now.size_in_bytes} now"
            )
        return system.open(source.name, "application/octet-stream", "uncompressed")

    def read_at(self, position: int, num_bytes: int) -> bytes:
        """Returns `num_bytes` from `position`, fewer only at the end of the file."""
        return bytes(self._call(self._read, position, num_bytes))

    def _read(self, position: int, num_bytes: int) -> bytes:
        self._file.seek(position)
        pieces = []
        while num_bytes > 0 and (piece := self._file.read(num_bytes)):
            pieces.append(piece)
            num_bytes -= len(piece)
        return b"".join(pieces)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _call(self, call: Any, *arguments: Any) -> Any:
        try:
            return try_again(call, *arguments)
        except OSError as error:
            if error.errno is not None:
                raise
            raise self._error(error) from error
        except Exception as error:
            raise self._error(error) from error

    def _error(self, error: Exception) -> OSError:
        codes = {http.client.NOT_FOUND: errno.ENOENT, http.client.FORBIDDEN: errno.EACCES}
        return OSError(codes.get(status_of(error) or 0, errno.EIO), f"{self._name}: {error}"[:500])
