"""A file system of Beam's in memory, mem://, which fails when it is told to; registered by being imported."""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator
from typing import Any

from apache_beam.io.filesystem import BeamIOError, CompressionTypes, FileMetadata, FileSystem

_FILES: dict[str, bytes] = {}
_FAILURES: list[Exception] = []
_NUMBERS = itertools.count()


class ServiceError(Exception):
    """What a storage service answers."""

    def __init__(self, code: int) -> None:
        super().__init__(f"the service answered {code}")
        self.code = code


def new_root() -> str:
    """Returns the URL of an empty directory."""
    return f"mem://out-{next(_NUMBERS)}/corpus"


def tree(root: str) -> dict[str, bytes]:
    """Returns all files below a directory."""
    return {path.removeprefix(f"{root}/"): data for path, data in sorted(_FILES.items()) if path.startswith(f"{root}/")}


def fail_next_writes(*codes: int) -> list[Exception]:
    """Makes the next files that are created fail with these statuses; returns what is left to fail."""
    _FAILURES[:] = [ServiceError(code) for code in codes]
    return _FAILURES


class _Sink(io.BytesIO):
    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path

    def close(self) -> None:
        if not self.closed:
            _FILES[self._path] = self.getvalue()
        super().close()


class MemoryFileSystem(FileSystem):
    """Files by their whole URLs."""

    @classmethod
    def scheme(cls) -> str:
        return "mem"

    def join(self, basepath: str, *paths: str) -> str:
        return "/".join([basepath.rstrip("/"), *paths])

    def split(self, path: str) -> tuple[str, str]:
        head, _, tail = path.rpartition("/")
        return head, tail

    def mkdirs(self, path: str) -> None:
        raise OSError(f"{path} exists")

    def has_dirs(self) -> bool:
        return False

    def _list(self, dir_or_prefix: str) -> Iterator[FileMetadata]:
        for path, data in sorted(_FILES.items()):
            if path.startswith(dir_or_prefix):
                yield FileMetadata(path, len(data))

    def create(self, path: str, mime_type: str = "", compression_type: str = CompressionTypes.AUTO) -> Any:
        if _FAILURES:
            raise _FAILURES.pop(0)
        return _Sink(path)

    def open(self, path: str, mime_type: str = "", compression_type: str = CompressionTypes.AUTO) -> Any:
        return io.BytesIO(_FILES[path])

    def copy(self, source_file_names: list[str], destination_file_names: list[str]) -> None:
        for source, target in zip(source_file_names, destination_file_names, strict=True):
            _FILES[target] = _FILES[source]

    def rename(self, source_file_names: list[str], destination_file_names: list[str]) -> None:
        raise BeamIOError("mem:// has no rename")

    def exists(self, path: str) -> bool:
        return path in _FILES

    def size(self, path: str) -> int:
        return len(_FILES[path])

    def last_updated(self, path: str) -> float:
        return 0.0

    def metadata(self, path: str) -> FileMetadata:
        return FileMetadata(path, len(_FILES[path]))

    def delete(self, paths: list[str]) -> None:
        for path in paths:
            del _FILES[path]
