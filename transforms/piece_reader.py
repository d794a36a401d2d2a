"""Reads a shard that was worked on in pieces: as the batches it would have given in one go. No Beam here.

A piece that is there gives what the steps made of it. One that is not, or that does not begin where the piece before it
really ended, is read from its inputs like any range, and its batches go through the steps like any other's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from transforms.checksums import combine
from transforms.dead_letters import estimate_records
from transforms.elements import DeadLetter, JobSpec, RecordBatch, ShardTask, Span
from transforms.piece_log import open_log, read_log
from transforms.pieces import PieceEntry, find_piece, tasks_of_shard
from transforms.reread import is_unreadable
from transforms.shard_reader import read_interval
from transforms.store import Store


def read_pieces(store: Store, spec: JobSpec, task: ShardTask, *, isolated: bool) -> Iterator[RecordBatch]:
    """Yields the batches of a shard, not yet numbered, without the closing one.

    Args:
        store: The output directory.
        spec: The job.
        task: The shard.
        isolated: Whether what has to be read again is read in a child process.
    """
    seam = _Seam(task)
    pieces = tasks_of_shard(store, task.shard) or [task]
    held: RecordBatch | None = None  # The dead letter at its end may go on in the next batch.
    for piece in pieces:
        for batch in _read_piece(store, spec, piece, seam, isolated=isolated):
            batch.task = task
            seam.follow(batch)
            if held is not None and join_letters(held, batch, spec.record_bytes):
                continue
            if held is not None:
                yield held
            held = batch
    if held is not None:
        yield held


def _read_piece(store: Store, spec: JobSpec, piece: ShardTask, seam: _Seam, *, isolated: bool) -> Iterator[RecordBatch]:
    entry = None if piece.piece is None else find_piece(store, spec, piece)
    if entry is not None and seam.meets(entry):
        with open_log(store, entry) as path:
            if path is not None:
                yield from read_log(path, piece)
                return
    yield from read_interval(store, spec, seam.begin(piece), isolated=isolated)


class _Seam:
    """Where the pieces before have ended, and what they covered together."""

    def __init__(self, task: ShardTask) -> None:
        self._index = task.first_index
        self._boundary = task.start_at
        self._covered: Span | None = None

    def meets(self, entry: PieceEntry) -> bool:
        """Whether a piece begins where the one before it ended, as far as that can be told."""
        boundary, span = self._boundary_for(entry.task), entry.first_span
        if boundary is None or span is None:
            return boundary is None
        return boundary >= span.asked_end if span.start is None else span.start == boundary

    def begin(self, piece: ShardTask) -> ShardTask:
        """Returns the piece to be read from where the one before it ended."""
        return dataclasses.replace(piece, start_at=self._boundary_for(piece))

    def _boundary_for(self, piece: ShardTask) -> int | None:
        return self._boundary if piece.first_index == self._index and piece.start > 0 else None

    def follow(self, batch: RecordBatch) -> None:
        """Takes note of where a range has ended; its span becomes that of all ranges of the input so far."""
        span, source = batch.span, batch.source
        if span is None or source is None:
            return
        if source.index != self._index:
            self._index, self._boundary, self._covered = source.index, None, None
        if span.end is not None:
            self._boundary = span.end
        if self._covered is not None:
            batch.span = _together(self._covered, span)
        self._covered = batch.span


def join_letters(before: RecordBatch, after: RecordBatch, record_bytes: float) -> bool:
    """Makes one dead letter of an unreadable range of which two pieces have each lost a part.

    Args:
        before: The end of a piece, which gets the letter.
        after: What follows it, which loses its own.
        record_bytes: See `estimate_records`.

    Returns:
        Whether all of `after` is in `before` now.
    """
    if not before.dead or not after.dead or before.span is None or not _goes_on(before.dead[-1], after.dead[0]):
        return False
    length = before.dead[-1].length + after.dead.pop(0).length
    before.dead[-1] = dataclasses.replace(before.dead[-1], length=length)
    estimate_records(before.dead[-1:], record_bytes)
    after.records_read -= 1
    if after.records_read or after.dropped or after.rolls:
        return False
    before.num_bytes += after.num_bytes
    before.span = after.span
    return True


def _together(one: Span, other: Span) -> Span:
    """Returns the span of two ranges of an input that follow one another."""
    start = other.start if one.start is None else one.start
    end = one.end if other.end is None else other.end
    known = one.crc is not None and other.crc is not None
    crc = combine(one.crc or 0, other.crc or 0, other.asked_end - other.asked_start) if known else None
    return Span(one.asked_start, other.asked_end, start, end, crc)


def _goes_on(letter: DeadLetter, following: DeadLetter) -> bool:
    same = (letter.source, letter.reason, letter.error) == (following.source, following.reason, following.error)
    meets = letter.position + letter.length == following.position
    return same and meets and is_unreadable(letter) and is_unreadable(following)
