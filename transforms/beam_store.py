"""Output directories on any file system that Beam knows: s3://, hdfs://, azure and those that a program registers.

Beam's interface has neither a conditional create nor versions. `put_if_absent` therefore looks first, writes, and reads
back what stands: of two attempts that write within the same moment the later one wins, and the other finds that out as
long as reading shows what was written last. Whoever wins, the ledger names files that exist, since only an attempt
that reads back another's entry deletes its own files.

Changes that are bound to a version look first in the same way: who comes between look and write is not noticed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, cast

from transforms.spool import UploadSpool, delete_left_over, spooled
from transforms.store import OutputError, Spool, Version
from transforms.transient import try_again

_OCTETS = "application/octet-stream"
_PIECE_BYTES = 4 << 20


class BeamStore:
    """A directory of a file system of Beam's.

    Args:
        root: URL of the directory.

    Raises:
        ValueError: Beam knows no file system for it.
    """

    requests_at_once = 16

    def __init__(self, root: str) -> None:
        self.root = root.rstrip("/")
        _ = self._fs

    @property
    def _fs(self) -> Any:
        """A file system of the caller's own: Beam does not share one between threads either."""
        from transforms.beam_files import file_system

        return file_system(self.root)

    def put_if_absent(self, name: str, data: bytes) -> bool:
        """Looks, writes, and reads back who won; see the module's text."""
        if self.size(name) is not None:
            return False
        self.put(name, data)
        found = self.get(name)
        return found is not None and found[0] == data

    def put(self, name: str, data: bytes) -> None:
        """Creates or replaces the file."""
        self._write(name, lambda target: target.write(data))

    def put_file(self, path: str, name: str) -> None:
        """Uploads a local file."""

        def upload(target: BinaryIO) -> None:
            with open(path, "rb") as source:
                shutil.copyfileobj(source, target, _PIECE_BYTES)

        self._write(name, upload)

    def put_if_version(self, name: str, data: bytes, version: Version | None) -> Version | None:
        """Looks, writes, and reads back who won; see the module's text."""
        if not self._has_version(name, version):
            return None
        self.put(name, data)
        found = self.get(name)
        return data if found is not None and found[0] == data else None

    def put_file_if_version(self, path: str, name: str, version: Version | None) -> Version | None:
        """Looks, then uploads."""
        if not self._has_version(name, version):
            return None
        self.put_file(path, name)
        return self.version(name)

    def version(self, name: str) -> Version | None:
        """Returns what the file system tells without reading: a checksum if it has any, the time, and the size."""
        size, path = self.size(name), self._path(name)
        if size is None:
            return None
        found = [repr(size)]
        for tell in (self._fs.checksum, self._fs.last_updated):
            with contextlib.suppress(Exception):  # Not every file system tells both.
                found.append(repr(try_again(tell, path)))
        return " ".join(found)

    def _has_version(self, name: str, version: Version | None) -> bool:
        """Whether a name has a version, as `get` tells it or as `version` does."""
        if version is None:
            return self.size(name) is None
        if not isinstance(version, bytes):
            return self.version(name) == version
        found = self.get(name)
        return found is not None and found[1] == version

    def get(self, name: str) -> tuple[bytes, Version] | None:
        """Reads the whole file; its content is its version."""
        try:
            with self.open(name) as file:
                data = file.read()
        except FileNotFoundError:
            return None
        except OutputError:
            if self.size(name) is None:  # It was deleted between two calls.
                return None
            raise
        return data, data

    def open(self, name: str) -> BinaryIO:
        """Opens the file."""
        if self.size(name) is None:
            raise FileNotFoundError(f"there is no {self._path(name)}")
        return cast(BinaryIO, self._call("read", name, self._fs.open, self._path(name), _OCTETS, "uncompressed"))

    def size(self, name: str) -> int | None:
        """Looks the file up."""
        path = self._path(name)
        if not self._call("look up", name, self._fs.exists, path):
            return None
        return int(self._call("look up", name, self._fs.size, path))

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Lists everything below the folder of the prefix."""
        start = len(self.root) + 1
        folder = self._path(prefix.rpartition("/")[0])
        try:
            found = self._call("list", prefix, lambda: [(m.path, m.size_in_bytes) for m in self._fs._list(folder)])
        except OutputError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return
            raise
        names = sorted((path[start:], size) for path, size in found)
        yield from (item for item in names if item[0].startswith(prefix))

    def copy(self, source: str, target: str) -> None:
        """Copies within the file system, which may replace what stands there only after deleting it."""
        if self.size(source) is None:
            raise FileNotFoundError(f"there is no {self._path(source)}")
        if source == target:
            return
        self.delete(target)
        self._make_folder(self._path(target))
        self._call("copy to", target, self._fs.copy, [self._path(source)], [self._path(target)])

    def copy_if_version(self, source: str, target: str, version: Version | None) -> Version | None:
        """Looks, then copies; a file onto itself as it is, for there is no version to be made anew."""
        if not self._has_version(target, version):
            return None
        self.copy(source, target)
        return self.version(target)

    def delete(self, name: str, version: Version | None = None) -> bool:
        """Deletes the file; with a version, after looking that it still has it."""
        if version is not None and not self._has_version(name, version):
            return False
        if self.size(name) is None:
            return False
        try:
            self._call("delete", name, self._fs.delete, [self._path(name)])
        except OutputError:
            if self.size(name) is None:  # Somebody else was quicker.
                return False
            raise
        return True

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Nothing is under way that could be waited for."""
        yield

    def guarded(self, check: Callable[[], object]) -> None:
        """Cannot: Beam's file systems have no locks."""

    def spool(self, name: str) -> Spool:
        """Writes to a local file, which sealing uploads."""
        return UploadSpool(lambda path: self._upload(path, name))

    def clean(self) -> None:
        """Deletes local files of writers that were killed; others appear under their names only."""
        delete_left_over()

    @contextlib.contextmanager
    def local_copy(self, name: str) -> Iterator[str]:
        """Downloads the file for a while."""
        with self.open(name) as source, spooled(self.size(name) or 0) as path:
            with open(path, "wb") as target:
                shutil.copyfileobj(source, target, _PIECE_BYTES)
            yield path

    def _upload(self, path: str, name: str) -> None:
        """Uploads a local file and checks the size of what arrived."""
        self.put_file(path, name)
        size, arrived = os.path.getsize(path), self.size(name)
        if arrived != size:
            raise OutputError(f"{name} was uploaded with {size} bytes but {arrived} arrived")

    def _write(self, name: str, fill: Any) -> None:
        path = self._path(name)

        def write() -> None:
            self._make_folder(path)
            with contextlib.closing(self._fs.create(path, _OCTETS, "uncompressed")) as target:
                fill(target)

        self._call("write", name, write)

    def _make_folder(self, path: str) -> None:
        """Makes a folder where the file system has such things."""
        if self._fs.has_dirs():
            with contextlib.suppress(Exception):  # It exists; if it does not, creating the file says why.
                self._fs.mkdirs(path.rpartition("/")[0])

    def _call(self, what: str, name: str, call: Any, *arguments: Any) -> Any:
        try:
            return try_again(call, *arguments)
        except Exception as error:
            raise OutputError(f"cannot {what} {self._path(name)}: {error}") from error

    def _path(self, name: str) -> str:
        return f"{self.root}/{name}" if name else self.root
