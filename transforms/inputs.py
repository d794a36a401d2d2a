"""Lists the inputs once and streams them to inputs.jsonl, in order, whatever their number.

Names, sizes and duplicates go through a temporary SQLite table, so ten million files cost no more memory than ten.
A name that came from a listing is literal from then on: nothing looks for `*` or `[` in it again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import glob
import hashlib
import itertools
import json
import os
import re
import sqlite3
import stat
import tempfile
from collections.abc import Iterator
from typing import BinaryIO

from transforms.elements import Input, name_fields, name_from_fields
from transforms.plan import COMPRESSED_SUFFIXES
from transforms.sources import explain_error

_SYSTEM_NAMES = {b"thumbs.db", b"ehthumbs.db", b"desktop.ini", b"__macosx"}
_TEMPORARY_SUFFIXES = (b"~", b".tmp", b".temp", b".swp", b".crdownload", b".incomplete")
_COMPRESSED = tuple(suffix.encode() for suffix in COMPRESSED_SUFFIXES)
_ROWS_AT_ONCE = 10_000


class InputPatternError(ValueError):
    """A pattern cannot be used; the message names it."""


@dataclasses.dataclass(frozen=True)
class Listing:
    """What was listed.

    Attributes:
        num_inputs: Lines of inputs.jsonl.
        total_bytes: Sum of their sizes.
        compressed_bytes: Sum of the sizes of those with the name of a compressed file.
        num_skipped: Hidden, `_`, system and temporary files that a pattern or folder offered.
        num_duplicates: Names dropped because another name stands for the same file.
        digest: Fingerprint of inputs.jsonl.
    """

    num_inputs: int
    total_bytes: int
    compressed_bytes: int
    num_skipped: int
    num_duplicates: int
    digest: str


@dataclasses.dataclass(slots=True)
class _Found:
    name: bytes
    key: bytes
    size: int = 0
    mtime_ns: int = 0
    reason: str | None = None
    error: str | None = None


class _Lister:
    """Expands patterns one after the other; counts what it skips."""

    def __init__(self, excluded_folder: bytes) -> None:
        self._excluded = os.path.realpath(excluded_folder)
        self._real_folders: dict[bytes, bytes] = {}
        self.num_skipped = 0

    def expand(self, argument: str, *, must_match: bool = True) -> Iterator[_Found]:
        """Yields the files of a name, folder, pattern or `@list`."""
        if argument.startswith("@") and not os.path.lexists(argument):
            for line in _list_lines(argument[1:]):
                yield from self.expand(os.fsdecode(line), must_match=False)
            return
        if re.match(r"^[a-zA-Z][a-zA-Z0-9+.-]*://", argument):
            raise InputPatternError(f"input {argument!r}: only files of this machine can be read, got another scheme")
        path = os.path.normpath(os.path.join(os.fsencode(os.getcwd()), os.fsencode(argument)))
        if os.path.isdir(path):
            found = self._walk(path, [b"**"], ())
        elif os.path.lexists(path) or not glob.has_magic(path):
            found = iter([self._file(path, None)] if must_match is False or os.path.lexists(path) else [])
        else:
            base, parts = _split_pattern(path)
            found = self._walk(base, parts, ())
        first = next(found, None)
        if first is not None:
            yield first
            yield from found
        elif must_match:
            raise InputPatternError(f"input {argument!r} matches no file; check the path, and quote it in the shell")
        else:
            yield _Found(path, path, reason="not_found", error="no file matches this name or pattern")

    def _walk(self, folder: bytes, parts: list[bytes], above: tuple[bytes, ...]) -> Iterator[_Found]:
        """Yields the files below `folder` that match the remaining parts of a pattern."""
        real = os.path.realpath(folder)
        if real == self._excluded:
            return
        part, rest = parts[0], parts[1:]
        deep = part == b"**"
        if deep and rest:
            yield from self._walk(folder, rest, above)
        accept = (lambda _: True) if deep else re.compile(fnmatch.translate(os.fsdecode(part))).match
        try:
            entries = os.scandir(folder)
        except OSError as error:
            if not above:
                reason, text = explain_error(error)
                yield _Found(folder, real, reason=reason, error=text)
            return
        with entries:
            for entry in entries:
                if not accept(os.fsdecode(entry.name)):
                    continue
                if _is_folder(entry):
                    yield from self._enter(entry, real, parts if deep else rest, above)
                elif not rest:
                    yield from self._offer(entry, real)

    def _enter(
        self, entry: os.DirEntry[bytes], real: bytes, parts: list[bytes], above: tuple[bytes, ...]
    ) -> Iterator[_Found]:
        if not parts:
            return
        target = os.path.realpath(entry.path) if entry.is_symlink() else os.path.join(real, entry.name)
        if target in above or target == real:  # A link to a folder above: its files are reached without it.
            return
        found = self._walk(entry.path, parts, (*above, real))
        if _is_skipped(entry.name):
            self.num_skipped += sum(1 for _ in found)
        else:
            yield from found

    def _offer(self, entry: os.DirEntry[bytes], real: bytes) -> Iterator[_Found]:
        if _is_skipped(entry.name):
            self.num_skipped += 1
            return
        if entry.is_symlink():
            yield self._file(entry.path, None)
            return
        yield self._file(entry.path, os.path.join(real, entry.name), entry)

    def _file(self, path: bytes, key: bytes | None, entry: os.DirEntry[bytes] | None = None) -> _Found:
        if key is None:
            key = self._real_path(path)
        found = _Found(path, key)
        try:
            info = entry.stat() if entry is not None else os.stat(path)
        except OSError as error:
            found.reason, found.error = explain_error(error)
            return found
        if not stat.S_ISREG(info.st_mode):
            found.reason, found.error = "not_a_file", "neither a regular file nor a link to one"
            return found
        found.size, found.mtime_ns = info.st_size, info.st_mtime_ns
        return found

    def _real_path(self, path: bytes) -> bytes:
        """`os.path.realpath`, with the folder looked up once: lists name many files of few folders."""
        if os.path.islink(path):
            try:
                return os.path.realpath(path)
            except OSError:
                return path
        folder, name = os.path.split(path)
        if folder not in self._real_folders:
            if len(self._real_folders) > _ROWS_AT_ONCE:
                self._real_folders.clear()
            self._real_folders[folder] = os.path.realpath(folder)
        return os.path.join(self._real_folders[folder], name)


def _is_folder(entry: os.DirEntry[bytes]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # A link that leads to itself: reported as a file that cannot be read.
        return False


def _is_skipped(name: bytes) -> bool:
    lower = name.lower()
    return name[:1] in b"._" or lower in _SYSTEM_NAMES or lower.endswith(_TEMPORARY_SUFFIXES)


def _split_pattern(path: bytes) -> tuple[bytes, list[bytes]]:
    """Splits at the first part that is a pattern; a folder whose very name has a `[` in it is a folder."""
    base, parts = b"/", path.split(b"/")[1:]
    while len(parts) > 1 and (not glob.has_magic(parts[0]) or os.path.isdir(os.path.join(base, parts[0]))):
        base = os.path.join(base, parts.pop(0))
    return base, parts


def _list_lines(path: str) -> Iterator[bytes]:
    """Yields the names of a list file: one a line, or separated by NUL if there is one (`find -print0`)."""
    try:
        file: BinaryIO = open(path, "rb")  # noqa: SIM115  (closed below; the open itself needs its own message)
    except OSError as error:
        raise InputPatternError(f"input @{path}: the list cannot be read: {error.strerror}") from error
    with file:
        if b"\0" in file.read(1 << 16):
            file.seek(0)
            yield from _nul_separated(file)
            return
        file.seek(0)
        for line in file:
            line = line.rstrip(b"\r\n")
            if line:
                yield line


def _nul_separated(file: BinaryIO) -> Iterator[bytes]:
    rest = b""
    while piece := file.read(1 << 20):
        *names, rest = (rest + piece).split(b"\0")
        yield from filter(None, names)
    if rest:
        yield rest


_SCHEMA = """
CREATE TABLE found (pattern INTEGER, name BLOB, key BLOB, size INTEGER, mtime_ns INTEGER, reason TEXT, error TEXT)
"""
_UNIQUE_IN_ORDER = """
SELECT name, size, mtime_ns, reason, error FROM found AS f WHERE NOT EXISTS (
  SELECT 1 FROM found AS g WHERE g.key = f.key AND (g.pattern, g.name, g.rowid) < (f.pattern, f.name, f.rowid))
