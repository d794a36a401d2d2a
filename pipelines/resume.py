"""`--resume-anyway`: goes on with a job whose steps or write keys changed, keeping what is committed."""

from __future__ import annotations

import dataclasses
from typing import Any, BinaryIO

from pipelines.errors import UsageError
from pipelines.plan_job import PlannedJob
from transforms.plan_file import PLAN_NAME, replace_header
from transforms.report import spec_to_header
from transforms.state import StateError, plan_header
from transforms.store import Store

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
