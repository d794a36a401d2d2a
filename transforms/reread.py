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
from collections.abc import Iterator

from transforms.elements import Chunk, DeadLetter, Input, JobSpec, name_fields, name_from_fields, to_json
from transforms.formats import array_record, tfrecord
from transforms.isolated_reader import REASON as READER_DIED
from transforms.isolated_reader import read_isolated
from transforms.plan_file import DamagedLineError
from transforms.shard_reader import read_input
from transforms.sources import explain_error, look_up, open_input
from transforms.state import open_inputs
from transforms.store import Store

_DAMAGE = {"data_checksum", "length_checksum", "impossible_length", "truncated", "not_tfrecord", "record_too_large"}
_STREAM_ENDS = {"truncated_stream", "damaged_stream", "trailing_garbage"}
UNKNOWN_SIZE = -1
_WHOLE = {"not_tfrecord", "not_array_record"}


@dataclasses.dataclass(frozen=True)
class Listed:
    """A source of a replay.

    Attributes:
        offset: Byte offset of its line in inputs.jsonl.
        source: The source; its size is the number of its letters that the replay takes.
        size: Bytes of the source when it was listed for conversion; UNKNOWN_SIZE where its end was mended since.
        mtime_ns: Its modification time then.
        letters: All its letters, those that are not taken included.
        was_dead: Whether nothing of the source could be converted before.
        taken_bytes: Bytes of the letters that the replay takes.
        tail: Position from which on letters of the reader cover the source to its end as listed; beyond it if none do.
        taken_estimate: Records that the taken letters probably held, see `DeadLetter.records_estimate`.
    """

    offset: int
    source: Input
    size: int
    mtime_ns: int
    letters: int
    was_dead: bool
    taken_bytes: int
    tail: int
    taken_estimate: int = 0


def listed_line(listed: Listed) -> bytes:
    """Returns the line of a source in a replay's inputs.jsonl."""
    fields: dict[str, object] = dict(name_fields("name", listed.source.name))
    fields.update(size=listed.source.size, mtime_ns=listed.mtime_ns, listed_size=listed.size)
    fields.update(letters=listed.letters, was_dead=listed.was_dead, taken_bytes=listed.taken_bytes)
    fields.update(tail=listed.tail, taken_estimate=listed.taken_estimate)
    return to_json(fields)


def read_listed(store: Store, offset: int = 0, index: int = 0) -> Iterator[Listed]:
    """Yields the sources of a replay from a line of its inputs.jsonl on."""
    with open_inputs(store) as lines:
        lines.seek(offset)
        for line in lines:
            yield _listed(line, offset, index)
            offset += len(line)
            index += 1


def _listed(line: bytes, offset: int, index: int) -> Listed:
    try:
        fields = json.loads(line)
        source = Input(index, name_from_fields("name", fields), fields["size"], fields["mtime_ns"])
        sizes = fields["listed_size"], fields["mtime_ns"], fields["letters"]
        tail, estimate = fields["tail"], fields.get("taken_estimate", 0)
        return Listed(offset, source, *sizes, fields["was_dead"], fields["taken_bytes"], tail, estimate)
    except (ValueError, KeyError, TypeError, AttributeError) as damage:
        raise DamagedLineError(f"is damaged at byte {offset}") from damage


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
    by_number = [letter for letter in letters if spec.format == "array_record" and _has_row(letter)]
    yield from reader.rows(by_number)
    regions = [letter for letter in letters if letter not in by_number] if by_number else letters
    yield from reader.regions(regions, joins=joins, goes_on=goes_on)


def _has_row(letter: DeadLetter) -> bool:
    """Whether the letter of an ArrayRecord stands for one record: the reader says so, and steps see records only."""
    return "row" in letter.extra or letter.step != "read"