ORDER BY pattern, name
"""


@contextlib.contextmanager
def _table() -> Iterator[sqlite3.Connection]:
    with tempfile.TemporaryDirectory(prefix="gristmill-") as folder:
        table = sqlite3.connect(os.path.join(folder, "inputs.sqlite"), isolation_level=None)
        try:
            table.execute("PRAGMA journal_mode=OFF")
            table.execute("PRAGMA synchronous=OFF")
            table.execute("PRAGMA cache_size=-65536")
            table.execute("PRAGMA temp_store=FILE")
            table.execute(_SCHEMA)
            yield table
        finally:
            table.close()


def _fill(table: sqlite3.Connection, lister: _Lister, arguments: list[str]) -> int:
    """Lists everything into the table; a list file's lines keep their order, files of a pattern are sorted."""
    number = itertools.count()

    def rows() -> Iterator[tuple[object, ...]]:
        for argument in arguments:
            as_listed = argument.startswith("@")
            pattern = next(number)
            for found in lister.expand(argument):
                if as_listed:
                    pattern = next(number)
                yield (pattern, found.name, found.key, found.size, found.mtime_ns, found.reason, found.error)

    count = 0
    all_rows = rows()
    while batch := list(itertools.islice(all_rows, _ROWS_AT_ONCE)):
        table.execute("BEGIN")
        table.executemany("INSERT INTO found VALUES (?, ?, ?, ?, ?, ?, ?)", batch)
        table.execute("COMMIT")
        count += len(batch)
    table.execute("CREATE INDEX by_key ON found (key, pattern, name)")
    return count


