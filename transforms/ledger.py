"""The ledger of a shard: the one entry that says which attempt won, and with what.

An attempt writes its files under names of its own and makes them durable; creating the ledger *put-if-absent* is
the commit. A ledger counts only while it belongs to this plan and the files it names exist with the recorded size,
under the attempt's names or under the published ones.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from transforms.books import SourceRow, add_rows, edges_of
from transforms.elements import JobSpec, ShardInfo, ShardTask
from transforms.generations import REPLAYED, find_letters
from transforms.store import Store, Version

ATTEMPTS = "_gristmill/attempts/"
LEDGERS = "_gristmill/shards/"
PUBLISHED = "_gristmill/published/"
_LEDGER_VERSION = 1


@dataclasses.dataclass(frozen=True)
class StoredFile:
    """A file of an attempt.

    Attributes:
        name: Its name in the store.
        size: Bytes.
        crc32c: Checksum of the whole file, eight hex digits.
        records: Records (or lines) in it.
    """

    name: str
    size: int
    crc32c: str
    records: int


@dataclasses.dataclass(frozen=True)
class Ledger:
    """What a committed attempt wrote.

    Attributes:
        plan_id: The plan it belongs to.
        shard: Planned shard.
        parts: Files of records, in order; none when the shard has no record.
        dead_lines: The dead-letter file, None when there are no dead letters.
        dead_payloads: The payloads beside it, None when there are none.
        rows: Books by source.
        dropped_by_reason: Dropped records by reason.
        dead_by_reason: Dead letters by reason.
        start_at: Boundary from which the range was read again, see `ShardTask.start_at`.
        committed_at: Unix time of the commit by the worker's clock, from which `status` tells the speed.
    """

    plan_id: str
    shard: int
    parts: tuple[StoredFile, ...]
    dead_lines: StoredFile | None
    dead_payloads: StoredFile | None
    rows: tuple[SourceRow, ...]
    dropped_by_reason: dict[str, int]
    dead_by_reason: dict[str, int]
    start_at: int | None = None
    committed_at: float = dataclasses.field(default=0.0, compare=False)

    def files(self) -> list[StoredFile]:
        """Returns every file that the attempt wrote."""
        return [*self.parts, *(file for file in (self.dead_lines, self.dead_payloads) if file is not None)]

    def names_any(self, names: Iterable[str]) -> bool:
        """Whether one of these files is the attempt's."""
        return not {file.name for file in self.files()}.isdisjoint(names)

    def books(self) -> dict[str, int]:
        """Returns the shard's totals."""
        books = add_rows(self.rows)
        books["bytes_written"] = sum(part.size for part in self.parts)
        return books

    def to_info(self, task: ShardTask, named: Mapping[str, int] | None = None) -> ShardInfo:
        """Returns what leaves the worker.

        Args:
            task: The planned shard.
            named: Dead letters by those reasons that the budget names; all others are a matter of the report.
        """
        first, last = edges_of(list(self.rows))
        return ShardInfo(task, len(self.parts), self.books(), first, last, dict(named or {}))

    def to_json(self) -> bytes:
        """Returns the entry as it is stored."""
        fields = {
            "gristmill_ledger": _LEDGER_VERSION,
            "plan_id": self.plan_id,
            "shard": self.shard,
            "start_at": self.start_at,
            "committed_at": self.committed_at,
            "parts": [dataclasses.asdict(part) for part in self.parts],
            "dead_lines": None if self.dead_lines is None else dataclasses.asdict(self.dead_lines),
            "dead_payloads": None if self.dead_payloads is None else dataclasses.asdict(self.dead_payloads),
            "books": self.books(),
            "dropped_by_reason": self.dropped_by_reason,
            "dead_by_reason": self.dead_by_reason,
            "sources": [row.to_fields() for row in self.rows],
        }
        return json.dumps(fields).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Ledger:
        """Reads a stored entry.

        Raises:
            ValueError: It is not a whole ledger of this version.
        """
        try:
            fields = json.loads(data)
            if fields["gristmill_ledger"] != _LEDGER_VERSION:
                raise ValueError(f"ledger version {fields['gristmill_ledger']}, expected {_LEDGER_VERSION}")
            return cls(
                fields["plan_id"],
                fields["shard"],
                tuple(StoredFile(**part) for part in fields["parts"]),
                _stored(fields["dead_lines"]),
                _stored(fields["dead_payloads"]),
                tuple(SourceRow.from_fields(row) for row in fields["sources"]),
                fields["dropped_by_reason"],
                fields["dead_by_reason"],
                fields["start_at"],
                fields.get("committed_at", 0.0),
            )
        except (KeyError, TypeError, IndexError) as error:
            raise ValueError(f"not a ledger: {error!r}") from error


