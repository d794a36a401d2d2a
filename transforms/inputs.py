"""Lists the inputs once and streams them to inputs.jsonl, in order, whatever their number.

A listing of URLs that comes in order goes straight to the file; all else goes through a temporary SQLite table, which
sorts it and finds duplicates. So ten million files cost no more memory than ten.
A name that came from a listing is literal from then on: nothing looks for `*` or `[` in it again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fnmatch
import glob
import hashlib
import itertools
import json
import os
import re
import sqlite3
import stat
from collections.abc import Iterator
from typing import BinaryIO

from transforms.elements import Input, name_from_fields
from transforms.input_lists import ListError, is_remark, list_lines, spellings
from transforms.input_table import (
    ROWS_AT_ONCE,
    Found,
    Row,
    count_rows,
    fill,
    found_table,
    rows_in_order,
    to_line,
    without_checksum,
)
from transforms.leftovers import PassedOver, asked_for, is_plain, passed_over_as
from transforms.plan import COMPRESSED_SUFFIXES
from transforms.plan_file import DamagedLineError
from transforms.remote_inputs import SCHEME, ListingError, RemoteLister, pending
from transforms.sources import MachineFaultError, explain_error

_COMPRESSED = tuple(suffix.encode() for suffix in COMPRESSED_SUFFIXES)
_decode = json.JSONDecoder().raw_decode
_STATE_FOLDER = "/_gristmill"
"""Below the output folder: the job's own state, which is nobody's input."""


class InputPatternError(ValueError):
    """A pattern cannot be used; the message names it."""


@dataclasses.dataclass(frozen=True)
class Listing:
    """What was listed.

    Attributes:
        num_inputs: Lines of inputs.jsonl.
        total_bytes: Sum of their sizes.
        compressed_bytes: Sum of the sizes of those with the name of a compressed file.
        num_skipped: Files that a pattern or folder offered and that are passed over by their names.
        num_duplicates: Names dropped because another name stands for the same file.
        digest: Fingerprint of inputs.jsonl.
        notes: What a person should know of what was left out.
    """

    num_inputs: int
    total_bytes: int
    compressed_bytes: int
    num_skipped: int
    num_duplicates: int
    digest: str
    notes: tuple[str, ...] = ()


class _Lister:
    """Expands patterns one after the other; counts what it skips."""

    def __init__(self, excluded_folder: bytes, *, may_be_gone: bool = False) -> None:
        self._may_be_gone = may_be_gone
        self._excluded = _resolve(excluded_folder)
        self._state = self._excluded + os.fsencode(_STATE_FOLDER)
        self._working_folder = os.fsencode(os.getcwd()) + b"/"
        self._real_folders: dict[bytes, bytes] = {}
        self.passed_over = PassedOver()
        self.remote = RemoteLister(os.fsdecode(excluded_folder), self.passed_over)
        self.has_pending = False  # Whether lists have named URLs.
        self.may_repeat = False  # Whether one file may have been found under two names.

    def expand(self, argument: str) -> Iterator[Iterator[Found]]:
        """Yields the files of a name, folder or pattern, and of every line of an `@list`: one group each.

        Raises:
            InputPatternError: It matches nothing.
        """
        if not argument:
            raise InputPatternError("input '': a name is empty; is a variable unset?")
        if argument.startswith("@") and not os.path.lexists(argument):
            lines = _lines_of(argument)
            first_line = next(lines, None)
            if first_line is None:
                raise InputPatternError(f"input {argument!r}: the list is empty")
            yield self._expand_line(first_line)
            yield from map(self._expand_line, lines)
            return
        before = self.passed_over.seen
        is_url = SCHEME.match(argument) is not None
        found = self.remote.expand(argument) if is_url else self._expand_path(self._absolute(os.fsencode(argument)))
        first = next(found, None)
        if first is None and self._may_be_gone:
            return
        if first is None:
            raise InputPatternError(f"input {argument!r} {self.passed_over.why_nothing(before)}")
        yield itertools.chain([first], found)

    def _absolute(self, name: bytes) -> bytes:
        return _normalize(os.path.join(self._working_folder, name))

    def _expand_line(self, line: bytes) -> Iterator[Found]:
        """Yields what a line of a list names; nearly always one file, found with one look."""
        if b"\0" in line:
            return iter([Found(line.replace(b"\0", b"\\0"), line, 0, 0, "not_found", "the name holds a zero byte")])
        found = self._look(line)
        for spelling in spellings(line) if found is None else ():
            found = found or self._look(spelling)
        if found is not None:
            return found
        return iter(()) if is_remark(line) else iter([self._missing(line.strip())])

    def _look(self, line: bytes) -> Iterator[Found] | None:
        if SCHEME.match(os.fsdecode(line)):
            return self._expand_url(line)
        path = self._absolute(line)
        try:
            info = os.lstat(path)
        except OSError:
            if not glob.has_magic(path):
                return None
        else:
            if stat.S_ISREG(info.st_mode):
                return iter([Found(path, self._real_path(path), info.st_size, info.st_mtime_ns)])
        found = self._expand_path(path)
        first = next(found, None)
        return None if first is None else itertools.chain([first], found)

    def _missing(self, line: bytes) -> Found:
        """A pattern or folder in a list that holds nothing is a loss that must show, as is a name."""
        path = self._absolute(line)
        try:
            os.lstat(path)
        except OSError as error:
            if not glob.has_magic(path):
                return Found(path, path, 0, 0, *explain_error(error))
        return Found(path, path, 0, 0, "not_found", "no file matches this pattern or lies in this folder")

    def _expand_url(self, url: bytes) -> Iterator[Found]:
        try:
            name = url.decode()
        except UnicodeDecodeError:
            return iter([Found(url, url, 0, 0, "not_found", "the URL is not UTF-8")])
        if name.endswith("/"):
            return self._at_least_one(url, self.remote.expand(name))
        self.has_pending = True
        return iter([pending(url)])

    def _at_least_one(self, path: bytes, found: Iterator[Found]) -> Iterator[Found]:
        first = next(found, None)
        yield first or Found(path, path, 0, 0, "not_found", "no file matches this pattern or lies in this folder")
        yield from found

    def _expand_path(self, path: bytes) -> Iterator[Found]:
        if os.path.isdir(path):
            return self._walk_from(path, [b"**"])
        if os.path.lexists(path):
            key = _resolve(path) if os.path.islink(path) else self._real_path(path)
            return iter([self._file(path, key)])
        if not glob.has_magic(path):
            return iter([])
        return self._walk_from(*_split_pattern(path))

    def _walk_from(self, folder: bytes, parts: list[bytes]) -> Iterator[Found]:
        if b"**" in parts and self._excluded.startswith(_resolve(folder).rstrip(b"/") + b"/"):
            self.passed_over.outputs += 1  # It may not be there yet.
        return self._walk(folder, parts, ())

    def _walk(self, folder: bytes, parts: list[bytes], above: tuple[bytes, ...]) -> Iterator[Found]:
        """Yields the files below `folder` that match the remaining parts of a pattern."""
        real = _resolve(folder)
        if real == self._excluded or real.startswith(self._state):
            self.passed_over.outputs += 1
            return
        part, rest = parts[0], parts[1:]
        deep = part == b"**"
        if deep and rest:
            yield from self._walk(folder, rest, above)
        accept = None if deep else re.compile(fnmatch.translate(os.fsdecode(part))).match
        asked = asked_for(part)
        try:
            entries = os.scandir(folder)
        except OSError as error:
            # Files that cannot even be listed are a loss that must show; only a pattern's missing folder is not.
            if above or error.errno not in (errno.ENOENT, errno.ENOTDIR):
                yield Found(folder, real, 0, 0, *explain_error(error))
            return
        with entries:
            for entry in entries:
                if accept is not None and not accept(os.fsdecode(entry.name)):
                    continue
                if _is_folder(entry):
                    yield from self._enter(entry, real, parts if deep else rest, above, asked)
                elif rest:
                    continue
                elif not is_plain(entry.name) and (label := passed_over_as(entry.name, asked)):
                    self.passed_over.counts[label] += 1
                elif entry.is_symlink():
                    self.may_repeat = True
                    yield self._file(entry.path, _resolve(entry.path))
                else:
                    yield self._file(entry.path, real + b"/" + entry.name, entry)

    def _enter(
        self,
        entry: os.DirEntry[bytes],
        real: bytes,
        parts: list[bytes],
        above: tuple[bytes, ...],
        asked: frozenset[str],
    ) -> Iterator[Found]:
        if not parts:
            return
        target = os.path.join(real, entry.name)
        if entry.is_symlink():
            self.may_repeat = True
            target = _resolve(entry.path)
        if target in above or target == real:  # A link to a folder above: its files are reached without it.
            return
        found = self._walk(entry.path, parts, (*above, real))
        label = None if is_plain(entry.name) else passed_over_as(entry.name, asked, is_folder=True)
        if label is None:
            yield from found
        elif num_files := sum(1 for _ in found):
            self.passed_over.counts[label] += num_files

    def _file(self, path: bytes, key: bytes, entry: os.DirEntry[bytes] | None = None) -> Found:
        try:
            info = entry.stat() if entry is not None else os.stat(path)
        except OSError as error:
            return Found(path, key, 0, 0, *explain_error(error))
        if not stat.S_ISREG(info.st_mode):
            return Found(path, key, 0, 0, "not_a_file", "neither a regular file nor a link to one")
        return Found(path, key, info.st_size, info.st_mtime_ns)

    def _real_path(self, path: bytes) -> bytes:
        """Resolves the folder of a file that is no link; lists name many files of few folders."""
        folder, _, name = path.rpartition(b"/")
        real = self._real_folders.get(folder)
        if real is None:
            if len(self._real_folders) > ROWS_AT_ONCE:
                self._real_folders.clear()
            real = self._real_folders[folder] = _resolve(folder or b"/")
        return real + b"/" + name


def _resolve(path: bytes) -> bytes:
    """Follows links, as far as they may be followed."""
    try:
        return os.path.realpath(path)
    except OSError:
        return path


def _normalize(path: bytes) -> bytes:
    """Takes `//` and `/./` out of an absolute path; `..` behind a link means the folder above the link's target."""
    if b"/.." in path:
        folder, name = os.path.split(path)
        path = _resolve(path) if name == b".." else os.path.join(_resolve(folder), name)
    return os.path.normpath(path)


