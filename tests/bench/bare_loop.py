"""The least that a conversion can cost in Python: one process that reads, checks and writes.

This is the yardstick of the benchmark table. It reads TFRecord files, checks both CRCs of every
record and writes one ArrayRecord file per input file. It is meant to be as fast as plain Python
gets, and is arranged as measurements asked for:

* `os.pread` of buffers of 0.5 or 1 MiB, which stay in the processor's cache, each read starting
  at the first record that the last one cut short, so no bytes are joined to what is left over;
* the 12 header bytes of a record are looked up among the headers checked before, so that the CRC
  of each length is computed only once for each length there is;
* small records are checked a buffer at a time: their CRCs are masked in one go by arithmetic on
  one big integer, and they reach the writer through `map`.
"""

from __future__ import annotations

import argparse
import glob
import os
import struct
from collections import deque
from collections.abc import Callable

from array_record.python.array_record_module import ArrayRecordWriter
from google_crc32c import value as crc32c

Write = Callable[[bytes], None]

SMALL_BUFFER_BYTES = 512 << 10
LARGE_BUFFER_BYTES = 1 << 20
LARGE_RECORD_BYTES = 8 << 10  # From here on a record is checked and written on its own.

_unpack_header = struct.Struct("<QI").unpack_from
_unpack_crc = struct.Struct("<I").unpack_from


class Headers(dict[bytes, int]):
    """Record lengths by their 12 header bytes; a header not seen before is checked."""

    def __missing__(self, header: bytes) -> int:
        """Returns the length in a header whose CRC is right."""
        length: int
        length, crc = _unpack_header(header)
        if _masked(crc32c(header[:8])) != crc:
            raise ValueError("the CRC of a record's length is wrong")
        self[header] = length
        return length


def copy_small(fd: int, write: Write, buffer_bytes: int) -> None:
    """Copies the records of an open file, checking a buffer of them at a time."""
    headers = Headers()
    offset = 0
    while data := os.pread(fd, buffer_bytes, offset):
        records: list[bytes] = []
        stored: list[bytes] = []
        add_record, add_stored = records.append, stored.append
        start, end = 0, len(data) - 4
        last = end - 8
        while start <= last:
            body = start + 12
            crc = body + headers[data[start:body]]
            if crc > end:
                break
            start = crc + 4
            add_record(data[body:crc])
            add_stored(data[crc:start])
        if _masked_all(list(map(crc32c, records))) != b"".join(stored):
            raise ValueError("the CRC of a record's data is wrong")
        deque(map(write, records), 0)
        offset += start
        buffer_bytes = _next_buffer(start, len(data), buffer_bytes)


def copy_large(fd: int, write: Write, buffer_bytes: int) -> None:
    """Copies the records of an open file, each checked and written on its own."""
    headers = Headers()
    offset = 0
    while data := os.pread(fd, buffer_bytes, offset):
        start, end = 0, len(data) - 4
        last = end - 8
        while start <= last:
            body = start + 12
            crc = body + headers[data[start:body]]
            if crc > end:
                break
            record = data[body:crc]
            if _masked(crc32c(record)) != _unpack_crc(data, crc)[0]:
                raise ValueError("the CRC of a record's data is wrong")
            write(record)
            start = crc + 4
        offset += start
        buffer_bytes = _next_buffer(start, len(data), buffer_bytes)


def convert(path: str, out_path: str, options: str) -> None:
    """Converts one TFRecord file to one ArrayRecord file."""
    fd = os.open(path, os.O_RDONLY)
    writer = ArrayRecordWriter(out_path, options)
    header = os.pread(fd, 12, 0)
    if header and _unpack_header(header)[0] >= LARGE_RECORD_BYTES:
        copy_large(fd, writer.write, LARGE_BUFFER_BYTES)
    else:
        copy_small(fd, writer.write, SMALL_BUFFER_BYTES)
    writer.close()
    os.close(fd)


def main() -> None:
    """Converts the files that match a glob into an existing folder."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--input", required=True, help="glob of TFRecord files")
    parser.add_argument("--output", required=True, help="folder for the ArrayRecord files")
    parser.add_argument("--options", default="group_size:1,zstd:3", help="ArrayRecord options")
    args = parser.parse_args()
    for path in sorted(glob.glob(args.input)):
        name = os.path.basename(path).removesuffix(".tfrecord")
        convert(path, os.path.join(args.output, f"{name}.array_record"), args.options)


def _masked(crc: int) -> int:
    """Returns a CRC as TFRecord masks it: rotated by 15 bits, and a constant added."""
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _masked_all(crcs: list[int]) -> bytes:
    """Returns many CRCs masked and packed, computed as the 32-bit lanes of one integer."""
    count = len(crcs)
    lanes = int.from_bytes(struct.pack(f"<{count}I", *crcs), "little")
    rotated = lanes >> 15 & _lanes(0x1FFFF, count) | lanes << 17 & _lanes(0xFFFE0000, count)
    top, delta = _lanes(0x80000000, count), _lanes(0xA282EAD8, count)
    total = (rotated & ~top) + (delta & ~top) ^ (rotated ^ delta) & top
    return total.to_bytes(4 * count, "little")


def _lanes(number: int, count: int) -> int:
    """Returns an integer that repeats a 32-bit number."""
    return int.from_bytes(struct.pack("<I", number) * count, "little")


def _next_buffer(used: int, read: int, buffer_bytes: int) -> int:
    """Returns the size of the next read: twice the last if not one record fitted in it.

    Raises:
        ValueError: If the last read met the end of the file inside a record.
    """
    if used < read < buffer_bytes:
        raise ValueError("the file ends inside a record")
    return buffer_bytes if used else 2 * buffer_bytes


if __name__ == "__main__":
    main()
