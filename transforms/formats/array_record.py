"""ArrayRecord as a source: split by record index, so that a corpus can be resharded or recompressed.

The format keeps no byte positions of records, so a position in the file stands for the record index in the same
proportion: record i of n lies at position i * size / n. Dead letters therefore carry the record's index, as
`position` and as `row`. The library reads paths: an input with a URL is copied to this machine for as long as it is
open, since the library's own reader of gs:// never gives up on a service that does not answer.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from array_record.python.array_record_module import ArrayRecordReader

from transforms.dead_letters import MAX_ERROR_CHARS
from transforms.elements import BATCH_MAX_BYTES, BATCH_MAX_RECORDS, Chunk, DeadLetter, Input, JobSpec, Span
from transforms.formats.sniff import HEAD_BYTES, what_is_it
from transforms.sources import RandomAccessFile, local_path, open_input

SPLITTABLE = True
NATIVE = True
_READER_OPTIONS = "readahead_buffer_size:1048576,max_parallelism:1"


def read_range(
    file: RandomAccessFile, source: Input, start: int, end: int, spec: JobSpec, *, trusted: bool = False
) -> Iterator[Chunk]:
    """Yields the records whose position lies in [start, end); a damaged record is one dead letter.

    Raises:
        OSError: The file could not be read.
    """
    with local_path(file, source) as path:
        yield from _read_path(path, file, source, start, end, spec)


def _read_path(
    path: str, file: RandomAccessFile, source: Input, start: int, end: int, spec: JobSpec
) -> Iterator[Chunk]:
    reader = _open(path)
    if reader is None:
        yield from _not_array_record(file, source, start, end)
        return
    records = _Records(reader, path, source)
    try:
        count = reader.num_records()
        first, last = (-(-position * count // file.size) for position in (start, end))
        yield from records.read(first, last, spec.max_record_bytes)
        yield Chunk(span=Span(start, end, start, end))
    finally:
        records.close()


def count_records(path: str) -> int:
    """Returns the records of a file, 0 where it is no ArrayRecord."""
    reader = _open(path)
    if reader is None:
        return 0
    try:
        return int(reader.num_records())
    finally:
        _close(reader)


def _open(path: str) -> ArrayRecordReader | None:
    """Opens the file; None when it is no ArrayRecord. Versions of the library differ in whether they raise."""
    try:
        reader = ArrayRecordReader(os.fsencode(path), _READER_OPTIONS)
        if reader.ok():
            return reader
        _close(reader)
    except RuntimeError:
        pass
    os.close(os.open(os.fsencode(path), os.O_RDONLY))  # Raises if the machine is out of descriptors.
    return None


def _not_array_record(file: RandomAccessFile, source: Input, start: int, end: int) -> Iterator[Chunk]:
    if start > 0:  # The range that holds byte 0 speaks for the file.
        yield Chunk(span=Span(start, end, None, None))
        return
    letter = DeadLetter(source.name, 0, file.size, "read", "not_array_record", whole_file=True)
    guess = what_is_it(file.read_at(0, HEAD_BYTES))
    letter.error = f"the file has no valid ArrayRecord footer (cut, or another format); {guess}"
    yield Chunk(dead=[letter], num_bytes=file.size, span=Span(start, end, 0, file.size))


def read_rows(source: Input, rows: list[int], max_record_bytes: int) -> Iterator[Chunk | None]:
    """Yields one chunk for each record number, None for what the file no longer holds."""
    file = open_input(source)
    try:
        with local_path(file, source) as path:
            yield from _read_rows_of_path(path, source, rows, max_record_bytes)
    finally:
        file.close()


def _read_rows_of_path(path: str, source: Input, rows: list[int], max_record_bytes: int) -> Iterator[Chunk | None]:
    reader = _open(path)
    if reader is None:
        yield from (None for _ in rows)
        return
    records = _Records(reader, path, source)
    try:
        count = reader.num_records()
        for row in rows:
            yield next(records.read(row, row + 1, max_record_bytes)) if row < count else None
    finally:
        records.close()


class _Records:
    """Reads records one after the other, so that a batch can end when it is full, whatever their sizes.

    A damaged record counts as long as the mean of the file: the format does not tell.
    """

    def __init__(self, reader: ArrayRecordReader, path: str, source: Input) -> None:
        self._reader: ArrayRecordReader | None = reader
        self._path = path
        self._source = source
        self._mean_bytes = source.size // max(1, reader.num_records())

    def read(self, first: int, last: int, max_record_bytes: int) -> Iterator[Chunk]:
        """Yields the records [first, last) in batches."""
        self._seek(first)
        chunk = Chunk()
        for index in range(first, last):
            self._read_one(index, chunk, max_record_bytes)
            if chunk.num_bytes >= BATCH_MAX_BYTES or len(chunk.records) + len(chunk.dead) >= BATCH_MAX_RECORDS:
                yield chunk
                chunk = Chunk()
        yield chunk

    def _read_one(self, index: int, chunk: Chunk, max_record_bytes: int) -> None:
        try:
            if self._reader is None:
                self._reader = _open(self._path)
                self._seek(index)
            if self._reader is None:
                raise RuntimeError("the file cannot be opened any more")
            record = self._reader.read()
        except RuntimeError as error:
            # A reader that met damage stays failed: the next record needs a new one.
            self.close()
            chunk.num_bytes += self._mean_bytes
            text = str(error)[:MAX_ERROR_CHARS]
            chunk.dead.append(self._letter(index, self._mean_bytes, "damaged_record", text, error))
            return
        chunk.num_bytes += len(record)
        if len(record) > max_record_bytes:
            text = f"the record has {len(record)} bytes; source.max_record_bytes allows {max_record_bytes}"
            chunk.dead.append(self._letter(index, len(record), "record_too_large", text))
            return
        chunk.records.append(record)
        chunk.positions.append(index)

    def _seek(self, index: int) -> None:
        if self._reader is not None and index < self._reader.num_records():
            self._reader.seek(index)

    def _letter(self, index: int, length: int, reason: str, text: str, error: Exception | None = None) -> DeadLetter:
        letter = DeadLetter(self._source.name, index, length, "read", reason, error=text, extra={"row": index})
        letter.error_type = type(error).__name__ if error is not None else ""
        return letter

    def close(self) -> None:
        """Gives the reader back."""
        if self._reader is not None:
            _close(self._reader)
            self._reader = None


def _close(reader: ArrayRecordReader) -> None:
    """Closes the reader; one that met damage raises on closing, which its dead letters have already told."""
    with contextlib.suppress(RuntimeError):
        reader.close()
