"""VerifyShards: every planned shard is read back by some worker, and one result stands in the output directory."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import apache_beam as beam
from apache_beam.metrics import Metrics
from apache_beam.pvalue import PBegin, PCollection

from transforms.billing import pay_by
from transforms.check_shard import Found, ShardChecker, add_up
from transforms.read import list_shards
from transforms.store import Store, open_store
from transforms.verify import VerifyOrder, conclude, write_result
from transforms.whole import load_generation


@dataclasses.dataclass
class VerifyShards(beam.PTransform):
    """Reads every file of every planned shard, and writes the result to `_gristmill/verify.json`.

    Output: PCollection[dict], the one result. Only (generation, planned shard) is shuffled, and what was found.

    Attributes:
        order: What is to be checked.
        num_workers: See `ReadPlan`.
    """

    order: VerifyOrder
    num_workers: int = 1

    def expand(self, begin: PBegin) -> PCollection[dict[str, Any]]:
        return (
            begin
            | "Start" >> beam.Impulse()
            | "ListShards" >> beam.FlatMap(_list_for, self.order, self.num_workers)  # (turn, (generation, shard))
            | "Spread" >> beam.GroupByKey()
            | "CheckShards" >> beam.ParDo(_CheckShardsFn(self.order))  # Found
            | "AddUp" >> beam.CombineGlobally(add_up)  # Found, one
            | "Conclude" >> beam.Map(_conclude, self.order)  # the result
        )


def _list_for(_: bytes, order: VerifyOrder, num_workers: int) -> Iterator[tuple[int, tuple[str, int]]]:
    return enumerate(_list_tasks(order, num_workers))


def _list_tasks(order: VerifyOrder, num_workers: int) -> Iterator[tuple[str, int]]:
    store = _open(order)
    for name in order.generations:
        for shard, _ in list_shards(load_generation(store, name).spec, num_workers):
            yield name, shard  # Shard -1 stands for nothing.


def _open(order: VerifyOrder) -> Store:
    pay_by(order.billing_project)
    return open_store(order.root)


class _CheckShardsFn(beam.DoFn):
    def __init__(self, order: VerifyOrder) -> None:
        self._order = order
        self._bytes = Metrics.counter("Verify", "bytes")
        self._differences = Metrics.counter("Verify", "differences")

    def setup(self) -> None:
        self._checker = ShardChecker(_open(self._order))

    def process(self, element: tuple[int, Iterable[tuple[str, int]]]) -> Iterator[Found]:
        for generation, shard in element[1]:
            if shard >= 0:
                found = self._checker.check(generation, shard)
                self._bytes.inc(found.num_bytes)
                self._differences.inc(found.num_differences)
                yield found


def _conclude(found: Found, order: VerifyOrder) -> dict[str, Any]:
    result = conclude(order, found)
    write_result(_open(order), result)
    return result
