"""Notes of how far attempts are: written now and then, gone with the attempt, never trusted."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from fakes import WorstStore, make_batch, make_letter, make_spec, make_task, toy_records
from transforms import shard_progress
from transforms.shard_progress import PROGRESS, Running, list_running
from transforms.shard_writer import ShardWriter
from transforms.store import OutputError


@pytest.fixture
def store() -> WorstStore:
    return WorstStore()


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_progress, "NEAR_SECS", 0.0)


def running(store: WorstStore, **fields: Any) -> list[Running]:
    return list(list_running(store, make_spec(store.root, num_shards=3, **fields)))


def make_writer(store: WorstStore, shard: int = 0) -> ShardWriter:
    return ShardWriter(store, make_spec(store.root, num_shards=3), make_task(shard))


def test_tell_what_was_read_written_dropped_and_dead_so_far(store: WorstStore) -> None:
    writer = make_writer(store)
    writer.add(make_batch(toy_records(3), dead=[make_letter(1)], dropped={"short": 2}))
    writer.add(make_batch(toy_records(4), sequence=1))
    [note] = running(store)
    counts = {name: note.books[f"records_{name}"] for name in ("read", "written", "dropped", "dead", "added")}
    assert counts == {"read": 10, "written": 7, "dropped": 2, "dead": 1, "added": 0}
    assert (note.shard, note.dropped_by_reason, note.dead_by_reason) == (0, {"short": 2}, {"data_checksum": 1})
    assert note.books["bytes_read"] == sum(map(len, toy_records(7)))
    assert note.share == note.books["bytes_read"] / 1000
    assert note.at >= note.started_at
    writer.abandon()


@pytest.mark.parametrize("end", ["commit", "abandon"])
def test_go_with_the_attempt(end: str, store: WorstStore) -> None:
    writer = make_writer(store)
    writer.add(make_batch(toy_records(3)))
    assert len(running(store)) == 1
    getattr(writer, end)()
    assert list(store.list(PROGRESS)) == []


def test_are_not_written_by_attempts_that_are_quickly_done(store: WorstStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_progress, "NEAR_SECS", 1000.0)
    writer = make_writer(store)
    writer.add(make_batch(toy_records(3)))
    writer.commit()
    assert [call for call in store.calls if PROGRESS in call] == []


def test_of_an_attempt_that_died_are_replaced_by_the_next_one_at_once(
    store: WorstStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_writer(store).add(make_batch(toy_records(500)))
    monkeypatch.setattr(shard_progress, "NEAR_SECS", 1000.0)
    writer = make_writer(store)
    writer.add(make_batch(toy_records(2), try_number=2))
    assert [note.books["records_read"] for note in running(store)] == [2]
    writer.abandon()


def test_that_cannot_be_written_cost_nothing(store: WorstStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OutputError("disk full")

    writer = make_writer(store)
    monkeypatch.setattr(store, "put", full)
    writer.add(make_batch(toy_records(3)))
    assert writer.commit().books["records_written"] == 3


def test_of_other_plans_and_what_is_none_do_not_count(store: WorstStore) -> None:
    writer = make_writer(store)
    writer.add(make_batch(toy_records(3)))
    [note] = running(store)
    good = dataclasses.asdict(note)
    for number, fields in enumerate(
        [{}, {**good, "books": []}, {**good, "books": {"a": "b"}}, {**good, "more": 1}, {**good, "at": None}]
    ):
        store.put(f"{PROGRESS}x{number}", json.dumps(fields).encode())
    for number, data in enumerate([b"", b"\xff", b"[]", b"7"]):
        store.put(f"{PROGRESS}y{number}", data)
    assert running(store) == [note]
    assert running(store, plan_id="plan-b") == []
    assert running(store, plan_id="plan-b", earlier_plans=("plan-a",)) == [note]
    writer.abandon()


def test_a_shard_that_reads_more_than_was_planned_is_not_done_before_it_is_committed() -> None:
    note = Running("p", 0, 10, {"bytes_read": 50}, {}, {}, 0.0, 1.0)
    assert note.share < 1
    assert Running("p", 0, 0, {}, {}, {}, 0.0, 1.0).share == 0
