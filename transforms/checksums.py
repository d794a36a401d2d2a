"""Checksums of what was read of each input, by which a file is known again that has only a new time. No Beam here.

Inputs are hashed while they are read, at some 20 GB/s: what the reader asks for anyway, in order, each byte once. What
it jumped over is read for the purpose. A range has its CRC-32C in its span, so that ranges of one file need not be put
together; a run of small files has a list of them whose length is bounded.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
from array import array

import google_crc32c
import numpy as np

from transforms.elements import Input
from transforms.sources import RandomAccessFile, open_input

MAX_ENTRIES = 4_096
"""Checksums of a run of files in a ledger, 22 KB: beyond them two neighbours share one, so that ledgers stay small."""

_PIECE_BYTES = 1 << 20
_SKIM_BYTES = 4_096  # Smaller reads look at what may be a header far ahead; the reader comes back from there.


class HashedFile:
    """An open input of which a range is hashed while it is read.

    Args:
        file: The open input.
        start: First byte of the range.
        end: Byte after it.

    Attributes:
        size: Bytes of the input.
    """

    def __init__(self, file: RandomAccessFile, start: int, end: int) -> None:
        self._file = file
        self.size = file.size
        self._start = self._at = start
        self._end = end
        self._crc = 0

    def read_at(self, position: int, num_bytes: int) -> bytes:
        """Returns `num_bytes` from `position`, fewer only at the end of the file."""
        data = self._file.read_at(position, num_bytes)
        at, end = self._at, self._end
        if position > at and at < end and num_bytes >= _SKIM_BYTES:
            at = self._hash_up_to(min(position, end))
        if position <= at < end and position + len(data) > at:
            last = min(len(data), end - position)
            # A view: reads overlap by a part of a record nearly always, and a copy would cost more than its checksum.
            new = np.frombuffer(data, np.uint8)[at - position : last]
            self._crc = google_crc32c.extend(self._crc, new)
            self._at = position + last
        return data

    def close(self) -> None:
        """Closes the input."""
        self._file.close()

    @property
    def is_untouched(self) -> bool:
        """Whether nothing of the range was read."""
        return self._at == self._start

    def checksum(self) -> int | None:
        """Returns the CRC-32C of the range, None where a part of it cannot be read."""
        return self._crc if self._hash_up_to(self._end) == self._end else None

    def _hash_up_to(self, end: int) -> int:
        """Reads what the reader does not; a part that cannot be read is the reader's to tell."""
        try:
            while self._at < end:
                data = self._file.read_at(self._at, min(_PIECE_BYTES, end - self._at))
                if not data:
                    break
                self._crc = google_crc32c.extend(self._crc, data)
                self._at += len(data)
        except OSError:
            pass
        return self._at


def has_own_checksum(source: Input) -> bool:
    """Whether the store lists checksums itself, so that none need be made."""
    return source.name.startswith("gs://")


def checksum_of(source: Input, start: int, end: int) -> int | None:
    """Returns the CRC-32C of a range of an input, None where it cannot be read."""
    try:
        file = open_input(source)
    except OSError:
        return None
    try:
        return HashedFile(file, start, end).checksum()
    finally:
        file.close()


@dataclasses.dataclass(slots=True)
class RunChecksums:
    """Checksums of a run of whole inputs: one for each, or for each `step` of them where they are many.

    Attributes:
        crcs: The checksums.
        step: Inputs that one of them stands for; the last may stand for fewer.
        in_last: Inputs that the last one stands for.
        lengths: Bytes that each stands for, known only while the run grows.
    """

    crcs: array[int] = dataclasses.field(default_factory=lambda: array("I"))
    step: int = 1
    in_last: int = 0
    lengths: list[int] = dataclasses.field(default_factory=list, compare=False)

    def add(self, crc: int, length: int) -> None:
        """Takes the checksum of the next input of the run."""
        if self.crcs and self.in_last < self.step:
            self.crcs[-1] = combine(self.crcs[-1], crc, length)
            self.lengths[-1] += length
            self.in_last += 1
            return
        if len(self.crcs) == MAX_ENTRIES:
            self._halve()
        self.crcs.append(crc)
        self.lengths.append(length)
        self.in_last = 1

    def _halve(self) -> None:
        pairs = range(0, MAX_ENTRIES, 2)
        self.crcs = array("I", (combine(self.crcs[at], self.crcs[at + 1], self.lengths[at + 1]) for at in pairs))
        self.lengths = [self.lengths[at] + self.lengths[at + 1] for at in pairs]
        self.step *= 2

    def to_text(self) -> str:
        """Returns them as they stand in a ledger."""
        crcs = b"".join(crc.to_bytes(4, "big") for crc in self.crcs)
        return f"{self.step},{self.in_last},{base64.b64encode(crcs).decode()}"

    @classmethod
    def from_text(cls, text: str) -> RunChecksums:
        """Reads what `to_text` gives.

        Raises:
            ValueError: It is none.
        """
        step, in_last, packed = text.split(",")
        data = base64.b64decode(packed)
        crcs = array("I", (int.from_bytes(data[at : at + 4], "big") for at in range(0, len(data), 4)))
        return cls(crcs, int(step), int(in_last))


def combine(first: int, second: int, length: int) -> int:
    """Returns the CRC-32C of two pieces one after the other.

    Args:
        first: That of the first piece.
        second: That of the second.
        length: Bytes of the second.
    """
    return _times(first, _power_of_x(8 * length)) ^ second


_POLYNOMIAL = 0x82F63B78
"""CRC-32C's, bits reversed: the highest bit is the constant term, as everywhere below."""


def _times(one: int, other: int) -> int:
    """Multiplies two polynomials modulo CRC-32C's."""
    product = 0
    mask = 1 << 31
    while mask:
        if one & mask:
            product ^= other
        other = (other >> 1) ^ (_POLYNOMIAL if other & 1 else 0)
        mask >>= 1
    return product


@functools.cache
def _squares() -> list[int]:
    """Returns x to the powers 1, 2, 4 and so on: enough for any file."""
    squares = [1 << 30]
    for _ in range(68):
        squares.append(_times(squares[-1], squares[-1]))
    return squares


@functools.lru_cache(4096)  # Small files are often of few sizes.
def _power_of_x(exponent: int) -> int:
    result = 1 << 31
    for bit, square in enumerate(_squares()):
        if exponent >> bit & 1:
            result = _times(result, square)
    return result
