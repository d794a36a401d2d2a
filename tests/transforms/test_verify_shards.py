"""VerifyShards finds on any runner what is found without Beam, and shuffles numbers and findings only."""

from __future__ import annotations

import pickle
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.portability import common_urns

from grown_set import DAMAGES, GrownSet, check_differences, damage_all
from transforms.check_shard import Found, ShardChecker, add_up
from transforms.store import LocalStore
from transforms.verify import VerifyOrder, conclude, list_tasks, order_verify, read_result
from transforms.verify_shards import VerifyShards, _list_for
from transforms.whole import build_whole

RUNNERS = {
    "in_memory": ["--runner=FnApiRunner"],
    "threads": ["--runner=FnApiRunner", "--direct_running_mode=multi_threading", "--direct_num_workers=3"],
    "bundle_based": ["--runner=BundleBasedDirectRunner"],
    "every_bundle_twice": ["--runner=BundleBasedDirectRunner", "--direct_runner_bundle_repeat=1"],
}


def order_of(store: LocalStore) -> VerifyOrder:
    return order_verify(store, build_whole(store))


def without_beam(store: LocalStore, order: VerifyOrder) -> dict[str, Any]:
    checker = ShardChecker(store)
    return conclude(order, add_up(checker.check(*task) for task in list_tasks(store, order)))


def run(order: VerifyOrder, flags: list[str], num_workers: int = 1) -> None:
    with beam.Pipeline(options=PipelineOptions(flags)) as pipeline:
        _ = pipeline | VerifyShards(order, num_workers)


@pytest.mark.parametrize("name", DAMAGES)
def test_every_damage_is_found_as_without_beam(name: str, grown: GrownSet) -> None:
    DAMAGES[name].act(grown.store)
    order = order_of(grown.store)
    run(order, RUNNERS["in_memory"])
    result = read_result(grown.store, order)
    assert result == without_beam(grown.store, order)
    check_differences(result["differences"], DAMAGES[name].differences)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("damaged", [False, True], ids=["whole", "damaged"])
def test_every_runner_gives_the_same_result(runner: str, damaged: bool, grown: GrownSet) -> None:
    if damaged:
        damage_all(grown.store)
    order = order_of(grown.store)
    run(order, RUNNERS[runner], num_workers=3)
    result = read_result(grown.store, order)
    assert result == without_beam(grown.store, order)
    assert result["status"] == ("different" if damaged else "verified")


def test_no_planned_shard_is_a_result_too(grown: GrownSet) -> None:
    order = VerifyOrder(grown.store.root, "id", "plan", 1.0, (), 0, 0, 0, ())
    run(order, RUNNERS["in_memory"])
    assert read_result(grown.store, order) == conclude(order, Found())


def test_only_numbers_are_dealt_out(grown: GrownSet) -> None:
    order = order_of(grown.store)
    assert list(_list_for(b"", order, 2)) == [
        (0, ("", 0)),
        (1, ("", 1)),
        (2, ("", 2)),
        (3, ("", -1)),
        (4, ("g001", 0)),
        (5, ("g001", -1)),
        (6, ("g002", 0)),
        (7, ("g002", -1)),
    ]


def test_only_numbers_and_findings_are_shuffled(grown: GrownSet) -> None:
    pipeline = beam.Pipeline()
    _ = pipeline | "Verify" >> VerifyShards(order_of(grown.store))
    graph = pipeline.to_runner_api()
    grouping = (common_urns.primitives.GROUP_BY_KEY.urn, common_urns.composites.RESHUFFLE.urn)
    grouped = [one.unique_name for one in graph.components.transforms.values() if one.spec.urn in grouping]
    assert len(grouped) == 2, grouped
    assert "Verify/Spread" in grouped
    assert next(name for name in grouped if name != "Verify/Spread").startswith("Verify/AddUp/")
    checker = ShardChecker(grown.store)
    found = add_up(checker.check(*task) for task in list_tasks(grown.store, order_of(grown.store)))
    assert len(pickle.dumps(found)) < 1_000
    assert len(graph.SerializeToString()) < 50_000
