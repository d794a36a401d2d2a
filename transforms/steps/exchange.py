"""What a worker and the process of its isolated steps share: a piece of memory, and the form of batches and outcomes.

Records go to the process through a pipe. What became of them comes back through the memory, a frame a record, which
outlives the process: a record whose frame is complete is finished, whatever happens afterwards. No Beam here.
"""

from __future__ import annotations

import array
import dataclasses
import json
import mmap
import os
import struct
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import BinaryIO

from transforms.dead_letters import Failure
from transforms.steps.chain import Outcome

ARENA_BYTES = 1 << 20
"""Room for frames: twice an ordinary batch, so that the process nearly always goes through a batch without a stop."""

# Numbers of 8 bytes at the beginning of the memory.
BEGUN = 0  # Records of the batch that were begun; the last of them runs unless its frame is complete.
STEP = 1  # The step that runs, or ran last.
ITEM = 2  # 0 for a call, else the number of the item that its iterator is asked for.
STARTED_NS = 3  # CLOCK_MONOTONIC when the step started; 0 when none runs.
FILLED = 4  # Bytes of frames in the arena.
ENDED = 5  # 1 once the process has ended and the fields below are set.
STATUS = 6  # Its wait status.
TIMED_OUT = 7  # 1 if it was ended because a step ran for too long.

# What the process says through its pipe, a byte each; and the answer to FULL.
READY, REFUSED, FULL, DONE = b"R", b"E", b"F", b"D"
GO_ON = b"G"

CHECK = struct.Struct("<4q")
"""Asks the warden to end the process if BEGUN, STEP, ITEM and STARTED_NS are still the same."""

STDERR, TRACE = 0, 1
"""Texts that the process leaves: the end of its standard error, and where it was when it died."""

MAX_NOTE_BYTES = 8_000
_NUM_SLOTS = 16
_NOTES_AT = 1 << 10
_NOTE_BYTES = 1 << 13
_HEADER_BYTES = 1 << 15
_NOTE_HEAD = struct.Struct("<q")
_BATCH_HEAD = struct.Struct("<qq")  # Records, bytes of the note.
_FRAME_HEAD = struct.Struct("<qqq")  # Bytes of the frame, outputs, bytes of the text about drops and failure.
_JOIN_BYTES = 4 << 20


class Exchange:
    """The shared memory.

    Args:
        fd: Of the anonymous file; the caller may close it afterwards.

    Attributes:
        slots: The numbers.
        arena: Room for frames.
    """

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, _HEADER_BYTES + ARENA_BYTES)
        self._view = memoryview(self._map)
        self.slots = self._view[: 8 * _NUM_SLOTS].cast("q")
        self.arena = self._view[_HEADER_BYTES:]

    def close(self) -> None:
        """Gives the memory back."""
        for view in (self.slots, self.arena, self._view):
            view.release()
        self._map.close()

    def put_text(self, text: str) -> None:
        """Puts a text in the place of frames."""
        data = text.encode("utf-8", "backslashreplace")[:MAX_NOTE_BYTES]
        self.arena[: len(data)] = data
        self.slots[FILLED] = len(data)

    def text(self) -> str:
        """Returns the text that stands in the place of frames."""
        return bytes(self.arena[: self.slots[FILLED]]).decode("utf-8", "replace")

    def put_note(self, which: int, data: bytes) -> None:
        """Leaves the end of a text."""
        kept = data[-MAX_NOTE_BYTES:]
        start = _NOTES_AT + which * _NOTE_BYTES
        self._view[start : start + _NOTE_HEAD.size + len(kept)] = _NOTE_HEAD.pack(len(kept)) + kept

    def note(self, which: int) -> bytes:
        """Returns a text that was left."""
        start = _NOTES_AT + which * _NOTE_BYTES
        (length,) = _NOTE_HEAD.unpack_from(self._view, start)
        start += _NOTE_HEAD.size
        return bytes(self._view[start : start + min(length, MAX_NOTE_BYTES)])


def make_memory() -> int:
    """Returns a new anonymous file of the right size."""
    fd = make_file("gristmill-steps")
    os.ftruncate(fd, _HEADER_BYTES + ARENA_BYTES)
    return fd