def _present(listed: Listed) -> Input | None:
    """Returns the source as it is now, None when it cannot be opened."""
    name = listed.source.name
    try:
        present = look_up(name)
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
        rows = [letter.position for letter in letters]
        chunks = array_record.read_rows(self._present, rows, self._spec.max_record_bytes)
        for letter, chunk in zip(letters, chunks, strict=True):
            if chunk is None or letter.step != "read":
                yield _same_record(chunk.records if chunk is not None else [], letter)
            else:
                yield _again(chunk, letter)

    def regions(self, letters: list[DeadLetter], *, joins: bool, goes_on: bool) -> Iterator[Chunk]:
        """Reads regions of a file in which any position can be read."""
        behind: int | None = None  # Where reading of the unreadable range before has ended.
        for number, letter in enumerate(letters):
            is_last = number == len(letters) - 1
            follows = not is_last and letters[number + 1].position == letter.position + letter.length
            start = letter.position if behind is None else max(letter.position, behind)
            behind = None
            if letter.step != "read":
                yield self._record(letter)
                continue
            end = self._end(letter, meets=follows or is_unreadable(letter) or (goes_on and is_last))
            if end is None:
                yield stays(letter)
                continue
            for chunk in self._region(start, end, trusted=not (joins and number == 0)):
                if is_unreadable(letter):
                    behind = chunk.span.end if follows and chunk.span is not None else None
                else:
                    _cut_at(chunk, end)
                yield _again(chunk, letter)

    def _record(self, letter: DeadLetter) -> Chunk:
        """Reads one record again of which only the beginning was kept, and checks that it is the same."""
        end = self._present.size if self._spec.format == "files" else letter.position + 1
        chunks = self._read(self._spec, self._present, letter.position, end, trusted=letter.position > 0)
        return _same_record([record for chunk in chunks for record in chunk.records], letter)

    def _region(self, start: int, end: int, *, trusted: bool) -> Iterator[Chunk]:
        if start < end or (start == 0 and not self._present.size):
            yield from self._read(self._spec, self._present, start, end, trusted=trusted and start > 0)

    def _end(self, letter: DeadLetter, *, meets: bool) -> int | None:
        """Returns where the letter's region ends in the source as it is now, None when that cannot be told.

        Args:
            letter: The letter.
            meets: Whether no record need begin behind the region, because more that was not read follows.
        """
        position, end = letter.position, letter.position + letter.length
        now, before, tail = self._present.size, self._listed.size, self._listed.tail
        before = now if before == UNKNOWN_SIZE else before
        if letter.reason in _WHOLE:
            return now
        if now == before:
            return max(end, now) if end >= before else self._checked(end, meets=meets)
        if tail <= before:  # The end was damaged; if it is where it was, so is all that is in front of it.
            if now < tail or not self._is_end(tail):
                return None
            if position >= tail:
                return now if end >= before else min(end, now)
            return self._checked(end, meets=meets) if self._is_end(position) else None
        grown = end + now - before
        is_only = self._listed.letters == 1 and grown >= position
        return grown if is_only and self._is_end(position) and self._is_end(grown) else None

    def _checked(self, end: int, *, meets: bool) -> int | None:
        return end if meets or self._is_end(end) else None

    def _is_end(self, end: int) -> bool:
        """Whether a record may begin at a position, so that what was converted beside it is still there."""
        if self._spec.format != "tfrecord" or end in (0, self._present.size):
            return True
        with contextlib.closing(open_input(self._present)) as file:
            return tfrecord.is_boundary(file, self._present, end, self._spec)

    def stream(self, letters: list[DeadLetter]) -> Iterator[Chunk]:
        """Reads a compressed file from its beginning and takes what lies in the letters' regions."""
        windows = [_Window(letter) for letter in letters if not _is_range_of_stream(letter)]
        for window, following in itertools.pairwise(windows):
            window.end_before(following)
        reached = 0
        for chunk in self._whole():
            reached = max(reached, chunk.reached or 0)
            for window in windows:
                window.look(chunk)
        for window in windows:
            if not window.is_in_place(reached):
                yield stays(window.letter)
        windows = [window for window in windows if window.is_in_place(reached)]
        for chunk in self._whole() if windows else ():
            for window in windows:
                taken = window.take(chunk)
                if window.letter.step != "read":
                    if taken.records:
                        window.is_told = True
                        yield _same_record(taken.records, window.letter)
                elif taken.records or taken.dead:
                    yield taken
        for window in windows:
            if not window.is_settled():
                yield stays(window.letter)

    def _whole(self) -> Iterator[Chunk]:
        return self._read(self._spec, self._present, 0, self._present.size)


