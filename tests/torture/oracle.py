"""What must hold for a damaged file, found without any reader of ours.

The records that were written and the regions that dead letters name are laid end to end along the bytes of the file
(of the decompressed stream, where it is compressed). They must tile it: each byte is named once, each record that was
written stands there as a whole frame, in order. And each frame that the damage left alone must be among them.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import corpora

Letter = dict[str, Any]
STREAM_REASONS = ("truncated_stream", "damaged_stream", "trailing_garbage")


class DiscrepancyError(AssertionError):
    """A law of the design does not hold."""


def require(holds: bool, text: str) -> None:
    """Raises if a law does not hold."""
    if not holds:
        raise DiscrepancyError(text)


def tile(data: bytes, letters: Sequence[Letter], records: Iterator[bytes], name: str) -> dict[int, bytes]:
    """Lays records and dead letters along the bytes they came from.

    Args:
        data: The bytes that were read.
        letters: Dead letters of the file, in order.
        records: What was written, from the first record of this file on; what is used is taken from it.
        name: The file, for messages.

    Returns:
        The written records by position.
    """
    found: dict[int, bytes] = {}
    waiting = list(letters)
    at = 0
    while at < len(data) or waiting:
        if waiting and waiting[0]["position"] == at:
            at += _length(waiting.pop(0), len(data), name)
            continue
        require(at < len(data), f"{name}: dead letters {waiting[:3]} stand beyond the {len(data)} bytes")
        record = next(records, None)
        require(record is not None, f"{name}: byte {at} is in no record and no dead letter")
        assert record is not None
        frame = corpora.frame(record)
        if data[at : at + len(frame)] != frame:
            near = [letter["position"] for letter in waiting[:2]]
            raise DiscrepancyError(f"{name}: {record[:40]!r} was written, but stands not at {at}; next letters {near}")
        found[at] = record
        at += len(frame)
    return found


def _length(letter: Letter, size: int, name: str) -> int:
    length = int(letter["length"])
    is_end_of_stream = letter["position"] == size  # A stream may break between two records.
    require(length > 0 or is_end_of_stream, f"{name}: a dead letter names no byte: {letter}")
    return length


def check_payloads(data: bytes, letters: Sequence[Letter], payload_of: Callable[[Letter], bytes], name: str) -> None:
    """Payloads of the reader's dead letters are the bytes between the framing."""
    for letter in letters:
        if letter["payload_index"] is not None:
            at, length = letter["position"], letter["length"]
            same = payload_of(letter) == data[at + 12 : at + length - 4]
            require(same, f"{name}: the payload of {letter} is not what stands there")


@functools.lru_cache(8)
def inflate(data: bytes, compression: str) -> tuple[bytes, str | None, int]:
    """Inflates a compressed file, one byte at a time.

    Returns:
        What it gives, the reason code of what is wrong with it, and how many bytes from there on cannot be inflated.
    """
    bits = {"gzip": 31, "zlib": 15}[compression]
    out = bytearray()
    at = 0
    while True:
        at, problem = _inflate_member(data, at, bits, out)
        if problem is not None:
            return bytes(out), problem, len(data) - at
        rest = data[at:].lstrip(b"\0")
        if not rest:
            return bytes(out), None, 0
        if compression != "gzip" or not rest.startswith(b"\x1f\x8b"):
            return bytes(out), "trailing_garbage", len(rest)
        at = len(data) - len(rest)


def _inflate_member(data: bytes, at: int, bits: int, out: bytearray) -> tuple[int, str | None]:
    inflater = zlib.decompressobj(bits)
    while at < len(data):
        try:
            out += inflater.decompress(data[at : at + 1])
        except zlib.error:
            return at, "damaged_stream"
        at += 1
        if inflater.eof:
            return at, None
    out += inflater.flush()
    return at, "truncated_stream"


def check_end(stream: bytes, problem: str | None, unread: int, letters: Sequence[Letter], name: str) -> None:
    """What is wrong with a compressed file is told by one dead letter, which reaches to the end of what it gave.

    It counts the bytes that could not be inflated too.
    """
    told = [letter for letter in letters if letter["reason"] in STREAM_REASONS]
    if problem is None:
        require(not told, f"{name}: the stream is whole, but {told}")
        return
    require([letter["reason"] for letter in told] == [problem], f"{name}: {problem} is told by {told}")
    require(told[0] is letters[-1], f"{name}: {told[0]} is not the last dead letter")
    end = told[0]["position"] + told[0]["length"]
    require(end == len(stream) + unread, f"{name}: {told[0]} does not reach to byte {len(stream)}, and {unread} more")


def common_prefix(first: bytes, second: bytes) -> int:
    """Returns how many bytes two streams share from their beginning."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[:middle] == second[:middle]:
            low = middle
        else:
            high = middle - 1
    return low