def make_file(name: str) -> int:
    """Returns an anonymous file in memory, on disk where the system has none in memory."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def pack_batch(records: Sequence[bytes], note: bytes = b"") -> list[bytes]:
    """Returns what to send for a batch, with a note on it; large records are not copied."""
    lengths = array.array("q", map(len, records))
    parts = [_BATCH_HEAD.pack(len(records), len(note)), note, lengths.tobytes(), *records]
    return [b"".join(parts)] if sum(lengths) <= _JOIN_BYTES else parts


def read_batch(file: BinaryIO) -> tuple[Iterator[bytes], bytes] | None:
    """Reads a batch and its note, wholly before its first record is handed out; None at the end."""
    head = file.read(_BATCH_HEAD.size)
    if len(head) < _BATCH_HEAD.size:
        return None
    num_records, note_bytes = _BATCH_HEAD.unpack(head)
    note = file.read(note_bytes)
    lengths = array.array("q", file.read(8 * num_records))
    records = [file.read(length) for length in lengths]
    records.reverse()
    return (records.pop() for _ in range(len(records))), note  # A large record is not held longer than needed.


class OutcomeWriter:
    """Writes outcomes into the arena.

    Args:
        exchange: The memory.
        wait_for_room: Called when the arena is full; returns when it has been read.
    """

    def __init__(self, exchange: Exchange, wait_for_room: Callable[[], None]) -> None:
        self._arena = exchange.arena
        self._slots = exchange.slots
        self._size = len(exchange.arena)
        self._wait_for_room = wait_for_room
        self._filled = 0

    def restart(self) -> None:
        """Begins at the front again, for a new batch."""
        self._filled = 0

    def write(self, outcome: Outcome) -> None:
        """Writes what became of a record. It counts once its last byte is there."""
        parts = _pack_outcome(outcome)
        if sum(map(len, parts)) <= self._size - self._filled:
            self._put(b"".join(parts))
            return
        for part in parts:
            self._put_in_pieces(memoryview(part))

    def _put_in_pieces(self, part: memoryview) -> None:
        while len(part):
            if self._filled == self._size:
                self._wait_for_room()
                self._filled = 0
            room = self._size - self._filled
            self._put(part[:room])
            part = part[room:]

    def _put(self, data: bytes | memoryview) -> None:
        end = self._filled + len(data)
        self._arena[self._filled : end] = data
        self._slots[FILLED] = self._filled = end


def _pack_outcome(outcome: Outcome) -> list[bytes]:
    outputs = outcome.outputs
    text = b""
    if outcome.drops or outcome.failure is not None or outcome.logged:
        failure = None if outcome.failure is None else dataclasses.astuple(outcome.failure)
        text = json.dumps([outcome.drops, failure, outcome.logged]).encode()
    lengths = array.array("q", map(len, outputs))
    size = _FRAME_HEAD.size + 8 * len(outputs) + sum(lengths) + len(text)
    return [_FRAME_HEAD.pack(size, len(outputs), len(text)) + lengths.tobytes(), *outputs, text]


class OutcomeReader:
    """Reads outcomes out of the pieces that the arena brought."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._wanted = 0

    def feed(self, piece: memoryview) -> list[Outcome]:
        """Returns the outcomes that are complete with this piece; the rest is kept."""
        if self._rest:
            self._rest += piece
            if len(self._rest) < self._wanted:
                return []
            kept, self._rest = self._rest, bytearray()
            with memoryview(kept) as whole:
                return self._unpack(whole)
        return self._unpack(piece)

    def _unpack(self, data: memoryview) -> list[Outcome]:
        outcomes: list[Outcome] = []
        start, end = 0, len(data)
        self._wanted = _FRAME_HEAD.size
        while end - start >= _FRAME_HEAD.size:
            size, num_outputs, text_bytes = _FRAME_HEAD.unpack_from(data, start)
            if end - start < size:
                self._wanted = size
                break
            outcomes.append(_unpack_outcome(data[start : start + size], num_outputs, text_bytes))
            start += size
        self._rest += data[start:]
        return outcomes


def _unpack_outcome(frame: memoryview, num_outputs: int, text_bytes: int) -> Outcome:
    at = _FRAME_HEAD.size + 8 * num_outputs
    outcome = Outcome()
    for length in struct.unpack_from(f"={num_outputs}q", frame, _FRAME_HEAD.size):
        outcome.outputs.append(bytes(frame[at : at + length]))
        at += length
    if text_bytes:
        outcome.drops, failure, logged = json.loads(bytes(frame[at:]))
        outcome.logged = [(level, text) for level, text in logged] if logged else ()
        outcome.failure = None if failure is None else Failure(*failure)
    return outcome