def _is_folder(entry: os.DirEntry[bytes]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # A link that leads to itself: reported as a file that cannot be read.
        return False


def _split_pattern(path: bytes) -> tuple[bytes, list[bytes]]:
    """Splits at the first part that is a pattern; a folder whose very name has a `[` in it is a folder."""
    base, parts = b"/", path.split(b"/")[1:]
    while len(parts) > 1 and (not glob.has_magic(parts[0]) or os.path.isdir(os.path.join(base, parts[0]))):
        base = os.path.join(base, parts.pop(0))
    return base, parts


def _lines_of(argument: str) -> Iterator[bytes]:
    try:
        yield from list_lines(argument[1:])
    except ListError as error:
        raise InputPatternError(f"input {argument}: {error}") from error


class _NotInOrderError(Exception):
    """A listing did not come in the order of its names."""


def _straight_rows(lister: _Lister, argument: str) -> Iterator[Row]:
    """Yields what one URL lists, as it comes: in order, so that nothing needs to be kept."""
    last = b""
    for found in itertools.chain.from_iterable(lister.expand(argument)):
        if found.name <= last:
            raise _NotInOrderError
        last = found.name
        yield last, found.size, found.mtime_ns, found.reason, found.error, found.crc32c


def _find_all(table: sqlite3.Connection, lister: _Lister, arguments: list[str]) -> None:
    """Lists everything into the table."""
    fill(table, (group for argument in arguments for group in lister.expand(argument)))
    if lister.has_pending:
        lister.remote.resolve(table)


def list_inputs(arguments: list[str], path: str, excluded_folder: str, *, may_be_gone: bool = False) -> Listing:
    """Lists the inputs and writes them to a file of JSON lines.

    Args:
        arguments: Names, folders, patterns and `@lists`, in order. Folders are taken with all that is below them.
        path: Where to write inputs.jsonl.
        excluded_folder: The output folder, which is never an input.
        may_be_gone: Whether an argument may match nothing.

    Returns:
        Counts and the fingerprint.

    Raises:
        InputPatternError: An argument matches nothing, or a list cannot be read.
    """
    excluded = os.fsencode(excluded_folder)
    if not SCHEME.match(excluded_folder):
        excluded = os.path.normpath(os.path.join(os.fsencode(os.getcwd()), excluded))
    try:
        if len(arguments) == 1 and SCHEME.match(arguments[0]):
            with contextlib.suppress(_NotInOrderError):
                lister = _Lister(excluded, may_be_gone=may_be_gone)
                return _write_lines(path, _straight_rows(lister, arguments[0]), lister)
        return _list_sorted(arguments, path, _Lister(excluded, may_be_gone=may_be_gone))
    except (ListingError, MachineFaultError) as error:
        raise InputPatternError(f"input {error}") from error


def _list_sorted(arguments: list[str], path: str, lister: _Lister) -> Listing:
    """Lists through a table on disk, which brings names into order and finds those of one file."""
    with found_table() as table:
        _find_all(table, lister, arguments)
        num_found = count_rows(table)
        may_repeat = lister.may_repeat or len(arguments) > 1 or arguments[0].startswith("@")
        listing = _write_lines(path, rows_in_order(table, may_repeat=may_repeat), lister)
    return dataclasses.replace(listing, num_duplicates=num_found - listing.num_inputs)


def _write_lines(path: str, rows: Iterator[Row], lister: _Lister) -> Listing:
    """Writes inputs.jsonl from rows in order."""
    digest = hashlib.blake2b(digest_size=16)
    num_inputs = total_bytes = compressed_bytes = 0
    with open(path, "wb") as out:
        for row in rows:
            line = to_line(*row)
            out.write(line)
            digest.update(without_checksum(line))
            num_inputs += 1
            total_bytes += row[1]
            compressed_bytes += row[1] if row[0].lower().endswith(_COMPRESSED) else 0
    counts = (lister.passed_over.total, 0)
    return Listing(
        num_inputs, total_bytes, compressed_bytes, *counts, digest.hexdigest(), tuple(lister.passed_over.notes())
    )


def sample_inputs(path: str, count: int) -> list[Input]:
    """Returns up to `count` readable inputs, evenly spaced over inputs.jsonl, by looking at that many lines only.

    Their `index` is not known.
    """
    found: dict[str, Input] = {}
    size = os.path.getsize(path)
    with open(path, "rb") as lines:
        for number in range(count):
            lines.seek(size * number // count)
            if number:
                lines.readline()  # The rest of the line in which the place lies.
            for _, source in itertools.islice(read_inputs(lines, lines.tell()), count):
                if source.size and source.error is None:
                    found.setdefault(source.name, source)
                    break
    return list(found.values())


def read_inputs(lines: BinaryIO, offset: int = 0, index: int = 0) -> Iterator[tuple[int, Input]]:
    """Yields (byte offset of its line, input) from a line of inputs.jsonl on, one line at a time.

    Raises:
        DamagedLineError: A line is no input.
    """
    lines.seek(offset)
    for line in lines:
        try:
            fields = _decode(line.decode())[0]
            error = tuple(fields["error"]) if "error" in fields else None
            name, checksum = name_from_fields("name", fields), fields.get("crc32c", "")
            source = Input(index, name, fields["size"], fields["mtime_ns"], error, checksum)
        except (ValueError, KeyError, TypeError, AttributeError) as damage:
            raise DamagedLineError(f"is damaged at byte {offset}") from damage
        yield offset, source
        offset += len(line)
        index += 1
