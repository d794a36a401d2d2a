"""Lists what is new since a set was made: the inputs of a generation that `--append` adds.

Known names go through a temporary SQLite table, so memory does not grow with them. An input that has gone since is
nobody's concern: its records are in the set. One that has changed is, unless it had dead letters: then it was probably
mended, and it is for `replay` to read it again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sqlite3
from collections.abc import Iterator
from typing import BinaryIO

from transforms.elements import Input, name_from_fields
from transforms.input_table import to_line, without_checksum
from transforms.inputs import Listing, list_inputs, read_inputs
from transforms.plan import COMPRESSED_SUFFIXES
from transforms.scratch import scratch_folder
from transforms.state import open_inputs
from transforms.store import Store
from transforms.touched import OTHER, SAME, UNKNOWN, UNSEEN, TouchedInputs, name_some
from transforms.whole import Generation, dead_sources

_ROWS_AT_ONCE = 10_000


TOUCHED_NAME = "_gristmill/touched.jsonl"
"""Inputs of the set that have got a new time since, and were found or said to hold what they held; the last line of a
name counts."""


class ChangedInputsError(ValueError):
    """Inputs are not what they were when they were converted; the message names the first ones."""


@contextlib.contextmanager
def name_table() -> Iterator[sqlite3.Connection]:
    """Opens an empty table `known (name, size, mtime_ns, crc32c)` that lives as long as the context."""
    with scratch_folder() as folder:
        table = sqlite3.connect(os.path.join(folder, "names.sqlite"), isolation_level=None)
        try:
            for setting in ("journal_mode=OFF", "synchronous=OFF", "cache_size=-65536", "temp_store=FILE"):
                table.execute(f"PRAGMA {setting}")
            table.execute(
                "CREATE TABLE known (name BLOB PRIMARY KEY, size INTEGER, mtime_ns INTEGER, crc32c TEXT DEFAULT '') "
                "WITHOUT ROWID"
            )
            yield table
        finally:
            table.close()


def list_new_inputs(
    arguments: list[str],
    path: str,
    excluded_folder: str,
    made: list[Generation],
    *,
    accept_touched: bool = False,
    touched_path: str | None = None,
) -> Listing:
    """Lists the inputs that no generation knows and writes them to a file of JSON lines, in order.

    Args:
        arguments: As for `list_inputs`; here each of them may match nothing.
        path: Where to write inputs.jsonl.
        excluded_folder: The output folder.
        made: The base and all finished generations.
        accept_touched: Whether inputs with a new time and the same size are taken to hold what they held.
        touched_path: Where to write those of them that hold it, for `TOUCHED_NAME`; None not to.

    Returns:
        Counts and fingerprint of what is new.

    Raises:
        InputPatternError: A list cannot be read.
        ChangedInputsError: An input that was converted has changed since.
        StateError: The list of a generation is gone or damaged.
    """
    with name_table() as known, scratch_folder() as folder:
        all_path = os.path.join(folder, "all.jsonl")
        listing = list_inputs(arguments, all_path, excluded_folder, may_be_gone=True)
        for generation in made:
            if generation.spec.replay is None:
                with open_inputs(generation.store) as lines:
                    _remember(known, lines)
        _remember_touched(known, made[0].store)
        found = _New(known, made)
        with open(all_path, "rb") as lines, open(path, "wb") as out:
            new = found.filter(lines, out, listing)
        found.check(accept_touched=accept_touched)
        if touched_path is not None:
            found.write_touched(touched_path)
        return new


def _remember(known: sqlite3.Connection, lines: BinaryIO) -> None:
    known.execute("BEGIN")
    rows = ((os.fsencode(one.name), _size(one), one.mtime_ns, one.crc32c) for _, one in read_inputs(lines))
    known.executemany("INSERT OR REPLACE INTO known VALUES (?, ?, ?, ?)", rows)
    known.execute("COMMIT")


def _remember_touched(known: sqlite3.Connection, base: Store) -> None:
    """Takes the new times of inputs that were found to hold what they held, so that they are not read each time."""
    try:
        lines = base.open(TOUCHED_NAME)
    except FileNotFoundError:
        return
    with lines:
        known.execute("BEGIN")
        rows = ((one.mtime_ns, os.fsencode(one.name), one.size) for _, one in read_inputs(lines))
        known.executemany("UPDATE known SET mtime_ns = ? WHERE name = ? AND size = ?", rows)
        known.execute("COMMIT")


def _size(source: Input) -> int:
    """Bytes of an input; -1 for one that could not be read when it was listed, and so cannot have changed."""
    return -1 if source.error is not None else source.size


class _New:
    """Tells what is new from what is known and what has changed."""

    def __init__(self, known: sqlite3.Connection, made: list[Generation]) -> None:
        self._known = known
        self._made = made
        self._touched = TouchedInputs(known)
        self._changed = _Changed(made)

    def filter(self, lines: BinaryIO, out: BinaryIO, listing: Listing) -> Listing:
        """Writes the lines of what is new and returns its counts."""
        digest = hashlib.blake2b(digest_size=16)
        num_inputs = total_bytes = compressed_bytes = 0
        for offset, source in read_inputs(lines):
            if self._is_known(source):
                continue
            line = _line_at(lines, offset)
            out.write(line)
            digest.update(without_checksum(line))
            num_inputs += 1
            total_bytes += source.size
            compressed_bytes += source.size if source.name.lower().endswith(COMPRESSED_SUFFIXES) else 0
        counts = (listing.num_skipped, listing.num_duplicates)
        return Listing(num_inputs, total_bytes, compressed_bytes, *counts, digest.hexdigest(), listing.notes)

    def _is_known(self, source: Input) -> bool:
        query = "SELECT size, mtime_ns, crc32c FROM known WHERE name = ?"
        before = self._known.execute(query, [os.fsencode(source.name)]).fetchone()
        if before is None:
            return False
        size, mtime_ns, crc32c = before
        if size < 0 or source.error is not None or (size, mtime_ns) == (source.size, source.mtime_ns):
            return True
        if size != source.size or (crc32c and source.crc32c and crc32c != source.crc32c):
            self._changed.add(source.name)
        else:
            self._touched.add(source, SAME if crc32c and crc32c == source.crc32c else UNSEEN)
        return True

    def check(self, *, accept_touched: bool) -> None:
        """Raises for inputs that have changed, or may have."""
        if accept_touched:
            self._touched.accept()
        for generation in self._made if self._touched.count and not accept_touched else ():
            if generation.spec.replay is None:
                self._touched.compare(generation.store, generation.spec)
        for name in self._touched.names(OTHER):
            self._changed.add(name)
        for name in self._touched.names(UNSEEN, UNKNOWN):
            self._changed.add(name, unknown=True)
        self._changed.check()

    def write_touched(self, path: str) -> None:
        """Writes the lines of the inputs that have a new time only."""
        with open(path, "wb") as out:
            out.writelines(to_line(*row, None, None) for row in self._touched.same())


def _line_at(lines: BinaryIO, offset: int) -> bytes:
    """Returns a line that was just read, and stands behind it again."""
    lines.seek(offset)
    return lines.readline()


class _Changed:
    """Collects inputs that have changed, or may have, and raises for those that had no dead letters."""

    def __init__(self, made: list[Generation]) -> None:
        self._made = made
        self._stack = contextlib.ExitStack()
        self._names: sqlite3.Connection | None = None

    def add(self, name: str, *, unknown: bool = False) -> None:
        """Adds an input; `unknown` if nothing tells whether it holds what it held."""
        if self._names is None:
            self._names = self._stack.enter_context(name_table())
            self._names.execute("BEGIN")
        self._names.execute("INSERT OR IGNORE INTO known (name, size) VALUES (?, ?)", [os.fsencode(name), int(unknown)])

    def check(self) -> None:
        """Raises if there are any that count."""
        with self._stack:
            if self._names is None:
                return
            for generation in self._made:
                for fields, _ in dead_sources(generation):
                    name = os.fsencode(name_from_fields("name", fields))
                    self._names.execute("DELETE FROM known WHERE name = ?", [name])
            changed, unknown = (name_some(self._select(kind)) for kind in (0, 1))
        texts = [f"converted inputs have changed since: {changed}"] if changed else []
        if unknown:
            texts.append(
                f"converted inputs have a new time, and no checksum tells whether their bytes are the same: {unknown}"
            )
        if texts:
            raise ChangedInputsError("; ".join(texts))

    def _select(self, unknown: int) -> Iterator[str]:
        assert self._names is not None
        rows = self._names.execute("SELECT name FROM known WHERE size = ? ORDER BY name", [unknown])
        return (os.fsdecode(row[0]) for row in rows)
