"""Writes one attempt at a shard: parts, dead letters and books, then the commit. No Beam here.

ArrayRecordWriter knows only local paths and reports a full disk only when it is closed, so closing is checked and
every file is opened again and counted before it may be committed.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections import deque
from typing import BinaryIO

import google_crc32c
from array_record.python.array_record_module import ArrayRecordReader, ArrayRecordWriter

from transforms.books import SourceRow, add_rows, append_row
from transforms.dead_letters import to_line
from transforms.elements import DeadLetter, JobSpec, RecordBatch, ShardInfo, ShardTask
from transforms.generations import unfenced
from transforms.job_lock import LostLockError
from transforms.journal import forget_journal
from transforms.ledger import ATTEMPTS, Ledger, StoredFile, commit, find_ledger
from transforms.reasons import ReasonCounts, info_of, named_reasons
from transforms.shard_progress import ProgressNote
from transforms.store import OutputError, Spool, Store
from transforms.tries import forget_tries, unmark_try

_DIGEST_BYTES = 1 << 20
_PAYLOAD_OPTIONS = "group_size:1,zstd:3"


class _RecordFile:
    """One ArrayRecord file of the attempt."""

    def __init__(self, store: Store, name: str, options: str) -> None:
        self.name = name
        self.records = 0
        self.payload_bytes = 0
        self._spool: Spool = store.spool(name)
        try:
            self._writer = ArrayRecordWriter(os.fsencode(self._spool.path), options)
        except Exception as error:
            raise OutputError(f"cannot write {self._spool.path}: {error}") from error

    def write_all(self, records: list[bytes], num_bytes: int) -> None:
        """Appends records."""
        try:
            deque(map(self._writer.write, records), maxlen=0)  # The loop that adds least to compressing.
        except RuntimeError as error:  # Some versions say so at once, others only on closing.
            raise OutputError(f"cannot write {self._spool.path}: {error}") from error
        self.records += len(records)
        self.payload_bytes += num_bytes

    def finish(self) -> StoredFile:
        """Closes, counts and seals the file."""
        try:
            self._writer.close()
        except Exception as error:
            raise OutputError(f"cannot write {self._spool.path}: {error}") from error
        size = self._spool.seal()
        _check_count(self._spool.path, self.records)
        return StoredFile(self.name, size, file_crc32c(self._spool.path), self.records)

    def abandon(self) -> None:
        """Closes the writer, whose file is going to be deleted."""
        with contextlib.suppress(Exception):
            self._writer.close()


def open_records(store: Store, name: str, options: str) -> _RecordFile:
    """Opens an ArrayRecord file of an attempt for writing; it has `write_all`, `finish` and `abandon`."""
    return _RecordFile(store, name, options)


def _check_count(path: str, records: int) -> None:
    reader = ArrayRecordReader(os.fsencode(path))
    try:
        # A reader of a broken file does not raise, it says 0 records: ok() must be asked as well.
        if not reader.ok() or reader.num_records() != records:
            raise OutputError(f"{path} was written with {records} records but reads back as {reader.num_records()}")
    finally:
        with contextlib.suppress(Exception):
            reader.close()


def file_crc32c(path: str) -> str:
    """Returns the CRC-32C of a whole file as eight hex digits."""
    crc = google_crc32c.Checksum()
    with open(path, "rb") as file:
        while piece := file.read(_DIGEST_BYTES):
            crc.update(piece)
    return str(crc.digest().hex())


class ShardWriter:
    """One attempt at one shard, from its first batch to the commit."""

    def __init__(self, store: Store, spec: JobSpec, task: ShardTask) -> None:
        self._store = store
        self._spec = spec
        self._task = task
        self._folder = f"{ATTEMPTS}{spec.shard_key(task.shard)}-{uuid.uuid4().hex[:12]}/"
        self._names: list[str] = []
        self._part: _RecordFile | None = None
        self._parts: list[StoredFile] = []
        self._rows: list[SourceRow] = []
        self._row: SourceRow | None = None
        self._letters = _DeadLetterFiles(self)
        self._named = named_reasons(store, spec)
        self._dropped = ReasonCounts()
        self._dead = ReasonCounts(self._named)
        self._try = 0
        self._has_journal = False
        self._progress = ProgressNote(store, spec, task)

    def add(self, batch: RecordBatch) -> None:
        """Takes the next batch.

        Raises:
            OutputError: It cannot be written.
        """
        self._try = batch.try_number
        self._has_journal |= batch.journalled
        if batch.source is not None:
            self._enter(batch)
        if batch.records:
            self._write(batch)
        for letter in batch.dead:
            self._letters.add(letter)
            self._dead.add(letter.reason)
        for letter in batch.kept:
            self._letters.add(letter)
        self._dropped.update(batch.dropped)
        # Of an attempt that was killed there may be a note, which is not true any more.
        if self._progress.is_due() or (batch.sequence == 0 and self._try > 1):
            self._progress.write(self._books(), self._dropped.to_fields(), self._dead.to_fields())

    def commit(self) -> ShardInfo:
        """Makes everything durable and commits it, or yields to the attempt that did so first."""
        if self._part is not None:
            self._parts.append(self._part.finish())
            self._part = None
        self._close_row()
        lines, payloads = self._letters.finish()
        mine = Ledger(
            self._spec.plan_id,
            self._task.shard,
            tuple(self._parts),
            lines,
            payloads,
            tuple(self._rows),
            self._dropped.to_fields(),
            self._dead.to_fields(),
            self._task.start_at,
            time.time(),
        )
        winner = commit(self._store, self._spec, mine)
        if winner is not mine:
            self._delete_files()
        forget_tries(self._store, self._spec, self._task.shard, self._try)
        self._progress.forget()
        if self._has_journal:
            forget_journal(self._store, self._spec, self._task)
        return info_of(self._store, self._spec, winner, self._task, self._named)

    def abandon(self) -> None:
        """Deletes what the attempt has written, so that a full disk is not kept full by it.

        What struck may have done so just after the ledger was made: then the attempt has won, and its files stay.
        """
        if self._part is not None:
            self._part.abandon()
        self._letters.abandon()
        self._progress.forget()
        if not self._is_committed():
            self._delete_files()
        if self._try:
            with contextlib.suppress(OSError, LostLockError):
                unmark_try(self._store, self._spec, self._task.shard, self._try)

    def _is_committed(self) -> bool:
        try:
            found = find_ledger(self._store, self._spec, self._task.shard)
        except (OutputError, OSError):
            return True  # Unknown: files that no ledger names are deleted when the job goes on.
        return found is not None and found.ledger is not None and found.ledger.names_any(self._names)

    def new_name(self, base: str) -> str:
        """Returns a name in the attempt's folder and remembers it for deletion."""
        name = self._folder + base
        self._names.append(name)
        return name

    def record_file(self, base: str, options: str) -> _RecordFile:
        """Opens an ArrayRecord file of the attempt."""
        return _RecordFile(self._store, self.new_name(base), options)

    @property
    def store(self) -> Store:
        """Where the attempt writes."""
        return self._store

    @property
    def spec(self) -> JobSpec:
        """The job."""
        return self._spec

    def _books(self) -> dict[str, int]:
        """Returns the totals so far."""
        books = add_rows([*self._rows, *filter(None, [self._row])])
        books["bytes_written"] = sum(part.size for part in self._parts)
        return books

    def _enter(self, batch: RecordBatch) -> None:
        """Adds the batch to the row of its source."""
        source = batch.source
        assert source is not None
        row = self._row
        if row is None or row.index != source.index:
            self._close_row()
            row = self._row = SourceRow(source.index, 1, source.size, None)
        row.read += batch.records_read
        row.written += len(batch.records)
        row.added += batch.records_added
        row.dropped += sum(batch.dropped.values())
        row.dead += len(batch.dead)
        row.num_bytes += batch.num_bytes
        row.dead_bytes += sum(letter.length for letter in batch.dead)
        row.hidden += sum(letter.hidden for letter in batch.dead)
        if batch.span is not None:
            row.span = batch.span

    def _close_row(self) -> None:
        if self._row is not None:
            append_row(self._rows, self._row)
            self._row = None

    def _write(self, batch: RecordBatch) -> None:
        """Writes the batch's records, starting new parts at the bounds."""
        factor = 1 if batch.rolls else self._spec.roll_factor
        max_records = self._spec.part_max_records * factor or None
        max_bytes = self._spec.part_max_bytes * factor or None
        num_bytes = sum(map(len, batch.records))
        if self._fits(len(batch.records), num_bytes, max_records, max_bytes):
            self._open_part().write_all(batch.records, num_bytes)
            return
        # The rule is one of single records, so shards do not depend on where batches were cut.
        for record in batch.records:
            if not self._fits(1, len(record), max_records, max_bytes) and self._part is not None:
                self._parts.append(self._part.finish())
                self._part = None
            self._open_part().write_all([record], len(record))

    def _fits(self, records: int, num_bytes: int, max_records: int | None, max_bytes: int | None) -> bool:
        have_records = self._part.records if self._part else 0
        have_bytes = self._part.payload_bytes if self._part else 0
        if max_records is not None and have_records + records > max_records:
            return False
        return max_bytes is None or have_bytes + num_bytes <= max_bytes

    def _open_part(self) -> _RecordFile:
        if self._part is None:
            base = f"part-{len(self._parts):05d}.array_record"
            self._part = self.record_file(base, self._spec.writer_options)
        return self._part

    def _delete_files(self) -> None:
        for name in self._names:
            with contextlib.suppress(OSError):
                unfenced(self._store).delete(name)