def _is_range_of_stream(letter: DeadLetter) -> bool:
    """Whether the letter is a range of a compressed file that could not be opened: its first range reads it whole."""
    return is_unreadable(letter) and letter.position > 0 and letter.length > 0


class _Window:
    """A letter's region of a decompressed stream.

    Args:
        letter: The letter.

    Attributes:
        letter: The letter.
        is_told: Whether the record of a letter that a step failed on has been found.
    """

    def __init__(self, letter: DeadLetter) -> None:
        self.letter = letter
        self.is_told = False
        self._start = letter.position
        to_end = is_unreadable(letter) or letter.reason in _STREAM_ENDS | _WHOLE | {"truncated"}
        length = letter.length if letter.step == "read" else letter.length + tfrecord.FRAMING_BYTES
        self._end = _STREAM_END if to_end else letter.position + max(1, length)
        self._missing = {self._start, self._end} - {0, _STREAM_END}

    def end_before(self, following: _Window) -> None:
        """No record lies in two regions."""
        if self._start < following._start < self._end:
            self._end = following._start

    def look(self, chunk: Chunk) -> None:
        """Looks whether records or damage begin where the region begins and ends, as they did before."""
        if self._missing:
            self._missing.difference_update(chunk.positions, (letter.position for letter in chunk.dead))

    def is_in_place(self, reached: int) -> bool:
        """Whether the region is where it was in the stream, which ends at `reached`."""
        return not self._missing - {reached}

    def take(self, chunk: Chunk) -> Chunk:
        """Returns the part of a chunk that lies in the region."""
        inside = [number for number, position in enumerate(chunk.positions) if self._start <= position < self._end]
        dead = [letter for letter in chunk.dead if self._start <= letter.position < self._end]
        records = [chunk.records[number] for number in inside]
        num_bytes = sum(map(len, records)) + tfrecord.FRAMING_BYTES * len(records) + sum(one.length for one in dead)
        part = Chunk(records, [chunk.positions[number] for number in inside], dead, num_bytes)
        return _again(part, self.letter)

    def is_settled(self) -> bool:
        """Whether it was told what the region holds now."""
        return self.letter.step == "read" or self.is_told


_STREAM_END = 1 << 62


def _cut_at(chunk: Chunk, end: int) -> None:
    """Leaves what is damaged behind a region to the letter that stands for it."""
    inside = [letter for letter in chunk.dead if letter.position < end]
    for letter in inside:
        letter.length = min(letter.length, end - letter.position)
    if chunk.dead and chunk.reached is not None and chunk.reached > end:
        records = sum(map(len, chunk.records)) + tfrecord.FRAMING_BYTES * len(chunk.records)
        chunk.num_bytes = records + sum(letter.length for letter in inside)
    chunk.dead = inside


def _same_record(records: list[bytes], letter: DeadLetter) -> Chunk:
    """Returns the record of which the letter keeps the beginning, or the letter if it is another one."""
    size = letter.carried["payload_bytes"] if letter.carried is not None else None
    kept = letter.payload or b""
    if len(records) != 1 or (size is not None and len(records[0]) != size) or not records[0].startswith(kept):
        return stays(letter)
    origin = dataclasses.replace(letter, payload=None, carried=None)
    return Chunk(records, [letter.position], num_bytes=letter.length, origins=[origin])


def _again(chunk: Chunk, letter: DeadLetter) -> Chunk:
    """Returns a chunk whose records and dead letters have the letter as their origin."""
    chunk.origins = [
        DeadLetter(letter.source, position, len(record), letter.step, letter.reason, attempts=letter.attempts)
        for record, position in zip(chunk.records, chunk.positions, strict=True)
    ]
    for dead in chunk.dead:
        dead.attempts = letter.attempts + 1
    return chunk
