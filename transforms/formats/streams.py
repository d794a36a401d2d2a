"""Bytes to frame: a plain file by position, or a compressed stream through a sliding window.

Both answer `read(position, num_bytes)`, so that one reader serves both. A compressed stream is checked to its end:
every gzip member's trailer, and that the stream does not stop early. What could be decompressed before a fault is
always handed out first; the fault then stands in `problem`.
"""

from __future__ import annotations

import zlib
from typing import Any

from transforms.sources import RandomAccessFile

_COMPRESSED_PIECE_BYTES = 256 << 10
_INFLATED_PIECE_BYTES = 1 << 20  # What one step may inflate to, so that a bomb is met a MiB at a time.
_TRIED_BYTES = 4096
_ZLIB_HEADER_BYTES = 2
_WINDOW_BITS = {"gzip": 31, "zlib": 15}
GZIP_MAGIC = b"\x1f\x8b\x08"


class PlainBytes:
    """A plain file.

    Attributes:
        size: Bytes of the file.
        problem: Always None.
        unread: Always 0.
        consumed: Bytes of the file, all of them.
    """

    problem: tuple[str, str] | None = None
    unread = 0

    def __init__(self, file: RandomAccessFile) -> None:
        self._file = file
        self.size: int | None = file.size
        self.consumed = file.size
        self.read = file.read_at

    def forget(self, position: int) -> None:
        """Nothing is kept, so there is nothing to give up."""

    def rewind(self, position: int) -> None:
        """Any position can be read at any time."""


class InflatedBytes:
    """The decompressed bytes of a gzip or zlib file, readable forwards.

    Attributes:
        size: Decompressed bytes, None until the end was reached.
        problem: None, or (reason, text) once the stream turned out to be damaged or cut.
        unread: Compressed bytes behind the problem, which nobody can inflate.
        consumed: Compressed bytes used so far.
    """

    def __init__(self, file: RandomAccessFile, compression: str) -> None:
        self._file = file
        self._compression = compression
        self._begin()

    def _begin(self) -> None:
        self._inflater = zlib.decompressobj(_WINDOW_BITS[self._compression])
        self._fetched = 0
        self._pending = b""
        self._window = bytearray()
        self._base = 0
        self.size: int | None = None
        self.problem: tuple[str, str] | None = None
        self.unread = 0

    def rewind(self, position: int) -> None:
        """Makes a forgotten position readable again, by inflating the file anew up to there."""
        if position >= self._base:
            return
        self._begin()
        while self._base < position and self.size is None:
            step = min(position, self._base + _INFLATED_PIECE_BYTES)
            self.read(step, 0)
            self.forget(step)

    @property
    def inflated(self) -> int:
        """Decompressed bytes so far."""
        return self._base + len(self._window)

    @property
    def consumed(self) -> int:
        """Compressed bytes used so far."""
        return self._fetched - len(self._pending)

    def read(self, position: int, num_bytes: int) -> bytes:
        """Returns `num_bytes` from `position`, fewer only at the end; `position` must not be forgotten."""
        while self.size is None and self._base + len(self._window) < position + num_bytes:
            self._inflate()
        first = position - self._base
        return bytes(self._window[first : first + num_bytes])

    def forget(self, position: int) -> None:
        """Gives up everything before `position`."""
        drop = min(position - self._base, len(self._window))
        if drop > 0:
            del self._window[:drop]
            self._base += drop

    def _inflate(self) -> None:
        if not self._pending:
            self._pending = self._file.read_at(self._fetched, _COMPRESSED_PIECE_BYTES)
            self._fetched += len(self._pending)
            if not self._pending:
                self._window += self._inflater.flush()
                at = f"the {self._compression} stream stops at byte {self._fetched} of the file without its end"
                self._fail("truncated_stream", at, self._fetched)
                return
        before = self._inflater.copy()
        try:
            self._window += self._inflater.decompress(self._pending, _INFLATED_PIECE_BYTES)
        except zlib.error as error:
            used = self._salvage(before)
            where = self._fetched - len(self._pending) + used
            text = f"{self._compression} data is damaged at byte {where} of the file: {error}"
            self._fail("damaged_stream", text, where)
            return
        self._pending = self._inflater.unconsumed_tail
        if self._inflater.eof:
            self._next_member(self._inflater.unused_data)

    def _salvage(self, inflater: Any) -> int:
        """Inflates the piece that failed byte by byte, so that nothing before the fault is lost with it.

        Args:
            inflater: The decompressor as it was before the piece.

        Returns:
            How many bytes of the piece were good.
        """
        for used in range(len(self._pending)):
            try:
                self._window += inflater.decompress(self._pending[used : used + 1])
            except zlib.error:
                return used
        return len(self._pending)

    def _next_member(self, rest: bytes) -> None:
        """Goes on with the next member or stream; zeros after the last one are padding, anything else is a fault."""
        self._pending = rest.lstrip(b"\0")
        while not self._pending:
            more = self._file.read_at(self._fetched, _COMPRESSED_PIECE_BYTES)
            if not more:
                self._end()
                return
            self._fetched += len(more)
            self._pending = more.lstrip(b"\0")
        if len(self._pending) < len(GZIP_MAGIC):
            more = self._file.read_at(self._fetched, _COMPRESSED_PIECE_BYTES)
            self._fetched += len(more)
            self._pending += more
        if self._goes_on():
            self._inflater = zlib.decompressobj(_WINDOW_BITS[self._compression])
            return
        at = f"bytes that are no {self._compression} data follow the end of the stream, at {self.consumed}"
        self._fail("trailing_garbage", at, self.consumed)

    def _goes_on(self) -> bool:
        """Whether what follows the end of a stream is another one, as `cat a.zz b.zz` makes it."""
        if self._compression == "gzip":
            return self._pending.startswith(GZIP_MAGIC[:2])
        if len(self._pending) < _ZLIB_HEADER_BYTES:
            return False
        try:  # Two bytes of a header are too few to tell a stream from anything else.
            zlib.decompressobj().decompress(self._pending[:_TRIED_BYTES], _TRIED_BYTES)
        except zlib.error:
            return False
        return True

    def _fail(self, reason: str, text: str, where: int) -> None:
        self.problem = reason, text
        self.unread = self._file.size - where
        self._end()

    def _end(self) -> None:
        self.size = self._base + len(self._window)


def inflate_start(compression: str, head: bytes, num_bytes: int) -> tuple[bytes, bool]:
    """Inflates the first bytes of a file.

    Args:
        compression: "gzip" or "zlib".
        head: The first bytes of the file.
        num_bytes: How much to inflate to at most.

    Returns:
        (what they inflate to, whether a whole stream ended within); nothing if they are no such data.
    """
    inflater = zlib.decompressobj(_WINDOW_BITS[compression])
    try:
        return inflater.decompress(head, num_bytes), inflater.eof
    except zlib.error:
        return b"", False
