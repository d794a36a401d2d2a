"""A file of a journal: frames that are appended one by one, each with checksums, and found again by key. No Beam here.

A file begins with a line of JSON that names its plan. A frame has a head, whose own checksum covers the length and the
checksum of its body, so that going through a file reads heads only. The first head that does not hold ends the file:
that is where its writer was killed, or where it is damaged.
"""

from __future__ import annotations

import array
import bisect
import contextlib
import dataclasses
import json
import logging
import os
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO

import google_crc32c

if TYPE_CHECKING:
    import numpy as np

_LOGGER = logging.getLogger("gristmill")

KEY_BYTES = 16
NO_KEY = bytes(KEY_BYTES)
"""Of frames that are found through others, by their offset."""

MAX_INDEXED = 1 << 20
"""Frames whose keys and offsets stand in memory at a time, in about 60 MB while they are sorted; of a journal with more
of them, those of a stretch of records, and of the one before."""

Place = tuple[int, int]
"""A record: index of its input, position in it."""

_HEAD = struct.Struct("<IIQIq16s")  # Checksums of head and body, bytes of the body, input, position, key.
_CHECKED_FROM = 4
_MAX_LINE_BYTES = 4096
_FOLDER_ATTEMPTS = 10
_OFFSET_BITS = 48
_EVERYTHING: Place = (1 << 62, 0)


class JournalFile:
    """A file that one process appends to, from several threads; it comes into being with its first frame.

    It is opened for each frame, so that nothing a step does to open files can have a frame written elsewhere, and so
    that nobody writes on once the file was deleted.

    Args:
        path: Where it is to be. Nobody else writes there.
        plan_id: The plan of the job.
    """

    def __init__(self, path: str, plan_id: str) -> None:
        self.path = path
        self._line = json.dumps({"gristmill_journal": 1, "plan_id": plan_id}).encode() + b"\n"
        self._lock = threading.Lock()
        self._end = 0
        self._failed = False

    def append(self, key: bytes, place: Place, body: bytes) -> int:
        """Writes a frame and returns its offset; a process that is killed afterwards does not take it along.

        Raises:
            OSError: It could not be written. Then no other is either.
        """
        head = _HEAD.pack(0, google_crc32c.value(body), len(body), *place, key)[_CHECKED_FROM:]
        frame = b"".join((google_crc32c.value(head).to_bytes(_CHECKED_FROM, "little"), head, body))
        with self._lock:
            if self._failed:
                raise OSError("the journal's file was given up")
            self._failed = True
            if not self._end:
                self._create()
            offset = self._end
            self._write(frame)
            self._failed = False
            return offset

    def _create(self) -> None:
        for attempt in range(_FOLDER_ATTEMPTS):
            os.makedirs(os.path.dirname(self.path), exist_ok=True)
            try:
                os.close(os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
                break
            except FileNotFoundError:  # Another worker has just deleted the empty folder.
                if attempt == _FOLDER_ATTEMPTS - 1:
                    raise
        self._write(self._line)

    def _write(self, data: bytes) -> None:
        fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        try:
            written = os.write(fd, data)
            while written < len(data):  # A disk that fills up, or more than two GiB.
                written += os.write(fd, memoryview(data)[written:])
        finally:
            os.close(fd)
        self._end += len(data)


@dataclasses.dataclass(frozen=True, slots=True)
class Frame:
    """A frame that was found.

    Attributes:
        body: What it holds.
        file: The file in which it stands, for frames that it points to.
    """

    body: bytes
    file: int


class JournalIndex:
    """Finds frames in files that nobody appends to any more; used by several threads.

    Of two frames with one key the first counts, in the order of files and of frames in a file. Whatever the files hold,
    nothing here raises but for want of memory: what is damaged is not there, and the log says so once.

    Args:
        paths: The files, in order.
        accepts: Whether frames of a plan count.
        max_indexed: See `MAX_INDEXED`.
    """

    def __init__(self, paths: Sequence[str], accepts: Callable[[str], bool], max_indexed: int = MAX_INDEXED) -> None:
        self._paths = list(paths)
        self._starts = [_start_of(path, accepts) for path in self._paths]
        self._max = max_indexed
        self._lock = threading.Lock()
        self._warned = False
        self._before = _Stretch.empty((0, -1))
        self._now = self._load((0, -1)) if self._paths else _Stretch.empty(_EVERYTHING)

    @property
    def is_empty(self) -> bool:
        """Whether there is no frame at all."""
        return not len(self._now.keys) and self._now.until == _EVERYTHING

    def find(self, key: bytes, place: Place) -> Frame | None:
        """Returns the frame of a key, None where there is none.

        Args:
            key: The key.
            place: Its record; records are asked for about in the order in which they stand in their inputs.
        """
        if place > self._now.until:
            with self._lock:
                while place > self._now.until:
                    self._before, self._now = self._now, self._load(self._now.until)
        for stretch in (self._now, self._before):
            for location in stretch.find(key):
                frame = self.read(location >> _OFFSET_BITS, location & ((1 << _OFFSET_BITS) - 1), key)
                if frame is not None:
                    return frame
        return None

    def read(self, file: int, offset: int, key: bytes = NO_KEY) -> Frame | None:
        """Returns the frame at an offset of a file, None where none of that key stands there."""
        try:
            with open(self._paths[file], "rb", buffering=0) as opened:
                opened.seek(offset)
                head = _read_head(opened.read(_HEAD.size))
                if head is None or head.key != key:
                    return None
                if offset + _HEAD.size + head.length > os.fstat(opened.fileno()).st_size:
                    return None
                body = _read_all(opened, head.length)
        except OSError as error:
            self._warn(file, str(error))
            return None
        if google_crc32c.value(body) != head.body_crc:
            self._warn(file, f"the checksum at byte {offset:,} does not hold")
            return None
        return Frame(body, file)

    def _load(self, after: Place) -> _Stretch:
        rows = _Rows(self._max)
        for number, (path, start) in enumerate(zip(self._paths, self._starts, strict=True)):
            try:
                for place, key, offset in _scan(path, start):
                    if place > after:
                        rows.add(place, key, number << _OFFSET_BITS | offset)
            except OSError as error:
                self._warn(number, str(error))
        return rows.stretch()

    def _warn(self, file: int, why: str) -> None:
        if not self._warned:
            self._warned = True
            _LOGGER.warning("journal %s: %s; what it held there is asked for again", self._paths[file], why)


@dataclasses.dataclass(slots=True)
class _Head:
    body_crc: int
    length: int
    place: Place
    key: bytes


def _read_head(data: bytes) -> _Head | None:
    if len(data) < _HEAD.size:
        return None
    head_crc, body_crc, length, source, position, key = _HEAD.unpack(data)
    if google_crc32c.value(data[_CHECKED_FROM:]) != head_crc:
        return None
    return _Head(body_crc, length, (source, position), key)


def _read_all(file: BinaryIO, length: int) -> bytes:
    pieces = []
    while length and (piece := file.read(length)):
        pieces.append(piece)
        length -= len(piece)
    return b"".join(pieces)


def _start_of(path: str, accepts: Callable[[str], bool]) -> int:
    """Returns where the frames of a file begin; 0 where none counts, as its first line says."""
    line = b""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError), open(path, "rb") as file:
        line = file.readline(_MAX_LINE_BYTES)
        fields = json.loads(line)
        if fields["gristmill_journal"] == 1 and accepts(str(fields["plan_id"])):
            return len(line)
    _LOGGER.warning("%s is no journal of this job and is not used", path)
    return 0


