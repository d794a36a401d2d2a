"""The file of a piece: its batches as the steps left them, in an ArrayRecord. No Beam here.

For each batch there is one record of JSON, then the payloads of its dead letters, then its records. So the shard that
is written from its pieces meets the very batches that it would have met.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from typing import Any

from array_record.python.array_record_module import ArrayRecordReader

from transforms.budget import ESTIMATE
from transforms.elements import DeadLetter, Input, JobSpec, RecordBatch, ShardInfo, ShardTask, Span
from transforms.generations import unfenced
from transforms.job_lock import LostLockError
from transforms.journal import forget_journal
from transforms.ledger import ATTEMPTS
from transforms.pieces import PieceEntry, commit_piece, find_piece
from transforms.reasons import ReasonCounts, named_reasons
from transforms.shard_progress import ProgressNote
from transforms.shard_writer import file_crc32c, open_records
from transforms.store import OutputError, Store
from transforms.tries import forget_tries, unmark_try

_OPTIONS = "group_size:1,zstd:1"
"""A record a chunk, so that a reader holds one; the cheapest compression, since the file does not live for long."""


class PieceWriter:
    """One attempt at one piece, from its first batch to the commit; used like `ShardWriter`."""

    def __init__(self, store: Store, spec: JobSpec, task: ShardTask) -> None:
        self._store = store
        self._spec = spec
        self._task = task
        folder = f"{ATTEMPTS}{spec.piece_key(task.shard, task.piece)}-{uuid.uuid4().hex[:12]}/"
        self._name = f"{folder}batches.array_record"
        self._records = open_records(store, self._name, _OPTIONS)
        self._books: Counter[str] = Counter()
        self._dead = ReasonCounts(named_reasons(store, spec))
        self._first_span: Span | None = None
        self._try = 0
        self._has_journal = False
        self._progress = ProgressNote(store, spec, task)

    def add(self, batch: RecordBatch) -> None:
        """Takes the next batch.

        Raises:
            OutputError: It cannot be written.
        """
        self._try = batch.try_number
        self._has_journal = self._has_journal or batch.journalled
        if batch.source is None:
            return  # The closing batch holds nothing.
        payloads = [letter.payload for letter in batch.dead if letter.payload is not None]
        records = [json.dumps(_to_fields(batch)).encode(), *payloads, *batch.records]
        self._records.write_all(records, 0)
        if batch.span is not None and batch.source.index == self._task.first_index:
            self._first_span = batch.span
        self._count(batch)
        if self._progress.is_due() or (batch.sequence == 0 and self._try > 1):
            self._progress.write(dict(self._books), {}, self._dead.to_fields())

    def _count(self, batch: RecordBatch) -> None:
        self._books["records_read"] += batch.records_read
        self._books["records_written"] += len(batch.records)
        self._books["records_added"] += batch.records_added
        self._books["records_dropped"] += sum(batch.dropped.values())
        self._books["records_dead"] += len(batch.dead)
        self._books["bytes_read"] += batch.num_bytes
        self._books["bytes_dead"] += sum(letter.length for letter in batch.dead)
        self._books[ESTIMATE] += sum(1 + letter.hidden for letter in batch.dead)
        for letter in batch.dead:
            self._dead.add(letter.reason)

    def commit(self) -> ShardInfo:
        """Makes the file durable and commits the piece, or yields to the attempt that did so first."""
        file = self._records.finish()
        books, dead = dict(self._books), dict(sorted(self._dead.to_fields().items()))
        mine = PieceEntry(self._spec.plan_id, self._task, file, self._first_span, books, dead, time.time())
        if not commit_piece(self._store, self._spec, mine):
            unfenced(self._store).delete(self._name)
        forget_tries(self._store, self._spec, self._task.shard, self._try, self._task.piece)
        self._progress.forget()
        if self._has_journal:
            forget_journal(self._store, self._spec, self._task)
        return ShardInfo(self._task, 0, books, dead_by_reason=dead)

    def abandon(self) -> None:
        """Deletes what the attempt has written, unless it has won after all."""
        self._records.abandon()
        self._progress.forget()
        if not self._is_committed():
            with contextlib.suppress(OSError):
                unfenced(self._store).delete(self._name)
        if self._try:
            with contextlib.suppress(OSError, LostLockError):
                unmark_try(self._store, self._spec, self._task.shard, self._try, self._task.piece)

    def _is_committed(self) -> bool:
        try:
            entry = find_piece(self._store, self._spec, self._task)
        except (OutputError, OSError):
            return True  # Unknown: a file that no entry names is deleted when the job goes on.
        return entry is not None and entry.file.name == self._name


def _to_fields(batch: RecordBatch) -> dict[str, Any]:
    """Returns all of a batch but its payloads and records. JSON escapes keep names that are not UTF-8."""
    assert batch.source is not None
    return {
        "source": dataclasses.asdict(batch.source),
        "num_records": len(batch.records),
        "records_read": batch.records_read,
        "num_bytes": batch.num_bytes,
        "span": None if batch.span is None else dataclasses.asdict(batch.span),
        "records_added": batch.records_added,
        "dropped": batch.dropped,
        "rolls": batch.rolls,
        "dead": [_letter_fields(letter) for letter in batch.dead],
    }


def _letter_fields(letter: DeadLetter) -> dict[str, Any]:
    fields = {field.name: getattr(letter, field.name) for field in dataclasses.fields(letter)}
    return {**fields, "payload": letter.payload is not None}


@contextlib.contextmanager
def open_log(store: Store, entry: PieceEntry) -> Iterator[str | None]:
    """Gives a local path of a piece's file; None where it is gone or damaged, before anything of it has been used."""
    with contextlib.ExitStack() as stack:
        try:
            path: str | None = stack.enter_context(store.local_copy(entry.file.name))
            assert path is not None
            if os.path.getsize(path) != entry.file.size or file_crc32c(path) != entry.file.crc32c:
                path = None
        except FileNotFoundError:
            path = None
        yield path


def read_log(path: str, task: ShardTask) -> Iterator[RecordBatch]:
    """Yields the batches of a piece's file, as ones of the shard that it belongs to.

    Raises:
        OutputError: The file cannot be read.
    """
    reader = ArrayRecordReader(os.fsencode(path))
    try:
        if not reader.ok():  # It would say that it has no records.
            raise ValueError("it is no ArrayRecord")
        left = reader.num_records()
        while left > 0:
            batch = _read_batch(reader, task)
            left -= 1 + len(batch.records) + sum(letter.payload is not None for letter in batch.dead)
            yield batch
    except (RuntimeError, ValueError) as error:
        raise OutputError(f"{path}, a piece of shard {task.shard}, cannot be read: {str(error)[:300]}") from error
    finally:
        with contextlib.suppress(RuntimeError):
            reader.close()


def _read_batch(reader: ArrayRecordReader, task: ShardTask) -> RecordBatch:
    fields = json.loads(reader.read())
    source, span, count = fields.pop("source"), fields.pop("span"), fields.pop("num_records")
    error = None if source["error"] is None else tuple(source["error"])
    dead = [_read_letter(reader, letter) for letter in fields.pop("dead")]
    return RecordBatch(
        task,
        0,
        source=Input(**{**source, "error": error}),
        span=None if span is None else Span(**span),
        dead=dead,
        records=[reader.read() for _ in range(count)],
        applied=True,
        **fields,
    )


def _read_letter(reader: ArrayRecordReader, fields: dict[str, Any]) -> DeadLetter:
    return DeadLetter(**{**fields, "payload": reader.read() if fields["payload"] else None})
