"""Publish and Finish: final names for what was committed, then the manifest, then the report.

Everything here may be repeated: final names are given by copy (a hard link on a local disk), the attempts stay
until the manifest stands, and the manifest is written last.

Giving names is spread over the workers, and each worker has several shards of a remote store in hand. Settle, Number
and Finish run on one worker: Settle reads only what did not meet, Number makes two requests, and Finish two or three
a shard and one a file, which run ahead; see `transforms.ahead` for what that takes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from collections.abc import Iterable, Iterator
from typing import Any

import apache_beam as beam
from apache_beam.pvalue import AsSingleton, PCollection

from transforms.ahead import call_ahead
from transforms.books import JobBooks, Verdict, add_up, judge
from transforms.budget import Budget, called_off, dead_fraction
from transforms.elements import JobSpec, ShardInfo
from transforms.finish import finish_job
from transforms.generations import DECIDED_NAME, find_letters, open_job_store
from transforms.job_lock import keep_lock, read_lock, release_detached
from transforms.ledger import find_ledger, published_name
from transforms.names import shard_file_name
from transforms.repeat import settle
from transforms.replaced import delete_replaced, final_letters, set_aside
from transforms.state import MANIFEST_NAME, StateError, read_manifest, read_report
from transforms.steps.job_chain import load_chain
from transforms.store import OutputError, Store
from transforms.whole import judge_generation

NOT_PUBLISHED = -1


@dataclasses.dataclass(frozen=True)
class PublishTask:
    """The order to give one shard's files their final names.

    Attributes:
        shard: Planned shard.
        first: Number of its first part among all parts; NOT_PUBLISHED when only dead letters get their names.
        total: Number of parts of the job.
    """

    shard: int
    first: int
    total: int


class CollectShards(beam.CombineFn):
    """Gathers the metadata of all shards, each once: the latest reading of a range counts."""

    def create_accumulator(self) -> dict[int, ShardInfo]:
        return {}

    def add_input(self, accumulator: dict[int, ShardInfo], info: ShardInfo) -> dict[int, ShardInfo]:
        before = accumulator.get(info.task.shard)
        if before is None or before.task.round <= info.task.round:
            accumulator[info.task.shard] = info
        return accumulator

    def merge_accumulators(self, accumulators: Iterable[dict[int, ShardInfo]]) -> dict[int, ShardInfo]:
        merged: dict[int, ShardInfo] = {}
        for accumulator in accumulators:
            for info in accumulator.values():
                self.add_input(merged, info)
        return merged

    def extract_output(self, accumulator: dict[int, ShardInfo]) -> list[ShardInfo]:
        return [accumulator[shard] for shard in sorted(accumulator)]


@dataclasses.dataclass
class Publish(beam.PTransform):
    """Publishes the job and writes its report.

    Input: PCollection[list[ShardInfo]], the one list of all shards in plan order. Output: PCollection[dict], the
    report. Shards get their final names only when all are committed, the books balance and the job is within its
    budget of dead letters; dead letters and report are always written.

    Attributes:
        spec: The job.
    """

    spec: JobSpec

    def expand(self, collected: PCollection[list[ShardInfo]]) -> PCollection[dict[str, Any]]:
        settled = collected | "Settle" >> beam.Map(_settle, self.spec)  # list[ShardInfo]
        published = (
            settled
            | "Number" >> beam.FlatMap(_keyed_orders, self.spec)  # (group, PublishTask)
            | "Spread" >> beam.GroupByKey()
            | "GiveNames" >> beam.ParDo(_GiveNamesFn(self.spec))  # The number of shards, for each group
            | "CountNames" >> beam.CombineGlobally(sum).without_defaults()
        )
        return settled | "Finish" >> beam.Map(_finish, self.spec, AsSingleton(published, default_value=0))


def _settle(infos: list[ShardInfo], spec: JobSpec) -> list[ShardInfo]:
    store = open_job_store(spec)
    with contextlib.closing(load_chain(spec, store)) as chain, keep_lock(store, spec.lock_token):
        return settle(store, spec, chain, infos)


def _keyed_orders(infos: list[ShardInfo], spec: JobSpec) -> Iterator[tuple[int, PublishTask]]:
    at_once = open_job_store(spec).requests_at_once
    return ((order.shard // at_once, order) for order in number_parts(infos, spec))


def decide(infos: list[ShardInfo], spec: JobSpec) -> tuple[JobBooks, Verdict]:
    """Returns the books and what they allow; a job that was called off is over its budget.

    Raises:
        OutputError: A planned shard is missing.
    """
    if len(infos) != spec.num_shards:
        raise OutputError(f"{len(infos)} of {spec.num_shards} planned shards arrived; run the same command again")
    books = add_up(infos)
    if any(info.not_run for info in infos):
        message = called_off(open_job_store(spec)) or "the job was called off"
        return books, Verdict("over_budget", message, dead_fraction(books.totals))
    if spec.generation:
        return books, judge_generation(open_job_store(spec), spec, books)
    return books, judge(books, Budget.of(spec))


def number_parts(infos: list[ShardInfo], spec: JobSpec) -> Iterator[PublishTask]:
    """Numbers the parts in plan order, empty ones left out, and yields the names to give."""
    _, verdict = decide(infos, spec)
    done = verdict.status == "done"
    if done:
        _withdraw_old_manifest(open_job_store(spec), spec)
    total = sum(info.num_parts for info in infos)
    first = 0
    for info in infos:
        if info.num_parts or info.books.get("records_dead") or spec.replay is not None:
            yield PublishTask(info.task.shard, first if done else NOT_PUBLISHED, total)
        first += info.num_parts


def _withdraw_old_manifest(store: Store, spec: JobSpec) -> None:
    """Takes away the manifest of the set that is being replaced, before the first of its files changes.

    A generation replaces none: it notes that from here on it is going to be completed.
    """
    if spec.generation:
        store.put(DECIDED_NAME, b"{}")
        return
    try:
        manifest = read_manifest(store)
    except StateError:
        manifest = {}
    if manifest is not None and manifest.get("plan_id") != spec.plan_id:
        store.delete(MANIFEST_NAME)


class _GiveNamesFn(beam.DoFn):
    def __init__(self, spec: JobSpec) -> None:
        self._spec = spec

    def setup(self) -> None:
        self._store = open_job_store(self._spec)

    def process(self, element: tuple[int, Iterable[PublishTask]]) -> Iterator[int]:
        orders = list(element[1])
        give = functools.partial(give_names, self._store, self._spec)
        call_ahead(give, orders, self._store.requests_at_once)
        yield len(orders)


def give_names(store: Store, spec: JobSpec, task: PublishTask) -> None:
    """Gives the files of one shard their final names and notes them; may be repeated at any moment.

    Raises:
        OutputError: A committed file is gone, or another run has the lock of the output by now.
    """
    if spec.replay is not None and task.first == NOT_PUBLISHED:
        return  # The old dead letters stand until what passes now is published.
    found = find_ledger(store, spec, task.shard)
    if found is None or found.ledger is None:
        raise OutputError(f"committed files of shard {task.shard} are gone; run the same command again")
    ledger = found.ledger
    names: dict[str, str] = {}
    if task.first != NOT_PUBLISHED:
        for number, part in enumerate(ledger.parts, task.first):
            names[part.name] = shard_file_name(spec, number, task.total)
    lines_name, payloads_name = final_letters(store, spec, task.shard)
    set_aside(store, spec, task.shard)
    if ledger.dead_lines is not None:
        names[ledger.dead_lines.name] = lines_name
    if ledger.dead_payloads is not None:
        names[ledger.dead_payloads.name] = payloads_name
    sizes = {file.name: file.size for file in ledger.files()}
    for name, final in names.items():
        target = find_letters(store, spec.generation, final) if final in (lines_name, payloads_name) else final
        try:
            store.copy(name, target)
        except FileNotFoundError as error:
            if store.size(target) != sizes[name]:
                raise OutputError(f"committed file {name} is gone; run the same command again") from error
    delete_replaced(store, spec, task.shard, set(names.values()))
    store.put(published_name(spec, task.shard), json.dumps(names).encode())


def _finish(infos: list[ShardInfo], spec: JobSpec, num_published: int) -> dict[str, Any]:
    store = open_job_store(spec)
    ended = read_report(store) if spec.lock_token and read_lock(store) is None else None
    if ended is not None and ended["plan_id"] == spec.plan_id:
        return ended  # It has released the lock already; the runner has not heard of it and tries again.
    expected = sum(1 for _ in number_parts(infos, spec))
    if num_published < expected:
        raise OutputError(f"{num_published} of {expected} shards were published; run the same command again")
    _, verdict = decide(infos, spec)
    with keep_lock(store, spec.lock_token):
        report = finish_job(store, spec, verdict)
    release_detached(store, spec.lock_token)
    return report