def list_inputs(arguments: list[str], path: str, excluded_folder: str) -> Listing:
    """Lists the inputs and writes them to a file of JSON lines.

    Args:
        arguments: Names, folders, patterns and `@lists`, in order. Folders are taken with all that is below them.
        path: Where to write inputs.jsonl.
        excluded_folder: The output folder, which is never an input.

    Returns:
        Counts and the fingerprint.

    Raises:
        InputPatternError: An argument matches nothing, or a list cannot be read.
    """
    lister = _Lister(os.path.normpath(os.path.join(os.fsencode(os.getcwd()), os.fsencode(excluded_folder))))
    digest = hashlib.blake2b(digest_size=16)
    num_inputs = total_bytes = compressed_bytes = 0
    with _table() as table, open(path, "wb") as out:
        num_found = _fill(table, lister, arguments)
        for row in table.execute(_UNIQUE_IN_ORDER):
            line = _to_line(*row)
            out.write(line)
            digest.update(line)
            num_inputs += 1
            total_bytes += row[1]
            compressed_bytes += row[1] if row[0].lower().endswith(_COMPRESSED) else 0
    return Listing(num_inputs, total_bytes, compressed_bytes, lister.num_skipped, num_found - num_inputs, digest.hexdigest())


def _to_line(name: bytes, size: int, mtime_ns: int, reason: str | None, error: str | None) -> bytes:
    fields: dict[str, object] = dict(name_fields("name", os.fsdecode(name)))
    fields["size"] = size
    fields["mtime_ns"] = mtime_ns
    if reason is not None:
        fields["error"] = [reason, error]
    return json.dumps(fields, ensure_ascii=False).encode() + b"\n"


def read_inputs(lines: BinaryIO, offset: int = 0, index: int = 0) -> Iterator[tuple[int, Input]]:
    """Yields (byte offset of its line, input) from a line of inputs.jsonl on, one line at a time."""
    lines.seek(offset)
    for line in lines:
        fields = json.loads(line)
        error = tuple(fields["error"]) if "error" in fields else None
        yield offset, Input(index, name_from_fields("name", fields), fields["size"], fields["mtime_ns"], error)
        offset += len(line)
        index += 1
