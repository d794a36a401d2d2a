"""The base and its generations together: one manifest, one report, one set of books. No Beam here.

The whole is the sum of all generations, less the dead letters that replays have consumed: each of those was one record
read and one record dead, and what became of it stands in the books of the replay.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from transforms.books import BYTES, COUNTS, FILES, JobBooks, SourceRow, Verdict, judge
from transforms.budget import ESTIMATE, Budget, dead_fraction
from transforms.elements import JobSpec, display_name
from transforms.generations import DECIDED_NAME, FINISHED_NAME, base_of, generation_names, see_as
from transforms.reasons import BEFORE_NAME, ReasonCounts, named_reasons
from transforms.report import build_report, committed_shards, load_spec, worst_first
from transforms.reread import Listed, read_listed
from transforms.state import open_inputs
from transforms.store import Store

_ADDED = (*COUNTS, ESTIMATE, *BYTES, "planned_shards", "committed_shards")
_MAX_SOURCES = 1_000


@dataclasses.dataclass(frozen=True)
class Generation:
    """The base or a generation, as it stands in the output directory.

    Attributes:
        name: "" for the base.
        store: The output directory as it sees it.
        spec: Its job.
        header: Header of its plan.
    """

    name: str
    store: Store
    spec: JobSpec
    header: dict[str, Any]

    @property
    def kind(self) -> str:
        """What made it: "convert", "append" or "replay"."""
        if not self.name:
            return "convert"
        return "append" if self.spec.replay is None else "replay"

    def is_decided(self) -> bool:
        """Whether its publishing has begun, so that it must be completed."""
        return self.store.size(DECIDED_NAME) is not None

    def is_finished(self) -> bool:
        """Whether it is part of the manifest."""
        return self.store.size(FINISHED_NAME) is not None


def load_generation(store: Store, name: str) -> Generation:
    """Returns the base ("") or a generation that is planned.

    Raises:
        FileNotFoundError: There is none.
        StateError: What stands there is no plan.
    """
    seen = see_as(store, name)
    return Generation(name, seen, *load_spec(seen))


def list_generations(store: Store) -> list[Generation]:
    """Returns all generations that are planned, in order; only the last one may be unfinished."""
    return [load_generation(store, name) for name in generation_names(store)]


def build_whole(store: Store, also: str = "", named: Collection[str] = frozenset()) -> dict[str, Any]:
    """Returns the report of the base with all finished generations, from the ledgers.

    Args:
        store: The output directory.
        also: A generation that is about to be finished.
        named: Reasons that are counted by themselves, beside those that the budget of the base names.

    Raises:
        FileNotFoundError: There is no job.
    """
    base = load_generation(store, "")
    return add_generations(base.store, build_report(base.store, base.spec, base.header, named), also, named)


def add_generations(
    store: Store, report: dict[str, Any], also: str = "", named: Collection[str] = frozenset()
) -> dict[str, Any]:
    """Returns the base's report with all finished generations added, and with one that is about to be.

    Args:
        store: The output directory.
        report: The report of the base alone; it is changed.
        also: Name of the generation that is about to be finished.
        named: Reasons that are counted by themselves, beside those that the budget of the base names.
    """
    base = load_generation(store, "")
    adder = _Adder(report, named_reasons(base.store, base.spec).union(named))
    for generation in list_generations(store):
        if generation.name == also or generation.is_finished():
            adder.add(generation)
        elif generation.is_decided():
            report["message"] = f"{generation.kind} {generation.name} was stopped; the same command completes it"
    return adder.finish()


class _Adder:
    """Adds generations to a report."""

    def __init__(self, report: dict[str, Any], named: frozenset[str]) -> None:
        self._report = report
        self._named = named
        self._dropped = ReasonCounts()
        self._dropped.update(report["dropped_by_reason"])
        self._dead = ReasonCounts(named)
        self._dead.update(report["dead_by_reason"])
        self._lossy = {row["source"]: row for row in report["sources"]}
        self._generations: list[dict[str, Any]] = []

    def add(self, generation: Generation) -> None:
        """Adds the books of a generation, and takes back what it has consumed."""
        report = self._report
        own = build_report(generation.store, generation.spec, generation.header, self._named)
        for name in _ADDED:
            report[name] += own[name]
        self._dropped.update(own["dropped_by_reason"])
        self._dead.update(own["dead_by_reason"])
        report["shards"] += own["shards"]
        report["shards_by_plan"].update(own["shards_by_plan"])
        consumed = generation.header.get("consumed", {"records": 0})["records"]
        if generation.spec.replay is None:
            self._add_files(own)
        else:
            self._take_back(generation)
        counts = {name: own[name] for name in ("records_read", "records_written", "records_dropped", "records_dead")}
        entry = {"name": generation.name, "kind": generation.kind, "letters_consumed": consumed, **counts}
        self._generations.append({**entry, "shards": len(own["shards"])})

    def _add_files(self, own: dict[str, Any]) -> None:
        for name in ("files_seen", *FILES):
            self._report[name] += own[name]
        for name in ("files_skipped", "files_duplicate"):
            self._report[name] = own[name]  # Every listing meets the same ones again.
        self._lossy.update((row["source"], row) for row in own["sources"])
        self._report["sources_with_losses"] += own["sources_with_losses"]

    def _take_back(self, replay: Generation) -> None:
        consumed = replay.header["consumed"]
        for name in ("records_read", "records_dead"):
            self._report[name] -= consumed["records"]
        self._report[ESTIMATE] -= consumed.get("estimate", consumed["records"])
        for name in ("bytes_read", "bytes_dead"):
            self._report[name] -= consumed["bytes"]
        self._dead.subtract(consumed["by_reason"])
        for listed, row in replayed_sources(replay):
            outcome = new_outcome(listed, row)
            if outcome is not None:
                self._report["files_dead"] -= 1
                self._report[outcome] += 1
            self._change_source(listed, row)

    def _change_source(self, listed: Listed, row: SourceRow) -> None:
        """Brings the entry of a source with losses up to date."""
        entry = self._lossy.get(display_name(listed.source.name))
        if entry is None:
            return
        taken = listed.source.size
        entry["records_read"] += row.read - taken
        entry["records_written"] += row.written
        entry["records_added"] += row.added
        entry["records_dropped"] += row.dropped
        entry["records_dead"] += row.dead - taken
        entry[ESTIMATE] += row.dead + row.hidden - max(taken, listed.taken_estimate)
        entry["bytes_dead"] += row.dead_bytes - listed.taken_bytes

    def finish(self) -> dict[str, Any]:
        """Returns the report."""
        report = self._report
        lossy = [row for row in self._lossy.values() if row["records_dead"] or row["records_dropped"]]
        report["sources_with_losses"] -= len(self._lossy) - len(lossy)
        report["sources"] = lossy[:_MAX_SOURCES]
        report["worst_sources"] = worst_first(lossy)
        report["dropped_by_reason"] = dict(sorted(self._dropped.to_fields().items()))
        report["dead_by_reason"] = dict(sorted(self._dead.to_fields().items()))
        report["dead_fraction"] = dead_fraction(report)
        report["generations"] = self._generations
        return report


def merge_rows(rows: Iterable[SourceRow]) -> Iterator[SourceRow]:
    """Yields the rows of all shards in order, those of a file that several shards share as one."""
    shared: SourceRow | None = None
    for row in rows:
        if shared is not None and shared.index == row.index:
            shared.add(row)
            continue
        if shared is not None:
            yield shared
            shared = None
        if row.is_whole():
            yield row
        else:
            shared = dataclasses.replace(row)
    if shared is not None:
        yield shared


def _all_rows(generation: Generation) -> Iterator[SourceRow]:
    shards = committed_shards(generation.store, generation.spec)
    return merge_rows(row for _, ledger in shards for row in ledger.rows)


def dead_sources(generation: Generation) -> Iterator[tuple[dict[str, Any], SourceRow]]:
    """Yields (line of inputs.jsonl, row) of every source with dead letters, in order."""
    rows = (row for row in _all_rows(generation) if row.dead)
    row = next(rows, None)
    with open_inputs(generation.store) as lines:
        for index, line in enumerate(lines):
            if row is None:
                return
            if row.index == index:
                yield json.loads(line), row
                row = next(rows, None)


def replayed_sources(replay: Generation) -> Iterator[tuple[Listed, SourceRow]]:
    """Yields every source of a replay with its row, in order."""
    rows = _all_rows(replay)
    row = next(rows, None)
    for listed in read_listed(replay.store):
        while row is not None and row.index + row.count <= listed.source.index:
            row = next(rows, None)
        if row is not None and row.index <= listed.source.index:
            yield listed, row


def new_outcome(listed: Listed, row: SourceRow) -> str | None:
    """Returns what a file counts as that was dead as a whole before a replay, None if that has not changed."""
    if not listed.was_dead:
        return None
    if row.read > row.dead:
        return "files_read"
    return "files_empty" if row.read == 0 and listed.letters == listed.source.size else None


def judge_generation(store: Store, spec: JobSpec, books: JobBooks) -> Verdict:
    """Holds a generation against its budget: an append by itself, a replay by what the whole is after it.

    One that brings no record is no failure. A replay that leaves the whole no worse than before is never refused.
    """
    verdict = judge(books, Budget.of(spec))
    if verdict.status in ("done", "nothing_written") and spec.replay is not None:
        verdict = _judge_replay(store, spec, books)
    if verdict.status == "over_budget" and store.size(DECIDED_NAME) is not None:
        return dataclasses.replace(verdict, status="done")  # Its publishing has begun under a larger budget.
    if verdict.status == "nothing_written":
        return dataclasses.replace(verdict, status="done", message="no record was added")
    return verdict


def _judge_replay(store: Store, spec: JobSpec, books: JobBooks) -> Verdict:
    found = store.get(BEFORE_NAME)
    before = json.loads(found[0]) if found is not None else {}
    _, header = load_spec(store)
    consumed = header["consumed"]
    totals = {name: before["totals"][name] + books.totals[name] for name in (*COUNTS, *BYTES)}
    for name, key in (("records_read", "records"), ("records_dead", "records"), ("bytes_read", "bytes")):
        totals[name] -= consumed[key]
    totals["bytes_dead"] -= consumed["bytes"]
    estimate = before["totals"].get(ESTIMATE, before["totals"]["records_dead"]) + books.totals[ESTIMATE]
    totals[ESTIMATE] = estimate - consumed.get("estimate", consumed["records"])
    totals.update((name, before["totals"][name]) for name in FILES)  # At most fewer are dead.
    dead = Counter(before["dead_by_reason"]) + Counter(books.dead_by_reason)
    dead.subtract(consumed["by_reason"])
    verdict = judge(JobBooks(totals, [], dict(dead)), Budget(**before["budget"]))
    if verdict.status == "over_budget" and _no_worse(totals, before["totals"]):
        return dataclasses.replace(verdict, status="done")
    return verdict


def _no_worse(after: dict[str, int], before: dict[str, int]) -> bool:
    one, other = dead_fraction(after), dead_fraction(before)
    return after["records_dead"] <= before["records_dead"] and all(one[key] <= other[key] for key in one)


def books_before(store: Store, budget: Budget) -> bytes:
    """Returns what `BEFORE_NAME` holds: the books of the whole before a replay, and the budget that it is judged by."""
    whole = build_whole(store, named=budget.max_count_by_reason)
    totals = {name: whole[name] for name in (*COUNTS, ESTIMATE, *BYTES, *FILES)}
    limits = {name: getattr(budget, name) for name in ("max_fraction", "max_count", "max_count_by_reason")}
    fields = {"totals": totals, "dead_by_reason": whole["dead_by_reason"], "budget": limits}
    return json.dumps(fields).encode()


def whole_spec(store: Store) -> JobSpec:
    """Returns the job of the base."""
    return load_generation(base_of(store), "").spec
