"""Two attempts at one shard, in every order that their calls to the store can take; and attempts that are killed.

Whatever happens there is one ledger, the files it names and no others, and nothing is lost or double.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable

import pytest

from fakes import (
    Killed,
    WorstStore,
    every_interleaving,
    make_batch,
    make_letter,
    make_spec,
    make_task,
    read_array_record,
    toy_records,
)
from transforms.elements import JobSpec, RecordBatch, ShardInfo
from transforms.ledger import Ledger, StoredFile, find_ledger, ledger_name
from transforms.shard_writer import ShardWriter

RECORDS_ONLY = make_batch(toy_records(3))
RECORDS_AND_LINES = make_batch(toy_records(2), dead=[make_letter(0, payload=None)])
RECORDS_AND_PAIR = make_batch(toy_records(2), dead=[make_letter(0)])
NOTHING = make_batch([])


def attempt(store: WorstStore, spec: JobSpec, batch: RecordBatch) -> ShardInfo:
    """One worker's attempt at the shard, from the first record to the commit."""
    writer = ShardWriter(store, spec, make_task())
    writer.add(batch)
    return writer.commit()


def check_committed_once(store: WorstStore, spec: JobSpec, batch: RecordBatch) -> Ledger:
    """The store holds one ledger, its files and nothing else, and the files hold each record once."""
    found = find_ledger(store, spec, 0)
    assert found is not None
    assert found.ledger is not None
    ledger = found.ledger
    assert sorted(store.tree()) == sorted([ledger_name(spec, 0), *(file.name for file in ledger.files())])
    assert [record for part in ledger.parts for record in read_array_record(store, part.name)] == batch.records
    lines = store.tree()[ledger.dead_lines.name].count(b"\n") if ledger.dead_lines else 0
    assert lines == len(batch.dead)
    payloads = read_array_record(store, ledger.dead_payloads.name) if ledger.dead_payloads else []
    assert payloads == [letter.payload for letter in batch.dead if letter.payload is not None]
    return ledger


def run_every_interleaving(
    prepare: Callable[[WorstStore, JobSpec], None], batch: RecordBatch, num_attempts: int = 2
) -> int:
    """Runs attempts in every order and checks each end; returns the number of orders."""
    count = 0
    for interleaving in every_interleaving():
        count += 1
        store = WorstStore(list_delay=1000)
        spec = make_spec(store.root)
        prepare(store, spec)
        store.scheduler = interleaving
        results = interleaving.run([functools.partial(attempt, store, spec, batch)] * num_attempts)
        store.scheduler = None
        try:
            ledger = check_committed_once(store, spec, batch)
            assert results == [ledger.to_info(make_task())] * num_attempts
        except AssertionError as error:
            error.add_note("\n".join(interleaving.order))
            raise
    return count


def nothing_before(_store: WorstStore, _spec: JobSpec) -> None:
    """An empty output."""


def malformed_before(store: WorstStore, spec: JobSpec) -> None:
    """Half an entry, left by a crash on a file system without hard links."""
    store.put(ledger_name(spec, 0), b'{"gristmill_ledger": 1, "plan_id"')


def files_gone_before(store: WorstStore, spec: JobSpec) -> None:
    """An entry whose files somebody has deleted."""
    gone = StoredFile("_gristmill/attempts/00000-gone/part-00000.array_record", 131072, "0badcafe", 3)
    store.put(ledger_name(spec, 0), Ledger(spec.plan_id, 0, (gone,), None, None, (), {}, {}).to_json())


def other_plan_before(store: WorstStore, spec: JobSpec) -> None:
    """An entry of another plan."""
    store.put(ledger_name(spec, 0), Ledger("plan-b", 0, (), None, None, (), {}, {}).to_json())


