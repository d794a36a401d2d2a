"""Reads one planned shard: its slice of inputs.jsonl, input by input, as record batches. No Beam here.

Whatever an input does, the shard goes on: what cannot be read is a dead letter that names the bytes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from transforms.dead_letters import describe_exception
from transforms.elements import Chunk, DeadLetter, Input, JobSpec, RecordBatch, ShardTask, Span
from transforms.formats import load_format
from transforms.inputs import read_inputs
from transforms.ledger import find_ledger, ledger_name
from transforms.plan_file import INPUTS_NAME
from transforms.sources import RandomAccessFile, explain_error, open_input
from transforms.store import Store


def read_shard(store: Store, spec: JobSpec, task: ShardTask) -> Iterator[RecordBatch]:
    """Yields the batches of a shard, numbered from 0; the last one is empty and marked so.

    A shard that is committed already yields one batch that says so, and nothing is read.
    """
    if _is_committed(store, spec, task):
        yield RecordBatch(task, 0, last=True, committed=True)
        return
    sequence = 0
    left = spec.limit or None
    for source, start, end in _slices(store, task):
        for chunk in _read_slice(spec, source, start, end, task):
            if left is not None:
                chunk = _cut(chunk, left)
                left -= len(chunk.records) + len(chunk.dead)
            yield _to_batch(task, sequence, source, chunk)
            sequence += 1
            if left == 0:
                break
        if left == 0:
            break
    yield RecordBatch(task, sequence, last=True)


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


def _slices(store: Store, task: ShardTask) -> Iterator[tuple[Input, int, int]]:
    """Yields (input, start, end) for every input of the interval; the lines are streamed."""
    with store.open(INPUTS_NAME) as lines:
        for offset, source in read_inputs(lines, task.first_offset, task.first_index):
            start = task.start if offset == task.first_offset else 0
            end = task.end if offset == task.last_offset else source.size
            yield source, start, end
            if offset == task.last_offset:
                return


def _read_slice(spec: JobSpec, source: Input, start: int, end: int, task: ShardTask) -> Iterator[Chunk]:
    if task.start_at is None or source.index != task.first_index:
        yield from read_input(spec, source, start, end)
    elif task.start_at >= end:
        yield Chunk(span=Span(start, end, None, None))
    else:
        for chunk in read_input(spec, source, task.start_at, end):
            if chunk.span is not None:
                chunk.span = dataclasses.replace(chunk.span, asked_start=start)
            yield chunk


def read_input(spec: JobSpec, source: Input, start: int, end: int) -> Iterator[Chunk]:
    """Yields what a range of an input holds; whatever fails becomes the dead letter of the rest of the range.

    Raises:
        OSError: The machine is at fault, not the input.
    """
    if source.error is not None:
        yield _unreadable(source, 0, 0, *source.error)
        return
    position = start
    try:
        file = open_input(source)
        try:
            for chunk in _read_open(file, spec, source, start, end):
                yield chunk
                position += chunk.num_bytes
        finally:
            file.close()
    except OSError as error:
        yield _rest(source, start, position, end, *explain_error(error))
    except Exception as error:
        # A reader must not fail on any bytes; if it does, the job goes on and the dead letter tells.
        error_type, text, frames = describe_exception(error)
        chunk = _rest(source, start, position, end, "reader_failed", text)
        chunk.dead[0].error_type, chunk.dead[0].traceback = error_type, frames
        yield chunk


def _read_open(file: RandomAccessFile, spec: JobSpec, source: Input, start: int, end: int) -> Iterator[Chunk]:
    if source.size:
        yield from load_format(spec.format).read_range(file, source, start, end, spec)
    elif file.read_at(0, 1):  # Some file systems say 0 bytes of files that have content.
        yield _unreadable(source, 0, 0, "input_changed", "the file was listed with 0 bytes but holds some")
    elif spec.format == "files":
        yield _unreadable(source, 0, 0, "empty_file", "the file is empty")
    else:
        yield Chunk()  # An empty input has its row in the books.


def _unreadable(source: Input, position: int, length: int, reason: str, text: str) -> Chunk:
    letter = DeadLetter(source.name, position, length, "read", reason, error=text, whole_file=position == 0)
    return Chunk(dead=[letter], num_bytes=length)


def _rest(source: Input, start: int, position: int, end: int, reason: str, text: str) -> Chunk:
    """Returns the dead letter of what is left of a range. Where the next range begins is then not known."""
    position = min(position, end)
    chunk = _unreadable(source, position, end - position, reason, text)
    chunk.span = Span(start, end, None if position == start else start, None)
    return chunk


def _cut(chunk: Chunk, limit: int) -> Chunk:
    """Returns at most `limit` records and dead letters of a chunk, for trial runs."""
    records = chunk.records[:limit]
    dead = chunk.dead[: limit - len(records)]
    return dataclasses.replace(chunk, records=records, positions=chunk.positions[:limit], dead=dead)


def _to_batch(task: ShardTask, sequence: int, source: Input, chunk: Chunk) -> RecordBatch:
    return RecordBatch(
        task,
        sequence,
        source=source,
        records=chunk.records,
        positions=chunk.positions,
        dead=chunk.dead,
        records_read=len(chunk.records) + len(chunk.dead),
        num_bytes=chunk.num_bytes,
        span=chunk.span,
        rolls=chunk.rolls,
    )
