"""Goes on with a job whose plan is another one now, keeping what is committed.

`--resume-anyway` does so when steps or write keys changed; inputs that have a new time only need no flag.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, BinaryIO

from pipelines.errors import UsageError
from pipelines.plan_job import PlannedJob
from transforms.elements import Input, ShardTask
from transforms.inputs import read_inputs
from transforms.new_inputs import name_table
from transforms.plan_file import PLAN_NAME, read_tasks, replace_header
from transforms.report import changed_keys, load_spec, spec_to_header
from transforms.state import StateError, open_inputs, plan_header
from transforms.store import Store
from transforms.touched import OTHER, SAME, UNKNOWN, UNSEEN, WAY_OUT, TouchedInputs, name_some

_PIECE_BYTES = 1 << 20


_AS_PLANNED = (
    *("num_shards", "writer_options", "part_max_records", "part_max_bytes", "roll_factor"),
    *("planned_bytes", "planned_files", "record_bytes"),
)
"""What planning estimates, and another version may estimate otherwise: the plan that stands decides."""


def recall_earlier_plans(store: Store, job: PlannedJob) -> PlannedJob:
    """Returns the job as it was planned when it began, if it has begun.

    With it come the earlier plans whose shards it took as its own when it was resumed before.

    Args:
        store: The output directory.
        job: The planned job.
    """
    try:
        header = plan_header(store)
    except (FileNotFoundError, StateError):
        return job
    if header["plan_id"] != job.spec.plan_id:
        return job
    before = header["spec"]
    planned = {name: before.get(name, 0) for name in _AS_PLANNED}
    spec = dataclasses.replace(job.spec, earlier_plans=tuple(before.get("earlier_plans", ())), **planned)
    return dataclasses.replace(job, spec=spec)


def resume_anyway(store: Store, job: PlannedJob) -> PlannedJob:
    """Returns the job as one that takes the shards of the job before it as its own.

    Args:
        store: The output directory.
        job: The planned job; the header of its plan file is replaced.

    Raises:
        UsageError: The shards of the two jobs do not cover the same input.
        StateError: The plan of the job before it is damaged.
    """
    try:
        header = plan_header(store)
        with store.open(PLAN_NAME) as old, open(job.plan_path, "rb") as new:
            if job.spec.accepts(header["plan_id"]):
                return job
            _check_same_cuts(header, job.header, old, new)
    except FileNotFoundError:
        return job
    return _take_over(job, header)


def accept_touched(store: Store, job: PlannedJob, *, by_word: bool) -> PlannedJob:
    """Returns the job as one that goes on with the job before it, if their inputs differ by their times only.

    What is committed was made of bytes whose checksums must hold; what is not is read as it is now.

    Args:
        store: The output directory.
        job: The planned job; the header of its plan file is replaced.
        by_word: Whether inputs of the same size are taken to hold what they held.

    Raises:
        UsageError: An input that was read holds something else now, or nothing tells.
        StateError: The plan of the job before it is damaged.
    """
    try:
        before, header = load_spec(store)
    except FileNotFoundError:
        return job
    if job.spec.accepts(header["plan_id"]) or changed_keys(header["fingerprint"], job.header["fingerprint"]) != [
        "inputs"
    ]:
        return job
    with name_table() as table, store.open(PLAN_NAME) as old, open(job.plan_path, "rb") as new:
        touched = TouchedInputs(table)
        if not _have_same_names(store, job, touched) or not _have_same_cuts(old, new):
            return job
        if by_word:
            touched.accept()
        touched.compare(store, before)
        others, unknown = (name_some(touched.names(state)) for state in (OTHER, UNKNOWN))
    if others:
        raise UsageError(
            f"{store.root} was made of other inputs; of the same size, but not with the same bytes as now: {others}. "
            f"Put them back as they were, or {WAY_OUT}, or --overwrite to convert everything anew"
        )
    if unknown:
        raise UsageError(
            f"{store.root} was made of inputs with other times, and no checksum tells whether they are the same: "
            f"{unknown}. Put the times back, or {WAY_OUT}, or --overwrite to convert everything anew"
        )
    return _take_over(job, header)


def _have_same_names(store: Store, job: PlannedJob, touched: TouchedInputs) -> bool:
    """Whether two jobs list the same names with the same sizes; those with other times are added to the table."""
    with open_inputs(store) as old, open(job.inputs_path, "rb") as new:
        for before, now in itertools.zip_longest(read_inputs(old), read_inputs(new)):
            if before is None or now is None or _what_it_is(before[1]) != _what_it_is(now[1]):
                return False
            if before[1].mtime_ns == now[1].mtime_ns:
                continue
            checksums = {before[1].crc32c, now[1].crc32c}
            if "" not in checksums and len(checksums) == 2:
                return False
            touched.add(now[1], UNSEEN if "" in checksums else SAME)
    return True


def _what_it_is(source: Input) -> tuple[str, int, object]:
    return source.name, source.size, source.error


def _have_same_cuts(old: BinaryIO, new: BinaryIO) -> bool:
    """Whether two plans cut the same inputs alike; places of lines may differ by the digits of a time."""
    tasks = itertools.zip_longest(read_tasks(old), read_tasks(new))
    return all(one is not None and other is not None and _cut(one[1]) == _cut(other[1]) for one, other in tasks)


def _cut(task: ShardTask) -> tuple[int, ...]:
    return task.shard, task.first_index, task.start, task.end, task.planned_bytes


def _take_over(job: PlannedJob, header: dict[str, Any]) -> PlannedJob:
    """Returns the job as one that takes the shards of a plan before it as its own."""
    spec = dataclasses.replace(job.spec, earlier_plans=(*header["spec"].get("earlier_plans", ()), header["plan_id"]))
    earlier = {**header.get("earlier_fingerprints", {}), header["plan_id"]: header["fingerprint"]}
    fields = {**job.header, "spec": spec_to_header(spec), "earlier_fingerprints": earlier}
    replace_header(job.plan_path, fields)
    return dataclasses.replace(job, spec=spec, header=fields)


def _check_same_cuts(old: dict[str, Any], new: dict[str, Any], old_plan: BinaryIO, new_plan: BinaryIO) -> None:
    if old["fingerprint"]["inputs"] != new["fingerprint"]["inputs"]:
        raise UsageError(
            "--resume-anyway keeps committed shards when steps or write keys changed, but here the inputs changed; "
            "pass --append to add new files, or --overwrite to convert everything anew"
        )
    for plan in (old_plan, new_plan):
        plan.seek(0)
        plan.readline()
    while True:
        one, other = old_plan.read(_PIECE_BYTES), new_plan.read(_PIECE_BYTES)
        if one != other:
            raise UsageError(
                "--resume-anyway cannot keep the committed shards: what changed (write.shards or source keys) cuts the "
                "input into other shards; take the old values, or pass --overwrite to convert everything anew"
            )
        if not one:
            return