class TestEveryInterleaving:
    @pytest.mark.parametrize(
        ("batch", "num_orders"),
        # Each attempt makes n calls up to its commit; what the loser does then, it does alone: 2n over n orders.
        [(NOTHING, 2), (RECORDS_ONLY, 6), (RECORDS_AND_LINES, 20), (RECORDS_AND_PAIR, 70)],
        ids=["nothing", "records", "records and lines", "records and pair"],
    )
    def test_one_ledger_and_the_winners_files_remain(self, batch: RecordBatch, num_orders: int) -> None:
        assert run_every_interleaving(nothing_before, batch) == num_orders

    def test_three_attempts_have_one_winner(self) -> None:
        assert run_every_interleaving(nothing_before, NOTHING, num_attempts=3) >= 6

    @pytest.mark.parametrize("batch", [NOTHING, RECORDS_ONLY], ids=["nothing", "records"])
    @pytest.mark.parametrize("before", [malformed_before, other_plan_before])
    def test_entry_that_does_not_count_is_replaced_once(
        self, before: Callable[[WorstStore, JobSpec], None], batch: RecordBatch
    ) -> None:
        assert run_every_interleaving(before, batch) >= 50

    def test_entry_whose_files_are_gone_is_replaced_once(self) -> None:
        assert run_every_interleaving(files_gone_before, NOTHING) >= 200


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # The dead do not close their files.
class TestKilled:
    @pytest.mark.parametrize("after_effect", [False, True], ids=["before", "after"])
    @pytest.mark.parametrize("batch", [RECORDS_ONLY, RECORDS_AND_PAIR, NOTHING])
    @pytest.mark.parametrize("before", [nothing_before, malformed_before, files_gone_before])
    def test_next_attempt_commits_whole_wherever_the_first_was_killed(
        self, batch: RecordBatch, after_effect: bool, before: Callable[[WorstStore, JobSpec], None]
    ) -> None:
        for number in range(1, 100):
            store = WorstStore(list_delay=1000)
            spec = make_spec(store.root)
            before(store, spec)
            store.stop_at(number, after_effect=after_effect)
            finished = False
            with contextlib.suppress(Killed):
                attempt(store, spec, batch)
                finished = True
            left = set(store.tree())
            store.restart()
            info = attempt(store, spec, batch)

            found = find_ledger(store, spec, 0)
            assert found is not None
            assert found.ledger is not None
            ledger = found.ledger
            assert info == ledger.to_info(make_task())
            mine = {ledger_name(spec, 0), *(file.name for file in ledger.files())}
            assert mine <= set(store.tree()) <= mine | left  # The dead cannot clean up; the next run does.
            for name in set(store.tree()) - mine:
                store.delete(name)
            check_committed_once(store, spec, batch)
            if finished:
                return
        pytest.fail("the attempt never came to its end")

    def test_killed_after_its_commit_is_the_winner(self) -> None:
        store = WorstStore()
        spec = make_spec(store.root)
        calls_of_an_attempt = 3  # spool, seal, put_if_absent
        store.stop_at(calls_of_an_attempt, after_effect=True)
        with pytest.raises(Killed):
            attempt(store, spec, RECORDS_ONLY)
        first = store.tree()
        store.restart()
        attempt(store, spec, RECORDS_ONLY)
        assert store.tree() == first

    def test_zombie_that_wakes_after_its_shard_was_published_deletes_nothing_of_it(self) -> None:
        store = WorstStore()
        spec = make_spec(store.root)
        zombie = ShardWriter(store, spec, make_task())
        zombie.add(RECORDS_AND_PAIR)
        attempt(store, spec, RECORDS_AND_PAIR)
        found = find_ledger(store, spec, 0)
        assert found is not None
        assert found.ledger is not None
        published = {}
        for number, file in enumerate(found.ledger.files()):
            store.copy(file.name, f"final-{number}")
            store.delete(file.name)
            published[file.name] = f"final-{number}"
        store.put("_gristmill/published/00000.json", json.dumps(published).encode())
        before = store.tree()
        assert zombie.commit() == found.ledger.to_info(make_task())
        assert store.tree() == before
