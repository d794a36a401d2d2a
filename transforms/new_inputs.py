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

from transforms.elements import Input, display_name, name_from_fields
from transforms.inputs import Listing, list_inputs, read_inputs
from transforms.plan import COMPRESSED_SUFFIXES
from transforms.scratch import scratch_folder
from transforms.state import open_inputs
from transforms.whole import Generation, dead_sources

_SHOWN = 5
_ROWS_AT_ONCE = 10_000


class ChangedInputsError(ValueError):
    """Inputs are not what they were when they were converted; the message names the first ones."""


@contextlib.contextmanager
def name_table() -> Iterator[sqlite3.Connection]:
    """Opens an empty table `known (name, size, mtime_ns)` that lives as long as the context."""
    with scratch_folder() as folder:
        table = sqlite3.connect(os.path.join(folder, "names.sqlite"), isolation_level=None)
        try:
            for setting in ("journal_mode=OFF", "synchronous=OFF", "cache_size=-65536", "temp_store=FILE"):
                table.execute(f"PRAGMA {setting}")
            table.execute("CREATE TABLE known (name BLOB PRIMARY KEY, size INTEGER, mtime_ns INTEGER) WITHOUT ROWID")
            yield table
        finally:
            table.close()


def list_new_inputs(arguments: list[str], path: str, excluded_folder: str, made: list[Generation]) -> Listing:
    """Lists the inputs that no generation knows and writes them to a file of JSON lines, in order.

    Args:
        arguments: As for `list_inputs`; here each of them may match nothing.
        path: Where to write inputs.jsonl.
        excluded_folder: The output folder.
        made: The base and all finished generations.

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
        with open(all_path, "rb") as lines, open(path, "wb") as out:
            return _filter(known, lines, out, listing, made)


def _remember(known: sqlite3.Connection, lines: BinaryIO) -> None:
    known.execute("BEGIN")
    rows = ((os.fsencode(one.name), _size(one), one.mtime_ns) for _, one in read_inputs(lines))
    known.executemany("INSERT OR REPLACE INTO known VALUES (?, ?, ?)", rows)
    known.execute("COMMIT")


def _size(source: Input) -> int:
    """Bytes of an input; -1 for one that could not be read when it was listed, and so cannot have changed."""
    return -1 if source.error is not None else source.size


def _filter(
    known: sqlite3.Connection, lines: BinaryIO, out: BinaryIO, listing: Listing, made: list[Generation]
) -> Listing:
    digest = hashlib.blake2b(digest_size=16)
    num_inputs = total_bytes = compressed_bytes = 0
    changed = _Changed(made)
    for offset, source in read_inputs(lines):
        before = known.execute("SELECT size, mtime_ns FROM known WHERE name = ?", [os.fsencode(source.name)]).fetchone()
        if before is not None:
            if before[0] >= 0 and source.error is None and before != (source.size, source.mtime_ns):
                changed.add(source.name)
            continue
        line = _line_at(lines, offset)
        out.write(line)
        digest.update(line)
        num_inputs += 1
        total_bytes += source.size
        compressed_bytes += source.size if source.name.lower().endswith(COMPRESSED_SUFFIXES) else 0
    changed.check()
    counts = (listing.num_skipped, listing.num_duplicates)
    return Listing(num_inputs, total_bytes, compressed_bytes, *counts, digest.hexdigest(), listing.notes)


def _line_at(lines: BinaryIO, offset: int) -> bytes:
    """Returns a line that was just read, and stands behind it again."""
    lines.seek(offset)
    return lines.readline()


class _Changed:
    """Collects inputs that have changed, and raises for those that had no dead letters."""

    def __init__(self, made: list[Generation]) -> None:
        self._made = made
        self._stack = contextlib.ExitStack()
        self._names: sqlite3.Connection | None = None

    def add(self, name: str) -> None:
        if self._names is None:
            self._names = self._stack.enter_context(name_table())
            self._names.execute("BEGIN")
        self._names.execute("INSERT OR IGNORE INTO known VALUES (?, 0, 0)", [os.fsencode(name)])

    def check(self) -> None:
        with self._stack:
            if self._names is None:
                return
            for generation in self._made:
                for fields, _ in dead_sources(generation):
                    name = os.fsencode(name_from_fields("name", fields))
                    self._names.execute("DELETE FROM known WHERE name = ?", [name])
            count = self._names.execute("SELECT count(*) FROM known").fetchone()[0]
            first = self._names.execute("SELECT name FROM known ORDER BY name LIMIT ?", [_SHOWN]).fetchall()
        if count:
            names = ", ".join(display_name(os.fsdecode(row[0])) for row in first)
            more = f" and {count - len(first)} more" if count > len(first) else ""
            raise ChangedInputsError(f"converted inputs have changed since: {names}{more}")
