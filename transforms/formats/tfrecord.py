"""TFRecord: framing, damage and splitting.

A record is a header (uint64 length, masked CRC-32C of it), the payload, and the payload's masked CRC-32C.

A position is a *boundary* if its length checksum holds, the record fits the file, and its payload checksum holds. (That
a header follows is not enough: the payload and checksum of an 8-byte record are themselves a valid header, so files of
int64 labels are full of false ones.) Finding the start of a range and resynchronising inside damage
use this one function, so neighbouring ranges agree on where records begin. A record belongs to the range in which
its first byte lies, and a reader does not stop until it stands on a boundary at or after its end: the damage
before that boundary is its own.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import google_crc32c
import numpy as np

from transforms.elements import BATCH_MAX_BYTES, BATCH_MAX_RECORDS, Chunk, DeadLetter, Input, JobSpec, Span
from transforms.formats.sniff import what_is_it
from transforms.formats.streams import GZIP_MAGIC, InflatedBytes, PlainBytes, inflate_start
from transforms.formats.tfrecord_scan import HEADER_BYTES, find_headers, is_header
from transforms.sources import RandomAccessFile

SPLITTABLE = True
NATIVE = False
FRAMING_BYTES = 16
_SEARCH_BYTES = 1 << 20
_FIRST_SEARCH_BYTES = 64 << 10
_INFLATED_HEAD_BYTES = 4096
_SMALLEST_READ_BYTES = 4096
_KNOWN_LENGTHS = 4096  # Distinct record lengths whose header checksum is remembered.
_HEADER = struct.Struct("<QI").unpack_from

_Data = PlainBytes | InflatedBytes


def detect_compression(file: RandomAccessFile) -> str:
    """Returns "none", "gzip" or "zlib" from the first bytes of a file; its name says nothing.

    A valid record header wins, since a plain file may begin with any length. What begins like compressed data but does
    not inflate to a record is searched for plain records, so that a damaged first length does not cost the file.
    """
    head = file.read_at(0, HEADER_BYTES)
    if is_header(head):
        return "none"
    if head.startswith(GZIP_MAGIC):
        compression = "gzip"
    elif len(head) >= 2 and head[0] & 0x8F == 0x08 and int.from_bytes(head[:2], "big") % 31 == 0:
        compression = "zlib"
    else:
        return "none"
    start, is_whole = inflate_start(compression, file.read_at(0, _INFLATED_HEAD_BYTES), HEADER_BYTES)
    if is_header(start) or is_whole:
        return compression
    return "none" if find_headers(file.read_at(0, _SEARCH_BYTES), file.size) else compression


def read_range(
    file: RandomAccessFile, source: Input, start: int, end: int, spec: JobSpec, *, trusted: bool = False
) -> Iterator[Chunk]:
    """Yields the records that begin in bytes [start, end) of a file, and the damage up to the boundary after it.

    Args:
        file: The open input.
        source: Its listing, for names.
        start: First byte of the range. The range that holds byte 0 reads a compressed file whole, the others nothing.
        end: Byte after the range.
        spec: The job, for `compression` and `max_record_bytes`.
        trusted: Whether `start` is where the range before ended, so that the start is not searched for.

    Yields:
        Chunks in order; the last one carries the span covered. Damage comes as dead letters, never as an exception.

    Raises:
        OSError: The file could not be read on.
    """
    compression = spec.compression
    if compression == "auto":
        compression = detect_compression(file)
    if compression == "none":
        yield from _FrameReader(PlainBytes(file), source, spec).read(start, end, trusted=trusted)
    elif start == 0:
        for chunk in _FrameReader(InflatedBytes(file, compression), source, spec).read(0, None):
            chunk.rolls = True
            if chunk.span is not None:
                chunk.span = Span(start, end, 0, file.size)
            yield chunk
    elif trusted:
        letter = DeadLetter(source.name, start, end - start, "read", "damaged_stream")
        letter.error = "the beginning of the compressed file could not be read, so the rest cannot be inflated"
        yield Chunk(dead=[letter], num_bytes=letter.length, span=Span(start, end, start, end), reached=end)
    else:
        yield Chunk(span=Span(start, end, None, None))


def is_boundary(file: RandomAccessFile, source: Input, position: int, spec: JobSpec) -> bool:
    """Whether a record of a plain file begins at `position`, or the file ends there."""
    return _FrameReader(PlainBytes(file), source, spec)._ends_well(position)


def measure_inflation(file: RandomAccessFile) -> tuple[int, int]:
    """Returns (decompressed, compressed) bytes of the first MiB that a file inflates to; (0, 0) for a plain file."""
    compression = detect_compression(file)
    if compression == "none":
        return 0, 0
    data = InflatedBytes(file, compression)
    data.read(0, BATCH_MAX_BYTES)
    return data.inflated, data.consumed


def peek_record(file: RandomAccessFile, max_bytes: int) -> tuple[bytes, int]:
    """Looks at the first record, which may be longer than the file is known.

    Args:
        file: The open input, or its beginning.
        max_bytes: How much of the payload to return at most.

    Returns:
        The beginning of its payload and its bytes in the stream; nothing and 0 where no record begins.
    """
    compression = detect_compression(file)
    data = PlainBytes(file) if compression == "none" else InflatedBytes(file, compression)
    head = data.read(0, HEADER_BYTES + max_bytes)
    if not is_header(head[:HEADER_BYTES]):
        return b"", 0
    length = int.from_bytes(head[:8], "little")
    return head[HEADER_BYTES : HEADER_BYTES + length], length + FRAMING_BYTES


class _NoHeaderError(ValueError):
    """Twelve bytes are no header of a record that may be read."""


class _Lengths(dict[bytes, int]):
    """Record lengths by their 12 header bytes; most corpora have few distinct lengths, so each is checked once."""

    def __init__(self, max_record_bytes: int) -> None:
        self._max_record_bytes = max_record_bytes

    def __missing__(self, header: bytes) -> int:
        length = int.from_bytes(header[:8], "little")
        if length > self._max_record_bytes or not is_header(header):
            raise _NoHeaderError
        if len(self) >= _KNOWN_LENGTHS:
            self.clear()
        self[header] = length
        return length


def _first_mismatch(records: list[bytes], stored: list[bytes]) -> int | None:
    """Returns the index of the first record whose checksum is not the stored one, None when all hold."""
    crcs = np.fromiter(map(google_crc32c.value, records), np.uint32, len(records))
    masked = ((crcs >> np.uint32(15)) | (crcs << np.uint32(17))) + np.uint32(0xA282EAD8)
    wrong = masked != np.frombuffer(b"".join(stored), "<u4")
    return int(wrong.argmax()) if wrong.any() else None


class _FrameReader:
    """Reads the frames of one range."""

    def __init__(self, data: _Data, source: Input, spec: JobSpec) -> None:
        self._data = data
        self._source = source
        self._max_record_bytes = spec.max_record_bytes
        self._lengths = _Lengths(spec.max_record_bytes)

    def read(self, start: int, end: int | None, *, trusted: bool = False) -> Iterator[Chunk]:
        """Yields the chunks of [start, end), to the end of the stream when `end` is None."""
        first: int | None = start
        if start > 0 and not trusted:
            first = self._next_boundary(start, end)
        if first is None:
            yield Chunk(span=Span(start, end or 0, None, None))
            return
        position = first
        while end is None or position < end:
            chunk = self._next_chunk(position, end)
            if chunk is None:
                break
            position += chunk.num_bytes
            if self._data.size is not None:
                position = min(position, self._data.size)  # Bytes that cannot be inflated have no place in the stream.
            chunk.reached = position
            self._data.forget(position)
            yield chunk
        while end is not None and not self._ends_well(position):  # The damage before the next boundary is ours.
            chunk = self._next_chunk(position, position + 1) or self._region(position, "length_checksum")
            position += chunk.num_bytes
            chunk.reached = position
            yield chunk
        if end is None and self._data.problem is not None and not self._told_of_problem:
            yield self._region(position, "length_checksum", whole_file=position == 0)
        yield Chunk(span=Span(start, position if end is None else end, first, position), reached=position)

    def _next_chunk(self, position: int, end: int | None) -> Chunk | None:
        """Returns the records at `position`, or the dead letter of what is no record; None at the end."""
        # Not past the range: what cannot be read there must not cost the range anything.
        want = BATCH_MAX_BYTES if end is None else min(BATCH_MAX_BYTES, end - position)
        needed = FRAMING_BYTES
        while True:
            want = max(want, needed)
            try:
                buffer = self._data.read(position, want)
            except OSError:
                if want <= max(needed, _SMALLEST_READ_BYTES):
                    raise
                want = max(needed, _SMALLEST_READ_BYTES, want // 8)  # Come as near to the bad block as one can.
                continue
            if not buffer:
                return None
            chunk = self._good_records(buffer, position, end)
            if chunk.records:
                return chunk
            needed = self._bytes_needed(buffer, position)
            if needed <= want:
                return self._damage(buffer, position, is_start=position == 0)

    _told_of_problem = False

    def _good_records(self, buffer: bytes, base: int, end: int | None) -> Chunk:
        """Returns the whole good records at the front of `buffer` that begin before `end`: the hot loop.

        Checksums of data are compared for all records at once, which costs less than half of one by one.
        """
        records: list[bytes] = []
        positions: list[int] = []
        stored: list[bytes] = []
        lengths, size = self._lengths, len(buffer)
        stop = size - FRAMING_BYTES if end is None else min(size - FRAMING_BYTES, end - 1 - base)
        at = 0
        try:
            while at <= stop and len(records) < BATCH_MAX_RECORDS:
                first = at + HEADER_BYTES
                last = first + lengths[buffer[at:first]]
                after = last + 4
                if after > size:
                    break
                records.append(buffer[first:last])
                stored.append(buffer[last:after])
                positions.append(base + at)
                at = after
        except _NoHeaderError:
            pass
        bad = _first_mismatch(records, stored)
        if bad is not None:
            at = positions[bad] - base
            del records[bad:], positions[bad:]
        return Chunk(records, positions, num_bytes=at)

    def _bytes_needed(self, buffer: bytes, position: int) -> int:
        """How many bytes the record at the front of `buffer` needs, 0 if more would not help."""
        if not is_header(buffer[:HEADER_BYTES]):
            return 0
        length = _HEADER(buffer)[0]
        if length > self._max_record_bytes or not self._fits(position, length):
            return 0
        return int(length) + FRAMING_BYTES

    def _fits(self, position: int, length: int) -> bool:
        size = self._data.size
        return size is None or position + FRAMING_BYTES + length <= size

    def _damage(self, buffer: bytes, position: int, *, is_start: bool) -> Chunk:
        """Returns the chunk with the dead letter of what stands at `position`, which is no good record."""
        if not is_header(buffer[:HEADER_BYTES]):
            short = len(buffer) < HEADER_BYTES
            return self._region(position, "truncated" if short else "length_checksum", whole_file=is_start)
        length = _HEADER(buffer)[0]
        if not self._fits(position, length):
            return self._region(position, "truncated", whole_file=is_start)
        if length > self._max_record_bytes:
            return self._oversize(position, length, whole_file=is_start)
        if len(buffer) < length + FRAMING_BYTES:  # The file has shrunk.
            return self._region(position, "truncated", whole_file=is_start)
        after = position + FRAMING_BYTES + length
        if self._is_end_or_header(after) and not self._reaches_over_records(position, after):
            letter = self._letter(position, FRAMING_BYTES + length, "data_checksum")
            letter.error = f"the checksum of the record's {length} bytes of data does not hold"
            letter.payload = buffer[HEADER_BYTES : HEADER_BYTES + length]
            return Chunk(dead=[letter], num_bytes=letter.length)
        return self._region(position, "data_checksum", whole_file=is_start)

    def _reaches_over_records(self, position: int, after: int) -> bool:
        """Whether the damaged record [position, after) seems to hold whole records that stand behind it.

        Its length does so when bytes of it are missing, and `after` may then by chance be where a record begins, or the
        data of an 8-byte record, which look like a header. Records in its own data end before its checksum.
        """
        their_end = after - 4 if self._ends_well(after) else 0
        for first in range(position + 1, after, _SEARCH_BYTES):
            last = min(first + _SEARCH_BYTES, after)
            block = self._data.read(first, last - first + HEADER_BYTES - 1)
            for offset in find_headers(block, self._max_record_bytes):
                end = first + offset + FRAMING_BYTES + _HEADER(block, offset)[0]
                if end > their_end and self._is_boundary(first + offset):
                    return True
        return False

    def _oversize(self, position: int, length: int, *, whole_file: bool) -> Chunk:
        is_stream = self._data.size is None
        if is_stream:
            self._pass_over(position, FRAMING_BYTES + length)
        if self._fits(position, length) and self._is_end_or_header(position + FRAMING_BYTES + length):
            letter = self._letter(position, FRAMING_BYTES + length, "record_too_large")
            letter.error = f"the record has {length} bytes; source.max_record_bytes allows {self._max_record_bytes}"
            return Chunk(dead=[letter], num_bytes=letter.length)
        if is_stream:  # What was passed over may hold records, so it is inflated once more.
            self._data.rewind(position)
        return self._region(position, "data_checksum", whole_file=whole_file)

    def _pass_over(self, position: int, num_bytes: int) -> None:
        """Inflates a record without keeping it."""
        end = position + num_bytes
        while position < end and self._data.size is None:
            step = min(_SEARCH_BYTES, end - position)
            self._data.forget(position)
            self._data.read(position, step)
            position += step

    def _region(self, position: int, reason: str, *, whole_file: bool = False) -> Chunk:
        """Returns one dead letter for everything from `position` to the next boundary."""
        found = self._next_boundary(position + 1, None)
        end = found if found is not None else (self._data.size or 0)
        if found is not None and reason == "truncated":
            reason = "impossible_length"
        letter = self._letter(position, max(0, end - position), reason)
        letter.error = _REGION_ERRORS[reason].format(length=letter.length)
        if found is None:
            letter.whole_file = whole_file
            self._explain_tail(letter, reason)
        return Chunk(dead=[letter], num_bytes=letter.length)

    def _explain_tail(self, letter: DeadLetter, reason: str) -> None:
        """Finds better words for damage that reaches the end of the file."""
        if self._data.problem is not None:
            letter.reason, letter.error = self._data.problem
            letter.length += self._data.unread  # Of what these would inflate to nothing is known.
            self._told_of_problem = True
        elif letter.whole_file and reason == "length_checksum":
            letter.reason = "not_tfrecord"
            head = self._data.read(0, 4096) if isinstance(self._data, PlainBytes) else b""
            letter.error = f"no valid record in the file; {what_is_it(head)}"

    def _letter(self, position: int, length: int, reason: str) -> DeadLetter:
        return DeadLetter(self._source.name, position, length, "read", reason)

    def _ends_well(self, position: int) -> bool:
        return position == self._data.size or self._is_boundary(position)

    def _is_end_or_header(self, position: int) -> bool:
        following = self._data.read(position, HEADER_BYTES)
        if not following:
            return self._data.problem is None
        return is_header(following)

    def _is_boundary(self, position: int) -> bool:
        """The one rule for where a record begins, see the module's first lines."""
        header = self._data.read(position, HEADER_BYTES)
        if not is_header(header):
            return False
        length = _HEADER(header)[0]
        if self._data.size is None:
            if length > self._max_record_bytes:
                return False  # A stream cannot look that far ahead in flat memory.
            self._data.read(position, length + FRAMING_BYTES)
        return self._fits(position, length) and self._payload_holds(position, length)

    def _payload_holds(self, position: int, length: int) -> bool:
        crc = google_crc32c.Checksum()
        first = position + HEADER_BYTES
        for at in range(first, first + length, _SEARCH_BYTES):
            crc.update(self._data.read(at, min(_SEARCH_BYTES, first + length - at)))
        value = int.from_bytes(crc.digest(), "big")
        masked = (((value >> 15) | (value << 17)) + 0xA282EAD8) & 0xFFFFFFFF
        return masked == int.from_bytes(self._data.read(first + length, 4), "little")

    def _next_boundary(self, position: int, limit: int | None) -> int | None:
        """Returns the first boundary in [position, limit), None when there is none; `limit` None is the end."""
        step = _FIRST_SEARCH_BYTES  # Nearly always the next record is near.
        while limit is None or position < limit:
            block = self._data.read(position, step + HEADER_BYTES - 1)
            size = self._data.size
            max_length = self._max_record_bytes if size is None else max(0, size - position - FRAMING_BYTES)
            for offset in find_headers(block, max_length):
                if limit is not None and position + offset >= limit:
                    return None
                if self._is_boundary(position + offset):
                    return position + offset
            if len(block) < step + HEADER_BYTES - 1:
                return None
            position += step
            step = _SEARCH_BYTES
            self._data.forget(position)
        return None


_REGION_ERRORS = {
    "length_checksum": "the checksum of a record's length does not hold; {length} bytes up to the next record are lost",
    "impossible_length": "a record's length points past the end of the file; {length} bytes up to the next are lost",
    "truncated": "the file ends inside a record; its last {length} bytes are lost",
    "data_checksum": "the data's checksum does not hold and no record follows; {length} bytes up to the next are lost",
}
