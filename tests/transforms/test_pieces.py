"""Attempts at a piece: in every order and killed anywhere, one entry stands, with the one file that it names."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable

import pytest

from fakes import Killed, WorstStore, every_interleaving, make_batch, make_letter, make_spec, make_task, toy_records
from transforms.elements import JobSpec, RecordBatch, ShardInfo
from transforms.ledger import StoredFile
from transforms.piece_log import PieceWriter, open_log, read_log
from transforms.pieces import PieceEntry, entry_name, find_piece

PIECE = dataclasses.replace(make_task(), piece=3, end=500)
BATCH = make_batch(toy_records(3), dead=[make_letter(1)])


def attempt(store: WorstStore, spec: JobSpec) -> ShardInfo:
    writer = PieceWriter(store, spec, PIECE)
    writer.add(BATCH)
    writer.add(make_batch([], source=None, last=True))
    return writer.commit()


def check_committed_once(store: WorstStore, spec: JobSpec) -> None:
    entry = find_piece(store, spec, PIECE)
    assert entry is not None
    assert sorted(store.tree()) == sorted([entry_name(spec, PIECE.shard, PIECE.piece), entry.file.name])
    with open_log(store, entry) as path:
        assert path is not None
        batches = list(read_log(path, PIECE))
    assert [batch.records for batch in batches] == [BATCH.records]
    assert [batch.dead for batch in batches] == [BATCH.dead]


def nothing_before(_store: WorstStore, _spec: JobSpec) -> None:
    """An empty output."""


def malformed_before(store: WorstStore, spec: JobSpec) -> None:
    store.put(entry_name(spec, PIECE.shard, PIECE.piece), b'{"gristmill_piece": 1')


def other_version_before(store: WorstStore, spec: JobSpec) -> None:
    store.put(entry_name(spec, PIECE.shard, PIECE.piece), b'{"gristmill_piece": 2}')


def entry_before(store: WorstStore, spec: JobSpec, **changes: object) -> None:
    """An entry whose file is there."""
    file = StoredFile("_gristmill/attempts/00000-00003-old/batches.array_record", 5, "0badcafe", 3)
    store.put(file.name, b"12345")
    entry = PieceEntry(spec.plan_id, PIECE, file, None, {}, {})
    store.put(entry_name(spec, PIECE.shard, PIECE.piece), dataclasses.replace(entry, **changes).to_json())


def other_plan_before(store: WorstStore, spec: JobSpec) -> None:
    entry_before(store, spec, plan_id="plan-b")


def other_range_before(store: WorstStore, spec: JobSpec) -> None:
    entry_before(store, spec, task=dataclasses.replace(PIECE, end=501))


def file_gone_before(store: WorstStore, spec: JobSpec) -> None:
    entry_before(store, spec, file=StoredFile("_gristmill/attempts/00000-00003-gone/batches", 131072, "0badcafe", 3))


BEFORE = [
    nothing_before,
    malformed_before,
    other_version_before,
    other_plan_before,
    other_range_before,
    file_gone_before,
]


def forget_old_file(store: WorstStore) -> None:
    """What cleans up when a job goes on does this."""
    store.delete("_gristmill/attempts/00000-00003-old/batches.array_record")


@pytest.mark.parametrize("before", BEFORE)
def test_one_entry_and_the_winners_file_remain_in_every_order(before: Callable[[WorstStore, JobSpec], None]) -> None:
    for interleaving in every_interleaving():
        store = WorstStore(list_delay=1000)
        spec = make_spec(store.root, num_pieces=4)
        before(store, spec)
        store.scheduler = interleaving
        results = interleaving.run([functools.partial(attempt, store, spec)] * 2)
        store.scheduler = None
        forget_old_file(store)
        check_committed_once(store, spec)
        assert all(isinstance(result, ShardInfo) for result in results), interleaving.order


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # The dead do not close their files.
@pytest.mark.parametrize("after_effect", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("before", BEFORE)
def test_the_next_attempt_commits_wherever_the_first_was_killed(
    before: Callable[[WorstStore, JobSpec], None], after_effect: bool
) -> None:
    for number in range(1, 100):
        store = WorstStore(list_delay=1000)
        spec = make_spec(store.root, num_pieces=4)
        before(store, spec)
        store.stop_at(number, after_effect=after_effect)
        finished = False
        with contextlib.suppress(Killed):
            attempt(store, spec)
            finished = True
        left = set(store.tree())
        store.restart()
        attempt(store, spec)
        entry = find_piece(store, spec, PIECE)
        assert entry is not None
        mine = {entry_name(spec, PIECE.shard, PIECE.piece), entry.file.name}
        assert mine <= set(store.tree()) <= mine | left
        for name in set(store.tree()) - mine:
            store.delete(name)
        check_committed_once(store, spec)
        if finished:
            return
    pytest.fail("the attempt never came to its end")


def test_an_attempt_that_fails_leaves_nothing() -> None:
    store = WorstStore()
    spec = make_spec(store.root, num_pieces=4)
    writer = PieceWriter(store, spec, PIECE)
    writer.add(BATCH)
    writer.abandon()
    assert store.tree() == {}


def test_an_attempt_that_is_given_up_after_its_commit_has_won() -> None:
    store = WorstStore()
    spec = make_spec(store.root, num_pieces=4)
    writer = PieceWriter(store, spec, PIECE)
    writer.add(BATCH)
    writer.commit()
    writer.abandon()
    check_committed_once(store, spec)


def test_what_leaves_the_worker_are_the_books_of_the_piece() -> None:
    store = WorstStore()
    batch: RecordBatch = BATCH
    info = attempt(store, make_spec(store.root, num_pieces=4))
    assert (info.task, info.num_parts, info.dead_by_reason) == (PIECE, 0, {"data_checksum": 1})
    assert info.books["records_read"] == batch.records_read == 4
    assert (info.books["records_written"], info.books["records_dead"], info.books["bytes_dead"]) == (3, 1, 11)
