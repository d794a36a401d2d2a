"""Reads objects of Google Cloud Storage at any position, ahead of who reads them in order, in flat memory.

All requests of one reader are for one generation of the object, so what is read is one content. Bytes come as they are
stored: an object with `Content-Encoding: gzip` is a gzip file.
"""

from __future__ import annotations

import errno
import http.client
import inspect
import io
from concurrent.futures import Future
from typing import Any, BinaryIO, cast

from google.cloud.storage import Blob

from transforms import gcs
from transforms.sources import InputChangedError
from transforms.transient import status_of

HEAD_BYTES = 256 << 10
"""The first request: all of a small object, and of a large one what tells its format."""

BLOCK_BYTES = 8 << 20
_LARGEST_BYTES = 4 * BLOCK_BYTES  # A connection that breaks costs no more than this.
_GROWTH = 4
_PAST_END_BYTES = 256 << 10
"""What is read past the end of a range, for records that go over it."""


_CAN_TAKE_ONE_PIECE = "single_shot_download" in inspect.signature(Blob.download_to_file).parameters
"""Older versions of the library only read by 8 KiB."""


class _Pieces:
    """What an answer is written to; one that comes in one piece is not copied."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def write(self, data: bytes) -> int:
        self._pieces.append(data)
        return len(data)

    def tell(self) -> int:
        return sum(map(len, self._pieces))

    def join(self) -> bytes:
        return self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)


class ObjectReader:
    """An object that is open for reading. Blocks grow while they are read in order, and then the next is on its way.

    Args:
        url: The object.
        size: Its bytes.
        generation: The generation to read.

    Attributes:
        size: Its bytes.

    Raises:
        OSError: It cannot be read, or is another generation.
    """

    def __init__(self, url: str, size: int, generation: int) -> None:
        self.size = size
        self._url = url
        self._bucket, self._name = gcs.split_url(url)
        self._generation = generation
        self._end = size
        self._block_bytes = HEAD_BYTES
        self._next: tuple[int, Future[bytes]] | None = None
        self._head = self._fetch(0, min(size, HEAD_BYTES))
        self._blocks = [(0, self._head)]  # The last two: a record may begin in one and end in the other.

    def will_read(self, end: int) -> None:
        """Says that reading will go no further than about `end`, so that nothing behind it is fetched ahead."""
        self._end = min(self.size, end + _PAST_END_BYTES)

    def read_at(self, position: int, num_bytes: int) -> bytes:
        """Returns `num_bytes` from `position`, fewer only at the end of the object."""
        end = min(position + num_bytes, self.size)
        pieces = []
        while position < end:
            piece = self._piece(position, end)
            pieces.append(piece)
            position += len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def close(self) -> None:
        """Gives up what was fetched ahead."""
        if self._next is not None:
            self._next[1].cancel()
            self._next = None
        self._blocks = []

    def _piece(self, position: int, end: int) -> bytes:
        """Returns what one block has of a range, at least its first byte."""
        for start, data in ((0, self._head), *self._blocks):
            if start <= position < start + len(data):
                return data[position - start : end - start]
        if self._next is None and end - position >= BLOCK_BYTES:
            return self._fetch(position, min(end, position + _LARGEST_BYTES))  # Kept by the caller alone.
        start, data = self._next_block(position)
        self._blocks = [*self._blocks[-1:], (start, data)]
        return data[position - start : end - start]

    def _next_block(self, position: int) -> tuple[int, bytes]:
        """Returns the block that holds a position, and has the one behind it fetched when blocks follow each other."""
        before = self._blocks[-1] if self._blocks else (0, b"")
        follows = before[0] + len(before[1]) == position
        self._block_bytes = min(BLOCK_BYTES, self._block_bytes * _GROWTH) if follows else HEAD_BYTES
        start, data = position, None
        if self._next is not None:
            (start, ahead), self._next = self._next, None
            if start == position:
                data = ahead.result()
            else:
                ahead.cancel()
        if data is None:
            start, data = position, self._fetch(position, self._block_end(position))
        if follows:
            self._fetch_ahead(start + len(data))
        return start, data

    def _block_end(self, position: int) -> int:
        limit = self._end if position < self._end else self.size
        return min(position + self._block_bytes, limit)

    def _fetch_ahead(self, position: int) -> None:
        if position < self._end:
            future = gcs.in_background(self._fetch, position, self._block_end(position))
            self._next = (position, future)

    def _fetch(self, start: int, end: int) -> bytes:
        try:
            return gcs.retry_policy()(self._fetch_once)(start, end)
        except InputChangedError:
            raise
        except Exception as error:
            if status_of(error) in (http.client.PRECONDITION_FAILED, http.client.REQUESTED_RANGE_NOT_SATISFIABLE):
                raise self._changed() from error
            raise gcs.reading_error(error, self._url) from error

    def _fetch_once(self, start: int, end: int) -> bytes:
        blob = gcs.bucket(self._bucket).blob(self._name)
        whole = end - start == self.size
        pieces = _Pieces()
        blob.download_to_file(
            pieces,
            start=None if whole else start,
            end=None if whole else end - 1,
            raw_download=True,
            if_generation_match=self._generation,
            checksum="crc32c" if whole else None,
            timeout=gcs.TIMEOUT_SECS,
            retry=None,  # Ours begins the range anew.
            **({"single_shot_download": True} if _CAN_TAKE_ONE_PIECE else {}),
        )
        data = pieces.join()
        if blob.generation is not None and int(blob.generation) != self._generation:
            raise self._changed()
        if len(data) != end - start:
            raise ConnectionError(f"{len(data)} bytes came of {end - start}")
        return data

    def _changed(self) -> InputChangedError:
        return InputChangedError(
            errno.ESTALE, f"the object changed after it was listed: it is no longer generation {self._generation}"
        )


class _RawObject(io.RawIOBase):
    def __init__(self, reader: ObjectReader) -> None:
        super().__init__()
        self._reader = reader
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._reader.size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        data = self._reader.read_at(self._position, len(buffer))
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)

    def close(self) -> None:
        self._reader.close()
        super().close()


def open_object(url: str, size: int, generation: int) -> BinaryIO:
    """Opens an object as a file that can seek.

    Raises:
        OSError: It cannot be read.
    """
    return cast(BinaryIO, io.BufferedReader(_RawObject(ObjectReader(url, size, generation)), HEAD_BYTES))
