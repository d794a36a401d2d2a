"""The requests of a whole job to Cloud Storage, phase by phase, as the code makes them.

A test holds these counts against what a real job asks an emulator for. They are of a job that meets nothing unusual: a
fresh output, no dead letters, one part a shard, no request that has to be repeated.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pipelines.progress import _LOOK_SECS, _LOOK_SHARE
from simulate.bucket import PAGE_FILES
from simulate.rates import Rates
from simulate.work import Shard, blocks_of, count_lookups, count_source_reads
from transforms.job_lock import HEARTBEAT_SECS, keep_lock
from transforms.plan_file import INPUTS_NAME, PLAN_NAME
from transforms.shard_progress import FAR_SECS

LINE_BYTES = 150
"""About what a line of plan or inputs takes."""

_KEEP_SECS = float(inspect.signature(keep_lock).parameters["look_secs"].default)


@dataclasses.dataclass(frozen=True)
class Operations:
    """Requests of one kind.

    Attributes:
        phase: Part of the job.
        action: "insert", "copy", "list", "get", "look" (metadata), "miss" (a get or look that finds nothing), "delete".
        what: Kind of object.
        count: How many.
    """

    phase: str
    action: str
    what: str
    count: int


@dataclasses.dataclass(frozen=True)
class Job:
    """What the counts depend on.

    Attributes:
        shards: The plan.
        inputs_bytes: Size of inputs.jsonl.
        plan_bytes: Size of plan.jsonl.
        pages: Pages that were listed.
        sample_reads: Reads of the sample.
        source_reads: Requests that read the inputs.
        run_secs: How long workers are at it.
        workers: How many, where they renew the lock themselves, as on Dataflow; 0 where the driver does.
        list_secs: What a page of a listing takes.
    """

    shards: list[Shard]
    inputs_bytes: int
    plan_bytes: int
    pages: int
    sample_reads: int
    source_reads: int
    run_secs: float = 0.0
    workers: int = 0
    list_secs: float = 0.0


def describe_job(folder: Path, shards: list[Shard], sizes: np.ndarray, facts: dict[str, Any], **run: Any) -> Job:
    """Returns a job whose plan stands in a folder; `facts` are those of `planner.plan`, `run` further attributes."""
    stored = [(folder / name).stat().st_size for name in (INPUTS_NAME, PLAN_NAME)]
    reads = count_source_reads(shards, sizes)
    return Job(shards, *stored, facts["pages"], facts["sample_reads"], reads, **run)


def count_operations(job: Job) -> list[Operations]:
    """Returns all requests of a job."""
    phases = {
        "plan": _plan(job),
        "prepare": _prepare(),
        "hand out": _hand_out(job),
        "convert": _convert(job),
        "watch": _watch(job),
        "publish": _publish(job),
        "finish": _finish(job),
    }
    return [Operations(phase, *kind) for phase, kinds in phases.items() for kind in kinds]


Kind = tuple[str, str, int]


def _plan(job: Job) -> Iterator[Kind]:
    yield "list", "source", job.pages
    yield "get", "source", job.sample_reads


def _prepare() -> Iterator[Kind]:
    """The driver: looks that the output is free, and puts the plan there."""
    yield "miss", "plan", 9  # Does the output answer? Resumed? Planned? Planned still, under the lock? To be replaced?
    yield "miss", "inputs", 2
    yield "miss", "manifest", 4
    yield "miss", "lock", 1
    yield "miss", "state", 10  # Report, names that are replaced, plan of a generation, pieces; what is deleted, config.
    yield "list", "output", 20
    yield "insert", "inputs", 1
    yield "insert", "plan", 1
    yield "insert", "state", 2  # Probe, config.
    yield "insert", "lock", 1
    yield "delete", "state", 1  # Probe.
    yield "get", "lock", 7  # Before each change, and once more after a name was created.


def _hand_out(job: Job) -> Iterator[Kind]:
    """One worker reads the plan; then every shard's line is looked up by its worker."""
    yield "look", "plan", 1 + len(job.shards)
    lookups = sum(count_lookups(shard.line_offset, LINE_BYTES, job.plan_bytes) for shard in job.shards)
    yield "get", "plan", blocks_of(job.plan_bytes) + lookups