def _stored(fields: dict[str, Any] | None) -> StoredFile | None:
    return None if fields is None else StoredFile(**fields)


def ledger_name(spec: JobSpec, shard: int) -> str:
    """Returns the name of a shard's ledger."""
    return f"{LEDGERS}{spec.shard_key(shard)}.json"


def published_name(spec: JobSpec, shard: int) -> str:
    """Returns the name of the note that says under which final names a shard was published."""
    return f"{PUBLISHED}{spec.shard_key(shard)}.json"


@dataclasses.dataclass(frozen=True)
class FoundLedger:
    """What stands under a ledger's name.

    Attributes:
        ledger: The entry if it counts, None if it does not.
        version: For deleting exactly this entry.
    """

    ledger: Ledger | None
    version: Version


SizeOf = Callable[[str], int | None]
"""Tells the bytes of a name, None when it does not exist: `Store.size`, or what knows a listing."""


def find_ledger(
    store: Store, spec: JobSpec, shard: int, *, check_files: bool = True, size_of: SizeOf | None = None
) -> FoundLedger | None:
    """Looks a shard's ledger up and checks that it counts; None when there is no entry at all.

    Args:
        store: The output directory.
        spec: The job.
        shard: Planned shard.
        check_files: Whether an entry whose files are gone does not count.
        size_of: What tells whether they are; the store by default.
    """
    found = store.get(ledger_name(spec, shard))
    if found is None:
        return None
    data, version = found
    ledger = read_entry(spec, data)
    if ledger is None or (check_files and not _files_exist(store, spec, ledger, size_of or store.size)):
        return FoundLedger(None, version)
    return FoundLedger(ledger, version)


def read_entry(spec: JobSpec, data: bytes) -> Ledger | None:
    """Returns the ledger that stands in an entry, None when it is not whole or not of this job."""
    try:
        ledger = Ledger.from_json(data)
    except ValueError:
        return None
    return ledger if spec.accepts(ledger.plan_id) else None


def _files_exist(store: Store, spec: JobSpec, ledger: Ledger, size_of: SizeOf) -> bool:
    missing = [file for file in ledger.files() if size_of(file.name) != file.size]
    if not missing:
        return True
    names = read_published(store, spec, ledger.shard)
    if not all(file.name in names for file in missing):
        return False
    moved = [file for file in missing if size_of(names[file.name]) != file.size]
    # A dead-letter file may have been consumed by a replay since: making it anew would give its records twice.
    found = {file: find_letters(store, spec.generation, names[file.name]) for file in moved}
    return all(
        file not in ledger.parts and (name.startswith(REPLAYED) or size_of(name) == file.size)
        for file, name in found.items()
    )


def read_published(store: Store, spec: JobSpec, shard: int) -> dict[str, str]:
    """Returns the final names of a shard's files by attempt name, empty when there is no note that can be read."""
    found = store.get(published_name(spec, shard))
    try:
        return {} if found is None else dict(json.loads(found[0]))
    except (ValueError, TypeError):
        return {}


def commit(store: Store, spec: JobSpec, ledger: Ledger) -> Ledger:
    """Creates the ledger unless another attempt has done so, and returns the one that counts.

    An entry whose files are gone does not count; it makes room. The first valid entry wins, and the caller deletes
    its own files if another was first.
    """
    data = ledger.to_json()
    while not store.put_if_absent(ledger_name(spec, ledger.shard), data):
        found = find_ledger(store, spec, ledger.shard)
        if found is not None and found.ledger == ledger:
            return ledger  # A store whose answer was lost: the entry is ours.
        if found is not None and found.ledger is not None:
            return found.ledger
        if found is not None:
            store.delete(ledger_name(spec, ledger.shard), found.version)
    return ledger
