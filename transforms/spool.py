"""Local files on their way to or from a store that has no paths, within what the disk has free.

They lie in the folder for temporary files (`TMPDIR`), see `transforms.scratch`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator

from transforms.scratch import ScratchFolder
from transforms.scratch import delete_left_over as delete_left_over
from transforms.store import OutputError

_KIND = "spool-"
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
        self._folder = ScratchFolder(_KIND)
        self.path = os.path.join(self._folder.path, "data")

    def close(self) -> None:
        """Deletes the file now."""
        self._folder.close()


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