def _convert(job: Job) -> Iterator[Kind]:
    count = len(job.shards)
    slices = ((shard.task.first_offset, shard.slice_bytes + LINE_BYTES) for shard in job.shards)
    yield "miss", "ledger", count
    yield "miss", "state", count  # Was the job called off?
    yield "insert", "mark", count
    yield "look", "inputs", count
    yield "get", "inputs", sum(count_lookups(*place, job.inputs_bytes) for place in slices)
    yield "get", "source", job.source_reads
    yield "insert", "part", count
    yield "insert", "ledger", count
    yield "delete", "mark", count
    yield "get", "lock", 5 * count  # Mark and ledger are created, the mark is deleted.


def _watch(job: Job) -> Iterator[Kind]:
    """The driver, while workers are at it: new ledgers, and the heartbeat of the lock, which workers look after too."""
    pages = pages_of(len(job.shards) // 2)  # Half of the ledgers stand, in the mean.
    notes = int(job.workers * job.run_secs / len(job.shards) / FAR_SECS)  # How far it is, of each shard as it runs.
    looks, beats = int(job.run_secs / _pause_secs(pages * job.list_secs)), int(job.run_secs / HEARTBEAT_SECS)
    yield "list", "output", looks * (pages + pages_of(job.workers if notes else 0))
    yield "insert", "progress", notes * len(job.shards)
    yield "delete", "progress", len(job.shards) if notes else 0
    yield "get", "progress", looks * job.workers if notes else 0
    yield "get", "ledger", len(job.shards) if job.run_secs else 0
    yield "get", "lock", beats + int(job.workers * job.run_secs / _KEEP_SECS)
    yield "insert", "lock", beats


def _pause_secs(look_secs: float) -> float:
    """Returns the time from one look at the ledgers to the next."""
    return look_secs + max(_LOOK_SECS, look_secs / _LOOK_SHARE)


def _publish(job: Job) -> Iterator[Kind]:
    count = len(job.shards)
    yield "miss", "manifest", 1
    yield "get", "ledger", count
    yield "look", "part", 2 * count  # Is it there? And its generation, to be copied.
    yield "miss", "shard", count
    yield "copy", "part", count
    yield "miss", "note", count
    yield "insert", "note", count
    yield "get", "lock", 4 * count  # At most: those that are under way at the same time share them.


def _finish(job: Job) -> Iterator[Kind]:
    """One worker: manifest and report, then the attempts go."""
    count = len(job.shards)
    yield "miss", "manifest", 2
    yield "look", "plan", 3
    yield "get", "plan", 2 + blocks_of(job.plan_bytes)
    yield "get", "ledger", count
    yield "get", "note", count
    yield (
        "list",
        "output",
        pages_of(4 * count) + pages_of(count) + 4,
    )  # Everything; attempts; marks, journals, notes, pieces.
    yield "miss", "state", 6  # Names that are replaced, plan of a generation, report twice, an older log.
    yield "insert", "manifest", 1
    yield "delete", "part", count
    yield "delete", "lock", 1
    yield "get", "state", 5  # The config four times, the report.
    yield (
        "get",
        "lock",
        count + 9,
    )  # At most; manifest and report, the parts that go, the command's last words, release.
    yield "insert", "state", 3  # Report, as JSON and as a page; log.


def pages_of(names: int) -> int:
    """Returns the pages of a listing."""
    return max(1, -(-names // PAGE_FILES))


def phase_costs(operations: list[Operations], rates: Rates) -> dict[str, dict[str, float]]:
    """Returns counts by action and "$", by phase and for "all"."""
    costs: dict[str, dict[str, float]] = {}
    for one in operations:
        for phase in (one.phase, "all"):
            row = costs.setdefault(phase, {})
            row[one.action] = row.get(one.action, 0) + one.count
            row["$"] = row.get("$", 0.0) + rates.price(one.action, one.count)
    costs["all"] = costs.pop("all")
    return costs
