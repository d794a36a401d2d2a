"""Reads a range in child processes, so that bytes which kill their reader cost themselves and not the job.

Readers are made never to fail, but they stand on libraries in native code. A range that has killed workers before is
read by children; if a child dies, the smallest part of the range that kills one is found by bisection, becomes one dead
letter, and reading goes on behind it. No Beam here.
"""

from __future__ import annotations

from collections.abc import Iterator

from transforms.child_call import ChildCall
from transforms.elements import Chunk, DeadLetter, Input, JobSpec, Span
from transforms.formats import load_format

REASON = "reader_died"


def read_isolated(spec: JobSpec, source: Input, start: int, end: int, *, trusted: bool = False) -> Iterator[Chunk]:
    """Yields what `transforms.shard_reader.read_input` yields, whatever the range does to the process that reads it.

    What kills the reader is one dead letter with reason `reader_died`: the record or region where the range splits,
    else the rest of the input.

    Raises:
        OSError: The machine is at fault, not the input.
    """
    if source.error is not None or not load_format(spec.format).SPLITTABLE:
        yield from _read_stream(spec, source, start, end, trusted=trusted)
        return
    probe = _child(spec, source, start, end, trusted=trusted, probe=True)
    rolls = False
    for chunk in probe.items():
        rolls = rolls or chunk.rolls
    if rolls or probe.death is None:
        yield from _read_stream(spec, source, start, end, trusted=trusted)
        return
    yield from _Bisection(spec, source, start, end, trusted=trusted).read()


def probe_input(spec: JobSpec, source: Input, start: int, end: int, *, trusted: bool) -> Iterator[Chunk]:
    """Yields the chunks of a range without their records, to see whether it can be read."""
    from transforms.shard_reader import read_input

    for chunk in read_input(spec, source, start, end, trusted=trusted):
        chunk.records, chunk.positions, chunk.dead, chunk.origins = [], [], [], None
        yield chunk


def _child(spec: JobSpec, source: Input, start: int, end: int, *, trusted: bool, probe: bool = False) -> ChildCall:
    target = "transforms.isolated_reader:probe_input" if probe else "transforms.shard_reader:read_input"
    return ChildCall(target, spec=spec, source=source, start=start, end=end, trusted=trusted)


def _read_stream(spec: JobSpec, source: Input, start: int, end: int, *, trusted: bool) -> Iterator[Chunk]:
    """Reads what cannot be split; if its reader dies, the rest is lost."""
    from transforms.shard_reader import Progress

    child = _child(spec, source, start, end, trusted=trusted)
    progress = Progress(source, start, end)
    for chunk in child.items():
        progress.follow(chunk)
        yield chunk
    if child.death is not None:
        yield progress.rest(REASON, f"the reader died: {child.death}")


class _Bisection:
    """Reads a range that kills its reader, part by part."""

    def __init__(self, spec: JobSpec, source: Input, start: int, end: int, *, trusted: bool) -> None:
        self._spec = spec
        self._source = source
        self._start, self._end = start, end
        self._trusted = trusted
        self._first: int | None = None  # Span of all parts together.
        self._last: int | None = None
        self._death = ""

    def read(self) -> Iterator[Chunk]:
        """Yields the chunks of the range and the dead letters of what kills the reader."""
        position = self._start
        killer = self._find_killer(position)
        while killer is not None:
            if killer > position:
                yield from self._part(position, killer)
            self._trusted = True
            position = self._find_revival(killer)
            letter = self._letter(killer, position)
            killer = self._find_killer(position) if position < self._end else None
            stop = self._end if killer is None else killer
            rest = self._part(position, stop) if position < stop else iter(())
            yield from self._join(letter, rest)
            position = stop
        else:
            if position < self._end:
                yield from self._part(position, self._end)
        yield Chunk(span=Span(self._start, self._end, self._first, self._last))

    def _find_killer(self, low: int) -> int | None:
        """Returns the largest position up to which [low, position) can be read; None when all of it can."""
        if self._lives(low, self._end):
            return None
        lives, dies = low, self._end
        while dies - lives > 1:
            middle = (lives + dies) // 2
            if self._lives(low, middle):
                lives = middle
            else:
                dies = middle
        return lives

    def _find_revival(self, killer: int) -> int:
        """Returns the first position behind a killer from which one can look for the next record."""
        dies, lives = killer, killer + 1
        if lives >= self._end or self._lives(lives, lives + 1):
            return lives
        dies, lives = lives, self._end
        while lives - dies > 1:
            middle = (lives + dies) // 2
            if self._lives(middle, middle + 1):
                lives = middle
            else:
                dies = middle
        return lives

    def _lives(self, start: int, end: int) -> bool:
        child = _child(self._spec, self._source, start, end, trusted=self._trusted, probe=True)
        for _ in child.items():
            pass
        self._death = child.death or self._death
        return child.death is None

    def _part(self, start: int, end: int) -> Iterator[Chunk]:
        """Yields a part that was found to be harmless, as far as its reader comes if something else kills it."""
        from transforms.shard_reader import Progress

        child = _child(self._spec, self._source, start, end, trusted=self._trusted)
        progress = Progress(self._source, start, end)
        for chunk in child.items():
            progress.follow(chunk)
            yield self._without_span(chunk)
        if child.death is not None:
            yield self._without_span(progress.rest(REASON, f"the reader died: {child.death}"))

    def _without_span(self, chunk: Chunk) -> Chunk:
        """Makes a part's span part of the whole's."""
        if chunk.span is not None:
            self._first = chunk.span.start if self._first is None else self._first
            self._last = chunk.span.end if chunk.span.end is not None else self._last
            chunk.span = None
        return chunk

    def _join(self, letter: Chunk, part: Iterator[Chunk]) -> Iterator[Chunk]:
        """Yields a killer's letter, then the part behind it, whose first damage is the rest of the same region."""
        killer = letter.dead[0]
        first = next(part, None)
        if first is not None and first.dead and first.dead[0].position == killer.position + killer.length:
            rest = first.dead.pop(0)
            killer.length += rest.length
            letter.num_bytes += rest.length
            first.num_bytes -= rest.length
        yield letter
        if first is not None:
            yield first
            yield from part

    def _letter(self, start: int, end: int) -> Chunk:
        self._first = start if self._first is None else self._first
        self._last = end
        text = f"the reader died: {self._death}"
        letter = DeadLetter(self._source.name, start, end - start, "read", REASON, error=text)
        return Chunk(dead=[letter], num_bytes=letter.length)
