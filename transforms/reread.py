"""Reads sources again where they could not be read: damaged regions, cut ends, whole files. No Beam here.

What was damaged has a place in the source as it was listed. A source that was mended in place has the same size; one
that has grown or shrunk has done so at its end, or in its only damaged region. Where neither can be, its records may
stand in other places than before, and taking any could double one: the letter then stays.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
from collections.abc import Iterator

from transforms.elements import Chunk, DeadLetter, Input, JobSpec, name_fields, name_from_fields
from transforms.formats import array_record, tfrecord
from transforms.isolated_reader import REASON as READER_DIED
from transforms.isolated_reader import read_isolated
from transforms.plan_file import INPUTS_NAME
from transforms.shard_reader import read_input
from transforms.sources import explain_error, open_input
from transforms.store import Store

_DAMAGE = {"data_checksum", "length_checksum", "impossible_length", "truncated", "not_tfrecord", "record_too_large"}
_STREAM_ENDS = {"truncated_stream", "damaged_stream", "trailing_garbage"}
_WHOLE = {"not_tfrecord", "not_array_record"}


@dataclasses.dataclass(frozen=True)
class Listed:
    """A source of a replay.

    Attributes:
        offset: Byte offset of its line in inputs.jsonl.
        source: The source; its size is the number of its letters that the replay takes.
        size: Bytes of the source when it was listed for conversion.
        mtime_ns: Its modification time then.
        letters: All its letters, those that are not taken included.
        was_dead: Whether nothing of the source could be converted before.
        taken_bytes: Bytes of the letters that the replay takes.
    """

    offset: int
    source: Input
    size: int
    mtime_ns: int
    letters: int
    was_dead: bool
    taken_bytes: int


def listed_line(listed: Listed) -> bytes:
    """Returns the line of a source in a replay's inputs.jsonl."""
    fields: dict[str, object] = dict(name_fields("name", listed.source.name))
    fields.update(size=listed.source.size, mtime_ns=listed.mtime_ns, listed_size=listed.size)
    fields.update(letters=listed.letters, was_dead=listed.was_dead, taken_bytes=listed.taken_bytes)
    return json.dumps(fields, ensure_ascii=False).encode() + b"\n"


def read_listed(store: Store, offset: int = 0, index: int = 0) -> Iterator[Listed]:
    """Yields the sources of a replay from a line of its inputs.jsonl on."""
    with store.open(INPUTS_NAME) as lines:
        lines.seek(offset)
        for line in lines:
            fields = json.loads(line)
            source = Input(index, name_from_fields("name", fields), fields["size"], fields["mtime_ns"])
            sizes = fields["listed_size"], fields["mtime_ns"], fields["letters"]
            yield Listed(offset, source, *sizes, fields["was_dead"], fields["taken_bytes"])
            offset += len(line)
            index += 1


def needs_source(letter: DeadLetter) -> bool:
    """Whether the letter holds no whole record, so that its source must be read again."""
    cut = letter.carried is not None and letter.carried["payload_truncated"]
    return letter.step == "read" or letter.payload is None or cut


def is_unreadable(letter: DeadLetter) -> bool:
    """Whether the letter stands for a range that could not be read, so that no record need begin at its ends."""
    return letter.step == "read" and letter.reason not in _DAMAGE | _STREAM_ENDS | _WHOLE and "row" not in letter.extra


def stays(letter: DeadLetter) -> Chunk:
    """Returns the letter as it was, tried once more."""
    again = dataclasses.replace(letter, attempts=letter.attempts + 1)
    return Chunk(dead=[again], num_bytes=letter.length)


def read_again(
    spec: JobSpec, letters: list[DeadLetter], listed: Listed, *, joins: bool, goes_on: bool, isolated: bool
) -> Iterator[Chunk]:
    """Yields what letters of one source hold now: records with their origins, and what is dead still.

    Args:
        spec: The replay.
        letters: Letters that need their source, in order.
        listed: The source.
        joins: Whether the first one begins inside an unreadable range that another shard reads.
        goes_on: Whether the next shard reads on from the last one.
        isolated: Whether to read in a child process.
    """
    yield Chunk()  # The source has its row in the books also when nothing is left of it.
    present = _present(listed)
    if present is None or (not present.size and listed.size):
        yield from map(stays, letters)
        return
    reader = _Reader(spec, present, listed, isolated=isolated or any(one.reason == READER_DIED for one in letters))
    if reader.is_stream():
        yield from reader.stream(letters)
        return
    by_number = [letter for letter in letters if "row" in letter.extra]
    yield from reader.rows(by_number)
    regions = [letter for letter in letters if "row" not in letter.extra]
    yield from reader.regions(regions, joins=joins, goes_on=goes_on)


def _present(listed: Listed) -> Input | None:
    """Returns the source as it is now, None when it cannot be opened."""
    name = listed.source.name
    try:
        info = None if "://" in name else os.stat(os.fsencode(name))
        present = Input(0, name, listed.size, listed.mtime_ns)
        if info is not None:
            present = dataclasses.replace(present, size=info.st_size, mtime_ns=info.st_mtime_ns)
        open_input(present).close()
    except OSError as error:
        explain_error(error)  # Raises when the machine is at fault.
        return None
    except ValueError:  # A name with a zero byte in it.
        return None
    return present


