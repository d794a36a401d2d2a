"""Publish and Finish: final names, manifest and report; whatever interrupts them, repeating gives the same tree."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.options.pipeline_options import PipelineOptions

from fakes import Killed, WorstStore, make_batch, make_letter, make_spec, make_task, read_array_record, toy_records
from transforms import publish as publish_module
from transforms.elements import Edge, JobSpec, ShardInfo, Span
from transforms.finish import REPLACED_NAME, finish_job
from transforms.generations import open_job_store
from transforms.job_lock import LOCK_NAME
from transforms.ledger import ATTEMPTS, published_name
from transforms.plan_file import INPUTS_NAME, PLAN_NAME, write_plan
from transforms.publish import (
    NOT_PUBLISHED,
    CollectShards,
    Publish,
    PublishTask,
    decide,
    give_names,
    number_parts,
)
from transforms.repeat import find_apart
from transforms.report import spec_to_header
from transforms.shard_writer import ShardWriter
from transforms.state import CONFIG_NAME, MANIFEST_NAME, REPORT_NAME
from transforms.store import LocalStore, OutputError, Store

CORPUS = [(3, 0), (0, 1), (5, 2), (0, 0), (1, 0)]
"""(records, dead letters) of each planned shard; a part holds two records."""

FINAL_NAMES = [f"corpus-train.array_record-{number:05d}-of-00006" for number in range(6)]


def commit_job(
    store: Store, corpus: Sequence[tuple[int, int]] = CORPUS, **changes: Any
) -> tuple[JobSpec, list[ShardInfo]]:
    """Plans and commits a job; returns it with the metadata of its shards."""
    changes = {"num_shards": len(corpus), "part_max_records": 2, "roll_factor": 1, "max_fraction": 0.5, **changes}
    spec = make_spec(store.root, **changes)
    header = {
        "plan_id": spec.plan_id,
        "num_shards": len(corpus),
        "num_inputs": len(corpus),
        "spec": spec_to_header(spec),
    }
    header.update({"num_skipped": 0, "num_duplicates": 0, "notes": []})
    spool = store.spool("scratch/plan")
    tasks = [make_task(shard) for shard in range(len(corpus))]
    write_plan(spool.path, lambda _: header, tasks)
    store.put_file(spool.path, PLAN_NAME)
    store.delete("scratch/plan")
    names = [json.dumps({"name": f"/in/{n}", "size": 1, "mtime_ns": 0}).encode() + b"\n" for n in range(len(corpus))]
    store.put(INPUTS_NAME, b"".join(names))
    budget = {"max_fraction": spec.max_fraction, "max_count": spec.max_count}
    store.put(CONFIG_NAME, json.dumps({"write": {"name": "corpus", "split": "train"}, "dead_letters": budget}).encode())
    infos, first = [], 0
    for task, (num_records, num_dead) in zip(tasks, corpus, strict=True):
        writer = ShardWriter(store, spec, task)
        letters = [make_letter(number) for number in range(num_dead)]
        writer.add(make_batch(toy_records(num_records, first), shard=task.shard, dead=letters))
        infos.append(writer.commit())
        first += num_records
    if isinstance(store, WorstStore):
        store.settle()
    return spec, infos


def publish(store: Store, spec: JobSpec, infos: list[ShardInfo]) -> dict[str, Any]:
    """What the Publish transform does, one step after the other."""
    for task in list(number_parts(infos, spec)):
        give_names(store, spec, task)
    return finish_job(store, spec, decide(infos, spec)[1])


def final_tree(store: WorstStore) -> dict[str, bytes]:
    """Everything but the names that attempts have at random: what a job leaves for good."""
    tree = {name: data for name, data in store.tree().items() if not name.startswith("_gristmill/")}
    tree[REPORT_NAME] = store.tree()[REPORT_NAME]
    return tree


def published_records(store: Store) -> list[bytes]:
    """All records in the order of the manifest."""
    found = store.get(MANIFEST_NAME)
    assert found is not None
    names = [shard["name"] for shard in json.loads(found[0])["shards"]]
    return [record for name in names for record in read_array_record(store, name)]


class TestNumberParts:
    def test_parts_are_numbered_in_plan_order_and_empty_shards_left_out(self) -> None:
        spec, infos = commit_job(WorstStore())
        assert [info.num_parts for info in infos] == [2, 0, 3, 0, 1]
        assert list(number_parts(infos, spec)) == [
            PublishTask(0, 0, 6),
            PublishTask(1, 2, 6),  # Dead letters only.
            PublishTask(2, 2, 6),
            PublishTask(4, 5, 6),
        ]

    @pytest.mark.parametrize("budget", [{"max_fraction": 0.01}, {"max_count": 2}])
    def test_over_budget_only_dead_letters_get_names(self, budget: dict[str, Any]) -> None:
        spec, infos = commit_job(WorstStore(), **budget)
        tasks = list(number_parts(infos, spec))
        assert {task.first for task in tasks} == {NOT_PUBLISHED}
        assert {1, 2} <= {task.shard for task in tasks}

    def test_missing_shard_is_an_output_error_with_both_numbers(self) -> None:
        spec, infos = commit_job(WorstStore())
        with pytest.raises(OutputError, match="4 of 5 planned shards"):
            list(number_parts(infos[1:], spec))


class TestGiveNames:
    def test_shard_gets_its_names_and_a_note_of_them(self) -> None:
        store = WorstStore()
        spec, _ = commit_job(store)
        give_names(store, spec, PublishTask(2, 2, 6))
        records = [read_array_record(store, name) for name in FINAL_NAMES[2:5]]
        assert records == [toy_records(2, 3), toy_records(2, 5), toy_records(1, 7)]
        assert store.tree()["_dead_letters/corpus-train-00002.jsonl"].count(b"\n") == 2
        payloads = read_array_record(store, "_dead_letters/corpus-train-00002.payloads")
        assert payloads == [b"dead-000000", b"dead-000001"]
        note = json.loads(store.tree()[published_name(spec, 2)])
        assert sorted(note.values()) == sorted(
            [*FINAL_NAMES[2:5], "_dead_letters/corpus-train-00002.jsonl", "_dead_letters/corpus-train-00002.payloads"]
        )

    @pytest.mark.parametrize("kind", ["local", "worst"])
    def test_may_be_repeated_also_without_the_attempt(self, kind: str, tmp_path: Path) -> None:
        store = LocalStore(str(tmp_path)) if kind == "local" else WorstStore()
        spec, _ = commit_job(store)
        task = PublishTask(2, 2, 6)
        give_names(store, spec, task)
        give_names(store, spec, task)
        for name, _ in list(store.list(ATTEMPTS)):
            store.delete(name)
        before = list(store.list(""))
        give_names(store, spec, task)
        assert list(store.list("")) == before

    def test_without_files_is_an_output_error(self) -> None:
        store = WorstStore()
        spec, _ = commit_job(store)
        for name in list(store.tree()):
            if name.startswith(f"{ATTEMPTS}00002-"):
                store.delete(name)
        with pytest.raises(OutputError, match="shard 2 are gone"):
            give_names(store, spec, PublishTask(2, 2, 6))


class TestPublished:
    @pytest.mark.parametrize("kind", ["local", "worst"])
    def test_job_is_whole_and_in_order(self, kind: str, tmp_path: Path) -> None:
        store = LocalStore(str(tmp_path)) if kind == "local" else WorstStore()
        spec, infos = commit_job(store)
        report = publish(store, spec, infos)
        assert report["status"] == "done"
        assert published_records(store) == toy_records(9)
        if isinstance(store, WorstStore):
            store.settle()
        names = [name for name, _ in store.list("")]
        assert [name for name in names if name.startswith("corpus-")] == FINAL_NAMES
        assert not [name for name in names if name.startswith(ATTEMPTS)]
        assert [name for name in names if name.startswith("_dead_letters")] == [
            "_dead_letters/corpus-train-00001.jsonl",
            "_dead_letters/corpus-train-00001.payloads",
            "_dead_letters/corpus-train-00002.jsonl",
            "_dead_letters/corpus-train-00002.payloads",
        ]

    def test_manifest_names_every_shard_with_its_records_and_bytes(self) -> None:
        store = WorstStore()
        spec, infos = commit_job(store)
        publish(store, spec, infos)
        manifest = json.loads(store.tree()[MANIFEST_NAME])
        assert (manifest["name"], manifest["split"], manifest["num_records"]) == ("corpus", "train", 9)
        assert [(shard["name"], shard["records"]) for shard in manifest["shards"]] == list(
            zip(FINAL_NAMES, [2, 1, 2, 2, 1, 1], strict=True)
        )
        sizes = [len(store.tree()[name]) for name in FINAL_NAMES]
        assert [shard["bytes"] for shard in manifest["shards"]] == sizes
        assert manifest["num_bytes"] == sum(sizes)

    def test_another_run_gives_the_same_bytes(self) -> None:
        stores = [WorstStore(), WorstStore()]
        for store in stores:
            spec, infos = commit_job(store)
            publish(store, spec, infos)
        one, other = (final_tree(store) for store in stores)
        for tree in (one, other):  # Their tracebacks and times aside, runs do not differ.
            del tree[REPORT_NAME]
        assert one == other

    def test_nothing_to_write_is_no_success_and_names_nothing(self) -> None:
        store = WorstStore()
        spec, infos = commit_job(store, [(0, 0), (0, 0)])
        assert publish(store, spec, infos)["status"] == "nothing_written"
        assert sorted(final_tree(store)) == [REPORT_NAME]

    def test_over_budget_publishes_dead_letters_and_report_only(self) -> None:
        store = WorstStore()
        spec, infos = commit_job(store, max_fraction=0.01)
        report = publish(store, spec, infos)
        assert (report["status"], report["shards"], report["records_dead"]) == ("over_budget", [], 3)
        assert sorted(final_tree(store)) == [
            "_dead_letters/corpus-train-00001.jsonl",
            "_dead_letters/corpus-train-00001.payloads",
            "_dead_letters/corpus-train-00002.jsonl",
            "_dead_letters/corpus-train-00002.payloads",
            REPORT_NAME,
        ]

    def test_larger_budget_publishes_what_was_kept(self) -> None:
        store, whole = WorstStore(), WorstStore()
        spec, infos = commit_job(store, max_fraction=0.01)
        publish(store, spec, infos)
        publish(store, dataclasses.replace(spec, max_fraction=0.5), infos)
        publish(whole, *commit_job(whole))
        one, other = final_tree(store), final_tree(whole)
        del one[REPORT_NAME], other[REPORT_NAME]
        assert one == other

    def test_end_of_a_job_that_has_released_its_lock_may_be_repeated(self) -> None:
        """The runner may not have heard that its last step came to an end, and has another worker do it again."""
        store = WorstStore()
        spec, infos = commit_job(store, lock_token="ours", run_token="ours")
        held = json.dumps({"token": "ours", "heartbeat": time.time(), "job": {"detached": True}})
        store.put(LOCK_NAME, held.encode())
        orders = list(number_parts(infos, spec))
        for order in orders:
            give_names(open_job_store(spec), spec, order)
        first = publish_module._finish(infos, spec, len(orders))
        before = store.tree()
        assert LOCK_NAME not in before
        assert publish_module._finish(infos, spec, len(orders)) == json.loads(json.dumps(first))
        assert store.tree() == before

    def test_pipeline_does_the_same(self) -> None:
        store, expected = WorstStore(), WorstStore()
        spec, infos = commit_job(store)
        with beam.Pipeline(options=PipelineOptions(["--runner=FnApiRunner"])) as pipeline:
            _ = pipeline | beam.Create([infos]) | Publish(spec)
        publish(expected, *commit_job(expected))
        assert final_tree(store) == final_tree(expected)


SMALL = [(3, 1), (0, 0), (1, 0)]


def commit_over_older_set(store: WorstStore) -> tuple[JobSpec, list[ShardInfo]]:
    """A committed job in a directory that holds an older set of another count."""
    older = [f"corpus-train.array_record-{number:05d}-of-00002" for number in range(2)]
    for name in (*older, "_dead_letters/corpus-train-00002.jsonl"):
        store.put(name, b"old")
    store.put(MANIFEST_NAME, json.dumps({"plan_id": "old", "shards": [{"name": name} for name in older]}).encode())
    store.put(REPLACED_NAME, json.dumps([*older, "_dead_letters/corpus-train-00002.jsonl"]).encode())
    return commit_job(store, SMALL)


class TestInterrupted:
    @pytest.mark.parametrize("after_effect", [False, True], ids=["before", "after"])
    @pytest.mark.parametrize("list_delay", [0, 1000], ids=["prompt", "late"])
    def test_repeating_gives_the_same_tree_wherever_it_was_killed(self, after_effect: bool, list_delay: int) -> None:
        expected = WorstStore()
        publish(expected, *commit_job(expected, SMALL))
        shards = {name: data for name, data in final_tree(expected).items() if name.startswith("corpus-")}
        for number in range(1, 1000):
            store = WorstStore(list_delay=list_delay)
            spec, infos = commit_over_older_set(store)
            store.stop_at(number, after_effect=after_effect)
            finished = False
            with contextlib.suppress(Killed):
                publish(store, spec, infos)
                finished = True
            manifest = json.loads(store.tree().get(MANIFEST_NAME, b"{}"))
            if manifest.get("plan_id") == spec.plan_id:  # Whoever sees the manifest finds all that it names.
                assert shards.items() <= store.tree().items()
            store.restart()
            publish(store, spec, infos)
            assert final_tree(store) == final_tree(expected)
            assert not [name for name in store.tree() if name.startswith(ATTEMPTS)]
            if finished:
                assert number > 40
                return
        pytest.fail("publishing never came to its end")

    def test_call_that_fails_anywhere_is_an_output_error_and_can_be_repeated(self) -> None:
        expected = WorstStore()
        publish(expected, *commit_job(expected, SMALL))
        for number in range(1, 1000):
            store = WorstStore()
            spec, infos = commit_over_older_set(store)
            store.fail_at(number)
            try:
                publish(store, spec, infos)
            except OutputError:
                store.restart()
                publish(store, spec, infos)
                assert final_tree(store) == final_tree(expected)
            else:
                return
        pytest.fail("publishing never came to its end")

    def test_manifest_of_an_older_set_goes_first_and_the_new_one_comes_last(self) -> None:
        store = WorstStore()
        spec, infos = commit_over_older_set(store)
        store.calls.clear()
        publish(store, spec, infos)
        writes = [call for call in store.calls if not call.startswith(("get", "size", "list", "open"))]
        writes = [call for call in writes if "corpus-train" in call.rpartition(" ")[2] or MANIFEST_NAME in call]
        assert writes[0] == f"delete {MANIFEST_NAME}"
        assert {
            "delete corpus-train.array_record-00001-of-00002",
            "delete _dead_letters/corpus-train-00002.jsonl",
        } <= set(writes)
        assert writes[-1] == f"put {MANIFEST_NAME}"


class TestOlderSet:
    def test_shards_of_an_older_count_go_and_files_of_others_stay(self) -> None:
        store = WorstStore()
        spec, infos = commit_job(store)
        older = [f"corpus-train.array_record-{number:05d}-of-00002" for number in range(2)]
        others = [
            "corpus-test.array_record-00000-of-00002",
            "README.md",
            "corpus-train_g001.array_record-00000-of-00001",
        ]
        for name in (*older, *others):
            store.put(name, b"x")
        store.settle()
        publish(store, spec, infos)
        names = [name for name in store.tree() if not name.startswith("_")]
        assert names == sorted([*FINAL_NAMES, *others, MANIFEST_NAME])

    def test_over_budget_job_leaves_the_older_set_whole(self) -> None:
        store = WorstStore()
        spec, infos = commit_job(store, max_fraction=0.01)
        older = {"corpus-train.array_record-00000-of-00001": b"x", MANIFEST_NAME: b'{"plan_id": "old", "shards": []}'}
        older[REPLACED_NAME] = b'["corpus-train.array_record-00000-of-00001"]'
        for name, data in older.items():
            store.put(name, data)
        store.settle()
        publish(store, spec, infos)
        assert older.items() <= store.tree().items()

    @pytest.mark.parametrize("list_delay", [0, 1000], ids=["prompt", "late"])
    def test_replaced_names_go_but_not_those_of_the_new_set(self, list_delay: int) -> None:
        store = WorstStore(list_delay=list_delay)
        spec, infos = commit_job(store)
        replaced = [FINAL_NAMES[0], "old-train.array_record-00000-of-00001"]
        replaced += ["_dead_letters/corpus-train-00001.jsonl", "_dead_letters/corpus-train-00003.jsonl"]
        for name in replaced:
            store.put(name, b"old")
        store.put(REPLACED_NAME, json.dumps(replaced).encode())
        publish(store, spec, infos)
        expected = WorstStore()
        publish(expected, *commit_job(expected))
        assert final_tree(store) == final_tree(expected)
        assert REPLACED_NAME not in store.tree()


class TestCollectShards:
    def info(self, shard: int, round_number: int = 0, written: int = 1) -> ShardInfo:
        return ShardInfo(dataclasses.replace(make_task(shard), round=round_number), 1, {"records_written": written})

    def collect(self, *bundles: list[ShardInfo]) -> list[ShardInfo]:
        combine = CollectShards()
        accumulators = []
        for bundle in bundles:
            accumulator = combine.create_accumulator()
            for info in bundle:
                accumulator = combine.add_input(accumulator, info)
            accumulators.append(accumulator)
        return combine.extract_output(combine.merge_accumulators(accumulators))

    def test_shards_come_in_plan_order_whatever_the_bundles(self) -> None:
        infos = [self.info(shard) for shard in range(6)]
        assert self.collect(infos[3:], [], infos[:3]) == infos
        assert self.collect(*([info] for info in reversed(infos))) == infos

    def test_latest_reading_counts_in_any_order(self) -> None:
        old, new, newest = self.info(0, 0, 10), self.info(0, 1, 11), self.info(0, 2, 12)
        for bundles in ([[old, new, newest]], [[newest], [old], [new]], [[new, old], [newest]], [[newest, new, old]]):
            assert self.collect(*bundles) == [newest]

    def test_shard_that_arrives_twice_counts_once(self) -> None:
        assert self.collect([self.info(0), self.info(0)], [self.info(0)]) == [self.info(0)]


def test_ranges_that_do_not_meet_are_read_again_from_the_boundary() -> None:
    books: dict[str, int] = dict.fromkeys(("records_read", "records_written"), 1)
    before = ShardInfo(make_task(0), 1, books, None, Edge(0, Span(0, 100, 0, 130), 1, 0))
    after = ShardInfo(make_task(1), 1, books, Edge(0, Span(100, 200, 110, 200), 1, 0), None)
    [task] = find_apart([before, after], 2)
    assert task == dataclasses.replace(make_task(1), start_at=130, round=2)
    again = dataclasses.replace(after, task=task, first=Edge(0, Span(100, 200, 130, 200), 1, 0))
    assert list(find_apart([before, again], 3)) == []
