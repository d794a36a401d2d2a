"""Inputs with a new time and the size that they had: whether they hold what was converted, by their checksums.

Copying a corpus, restoring it or touching it gives new times. What was read of each input has left its checksum in the
ledgers; a store that lists checksums itself has it in inputs.jsonl. No Beam here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import os
import sqlite3
from collections.abc import Iterable, Iterator

import google_crc32c

from transforms.ahead import map_ahead
from transforms.books import SourceRow
from transforms.checksums import checksum_of
from transforms.elements import Input, JobSpec, display_name
from transforms.inputs import read_inputs
from transforms.report import committed_shards
from transforms.sources import open_input
from transforms.state import open_inputs
from transforms.store import Store

_LOGGER = logging.getLogger("gristmill")

UNSEEN, SAME, UNKNOWN, OTHER = range(4)
"""What is known of a touched input; of two shards that hold parts of it, the larger counts."""

_THREADS = 8
_PIECE_BYTES = 1 << 20
SHOWN = 5

WAY_OUT = (
    "pass --accept-touched to take your word for it that inputs of the same size hold what they held (nothing of them "
    "is read again)"
)


@dataclasses.dataclass(frozen=True)
class _Check:
    """A part of touched inputs, and the checksum that it had.

    Attributes:
        inputs: A run of inputs, or one.
        start: First byte of the part.
        end: Byte after it; None for all of each input.
        crc: The checksum, None where there is none.
    """

    inputs: list[Input]
    start: int
    end: int | None
    crc: int | None

    def run(self) -> int:
        """Returns what is known of the inputs now."""
        if self.crc is None:
            return UNKNOWN
        if self.end is not None:
            found = checksum_of(self.inputs[0], self.start, self.end)
        else:
            found = _checksum_of_run(self.inputs)
        if found is None:
            return UNKNOWN
        return SAME if found == self.crc else OTHER


def _checksum_of_run(inputs: list[Input]) -> int | None:
    crc = 0
    for source in inputs:
        try:
            with contextlib.closing(open_input(source)) as file:
                for position in range(0, source.size, _PIECE_BYTES):
                    crc = google_crc32c.extend(crc, file.read_at(position, min(_PIECE_BYTES, source.size - position)))
        except OSError:
            return None
    return crc


class TouchedInputs:
    """A table of touched inputs, on disk, since every input may be one.

    Args:
        table: An open database; the table is made in it.
    """

    def __init__(self, table: sqlite3.Connection) -> None:
        self._table = table
        self._table.execute(
            "CREATE TABLE touched (name BLOB PRIMARY KEY, size INTEGER, mtime_ns INTEGER, state INTEGER) WITHOUT ROWID"
        )
        self.count = 0

    def add(self, source: Input, state: int = UNSEEN) -> None:
        """Adds an input as it is now."""
        self.count += 1
        row = [os.fsencode(source.name), source.size, source.mtime_ns, SAME if not source.size else state]
        self._table.execute("INSERT OR REPLACE INTO touched VALUES (?, ?, ?, ?)", row)

    def compare(self, store: Store, spec: JobSpec) -> None:
        """Reads the inputs again that a job has read, and compares their checksums.

        Args:
            store: The output directory as the job sees it.
            spec: The job.
        """
        if not self._left():
            return
        _LOGGER.info("%d inputs have a new time; they are read to compare their checksums", self.count)
        rows = (row for _, ledger in committed_shards(store, spec) for row in ledger.rows)
        with open_inputs(store) as lines:
            checks = self._checks(rows, (source for _, source in read_inputs(lines)))
            for check, state in map_ahead(lambda check: (check, check.run()), checks, _THREADS):
                for source in check.inputs:
                    self._note(source.name, state)

    def accept(self) -> None:
        """Takes all of them to hold what they held."""
        self._table.execute("UPDATE touched SET state = ?", [SAME])

    def names(self, *states: int) -> Iterator[str]:
        """Yields the names of which no more is known than that, in order."""
        marks = ", ".join("?" * len(states))
        rows = self._table.execute(f"SELECT name FROM touched WHERE state IN ({marks}) ORDER BY name", states)
        return (os.fsdecode(row[0]) for row in rows)

    def same(self) -> Iterator[tuple[bytes, int, int]]:
        """Yields (name, size, time) of those that hold what they held."""
        yield from self._table.execute("SELECT name, size, mtime_ns FROM touched WHERE state = ? ORDER BY name", [SAME])

    def _left(self) -> bool:
        return self._table.execute("SELECT 1 FROM touched WHERE state = ? LIMIT 1", [UNSEEN]).fetchone() is not None

    def _note(self, name: str, state: int) -> None:
        query = "UPDATE touched SET state = max(state, ?) WHERE name = ?"
        self._table.execute(query, [state, os.fsencode(name)])

    def _now(self, source: Input) -> Input | None:
        """Returns an input with its new time, None if it was not touched."""
        query = "SELECT mtime_ns FROM touched WHERE name = ?"
        row = self._table.execute(query, [os.fsencode(source.name)]).fetchone()
        return None if row is None else dataclasses.replace(source, mtime_ns=row[0])

    def _checks(self, rows: Iterable[SourceRow], inputs: Iterator[Input]) -> Iterator[_Check]:
        """Walks rows and inputs side by side; both are in order."""
        current: Input | None = None
        for row in rows:
            while current is None or current.index < row.index:
                current = next(inputs)
            others = itertools.islice(inputs, row.count - 1)
            if row.count == 1:
                yield from self._check_one(row, current)
            else:
                yield from self._check_run(row, itertools.chain([current], others))
                current = None

    def _check_one(self, row: SourceRow, source: Input) -> Iterator[_Check]:
        now = self._now(source)
        if now is not None and row.span is not None:
            yield _Check([now], row.span.asked_start, min(row.span.asked_end, now.size), row.span.crc)

    def _check_run(self, row: SourceRow, sources: Iterator[Input]) -> Iterator[_Check]:
        step = 1 if row.run is None else row.run.step
        for number in itertools.count():
            block = list(itertools.islice(sources, step))
            if not block:
                return
            found = [self._now(source) for source in block]
            if any(found):
                crc = None if row.run is None else row.run.crcs[number]
                yield _Check([now or source for now, source in zip(found, block, strict=True)], 0, None, crc)


def name_some(names: Iterator[str]) -> str:
    """Returns the first few names and how many more there are, "" for none."""
    first = [display_name(name) for name in itertools.islice(names, SHOWN)]
    more = sum(1 for _ in names)
    return ", ".join(first) + (f" and {more} more" if more else "")
