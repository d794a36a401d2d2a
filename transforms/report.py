"""Rebuilds the report from the ledgers: what became of every record, in numbers that add up."""

from __future__ import annotations

import dataclasses
import heapq
import importlib.metadata
import platform
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from transforms.ahead import map_ahead
from transforms.billing import billing_project
from transforms.books import BYTES, COUNTS, FILES, SourceRow, add_up, judge
from transforms.budget import ESTIMATE, Budget, dead_fraction
from transforms.elements import JobSpec, ShardInfo, ShardTask, display_name
from transforms.inputs import read_inputs
from transforms.ledger import Ledger, ledger_name, read_entry, read_published
from transforms.plan_file import read_tasks
from transforms.reasons import ReasonCounts, dead_by_reason, named_reasons
from transforms.state import open_inputs, open_plan, plan_header, read_config
from transforms.store import Store

VERIFIED_NAME = "_gristmill/verify.json"
"""What `verify` found, when it last ran as a pipeline."""
_BUDGET = ("max_fraction", "max_count", "max_count_by_reason")
_NUM_WORST = 3  # What a screen has room for.
_MAX_SOURCES = 1_000  # Sources with losses that the report names; the ledgers hold them all.
_PACKAGES = ("gristmill", "apache-beam", "array-record", "google-crc32c", "numpy", "protobuf")


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the libraries that touch records."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def spec_from_header(header: dict[str, Any], root: str) -> JobSpec:
    """Returns the job of a plan, for commands that only look at its output."""
    fields = dict(header["spec"])
    for name in ("steps", "earlier_plans"):
        fields[name] = tuple(fields.get(name, ()))
    return JobSpec(root=root, **fields)


def spec_to_header(spec: JobSpec) -> dict[str, Any]:
    """Returns what a plan keeps of the job: what decides the bytes, not where, when and within which budget."""
    fields = dataclasses.asdict(spec)
    passing = ("root", "started_at", "import_paths", "rate_share", "lock_token", "run_token", "billing_project")
    for name in (*passing, "num_pieces", *_BUDGET):
        del fields[name]
    return fields


def load_spec(store: Store) -> tuple[JobSpec, dict[str, Any]]:
    """Returns (job, plan header) of an output directory; the budget is the one of the last run.

    So is the project that pays, unless this command names one.

    Raises:
        FileNotFoundError: There is no plan.
        StateError: What stands there is no plan.
    """
    header = plan_header(store)
    spec = spec_from_header(header, store.root)
    config = read_config(store)
    budget = config.get("dead_letters", {})
    budget = {name: budget[name] for name in _BUDGET if name in budget}
    payer = billing_project() or config.get("source", {}).get("billing_project", "")
    return dataclasses.replace(spec, billing_project=payer, **budget), header


def _displayable(value: Any) -> Any:
    """Returns the config with names as valid UTF-8, since the report travels through Beam and into pages."""
    if isinstance(value, str):
        return display_name(value)
    if isinstance(value, dict):
        return {key: _displayable(item) for key, item in value.items()}
    return list(map(_displayable, value)) if isinstance(value, list) else value


def committed_shards(store: Store, spec: JobSpec) -> Iterator[tuple[ShardInfo, Ledger]]:
    """Yields every committed shard in plan order, one ledger at a time, whether or not its files still exist."""
    return ((info, ledger) for info, ledger, _ in _read_entries(store, spec, with_names=False))


def _read_entries(
    store: Store, spec: JobSpec, *, with_names: bool
) -> Iterator[tuple[ShardInfo, Ledger, dict[str, str]]]:
    """Yields committed shards with their final names if asked for; entries that wait are bytes, which are small."""

    def fetch(task: ShardTask) -> tuple[ShardTask, bytes | None, dict[str, str]]:
        found = store.get(ledger_name(spec, task.shard))
        names = read_published(store, spec, task.shard) if with_names and found is not None else {}
        return task, None if found is None else found[0], names

    with open_plan(store) as plan:
        tasks = (task for _, task in read_tasks(plan))
        for task, data, names in map_ahead(fetch, tasks, store.requests_at_once):
            ledger = None if data is None else read_entry(spec, data)
            if ledger is not None:
                yield ledger.to_info(task), ledger, names


@dataclasses.dataclass
class _Tally:
    """Adds up what the totals do not show."""

    dead: ReasonCounts
    dropped: ReasonCounts = dataclasses.field(default_factory=ReasonCounts)
    num_committed: int = 0
    plans: Counter[str] = dataclasses.field(default_factory=Counter)
    shards: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    lossy: list[SourceRow] = dataclasses.field(default_factory=list)
    num_lossy: int = 0
    worst: list[SourceRow] = dataclasses.field(default_factory=list)
    _shared: SourceRow | None = None  # A file that several shards share, until its last row is in.

    def add(self, ledger: Ledger, names: dict[str, str], dead: dict[str, int]) -> None:
        self.num_committed += 1
        self.plans[ledger.plan_id] += 1
        self.dropped.update(ledger.dropped_by_reason)
        self.dead.update(dead)
        for part in ledger.parts:
            if part.name in names:
                shard = {"name": names[part.name], "records": part.records, "bytes": part.size, "crc32c": part.crc32c}
                self.shards.append(shard)
        for row in ledger.rows:
            self._add_row(row)

    def _add_row(self, row: SourceRow) -> None:
        shared = self._shared
        if shared is not None and shared.index == row.index:
            shared.add(row)
            return
        self.close()
        if row.is_whole():
            self._keep(row)
        else:
            self._shared = dataclasses.replace(row)

    def close(self) -> None:
        """Takes the last row of a shared file to be in."""
        if self._shared is not None:
            self._keep(self._shared)
            self._shared = None

    def _keep(self, row: SourceRow) -> None:
        if row.dead or row.dropped:
            self.num_lossy += row.count
            if len(self.lossy) < _MAX_SOURCES:
                self.lossy.append(row)
        if row.dead:
            self.worst = heapq.nlargest(_NUM_WORST, [*self.worst, row], key=_badness)