def _scan(path: str, start: int) -> Iterator[tuple[Place, bytes, int]]:
    """Yields (record, key, offset) of every frame that is whole and has a key."""
    if not start:
        return
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        at = start
        while True:
            file.seek(at)
            head = _read_head(file.read(_HEAD.size))
            if head is None or at + _HEAD.size + head.length > size:
                break
            if head.key != NO_KEY:
                yield head.place, head.key, at
            at += _HEAD.size + head.length
    if at < size:
        _LOGGER.warning("journal %s: what follows byte %s of %s is not whole and is not used", path, f"{at:,}", size)


@dataclasses.dataclass(frozen=True)
class _Stretch:
    """The frames of the records up to one of them.

    Attributes:
        keys: The first eight bytes of their keys, as numbers, sorted.
        locations: File and offset of each.
        until: That record.
    """

    keys: array.array[int]
    locations: array.array[int]
    until: Place

    @classmethod
    def empty(cls, until: Place) -> _Stretch:
        return cls(array.array("Q"), array.array("Q"), until)

    def find(self, key: bytes) -> Iterator[int]:
        """Yields where frames of that key may stand, the first one first."""
        short = _short(key)
        at = bisect.bisect_left(self.keys, short)
        while at < len(self.keys) and self.keys[at] == short:
            yield self.locations[at]
            at += 1


def _short(key: bytes) -> int:
    return int.from_bytes(key[:8], "little")


class _Rows:
    """Collects frames, and keeps those of the first records when there are too many."""

    def __init__(self, max_rows: int) -> None:
        self._max = max_rows
        self._limit = 2 * max_rows
        self._until = _EVERYTHING
        self._sources, self._positions = array.array("Q"), array.array("q")
        self._keys, self._locations = array.array("Q"), array.array("Q")

    def add(self, place: Place, key: bytes, location: int) -> None:
        if place > self._until:
            return
        self._sources.append(place[0])
        self._positions.append(place[1])
        self._keys.append(_short(key))
        self._locations.append(location)
        if len(self._keys) >= self._limit:
            self._cut()
            self._limit = 2 * max(self._max, len(self._keys))  # One record may have any number of them.

    def _cut(self) -> None:
        """Leaves out the records behind the first ones; all frames of a record stay together."""
        import numpy as np

        sources, positions = np.frombuffer(self._sources, "Q"), np.frombuffer(self._positions, "q")
        last = np.lexsort((positions, sources))[self._max - 1]
        self._until = (int(sources[last]), int(positions[last]))
        kept = (sources < sources[last]) | ((sources == sources[last]) & (positions <= positions[last]))
        columns = (self._sources, self._positions, self._keys, self._locations)
        self._sources, self._positions, self._keys, self._locations = (_take(column, kept) for column in columns)

    def stretch(self) -> _Stretch:
        if not self._keys:
            return _Stretch.empty(self._until)
        import numpy as np  # Takes longer to import than most steps do, so only where there is a journal.

        keys = np.frombuffer(self._keys, np.uint64)
        order = np.argsort(keys, kind="stable")  # Of equal keys the first one stays the first.
        return _Stretch(_take(self._keys, order), _take(self._locations, order), self._until)


def _take(column: array.array[int], which: np.ndarray[Any, Any]) -> array.array[int]:
    import numpy as np

    return array.array(column.typecode, np.frombuffer(column, column.typecode)[which].tobytes())