class _DeadLetterFiles:
    """The pair of dead-letter files of an attempt; made only when there is something to keep."""

    def __init__(self, writer: ShardWriter) -> None:
        self._writer = writer
        self._spool: Spool | None = None
        self._lines: BinaryIO | None = None
        self._name = ""
        self._count = 0
        self._payloads: _RecordFile | None = None

    def add(self, letter: DeadLetter) -> None:
        payload_index = None
        limit = self._writer.spec.max_payload_bytes
        if letter.carried is not None and letter.payload is not None:
            limit = max(limit, len(letter.payload))  # It was cut when it was met first, never again.
        if letter.payload is not None:
            if self._payloads is None:
                self._payloads = self._writer.record_file("dead.payloads", _PAYLOAD_OPTIONS)
            payload_index = self._payloads.records
            self._payloads.write_all([letter.payload[:limit]], min(len(letter.payload), limit))
        self._append(to_line(letter, payload_index, limit))
        self._count += 1

    def _append(self, line: bytes) -> None:
        try:
            if self._lines is None:
                self._name = self._writer.new_name("dead.jsonl")
                self._spool = self._writer.store.spool(self._name)
                self._lines = open(self._spool.path, "wb")  # noqa: SIM115  (closed by finish or abandon)
            self._lines.write(line)
        except OSError as error:
            raise OutputError(f"cannot write dead letters: {error.strerror}") from error

    def finish(self) -> tuple[StoredFile | None, StoredFile | None]:
        if self._spool is None or self._lines is None:
            return None, None
        try:
            self._lines.close()
        except OSError as error:
            raise OutputError(f"cannot write {self._spool.path}: {error.strerror}") from error
        payloads = None if self._payloads is None else self._payloads.finish()
        size = self._spool.seal()
        return StoredFile(self._name, size, file_crc32c(self._spool.path), self._count), payloads

    def abandon(self) -> None:
        if self._payloads is not None:
            self._payloads.abandon()
        if self._lines is not None:
            with contextlib.suppress(OSError):
                self._lines.close()
