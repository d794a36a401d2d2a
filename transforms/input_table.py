"""The inputs that were found, on their way to inputs.jsonl: in a temporary SQLite table, and as lines."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import sqlite3
from collections.abc import Iterable, Iterator

from transforms.elements import name_fields, to_json
from transforms.scratch import scratch_folder

ROWS_AT_ONCE = 10_000
_quote = json.encoder.encode_basestring
Row = tuple[bytes, int, int, str | None, str | None, str | None]
"""(name, bytes, version, reason, error, checksum) of an input, as they stand in its line."""

PENDING = "pending"
"""The reason of a listed URL whose folder has not been listed yet."""


@dataclasses.dataclass(slots=True)
class Found:
    """One input that was found.

    Attributes:
        name: Absolute path or URL.
        key: What is the same for all names of one file.
        size: Bytes.
        mtime_ns: Modification time, or an object's generation.
        reason: Why it cannot be read, None when it can.
        error: The same in words.
        crc32c: Its checksum in hex digits, where the listing tells it.
    """

    name: bytes
    key: bytes
    size: int = 0
    mtime_ns: int = 0
    reason: str | None = None
    error: str | None = None
    crc32c: str | None = None


_SCHEMA = """
CREATE TABLE found (
  pattern INTEGER, name BLOB, key BLOB, size INTEGER, mtime_ns INTEGER, reason TEXT, error TEXT, crc32c TEXT)
"""
_IN_ORDER = "SELECT name, size, mtime_ns, reason, error, crc32c FROM found ORDER BY pattern, name"
_UNIQUE_IN_ORDER = """
SELECT name, size, mtime_ns, reason, error, crc32c FROM found AS f WHERE NOT EXISTS (
  SELECT 1 FROM found AS g WHERE g.key = f.key AND (g.pattern, g.name, g.rowid) < (f.pattern, f.name, f.rowid))
ORDER BY pattern, name
"""


@contextlib.contextmanager
def found_table() -> Iterator[sqlite3.Connection]:
    """Opens an empty table that lives as long as the context."""
    with scratch_folder() as folder:
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


def fill(table: sqlite3.Connection, groups: Iterable[Iterable[Found]]) -> None:
    """Puts groups of inputs into the table; a list's lines keep their order, files of a pattern are sorted."""
    insert(table, ((number, found) for number, group in enumerate(groups) for found in group))


def insert(table: sqlite3.Connection, numbered: Iterable[tuple[int, Found]]) -> None:
    """Puts inputs into the table, each with the number of its group."""
    rows = (
        (number, one.name, one.key, one.size, one.mtime_ns, one.reason, one.error, one.crc32c)
        for number, one in numbered
    )
    while batch := list(itertools.islice(rows, ROWS_AT_ONCE)):
        table.execute("BEGIN")
        table.executemany("INSERT INTO found VALUES (?, ?, ?, ?, ?, ?, ?, ?)", batch)
        table.execute("COMMIT")


def count_rows(table: sqlite3.Connection) -> int:
    """Returns how many inputs are in the table."""
    return int(table.execute("SELECT count(*) FROM found").fetchone()[0])


def rows_in_order(table: sqlite3.Connection, *, may_repeat: bool) -> Iterator[Row]:
    """Yields the inputs in order, each file once: where it may have been found twice, `may_repeat`."""
    if not may_repeat:
        return table.execute(_IN_ORDER)
    table.execute("CREATE INDEX by_key ON found (key, pattern, name)")
    return table.execute(_UNIQUE_IN_ORDER)


def to_line(
    name: bytes, size: int, mtime_ns: int, reason: str | None, error: str | None, crc32c: str | None = None
) -> bytes:
    """Returns a line of inputs.jsonl."""
    if crc32c and reason is None:
        return to_line(name, size, mtime_ns, None, None)[:-2] + _CHECKSUM + crc32c.encode() + b'"}\n'
    if reason is None:
        with contextlib.suppress(UnicodeDecodeError):  # The common case, ten million times.
            return f'{{"name": {_quote(name.decode())}, "size": {size}, "mtime_ns": {mtime_ns}}}\n'.encode()
    fields: dict[str, object] = dict(name_fields("name", os.fsdecode(name)))
    fields["size"] = size
    fields["mtime_ns"] = mtime_ns
    if reason is not None:
        fields["error"] = [reason, error]
    return to_json(fields)


_CHECKSUM = b', "crc32c": "'
_CHECKSUM_BYTES = len(_CHECKSUM) + len('01234567"}\n')


def without_checksum(line: bytes) -> bytes:
    """Returns a line of inputs.jsonl as it counts in fingerprints: those were made before lines had checksums."""
    has_one = line[-_CHECKSUM_BYTES:].startswith(_CHECKSUM)
    return line[:-_CHECKSUM_BYTES] + b"}\n" if has_one else line
