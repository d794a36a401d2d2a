"""What verify compares: every damage is told, with what mends it, and mending as told gives the same bytes again."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

import jobs
from grown_set import DAMAGES, GrownSet, check_differences, cut, damage_all, delete, put
from transforms.check_shard import MAX_TEXTS, Found, ShardChecker, add_up
from transforms.store import OutputError, Store
from transforms.verify import VerifyOrder, conclude, list_tasks, order_verify, read_result, write_result
from transforms.whole import build_whole


def verify(store: Store) -> dict[str, Any]:
    """Checks all shards one after the other."""
    order = order_verify(store, build_whole(store))
    checker = ShardChecker(store)
    return conclude(order, add_up(checker.check(*task) for task in list_tasks(store, order)))


def told(grown: GrownSet) -> list[str]:
    return list(verify(grown.store)["differences"])


def test_a_whole_set_is_verified_and_counted(grown: GrownSet) -> None:
    result = verify(grown.store)
    manifest = json.loads((grown.out / "manifest.json").read_text())
    old = list((grown.out / "_gristmill/replayed").rglob("*.*"))
    read = [*jobs.shards(grown.out), *(grown.out / "_dead_letters").iterdir(), *old]
    assert {name: result[name] for name in result if name not in ("verify_id", "plan_id", "started_at")} == {
        "status": "verified",
        "planned_shards": 5,
        "files": len(read),
        "records": manifest["num_records"],
        "bytes": sum(path.stat().st_size for path in read),
        "dead_letters": len(jobs.dead_letters(grown.out)),
        "num_differences": 0,
        "differences": [],
    }
    assert result["plan_id"] == manifest["plan_id"]


@pytest.mark.parametrize("name", [name for name, damage in DAMAGES.items() if damage.can_be_mended])
def test_damage_is_told_and_doing_as_told_mends_it(name: str, grown: GrownSet) -> None:
    before = jobs.content(grown.out)
    tree = jobs.tree(grown.out)
    DAMAGES[name].act(grown.store)
    differences = told(grown)
    check_differences(differences, DAMAGES[name].differences)
    for _ in range(2):  # What mends one may be another's to finish.
        for difference in differences:
            grown.do_as_told(difference)
        differences = told(grown)
    assert differences == []
    assert jobs.content(grown.out) == before
    assert jobs.tree(grown.out) == tree


@pytest.mark.parametrize("name", [name for name, damage in DAMAGES.items() if not damage.can_be_mended])
def test_damage_that_costs_nothing_of_the_set_is_told_as_such(name: str, grown: GrownSet) -> None:
    before = jobs.content(grown.out)
    DAMAGES[name].act(grown.store)
    check_differences(told(grown), DAMAGES[name].differences)
    assert jobs.content(grown.out) == before


def test_state_of_a_replay_that_is_gone_is_told(grown: GrownSet) -> None:
    cut("_gristmill/g002/letters.jsonl")(grown.store)
    [difference] = told(grown)
    assert difference.startswith("_gristmill/g002/letters.jsonl cannot be read: ")


def test_a_generation_that_is_gone_is_told(grown: GrownSet) -> None:
    delete("_gristmill/g002/plan.jsonl")(grown.store)
    assert any("names corpus-train_g002" in difference and "put back" in difference for difference in told(grown))


def test_a_generation_that_was_stopped_while_it_was_published_is_all_that_is_told(grown: GrownSet) -> None:
    delete("_gristmill/g002/finished.json")(grown.store)
    damage_all(grown.store)
    result = verify(grown.store)
    assert result["differences"] == [
        "replay g002 was stopped while it was published; the next `replay` completes it",
    ]
    assert result["planned_shards"] == 0


def test_committed_shards_of_a_job_that_was_stopped_are_read_where_they_are(grown: GrownSet) -> None:
    ledger = json.loads((grown.out / "_gristmill/shards/00001.json").read_text())
    grown.make_stopped()
    result = verify(grown.store)
    assert result["differences"] == []
    assert (result["files"], result["records"], result["dead_letters"]) == (3, 28, 2)
    name = ledger["parts"][0]["name"]
    put(name, b"")(grown.store)
    assert any(difference.startswith(f"{name} has 0 bytes") for difference in told(grown))


def test_a_permission_that_is_missing_is_told(grown: GrownSet, monkeypatch: pytest.MonkeyPatch) -> None:
    from transforms import check_shard

    def refuse(path: str) -> str:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(check_shard, "file_crc32c", refuse)
    result = verify(grown.store)
    assert result["files"] == 0
    assert all(text.endswith("may not be read; verify needs the permission to") for text in result["differences"])


def an_order(**changes: Any) -> VerifyOrder:
    order = VerifyOrder("/out", "id", "plan", 1.0, ("",), 2, 0, 0, ())
    return dataclasses.replace(order, **changes)


class TestConclude:
    def test_wants_every_planned_shard_once(self) -> None:
        with pytest.raises(OutputError, match="1 of 2 planned shards were checked"):
            conclude(an_order(), Found(shards=1))

    def test_counts_the_dead_letters_where_nothing_else_differs(self) -> None:
        order = an_order(records_dead=7)
        lines = "the dead-letter files have 8 lines, the books 7 dead records"
        assert conclude(order, Found(shards=2, letters=7))["differences"] == []
        assert conclude(order, Found(shards=2, letters=8))["differences"] == [lines]
        lost = Found(shards=2, letters=8, num_differences=1, differences=(("", 0, "lost"),))
        assert conclude(order, lost)["differences"] == ["lost"]

    def test_names_so_many_differences_and_counts_all(self) -> None:
        texts = tuple(("", shard, f"shard {shard}") for shard in range(MAX_TEXTS))
        order = an_order(num_differences=3, differences=("a", "b", "c"))
        result = conclude(order, Found(shards=2, num_differences=1_000, differences=texts))
        assert result["num_differences"] == 1_003
        assert result["differences"] == ["a", "b", "c", *(f"shard {shard}" for shard in range(MAX_TEXTS - 3))]


class TestResult:
    def test_stands_in_the_base_and_is_read_back(self, grown: GrownSet) -> None:
        result = conclude(an_order(), Found(shards=2))
        write_result(grown.store, result)
        assert read_result(grown.store, an_order()) == result
        assert json.loads((grown.out / "_gristmill/verify.json").read_text()) == result

    def test_of_another_run_is_refused(self, grown: GrownSet) -> None:
        with pytest.raises(OutputError, match="not the result of this run"):
            read_result(grown.store, an_order())
        write_result(grown.store, conclude(an_order(verify_id="another"), Found(shards=2)))
        with pytest.raises(OutputError, match="not the result of this run"):
            read_result(grown.store, an_order())

    def test_goes_with_the_set_that_it_is_of(self, grown: GrownSet) -> None:
        write_result(grown.store, conclude(an_order(), Found(shards=2)))
        command = ["--input", "in/f0.tfrecord", "--output", grown.out, "--overwrite"]
        assert jobs.convert(*command) == 0
        assert not (grown.out / "_gristmill/verify.json").exists()
