"""Raw files: one record a file, its bytes unchanged. Images, audio, documents."""

from __future__ import annotations

from collections.abc import Iterator

from transforms.elements import Chunk, DeadLetter, Input, JobSpec, Span
from transforms.sources import RandomAccessFile

SPLITTABLE = False
NATIVE = False


def read_range(
    file: RandomAccessFile, source: Input, start: int, end: int, spec: JobSpec, *, trusted: bool = False
) -> Iterator[Chunk]:
    """Yields the file as one record, or as a dead letter when it is longer than `max_record_bytes`.

    Empty files do not come here: the shard reader makes them dead letters.
    """
    span = Span(start, end, start, end)
    if file.size > spec.max_record_bytes:
        letter = DeadLetter(source.name, 0, file.size, "read", "record_too_large", whole_file=True)
        letter.error = f"the file has {file.size} bytes; source.max_record_bytes allows {spec.max_record_bytes}"
        yield Chunk(dead=[letter], num_bytes=file.size, span=span)
        return
    data = file.read_at(0, file.size)
    if len(data) < file.size:
        letter = DeadLetter(source.name, 0, file.size, "read", "input_changed", whole_file=True)
        letter.error = f"the file shrank while it was read: {file.size} bytes at first, {len(data)} now"
        yield Chunk(dead=[letter], num_bytes=file.size, span=span)
        return
    yield Chunk([data], [0], num_bytes=len(data), span=span)
