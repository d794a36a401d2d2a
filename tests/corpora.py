"""Seeded corpora, damage, and an oracle that shares no code with the readers it judges.

Payloads are arithmetic, so that a lost, doubled or misplaced record shows in what is compared. The framing is written
here from the format's description and held against TensorFlow's writer in `test_tfrecord.py`.
"""

from __future__ import annotations

import dataclasses
import errno
import gzip
import itertools
import json
import os
import random
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import google_crc32c
from array_record.python.array_record_module import ArrayRecordWriter

from transforms.books import JobBooks, SourceRow, add_rows, add_up, edges_of
from transforms.elements import Chunk, DeadLetter, Input, JobSpec, ShardInfo, ShardTask, Span, name_fields
from transforms.sources import RandomAccessFile

FRAME_BYTES = 16
HEADER_BYTES = 12
HUGE_LENGTH = 1 << 40

ReadRange = Callable[[RandomAccessFile, Input, int, int, JobSpec], Iterator[Chunk]]


# Corpora.


def text_payload(index: int, size: int) -> bytes:
    """The record's number, over and over: `17,17,17,...`."""
    word = b"%d," % index
    return (word * (size // len(word) + 1))[:size]


def zeros_payload(index: int, size: int) -> bytes:
    """The record's number and then zeros, which look like short lengths at every position."""
    return struct.pack("<H", index)[:size].ljust(size, b"\0")


def int64_payload(index: int, size: int) -> bytes:
    """Small int64 numbers, as token arrays hold: seven zero bytes of eight."""
    return struct.pack(f"<{size // 8 + 1}q", *range(index, index + size // 8 + 1))[:size]


PAYLOADS = {"text": text_payload, "zeros": zeros_payload, "int64": int64_payload}


def make_payloads(count: int, max_size: int = 200, *, kind: str = "text", seed: int = 0) -> list[bytes]:
    """Returns `count` payloads of 0 to `max_size` bytes."""
    rng = random.Random(seed)
    return [PAYLOADS[kind](index, rng.randint(0, max_size)) for index in range(count)]


# TFRecord framing.


def masked_crc(data: bytes) -> int:
    """CRC-32C, rotated right by 15 bits, plus the format's constant."""
    crc = google_crc32c.value(data)
    return (((crc >> 15) | (crc << 17) & 0xFFFFFFFF) + 0xA282EAD8) % (1 << 32)


def header(length: int) -> bytes:
    """A valid record header for any length."""
    packed = struct.pack("<Q", length)
    return packed + struct.pack("<I", masked_crc(packed))


def frame(payload: bytes) -> bytes:
    """A whole TFRecord record."""
    return header(len(payload)) + payload + struct.pack("<I", masked_crc(payload))


def frame_all(payloads: Iterable[bytes]) -> bytes:
    """A TFRecord file."""
    return b"".join(map(frame, payloads))


def interleaved(num_records: int, *, tracks: int = 2, size: int = 400, late: int = 0) -> tuple[bytes, list[bytes]]:
    """A valid file whose payloads hold further tracks of valid framing, and its payloads.

    Each record of a track runs from inside one record of the track before to the same place in its next, so that
    whoever begins on a track stays on it to the end of the file.

    Args:
        num_records: Records of the file.
        tracks: Tracks of framing, that of the file itself among them.
        size: Bytes of a payload.
        late: Record of the file in which the other tracks begin.
    """
    period = size + FRAME_BYTES
    end = num_records * period
    marks: list[tuple[int, int]] = []  # (where a record of some track begins, where its payload ends)
    for track in range(tracks):
        begin = track * period // tracks + (late * period if track else 0)
        marks += [(start, start + HEADER_BYTES + size) for start in range(begin, end, period)]
    data = bytearray()
    starts = {start for start, _ in marks}
    checksums = {last: start for start, last in marks}
    while len(data) < end:
        at = len(data)
        if at in checksums:  # All that it covers stands already.
            data += struct.pack("<I", masked_crc(bytes(data[checksums[at] + HEADER_BYTES : at])))
        elif at in starts:
            data += header(size)
        else:
            data += b"%d" % (at // period % 10)
    del data[end:]
    return bytes(data), [bytes(data[at + HEADER_BYTES : at + HEADER_BYTES + size]) for at in range(0, end, period)]


def frame_starts(payloads: Sequence[bytes]) -> list[int]:
    """Where each record begins, and the end of the file."""
    starts = [0]
    for payload in payloads:
        starts.append(starts[-1] + FRAME_BYTES + len(payload))
    return starts


def is_valid_header(data: bytes, position: int) -> bool:
    """Whether a header with a right checksum stands there."""
    length = data[position : position + 8]
    return len(length) == 8 and data[position + 8 : position + 12] == struct.pack("<I", masked_crc(length))


def gzip_of(data: bytes) -> bytes:
    """One gzip member, the same bytes every time."""
    return gzip.compress(data, 6, mtime=0)


# Damage.


def flip_bit(data: bytes, position: int, bit: int = 0) -> bytes:
    """One bit turned over."""
    return data[:position] + bytes([data[position] ^ 1 << bit]) + data[position + 1 :]


def insert(data: bytes, position: int, new: bytes) -> bytes:
    """Bytes pushed in."""
    return data[:position] + new + data[position:]


def remove(data: bytes, position: int, num_bytes: int) -> bytes:
    """Bytes taken out."""
    return data[:position] + data[position + num_bytes :]


def overwrite(data: bytes, position: int, new: bytes) -> bytes:
    """Bytes replaced by others, the length of the file kept."""
    return (data[:position] + new + data[position + len(new) :])[: len(data)]


def swap_blocks(data: bytes, first: int, second: int, num_bytes: int) -> bytes:
    """Two blocks that do not overlap, exchanged."""
    low, high = sorted((first, second))
    num_bytes = min(num_bytes, high - low, len(data) - high)
    return b"".join(
        (
            data[:low],
            data[high : high + num_bytes],
            data[low + num_bytes : high],
            data[low : low + num_bytes],
            data[high + num_bytes :],
        )
    )


DAMAGES = ("flip", "cut", "zero", "insert", "remove", "swap")


def damage_near(rng: random.Random, data: bytes, targets: Sequence[int]) -> tuple[str, bytes]:
    """Returns (kind, damaged bytes) for one random damage within 60 bytes of one of the positions.

    A swap exchanges one block there with another anywhere; a cut ends the file there.
    """
    kind = rng.choice(DAMAGES)
    position = min(max(rng.choice(targets) + rng.randint(-60, 60), 0), len(data) - 1)
    size = rng.randint(1, 80)
    if kind == "flip":
        return kind, flip_bit(data, position, rng.randrange(8))
    if kind == "cut":
        return kind, data[: max(1, position)]
    if kind == "zero":
        return kind, overwrite(data, position, bytes(size))
    if kind == "insert":
        return kind, insert(data, position, bytes(size) if rng.random() < 0.3 else rng.randbytes(size))
    if kind == "remove":
        return kind, remove(data, position, min(size, len(data) - 1)) or data[:1]
    return kind, swap_blocks(data, position, rng.randrange(len(data)), size)


# The oracle.


def whole_frames(data: bytes, payloads: Iterable[bytes]) -> list[tuple[int, bytes]]:
    """Every place in damaged bytes where a record of the corpus still stands whole, in order.

    Found by looking for the record's bytes, so neither checksums nor boundaries come into it.
    """
    found = []
    for payload in set(payloads):
        record = frame(payload)
        at = data.find(record)
        while at >= 0:
            found.append((at, payload))
            at = data.find(record, at + 1)
    return sorted(found)


def naive_headers(data: bytes, max_length: int) -> list[int]:
    """Every position with a valid header, one at a time."""
    return [
        at
        for at in range(len(data) - HEADER_BYTES + 1)
        if struct.unpack_from("<Q", data, at)[0] <= max_length and is_valid_header(data, at)
    ]


# Reading in ranges.


class MemoryFile:
    """A file in memory; it may say a size that it does not have, and have bad blocks."""

    def __init__(self, data: bytes, *, size: int | None = None, bad: tuple[int, int] | None = None) -> None:
        self.data = data
        self.size = len(data) if size is None else size
        self.bad = bad
        self.largest_read = 0
        self.num_reads = 0
        self.max_reads = 100_000
        self.closed = False

    def read_at(self, position: int, num_bytes: int) -> bytes:
        """Slices, and remembers how much was asked for."""
        self.num_reads += 1
        assert self.num_reads <= self.max_reads, f"the reader asked {self.max_reads} times: it does not come to an end"
        self.largest_read = max(self.largest_read, num_bytes)
        if self.bad is not None and position < self.bad[1] and position + num_bytes > self.bad[0]:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return self.data[position : position + num_bytes]

    def close(self) -> None:
        """Remembers that it was closed."""
        self.closed = True


@dataclasses.dataclass
class RangeResult:
    """All chunks of one range, put together."""

    records: list[bytes] = dataclasses.field(default_factory=list)
    positions: list[int] = dataclasses.field(default_factory=list)
    dead: list[DeadLetter] = dataclasses.field(default_factory=list)
    num_bytes: int = 0
    spans: list[Span] = dataclasses.field(default_factory=list)
    largest_chunk: int = 0
    rolls: set[bool] = dataclasses.field(default_factory=set)

    @property
    def span(self) -> Span:
        """What was covered; every range says it once, at its end."""
        [span] = self.spans
        return span

    @property
    def reasons(self) -> list[str]:
        """Why records are dead, in order."""
        return [letter.reason for letter in self.dead]

    @property
    def regions(self) -> list[tuple[int, int, str]]:
        """(position, length, reason) of the dead letters."""
        return [(letter.position, letter.length, letter.reason) for letter in self.dead]


def gather(chunks: Iterable[Chunk]) -> RangeResult:
    """Puts the chunks of a range together, of a reader that comes to an end."""
    result = RangeResult()
    idle = 0
    for chunk in chunks:
        idle = 0 if chunk.num_bytes else idle + 1
        assert idle < 1000, f"1,000 chunks of no bytes: the reader does not come to an end. {chunk}"
        assert len(chunk.records) == len(chunk.positions)
        assert not result.spans, "a chunk follows the one with the span"
        result.records += chunk.records
        result.positions += chunk.positions
        result.dead += chunk.dead
        result.num_bytes += chunk.num_bytes
        result.spans += [] if chunk.span is None else [chunk.span]
        result.largest_chunk = max(result.largest_chunk, sum(map(len, chunk.records)))
        result.rolls.add(chunk.rolls)
    return result


def make_spec(root: str = "", **changes: Any) -> JobSpec:
    """A job that reads TFRecord."""
    return JobSpec(**{"root": root, "plan_id": "plan", "num_shards": 1, "format": "tfrecord", **changes})


def read_bytes(
    read_range: ReadRange,
    data: bytes | MemoryFile,
    start: int = 0,
    end: int | None = None,
    **changes: Any,
) -> RangeResult:
    """Reads a range of bytes in memory, the whole of them by default."""
    file = MemoryFile(data) if isinstance(data, bytes) else data
    source = Input(0, "memory", file.size, 0)
    return gather(read_range(file, source, start, file.size if end is None else end, make_spec(**changes)))


def cut_ranges(size: int, cuts: Iterable[int]) -> list[tuple[int, int]]:
    """The ranges between cuts, to the end of the file."""
    edges = [0, *sorted({cut for cut in cuts if 0 < cut < size}), size]
    return list(itertools.pairwise(edges))


def as_shard(shard: int, result: RangeResult, size: int) -> ShardInfo:
    """What a shard that holds this range alone reports, when all its records are written."""
    span = result.spans[0] if result.spans else None
    dead, written = len(result.dead), len(result.records)
    row = SourceRow(0, 1, size, span, dead + written, written, 0, 0, dead, result.num_bytes)
    row.dead_bytes = sum(letter.length for letter in result.dead)
    first, last = edges_of([row])
    return ShardInfo(ShardTask(shard, 0, 0, 0, 0, 0, 0), 1, {**add_rows([row]), "bytes_written": 0}, first, last)


def add_up_ranges(results: Sequence[RangeResult], size: int) -> JobBooks:
    """The books of one file whose ranges are a shard each."""
    return add_up(as_shard(shard, result, size) for shard, result in enumerate(results))


def read_again(read_range: ReadRange, data: bytes, start: int, end: int, start_at: int, **changes: Any) -> RangeResult:
    """Reads a range from the boundary at which the range before it ended."""
    if start_at >= end:
        return RangeResult(spans=[Span(start, end, None, None)])
    result = read_bytes(read_range, data, start_at, end, **changes)
    result.spans = [dataclasses.replace(result.span, asked_start=start)]
    return result


def first_gap(results: Sequence[RangeResult]) -> tuple[int, int] | None:
    """(range, boundary) of the first range that does not begin where the ranges before it ended."""
    boundary = results[0].span.end
    assert boundary is not None
    for number, result in enumerate(results[1:], 1):
        span = result.span
        if span.start is None:
            if boundary < span.asked_end:
                return number, boundary
        elif span.start != boundary:
            return number, boundary
        else:
            assert span.end is not None
            boundary = span.end
    return None


def read_until_they_meet(
    read_range: ReadRange, data: bytes, ranges: Sequence[tuple[int, int]], **changes: Any
) -> tuple[list[RangeResult], bool]:
    """Reads every range on its own, and again those that `add_up` calls apart; says whether there were any."""
    results = [read_bytes(read_range, data, start, end, **changes) for start, end in ranges]
    ever_apart = False
    for _ in range(len(results) + 1):
        apart = [(info.task.shard, boundary) for info, boundary in add_up_ranges(results, len(data)).apart]
        assert (apart[0] if apart else None) == first_gap(results)
        if not apart:
            return results, ever_apart
        ever_apart = True
        for number, boundary in apart:
            results[number] = read_again(read_range, data, *ranges[number], boundary, **changes)
    raise AssertionError("the ranges do not meet however often they are read")


def assert_every_byte_is_named_once(results: Iterable[RangeResult], size: int, note: object = "") -> None:
    """Recovered records, with their framing, and dead letters tile the (decompressed) bytes from 0 to `size`."""
    pieces = []
    for result in results:
        for position, record in zip(result.positions, result.records, strict=True):
            pieces.append((position, position + FRAME_BYTES + len(record)))
        pieces += [(letter.position, letter.position + letter.length) for letter in result.dead]
    at = 0
    for start, end in sorted(pieces):
        assert start <= at, f"bytes {at} to {start} are named by nothing. {note}"
        assert start >= at, f"bytes {start} to {min(at, end)} are named twice. {note}"
        at = end
    assert at == size, f"the last {size - at} bytes are named by nothing. {note}"


# Files.


def write_file(path: Path, data: bytes) -> Input:
    """Writes a file and returns it as it would be listed."""
    path.write_bytes(data)
    return listed(path)


def listed(path: Path, index: int = 0) -> Input:
    """A file as it is listed."""
    info = os.stat(path)
    return Input(index, str(path), info.st_size, info.st_mtime_ns)


def input_lines(sources: Iterable[Input]) -> list[bytes]:
    """The lines of inputs.jsonl."""
    lines = []
    for source in sources:
        fields: dict[str, Any] = {**name_fields("name", source.name), "size": source.size, "mtime_ns": source.mtime_ns}
        fields |= {"error": source.error} if source.error else {}
        lines.append(json.dumps(fields).encode() + b"\n")
    return lines


def write_array_record(path: Path, records: Iterable[bytes], options: str = "group_size:1,zstd:3") -> Input:
    """Writes an ArrayRecord file and returns it as it would be listed."""
    writer = ArrayRecordWriter(str(path), options)
    for record in records:
        writer.write(record)
    writer.close()
    return listed(path)
