"""Reads one planned shard: its slice of inputs.jsonl, input by input, as record batches. No Beam here.

Whatever an input does, the shard goes on: what cannot be read is a dead letter that names the bytes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

from transforms.billing import pay_by
from transforms.budget import AbortWatch
from transforms.checksums import HashedFile, checksum_of, has_own_checksum
from transforms.dead_letters import describe_exception, estimate_records
from transforms.elements import Chunk, DeadLetter, Input, JobSpec, RecordBatch, ShardTask, Span
from transforms.formats import load_format
from transforms.inputs import read_inputs
from transforms.isolated_reader import read_isolated
from transforms.ledger import find_ledger, ledger_name
from transforms.pieces import find_piece
from transforms.plan_file import INPUTS_NAME
from transforms.sources import InputChangedError, RandomAccessFile, explain_error, look_up, open_input, will_read
from transforms.store import Store
from transforms.tries import ISOLATE_READER_FROM, ISOLATE_STEPS_FROM, mark_try


def read_shard(store: Store, spec: JobSpec, task: ShardTask) -> Iterator[RecordBatch]:
    """Yields the batches of a shard, numbered from 0; the last one is empty and marked so.

    A shard that is committed already yields one batch that says so, and nothing is read.
    """
    if _is_committed(store, spec, task) or _is_piece_committed(store, spec, task):
        yield RecordBatch(task, 0, last=True, committed=True)
        return
    watch = AbortWatch(store)
    if watch.is_off():
        yield RecordBatch(task, 0, last=True, not_run=True)
        return
    number = mark_try(store, spec, task.shard, task.piece)
    batches = _read_batches(store, spec, task, isolated=number >= ISOLATE_READER_FROM)
    for sequence, batch in enumerate(batches):
        batch.sequence = sequence
        batch.try_number = number
        batch.isolated = number >= ISOLATE_STEPS_FROM
        if watch.is_off():
            yield RecordBatch(task, sequence, last=True, not_run=True, try_number=number)
            return
        yield batch


def _read_batches(store: Store, spec: JobSpec, task: ShardTask, *, isolated: bool) -> Iterator[RecordBatch]:
    """Yields the batches of a shard, not yet numbered."""
    if spec.replay is not None:
        from transforms.replay_reader import read_letters  # It needs the readers below.

        yield from read_letters(store, spec, task, isolated=isolated)
        return
    if spec.num_pieces and task.piece is None:
        from transforms.piece_reader import read_pieces  # It needs the readers below, too.

        yield from read_pieces(store, spec, task, isolated=isolated)
        yield RecordBatch(task, 0, last=True)
        return
    left = spec.limit or None
    for source, start, end in _slices(store, task):
        for chunk in _read_slice(spec, source, start, end, task, isolated=isolated):
            if left is not None:
                chunk = _cut(chunk, left)
                left -= len(chunk.records) + len(chunk.dead)
            estimate_records(chunk.dead, spec.record_bytes)
            yield RecordBatch.of_chunk(task, source, chunk)
            if left == 0:
                break
        if left == 0:
            break
    yield RecordBatch(task, 0, last=True)


def _is_committed(store: Store, spec: JobSpec, task: ShardTask) -> bool:
    found = find_ledger(store, spec, task.shard)
    if found is None or found.ledger is None:
        return False
    if task.start_at is None or found.ledger.start_at == task.start_at:
        return True
    # The range is to be read again from another boundary: what was written from the wrong one makes room.
    if store.delete(ledger_name(spec, task.shard), found.version):
        for file in found.ledger.files():
            store.delete(file.name)
    return False


def _is_piece_committed(store: Store, spec: JobSpec, task: ShardTask) -> bool:
    return task.piece is not None and find_piece(store, spec, task) is not None


def read_interval(store: Store, spec: JobSpec, task: ShardTask, *, isolated: bool) -> Iterator[RecordBatch]:
    """Yields the batches of an interval of the inputs, not yet numbered, without a closing one."""
    for source, start, end in _slices(store, task):
        for chunk in _read_slice(spec, source, start, end, task, isolated=isolated):
            estimate_records(chunk.dead, spec.record_bytes)
            yield RecordBatch.of_chunk(task, source, chunk)


def _slices(store: Store, task: ShardTask) -> Iterator[tuple[Input, int, int]]:
    """Yields (input, start, end) for every input of the interval; the lines are streamed."""
    with store.open(INPUTS_NAME) as lines:
        for offset, source in read_inputs(lines, task.first_offset, task.first_index):
            start = task.start if offset == task.first_offset else 0
            end = task.end if offset == task.last_offset else source.size
            yield source, start, end
            if offset == task.last_offset:
                return


def _read_slice(
    spec: JobSpec, source: Input, start: int, end: int, task: ShardTask, *, isolated: bool
) -> Iterator[Chunk]:
    read = read_isolated if isolated else read_input
    again = task.start_at is not None and source.index == task.first_index
    chunks: Iterable[Chunk]
    if not again:
        chunks = read(spec, source, start, end)
    elif (task.start_at or 0) >= end:
        chunks = [Chunk(span=Span(start, end, None, None))]
    else:
        chunks = read(spec, source, task.start_at or 0, end, trusted=True)
    for chunk in chunks:
        if chunk.span is not None and (again or isolated):  # Not all of the range went by here.
            crc = None if has_own_checksum(source) else checksum_of(source, start, end)
            chunk.span = dataclasses.replace(chunk.span, asked_start=start, crc=crc)
        yield chunk


def read_input(spec: JobSpec, source: Input, start: int, end: int, *, trusted: bool = False) -> Iterator[Chunk]:
    """Yields what a range of an input holds; whatever fails becomes the dead letter of the rest of the range.

    Args:
        spec: The job.
        source: The input.
        start: First position of the range.
        end: Position after it.
        trusted: Whether `start` is where the range before ended.

    Raises:
        OSError: The machine is at fault, not the input.
    """
    if source.error is not None:
        yield _unreadable(source, 0, 0, *source.error)
        return
    if spec.billing_project:  # This may be a process of its own.
        pay_by(spec.billing_project)
    progress = Progress(source, start, end)
    try:
        file = _open(source, is_whole=start == 0 and end >= source.size)
        will_read(file, end)
        try:
            hashed = None if has_own_checksum(source) else HashedFile(file, start, end)
            for chunk in _read_open(hashed or file, spec, source, start, end, trusted=trusted):
                progress.follow(chunk)
                if chunk.span is not None and hashed is not None and not (chunk.dead and hashed.is_untouched):
                    chunk.span = dataclasses.replace(chunk.span, crc=hashed.checksum())
                yield chunk
        finally:
            file.close()
    except OSError as error:
        yield progress.rest(*explain_error(error))
    except Exception as error:
        # A reader must not fail on any bytes; if it does, the job goes on and the dead letter tells.
        error_type, text, frames = describe_exception(error)
        chunk = progress.rest("reader_failed", text)
        for letter in chunk.dead:
            letter.error_type, letter.traceback = error_type, frames
        yield chunk


def _open(source: Input, *, is_whole: bool) -> RandomAccessFile:
    """Opens an input; one that was only touched since it was listed, as it is now.

    That is an object whose checksum is the one that was listed, or a file of the size that was listed if it is read
    whole: then all that is read of it is one content, and its checksum goes into the ledger. Of a file that several
    shards share, some may have read another content before.
    """
    try:
        return open_input(source)
    except InputChangedError:
        now = look_up(source.name)
        is_same = now.crc32c == source.crc32c if source.crc32c else is_whole
        if now.size != source.size or now.mtime_ns == source.mtime_ns or not is_same:
            raise
        return open_input(now)


def _read_open(
    file: RandomAccessFile, spec: JobSpec, source: Input, start: int, end: int, *, trusted: bool
) -> Iterator[Chunk]:
    if source.size:
        yield from load_format(spec.format).read_range(file, source, start, end, spec, trusted=trusted)
    elif file.read_at(0, 1):  # Some file systems say 0 bytes of files that have content.
        yield _unreadable(source, 0, 0, "input_changed", "the file was listed with 0 bytes but holds some")
    elif spec.format == "files":
        yield _unreadable(source, 0, 0, "empty_file", "the file is empty")
    else:
        yield Chunk()  # An empty input has its row in the books.


def _unreadable(source: Input, position: int, length: int, reason: str, text: str) -> Chunk:
    letter = DeadLetter(source.name, position, length, "read", reason, error=text, whole_file=position == 0)
    return Chunk(dead=[letter], num_bytes=length)


class Progress:
    """How far a range was read, so that a failure costs exactly the rest of it."""

    def __init__(self, source: Input, start: int, end: int) -> None:
        self._source = source
        self._start, self._end = start, end
        self._first: int | None = None  # Where reading began, once that is known.
        self._position = start
        self._is_stream = False

    def follow(self, chunk: Chunk) -> None:
        """Takes note of what was read."""
        if chunk.reached is None:
            self._position += chunk.num_bytes
            return
        if self._first is None:
            self._first = chunk.reached - chunk.num_bytes
        self._position = chunk.reached
        self._is_stream = chunk.rolls

    def rest(self, reason: str, text: str) -> Chunk:
        """Returns the dead letter of what was not read.

        The range is said to end where it should have: the next one then names what lies before its first record.
        """
        if self._is_stream:
            chunk = _unreadable(self._source, self._position, 0, reason, text)
            chunk.rolls = True
            chunk.span = Span(self._start, self._end, self._start, self._source.size)
            return chunk
        first = self._start if self._first is None else self._first
        if self._first is not None and self._position >= self._end:
            # Only the look at what follows failed, and that is the next range's.
            return Chunk(span=Span(self._start, self._end, first, self._position))
        position = min(self._position, self._end)  # What was read may be longer than its place in the file.
        chunk = _unreadable(self._source, position, self._end - position, reason, text)
        chunk.span = Span(self._start, self._end, first, self._end)
        return chunk


def _cut(chunk: Chunk, limit: int) -> Chunk:
    """Returns at most `limit` records and dead letters of a chunk, for trial runs."""
    records = chunk.records[:limit]
    dead = chunk.dead[: limit - len(records)]
    if len(records) + len(dead) == len(chunk.records) + len(chunk.dead):
        return chunk
    num_bytes = sum(map(len, records)) + sum(letter.length for letter in dead)
    positions = chunk.positions[:limit]
    return dataclasses.replace(chunk, records=records, positions=positions, dead=dead, num_bytes=num_bytes)
