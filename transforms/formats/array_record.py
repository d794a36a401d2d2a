"""ArrayRecord as a source: split by record index, so that a corpus can be resharded or recompressed.

The format keeps no byte positions of records, so a position in the file stands for the record index in the same
proportion: record i of n lies at position i * size / n. Dead letters therefore carry the record's index, as
`position` and as `row`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from array_record.python.array_record_module import ArrayRecordReader

from transforms.elements import BATCH_MAX_BYTES, BATCH_MAX_RECORDS, Chunk, DeadLetter, Input, JobSpec, Span
from transforms.formats.sniff import what_is_it
from transforms.sources import RandomAccessFile

SPLITTABLE = True
_READER_OPTIONS = "readahead_buffer_size:1048576,max_parallelism:1"


def read_range(file: RandomAccessFile, source: Input, start: int, end: int, spec: JobSpec) -> Iterator[Chunk]:
    """Yields the records whose position lies in [start, end); a damaged record is one dead letter.

    Raises:
        OSError: The file could not be read.
    """
    reader = ArrayRecordReader(os.fsencode(source.name), _READER_OPTIONS)
    try:
        if not reader.ok():
            yield from _not_array_record(file, source, start, end)
            return
        count = reader.num_records()
        first, last = (-(-position * count // file.size) for position in (start, end))
        yield from _read_records(reader, source, first, last, spec)
        yield Chunk(span=Span(start, end, start, end))
    finally:
        _close(reader)


def _not_array_record(file: RandomAccessFile, source: Input, start: int, end: int) -> Iterator[Chunk]:
    if start > 0:  # The range that holds byte 0 speaks for the file.
        yield Chunk(span=Span(start, end, None, None))
        return
    letter = DeadLetter(source.name, 0, file.size, "read", "not_array_record", whole_file=True)
    letter.error = (
        f"the file has no valid ArrayRecord footer (cut, or another format); {what_is_it(file.read_at(0, 64))}"
    )
    yield Chunk(dead=[letter], num_bytes=file.size, span=Span(start, end, 0, file.size))


def _read_records(reader: ArrayRecordReader, source: Input, first: int, last: int, spec: JobSpec) -> Iterator[Chunk]:
    """Reads [first, last) in pieces of about a batch; the piece grows while records turn out small."""
    count = 1
    while first < last:
        until = min(last, first + count)
        chunk = _read_piece(reader, source, first, until)
        chunk = _without_oversize(chunk, source, spec)
        yield chunk
        first = until
        largest = max((len(record) for record in chunk.records), default=1)
        fitting = max(1, BATCH_MAX_BYTES // max(1, largest))
        count = min(2 * count, fitting, BATCH_MAX_RECORDS)


def _read_piece(reader: ArrayRecordReader, source: Input, first: int, last: int) -> Chunk:
    try:
        records = list(reader.read(first, last))
        if len(records) == last - first:
            return Chunk(records, list(range(first, last)), num_bytes=sum(map(len, records)))
    except Exception:  # A damaged record fails its whole piece; which one it is shows record by record.
        pass
    chunk = Chunk()
    for index in range(first, last):
        try:
            [record] = reader.read(index, index + 1)
        except Exception as error:
            chunk.dead.append(_damaged(source, index, error))
            continue
        chunk.records.append(record)
        chunk.positions.append(index)
        chunk.num_bytes += len(record)
    return chunk


def _damaged(source: Input, index: int, error: Exception) -> DeadLetter:
    letter = DeadLetter(source.name, index, 0, "read", "damaged_record", extra={"row": index})
    letter.error_type = type(error).__name__
    letter.error = str(error)[:2000]
    return letter


def _without_oversize(chunk: Chunk, source: Input, spec: JobSpec) -> Chunk:
    if all(len(record) <= spec.max_record_bytes for record in chunk.records):
        return chunk
    kept = Chunk(dead=chunk.dead, num_bytes=chunk.num_bytes)
    for position, record in zip(chunk.positions, chunk.records, strict=True):
        if len(record) <= spec.max_record_bytes:
            kept.records.append(record)
            kept.positions.append(position)
            continue
        letter = DeadLetter(source.name, position, len(record), "read", "record_too_large", extra={"row": position})
        letter.error = f"the record has {len(record)} bytes; source.max_record_bytes allows {spec.max_record_bytes}"
        kept.dead.append(letter)
    return kept


def _close(reader: ArrayRecordReader) -> None:
    """Closes the reader; one that met damage raises on closing, which its dead letters have already told."""
    try:
        reader.close()
    except Exception:
        return