class _Reader:
    """Reads the letters' places in one source."""

    def __init__(self, spec: JobSpec, present: Input, listed: Listed, *, isolated: bool) -> None:
        self._spec = spec
        self._present = present
        self._listed = listed
        self._read = read_isolated if isolated else read_input

    def is_stream(self) -> bool:
        """Whether the source can only be read from its beginning."""
        if self._spec.format != "tfrecord":
            return False
        if self._spec.compression != "auto":
            return self._spec.compression != "none"
        file = open_input(self._present)
        try:
            return tfrecord.detect_compression(file) != "none"
        except OSError as error:
            explain_error(error)
            return False
        finally:
            file.close()

    def rows(self, letters: list[DeadLetter]) -> Iterator[Chunk]:
        """Reads records of an ArrayRecord by their numbers."""
        if not letters:
            return
        rows = [int(letter.extra["row"]) for letter in letters]
        chunks = array_record.read_rows(self._present, rows, self._spec.max_record_bytes)
        for letter, chunk in zip(letters, chunks, strict=True):
            yield stays(letter) if chunk is None else _again(chunk, letter)

    def regions(self, letters: list[DeadLetter], *, joins: bool, goes_on: bool) -> Iterator[Chunk]:
        """Reads regions of a file in which any position can be read."""
        behind: int | None = None  # Where reading of the unreadable range before has ended.
        for number, letter in enumerate(letters):
            is_last = number == len(letters) - 1
            end = self._end(letter)
            meets = is_unreadable(letter) or (goes_on and is_last)
            if end is None or not (meets or self._is_end(end)):
                yield stays(letter)
                behind = None
                continue
            trusted = not (joins and number == 0)
            start = letter.position if behind is None else max(letter.position, behind)
            behind = None
            for chunk in self._region(letter, start, end, trusted=trusted):
                if chunk.span is not None and chunk.span.end is not None and is_unreadable(letter):
                    follows = not is_last and letters[number + 1].position == letter.position + letter.length
                    behind = chunk.span.end if follows else None
                yield _again(chunk, letter)

    def _region(self, letter: DeadLetter, start: int, end: int, *, trusted: bool) -> Iterator[Chunk]:
        if start < end or (start == 0 and not self._present.size):
            yield from self._read(self._spec, self._present, start, end, trusted=trusted and start > 0)

    def _end(self, letter: DeadLetter) -> int | None:
        """Returns where the letter's region ends in the source as it is now, None when that cannot be told."""
        end = letter.position + letter.length
        grown = self._present.size - self._listed.size
        if end >= self._listed.size or letter.reason in _WHOLE:
            end = self._present.size
        elif grown:
            if self._listed.letters > 1:
                return None
            end += grown
        return end if end >= letter.position else None

    def _is_end(self, end: int) -> bool:
        """Whether what was converted behind the region is still there."""
        if self._spec.format != "tfrecord" or end >= self._present.size:
            return True
        with contextlib.closing(open_input(self._present)) as file:
            return tfrecord.is_boundary(file, self._present, end, self._spec)

    def stream(self, letters: list[DeadLetter]) -> Iterator[Chunk]:
        """Reads a compressed file from its beginning and takes what lies in the letters' regions."""
        windows = [_Window(letter) for letter in letters]
        for window, following in itertools.pairwise(windows):
            window.end_before(following)
        reached = 0
        for chunk in self._read(self._spec, self._present, 0, self._present.size):
            reached = max(reached, chunk.reached or 0)
            for window in windows:
                taken = window.take(chunk)
                if taken.records or taken.dead:
                    yield taken
        for window in windows:
            if not window.is_settled(reached):
                yield stays(window.letter)


class _Window:
    """A letter's region of a decompressed stream."""

    def __init__(self, letter: DeadLetter) -> None:
        self.letter = letter
        self._start = letter.position
        to_end = is_unreadable(letter) or letter.reason in _STREAM_ENDS | _WHOLE | {"truncated"}
        self._end = 1 << 62 if to_end else letter.position + max(1, letter.length)
        self._is_hidden = False  # Whether damage that begins before the region covers its beginning.

    def end_before(self, following: _Window) -> None:
        """No record lies in two regions."""
        if self._start < following._start:
            self._end = min(self._end, following._start)

    def take(self, chunk: Chunk) -> Chunk:
        """Returns the part of a chunk that lies in the region."""
        inside = [number for number, position in enumerate(chunk.positions) if self._start <= position < self._end]
        dead = [letter for letter in chunk.dead if self._start <= letter.position < self._end]
        for letter in chunk.dead:
            if letter.position < self._start < letter.position + letter.length:
                self._is_hidden = True
        records = [chunk.records[number] for number in inside]
        num_bytes = sum(map(len, records)) + tfrecord.FRAMING_BYTES * len(records) + sum(one.length for one in dead)
        part = Chunk(records, [chunk.positions[number] for number in inside], dead, num_bytes)
        return _again(part, self.letter)

    def is_settled(self, reached: int) -> bool:
        """Whether the stream could be read as far as the region."""
        return reached >= self._start and not self._is_hidden


def _again(chunk: Chunk, letter: DeadLetter) -> Chunk:
    """Returns a chunk whose records and dead letters have the letter as their origin."""
    chunk.origins = [
        DeadLetter(letter.source, position, len(record), letter.step, letter.reason, attempts=letter.attempts)
        for record, position in zip(chunk.records, chunk.positions, strict=True)
    ]
    for dead in chunk.dead:
        dead.attempts = letter.attempts + 1
    return chunk