def _badness(row: SourceRow) -> tuple[int, int, int]:
    return row.dead + row.hidden, row.dead_bytes, -row.index


def worst_first(entries: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the few sources of a report that have lost most, the worst first."""
    dead = [entry for entry in entries if entry["records_dead"]]
    return heapq.nlargest(_NUM_WORST, dead, key=lambda entry: (entry[ESTIMATE], entry["bytes_dead"]))


def build_report(
    store: Store, spec: JobSpec, header: dict[str, Any], named: Collection[str] = frozenset()
) -> dict[str, Any]:
    """Returns the report of a job from its ledgers.

    Args:
        store: The output directory.
        spec: The job; its budget decides the status.
        header: Header of the plan, for the config and what the listing skipped.
        named: Reasons that are counted by themselves, beside those that the job's budget names.

    Returns:
        The report, see the README for its fields.
    """
    named = named_reasons(store, spec).union(named)
    tally = _Tally(ReasonCounts(named))
    infos: list[ShardInfo] = []
    for info, ledger, names in _read_entries(store, spec, with_names=True):
        dead = dead_by_reason(store, spec, ledger, named)
        infos.append(dataclasses.replace(info, dead_by_reason={one: dead[one] for one in named if one in dead}))
        tally.add(ledger, names, dead)
    tally.close()
    books = add_up(infos)
    verdict = judge(books, Budget.of(spec))
    incomplete = tally.num_committed < header["num_shards"]
    message = (
        f"{tally.num_committed} of {header['num_shards']} planned shards are committed"
        if incomplete
        else verdict.message
    )
    totals = books.totals
    return {
        "status": "incomplete" if incomplete else verdict.status,
        "message": message,
        "plan_id": spec.plan_id,
        "files_seen": header["num_inputs"],
        **{name: totals[name] for name in FILES},
        "files_skipped": header["num_skipped"],
        "files_duplicate": header["num_duplicates"],
        **{name: totals[name] for name in (*COUNTS, ESTIMATE, *BYTES)},
        "dead_fraction": dead_fraction(totals),
        "dropped_by_reason": dict(sorted(tally.dropped.to_fields().items())),
        "dead_by_reason": dict(sorted(tally.dead.to_fields().items())),
        "planned_shards": header["num_shards"],
        "committed_shards": tally.num_committed,
        "shards": tally.shards,
        "sources": list(_name_sources(store, tally.lossy)),
        "sources_with_losses": tally.num_lossy,
        "worst_sources": worst_first(_name_sources(store, sorted(tally.worst, key=lambda row: row.index))),
        "notes": [
            *header["notes"],
            *_count_note(read_config(store), len(tally.shards)),
            *_code_notes(header, tally.plans),
        ],
        "shards_by_plan": dict(tally.plans),
        "seconds": round(time.time() - spec.started_at, 3) if spec.started_at else None,
        "config": _displayable(read_config(store)),
        "versions": versions(),
    }


def _count_note(config: dict[str, Any], num_written: int) -> Iterator[str]:
    """Says so where a number of shards was asked for and another came out."""
    asked = config.get("write", {}).get("shards", "auto")
    if asked.isdigit() and num_written and int(asked) != num_written:
        yield (
            f"{asked} shards were asked for, {num_written} written: empty ones are left out, and input that cannot be "
            "split starts new ones at its bounds"
        )


def _code_notes(header: dict[str, Any], plans: Counter[str]) -> Iterator[str]:
    """Says which shards were made before something changed, where `--resume-anyway` kept them."""
    for plan_id, fingerprint in header.get("earlier_fingerprints", {}).items():
        changed = ", ".join(changed_keys(fingerprint, header["fingerprint"]))
        if plans[plan_id]:
            yield f"{plans[plan_id]} shards were committed by plan {plan_id}, before {changed} changed"


def changed_keys(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Returns which parts of a job differ between two fingerprints, for example ["steps", "write.compression"]."""
    changed: list[str] = []
    for key in new:
        before, after = old.get(key), new[key]
        if before == after:
            continue
        if isinstance(before, dict) and isinstance(after, dict):
            changed += [f"{key}.{inner}" for inner in after if before.get(inner) != after[inner]]
        else:
            changed.append(key)
    return changed


def _name_sources(store: Store, rows: list[SourceRow]) -> Iterator[dict[str, Any]]:
    """Yields the rows with their names, which only inputs.jsonl knows; both are in the same order."""
    if not rows:
        return
    waiting = iter(rows)
    row = next(waiting)
    with open_inputs(store) as lines:
        for _, source in read_inputs(lines):
            if source.index != row.index:
                continue
            yield {
                "source": display_name(source.name),
                "records_read": row.read,
                "records_written": row.written,
                "records_added": row.added,
                "records_dropped": row.dropped,
                "records_dead": row.dead,
                ESTIMATE: row.dead + row.hidden,
                "bytes_dead": row.dead_bytes,
            }
            following = next(waiting, None)
            if following is None:
                return
            row = following
