"""Reads one planned shard of a replay: the dead letters of one file, as record batches. No Beam here.

A letter that a step failed on is a record again, with the letter as its origin. What the reader could not read is read
again from its source. What is not taken goes along to the new file, and so does what cannot be read even now.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from transforms.dead_letters import estimate_records
from transforms.elements import (
    BATCH_MAX_BYTES,
    BATCH_MAX_RECORDS,
    Chunk,
    DeadLetter,
    JobSpec,
    RecordBatch,
    ShardTask,
    Span,
)
from transforms.letters import Selection, letters_file, read_old_letters
from transforms.reread import Listed, needs_source, read_again, read_listed
from transforms.store import Store


def read_letters(store: Store, spec: JobSpec, task: ShardTask, *, isolated: bool) -> Iterator[RecordBatch]:
    """Yields the batches of a replay's planned shard, not yet numbered; the last one is empty and marked so.

    Args:
        store: The output directory as the replay sees it.
        spec: The replay.
        task: The planned shard.
        isolated: Whether sources must be read in a child process, because a worker died on this shard before.

    Raises:
        OutputError: The dead letters cannot be read.
    """
    sources = _sources(store, task)
    listed: Listed | None = None
    joins = letters_file(store, task.shard).joins
    letters = read_old_letters(store, spec, task.shard)
    for group in _groups(letters, Selection.of(spec)):
        if group.taken:
            if listed is None or listed.source.name != group.taken[0].source:
                listed = next(sources)
            span = _span(task, listed)
            last = listed.offset == task.last_offset and span.asked_end < listed.source.size
            for chunk in _chunks(spec, group.taken, listed, joins=joins, goes_on=last, isolated=isolated):
                estimate_records(chunk.dead, spec.record_bytes)
                batch = RecordBatch.of_chunk(task, listed.source, chunk)
                batch.span, batch.rolls = span, True
                yield batch
            joins = False
        if group.kept:
            yield RecordBatch(task, 0, kept=group.kept)
    yield RecordBatch(task, 0, last=True)


def _sources(store: Store, task: ShardTask) -> Iterator[Listed]:
    for listed in read_listed(store, task.first_offset, task.first_index):
        yield listed
        if listed.offset == task.last_offset:
            return


def _span(task: ShardTask, listed: Listed) -> Span:
    """What the shard covers of a source, as numbers of letters; neighbouring shards always meet."""
    start = task.start if listed.offset == task.first_offset else 0
    end = task.end if listed.offset == task.last_offset else listed.source.size
    return Span(start, end, start, end)


@dataclasses.dataclass
class _Group:
    """Letters of one source that follow one another: no more than a batch of them."""

    source: str
    taken: list[DeadLetter] = dataclasses.field(default_factory=list)
    kept: list[DeadLetter] = dataclasses.field(default_factory=list)
    num_bytes: int = 0

    def add(self, letter: DeadLetter, *, taken: bool) -> None:
        (self.taken if taken else self.kept).append(letter)
        self.num_bytes += len(letter.payload or b"")

    def is_full(self) -> bool:
        return self.num_bytes >= BATCH_MAX_BYTES or len(self.taken) + len(self.kept) >= BATCH_MAX_RECORDS


def _groups(letters: Iterator[DeadLetter], selection: Selection) -> Iterator[_Group]:
    group: _Group | None = None
    for letter in letters:
        if group is not None and (group.source != letter.source or group.is_full()):
            yield group
            group = None
        group = group or _Group(letter.source)
        group.add(letter, taken=selection.takes(letter))
    if group is not None:
        yield group


def _chunks(
    spec: JobSpec, letters: list[DeadLetter], listed: Listed, *, joins: bool, goes_on: bool, isolated: bool
) -> Iterator[Chunk]:
    """Yields what becomes of the letters of a source: payloads together, then what is read again."""
    again = [letter for letter in letters if needs_source(letter)]
    records = [letter for letter in letters if not needs_source(letter)]
    if records:
        yield _from_payloads(records)
    if again:
        yield from read_again(spec, again, listed, joins=joins, goes_on=goes_on, isolated=isolated)


def _from_payloads(letters: list[DeadLetter]) -> Chunk:
    return Chunk(
        [letter.payload or b"" for letter in letters],
        [letter.position for letter in letters],
        num_bytes=sum(letter.length for letter in letters),
        origins=[dataclasses.replace(letter, carried=None) for letter in letters],
    )
