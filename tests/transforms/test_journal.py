"""The journal of a shard at its worker: what is made durable, how often, and what a failing store does to it."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from fakes import WorstStore, make_spec, make_task
from transforms import journal
from transforms.generations import see_as
from transforms.journal import JOURNALS, JobJournals, OpenJournal
from transforms.store import LocalStore, OutputError, Store

KEY = b"k" * 16


def open_journal(store: Store, *, fetch: bool = True, **fields: Any) -> OpenJournal:
    return OpenJournal(store, make_spec(store.root, **fields), make_task(), fetch=fetch)


def names(store: Store) -> list[str]:
    return [name.removeprefix(JOURNALS) for name, _ in store.list(JOURNALS)]


def put(opened: OpenJournal, *bodies: bytes) -> None:
    for number, body in enumerate(bodies):
        opened.own().put(KEY, (0, number), body)


def find(store: Store, **fields: Any) -> bytes | None:
    with contextlib.closing(open_journal(store, **fields)) as opened:
        found = opened.own().find(KEY, (0, 0))
    return None if found is None else found.body


class TestLocal:
    @pytest.fixture
    def store(self, tmp_path: Path) -> LocalStore:
        return LocalStore(str(tmp_path / "out"))

    def test_what_is_put_stands_there_at_once(self, store: LocalStore) -> None:
        put(open_journal(store), b"answer")
        assert find(store) == b"answer"

    def test_is_synced_without_being_asked(self, store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
        import threading

        synced = threading.Event()
        monkeypatch.setattr(journal, "SYNC_SECS", 0.01)
        monkeypatch.setattr(journal, "_sync", lambda path, is_new: synced.set())
        opened = open_journal(store)
        put(opened, b"answer")
        assert synced.wait(30)
        opened.close()

    def test_of_a_generation_stands_in_its_folder(self, store: LocalStore) -> None:
        generation = see_as(store, "g001")
        put(open_journal(generation, generation="g001"), b"answer")
        assert (Path(store.root) / "_gristmill/g001/journal/00000").is_dir()
        assert find(generation, generation="g001") == b"answer"
        assert find(store) is None

    def test_of_an_earlier_plan_counts_if_its_shards_do(self, store: LocalStore) -> None:
        put(open_journal(store, plan_id="plan-before"), b"answer")
        assert find(store) is None
        assert find(store, earlier_plans=("plan-before",)) == b"answer"

    def test_nothing_is_made_for_a_shard_without_answers(self, store: LocalStore) -> None:
        opened = open_journal(store)
        assert opened.own().find(KEY, (0, 0)) is None
        opened.close()
        assert not opened.stands
        assert not os.path.exists(store.root)


class TestWithoutAppending:
    def test_what_is_new_is_put_as_an_object_of_its_own(self) -> None:
        store = WorstStore()
        opened = open_journal(store)
        put(opened, b"one")
        opened._keep()
        opened._keep()
        assert len(names(store)) == 1
        put(opened, b"two")
        opened.close()
        assert len(names(store)) == 2
        assert opened.stands
        assert find(store) == b"one"

    def test_large_ones_are_put_in_pieces(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(journal, "_PIECE_BYTES", 100)
        store = WorstStore()
        opened = open_journal(store)
        put(opened, b"x" * 1_000)
        opened.close()
        assert len(names(store)) > 10
        assert find(store) == b"x" * 1_000

    def test_a_piece_that_is_missing_costs_what_follows(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(journal, "_PIECE_BYTES", 100)
        store = WorstStore()
        opened = open_journal(store)
        put(opened, b"first", b"x" * 1_000)
        opened.close()
        store.delete(JOURNALS + names(store)[3])
        assert find(store) == b"first"

    def test_what_cannot_be_put_is_put_the_next_time(self, caplog: pytest.LogCaptureFixture) -> None:
        store = WorstStore()
        opened = open_journal(store)
        put(opened, b"answer")
        store.fail_at(1)
        with caplog.at_level(logging.WARNING):
            opened._keep()
        assert "cannot be kept" in caplog.text
        opened.close()
        assert find(store) == b"answer"

    def test_what_others_have_put_there_is_passed_over(self) -> None:
        store = WorstStore()
        for name in ("odd", "a.b", "deep/er.0000000000000000", "a.0000000000000007"):
            store.put(f"{JOURNALS}00000/{name}", b"anything")
        assert find(store) is None

    def test_a_store_that_cannot_be_read_is_as_an_empty_one(self) -> None:
        store = WorstStore()
        opened = open_journal(store)
        put(opened, b"answer")
        opened.close()
        store.fail_at(1, OutputError("no way"))
        assert find(store) is None
        assert find(store) == b"answer"

    def test_nothing_is_left_on_this_machine(self) -> None:
        opened = open_journal(WorstStore())
        put(opened, b"answer")
        folder = opened.home.folder
        assert os.path.isdir(folder)
        opened.close()
        assert not os.path.exists(os.path.dirname(folder))


class TestLookingForJournals:
    def lists(self, store: WorstStore) -> int:
        return sum(call.startswith("list") for call in store.calls)

    def test_a_store_is_asked_once_where_a_job_may_have_none(self) -> None:
        store = WorstStore()
        journals = JobJournals(store, make_spec(store.root, num_shards=10))
        for shard in range(10):
            journals.open(make_task(shard), 1, surely_used=False).close()
        assert self.lists(store) == 1

    def test_a_shard_is_asked_for_that_was_tried_before_or_surely_has_one(self) -> None:
        store = WorstStore()
        journals = JobJournals(store, make_spec(store.root, num_shards=10))
        for shard, try_number, surely in ((0, 2, False), (1, 1, True), (2, 1, False), (2, 1, False)):
            journals.open(make_task(shard), try_number, surely_used=surely).close()
        assert self.lists(store) == 4

    def test_all_are_asked_for_where_journals_stood_when_the_worker_began(self) -> None:
        store = WorstStore()
        store.put(f"{JOURNALS}00009/x", b"")
        journals = JobJournals(store, make_spec(store.root, num_shards=10))
        for shard in range(3):
            journals.open(make_task(shard), 1, surely_used=False).close()
        assert self.lists(store) == 4
