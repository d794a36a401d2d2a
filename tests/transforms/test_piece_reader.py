"""A shard that was worked on in pieces is read as if it had been read in one go, whatever became of the pieces."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

import corpora
from corpora import frame_all, write_file
from transforms.elements import DeadLetter, Input, JobSpec, RecordBatch, ShardTask, Span
from transforms.piece_log import PieceWriter
from transforms.piece_reader import join_letters
from transforms.pieces import PIECES_NAME, entry_name, find_piece
from transforms.plan_file import INPUTS_NAME, write_plan
from transforms.shard_reader import read_shard
from transforms.steps.job_chain import load_chain
from transforms.store import LocalStore

PAYLOADS = [b"payload-%04d" % number for number in range(300)]
NESTED = [b"first", frame_all([b"inside-%d" % number for number in range(200)]), b"last"]


@dataclasses.dataclass
class Job:
    """One shard over all inputs, and its pieces."""

    store: LocalStore
    spec: JobSpec
    shard: ShardTask
    pieces: list[ShardTask]

    def work(self, piece: ShardTask) -> None:
        """Does what a worker does with a piece."""
        writer = PieceWriter(self.store, self.spec, piece)
        with contextlib.closing(load_chain(self.spec)) as chain:
            for batch in read_shard(self.store, self.spec, piece):
                if batch.committed:
                    writer.abandon()
                    return
                for out in chain.apply(batch):
                    writer.add(out)
        writer.commit()

    def read(self, **changes: int) -> list[RecordBatch]:
        return list(read_shard(self.store, self.spec, dataclasses.replace(self.shard, **changes)))

    def read_whole(self, **changes: int) -> list[RecordBatch]:
        """Reads the shard as it is read without pieces."""
        spec = dataclasses.replace(self.spec, num_pieces=0)
        return list(read_shard(self.store, spec, dataclasses.replace(self.shard, **changes)))


def make_job(tmp_path: Path, sources: list[Input], cuts: list[int]) -> Job:
    """Plans pieces of the first input, cut at positions; the last piece holds the other inputs as well."""
    store = LocalStore(str(tmp_path / "out"))
    sources = [dataclasses.replace(source, index=index) for index, source in enumerate(sources)]
    lines = corpora.input_lines(sources)
    last = sum(map(len, lines[:-1]))
    store.put(INPUTS_NAME, b"".join(lines))
    shard = ShardTask(0, 0, 0, 0, last, sources[-1].size, 0)
    starts = [0, *cuts]
    pieces = [dataclasses.replace(shard, piece=number, start=start) for number, start in enumerate(starts)]
    pieces = [
        dataclasses.replace(one, last_offset=0, end=other.start) for one, other in itertools.pairwise(pieces)
    ] + pieces[-1:]
    path = tmp_path / "pieces.jsonl"
    write_plan(str(path), lambda count: {"plan_id": "plan", "num_pieces": count}, pieces)
    store.put_file(str(path), PIECES_NAME)
    spec = corpora.make_spec(store.root, plan_id="plan", num_pieces=len(pieces))
    return Job(store, spec, shard, pieces)


Summary = tuple[list[bytes], list[tuple[str, int, int, str]], dict[int, Span], int, int]


def summary(batches: list[RecordBatch]) -> Summary:
    """Returns all that the books and files of a shard come from: each input counts with its last span."""
    assert [batch.sequence for batch in batches] == list(range(len(batches)))
    assert [batch.last for batch in batches] == [False] * (len(batches) - 1) + [True]
    letters = [(one.source, one.position, one.length, one.reason) for batch in batches for one in batch.dead]
    spans = {batch.source.index: batch.span for batch in batches if batch.source and batch.span}
    read, num_bytes = sum(batch.records_read for batch in batches), sum(batch.num_bytes for batch in batches)
    return [record for batch in batches for record in batch.records], letters, spans, read, num_bytes


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """A file with damage across the second cut, and another one."""
    data = bytearray(frame_all(PAYLOADS))
    data[3_990:4_060] = b"\xff" * 70
    first = write_file(tmp_path / "a", bytes(data))
    return make_job(tmp_path, [first, write_file(tmp_path / "b", frame_all(PAYLOADS[:20]))], [1_000, 4_000, 4_010])


def test_pieces_together_are_the_shard(job: Job) -> None:
    whole = job.read_whole()
    for piece in job.pieces:
        job.work(piece)
    batches = job.read()
    assert summary(batches) == summary(whole)
    assert all(batch.applied for batch in batches[:-1])
    assert {batch.task for batch in batches} == {job.shard}


@pytest.mark.parametrize("missing", [(0,), (1,), (3,), (0, 2), (0, 1, 2, 3)])
def test_what_is_missing_is_read_from_the_inputs(job: Job, missing: tuple[int, ...]) -> None:
    for piece in job.pieces:
        if piece.piece not in missing:
            job.work(piece)
    batches = job.read()
    assert summary(batches) == summary(job.read_whole())
    assert any(not batch.applied for batch in batches[:-1])


def delete_file(job: Job, piece: ShardTask) -> None:
    entry = find_piece(job.store, job.spec, piece)
    assert entry is not None
    job.store.delete(entry.file.name)


def damage_file(job: Job, piece: ShardTask) -> None:
    entry = find_piece(job.store, job.spec, piece)
    assert entry is not None
    path = Path(job.store.root) / entry.file.name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def damage_entry(job: Job, piece: ShardTask) -> None:
    job.store.put(entry_name(job.spec, piece.shard, piece.piece), b"{")


@pytest.mark.parametrize("harm", [delete_file, damage_file, damage_entry])
def test_what_was_harmed_is_read_from_the_inputs(job: Job, harm: Callable[[Job, ShardTask], None]) -> None:
    for piece in job.pieces:
        job.work(piece)
    harm(job, job.pieces[1])
    batches = job.read()
    assert summary(batches) == summary(job.read_whole())
    assert any(not batch.applied for batch in batches[:-1])


def test_a_piece_that_began_inside_a_record_is_read_again_from_where_the_one_before_it_ended(tmp_path: Path) -> None:
    job = make_job(tmp_path, [write_file(tmp_path / "a", frame_all(NESTED))], [700, 1_900])
    for piece in job.pieces:
        job.work(piece)
    batches = job.read()
    assert summary(batches)[0] == NESTED
    assert summary(batches) == summary(job.read_whole())


@pytest.mark.parametrize("start_at", [28, 1_000, 1_004, 4_100])
def test_a_shard_that_is_to_begin_elsewhere_takes_the_pieces_that_still_fit(job: Job, start_at: int) -> None:
    for piece in job.pieces:
        job.work(piece)
    shard = dataclasses.replace(job.shard, start=14)
    job = dataclasses.replace(job, shard=shard, pieces=[dataclasses.replace(job.pieces[0], start=14), *job.pieces[1:]])
    list_path = Path(job.store.root) / PIECES_NAME
    write_plan(str(list_path), lambda count: {"plan_id": "plan", "num_pieces": count}, job.pieces)
    assert summary(job.read(start_at=start_at)) == summary(job.read_whole(start_at=start_at))


def test_a_piece_is_not_done_twice(job: Job) -> None:
    job.work(job.pieces[0])
    batches = list(read_shard(job.store, job.spec, job.pieces[0]))
    assert [(batch.committed, batch.last) for batch in batches] == [(True, True)]


def unreadable(position: int, length: int, **changes: object) -> DeadLetter:
    letter = DeadLetter("a", position, length, "read", "not_found", error="gone")
    return dataclasses.replace(letter, **changes)  # type: ignore[arg-type]


def batch_of(letter: DeadLetter, records: list[bytes] | None = None, span: Span | None = None) -> RecordBatch:
    source = Input(0, "a", 100, 0)
    batch = RecordBatch(ShardTask(0, 0, 0, 0, 0, 100, 0), 0, source=source, records=records or [], dead=[letter])
    batch.records_read, batch.num_bytes, batch.span = 1 + len(batch.records), letter.length, span
    return batch


def test_two_parts_of_an_unreadable_range_are_one_letter() -> None:
    before, after = batch_of(unreadable(0, 40), span=Span(0, 40, 0, 40)), batch_of(unreadable(40, 60))
    after.span = Span(40, 100, 40, 100)
    assert join_letters(before, after, 0.0)
    assert before.dead == [unreadable(0, 100)]
    assert (before.records_read, before.num_bytes, before.span) == (1, 100, after.span)


def test_records_behind_an_unreadable_part_stay_a_batch_of_their_own() -> None:
    before, after = batch_of(unreadable(0, 40), span=Span(0, 40, 0, 40)), batch_of(unreadable(40, 60), [b"x"])
    assert not join_letters(before, after, 0.0)
    assert (before.dead, after.dead) == ([unreadable(0, 100)], [])
    assert (before.records_read, after.records_read) == (1, 1)


@pytest.mark.parametrize(
    "following",
    [
        unreadable(41, 59),
        unreadable(40, 60, reason="io_error"),
        unreadable(40, 60, error="another"),
        unreadable(40, 60, source="b"),
    ],
)
def test_other_letters_stay_apart(following: DeadLetter) -> None:
    before, after = batch_of(unreadable(0, 40), span=Span(0, 40, 0, 40)), batch_of(following)
    assert not join_letters(before, after, 0.0)
    assert (before.dead, after.dead) == ([unreadable(0, 40)], [following])


def test_damaged_regions_that_meet_are_two_letters_as_ever() -> None:
    one, other = unreadable(0, 40, reason="data_checksum"), unreadable(40, 60, reason="data_checksum")
    before = batch_of(one, span=Span(0, 40, 0, 40))
    assert not join_letters(before, batch_of(other), 0.0)
    assert before.dead == [one]
