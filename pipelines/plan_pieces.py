"""Plans by time: what the steps take on a few records, the pieces that slow ones are worked on in, and the workers.

Nothing of it is part of the plan, whose id and shards are those of its inputs and config: a job that goes on takes the
pieces that it finds, and one that finds none is timed anew.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
from typing import Any

from pipelines import local_runner
from pipelines.config import JobConfig
from pipelines.plan_job import PlannedJob, planned_shards
from transforms.cut_pieces import count_pieces, cut_pieces, piece_secs
from transforms.inputs import sample_inputs
from transforms.pieces import PIECES_NAME, pieces_header
from transforms.plan_file import DamagedLineError, read_tasks, write_plan
from transforms.store import Store
from transforms.timing import (
    LEAST_BYTES,
    LEAST_RECORDS,
    LEAST_SECS,
    TRIED_RECORDS,
    Timing,
    given_timing,
    is_cheap,
    time_steps,
)


def recall_pieces(store: Store, job: PlannedJob) -> PlannedJob | None:
    """Returns a job with the pieces that it was worked on in before; None where there are none, or not all of them.

    Args:
        store: The output directory, as the job's generation sees it.
        job: The planned job.
    """
    header = pieces_header(store)
    if header is None or header.get("plan_id") != job.spec.plan_id or not _is_whole(store, header):
        return None
    spec = dataclasses.replace(job.spec, num_pieces=header["num_pieces"])
    return dataclasses.replace(job, spec=spec, timing=Timing(**header["timing"]))


def _is_whole(store: Store, header: dict[str, Any]) -> bool:
    try:
        with store.open(PIECES_NAME) as lines:
            return sum(1 for _ in read_tasks(lines)) == header["num_pieces"]
    except DamagedLineError:
        return False


def plan_pieces(job: PlannedJob, config: JobConfig, scratch: str, *, may_cut: bool = True) -> PlannedJob:
    """Returns a job with what its steps take, and with pieces if that is much.

    Args:
        job: The planned job; notes are added to its header.
        config: Its config.
        scratch: Folder for the list of pieces.
        may_cut: Whether shards may be cut; answers that are kept of whole shards would not be found by their pieces.
    """
    timing = _find_timing(job, config)
    if timing is None:
        return job
    job = dataclasses.replace(job, timing=timing)
    job.header["notes"].append(_describe(timing))
    total_secs = timing.worker_secs(job.estimated_records)
    if total_secs >= LEAST_SECS and may_cut:
        job = _cut(job, timing, total_secs, os.path.join(tempfile.mkdtemp(dir=scratch), "pieces.jsonl"))
        job.header["notes"] += _advise(job, timing)
    return job


def _find_timing(job: PlannedJob, config: JobConfig) -> Timing | None:
    spec, wanted = job.spec, config.write.secs_per_record
    if not spec.steps or spec.limit or spec.replay is not None:
        return None
    if not isinstance(wanted, str):
        return given_timing(spec, wanted) if wanted else None
    is_small = job.estimated_records < LEAST_RECORDS and job.estimated_bytes < LEAST_BYTES
    if is_small or is_cheap(spec):
        return None
    # Opening an ArrayRecord in a bucket copies it, so what the planner has read of it must do.
    payloads = job.sampled if spec.format == "array_record" else []
    inputs = sample_inputs(job.inputs_path, TRIED_RECORDS) if spec.format != "array_record" else []
    return time_steps(spec, inputs, payloads, job.estimated_records)


def _cut(job: PlannedJob, timing: Timing, total_secs: float, path: str) -> PlannedJob:
    """Returns the job with the list of its pieces, if it is to have any."""
    planned = planned_shards(job.plan_path)
    counts = count_pieces(planned, total_secs, job.estimated_records)
    if max(counts) < 2:
        return job
    mean_bytes = max(1.0, job.estimated_bytes / max(1, job.estimated_records))

    def make_header(num_pieces: int) -> dict[str, Any]:
        fields = {"plan_id": job.spec.plan_id, "num_pieces": num_pieces}
        return {**fields, "timing": dataclasses.asdict(timing)}

    with open(job.plan_path, "rb") as plan, open(job.inputs_path, "rb") as lines:
        tasks = (task for _, task in read_tasks(plan))
        pieces = cut_pieces(tasks, counts, lines, job.spec, mean_bytes, all_compressed=job.all_compressed)
        num_pieces = write_plan(path, make_header, pieces)
    if not num_pieces:
        return job
    cut = sum(count > 1 for count in counts)
    job.header["notes"].append(
        f"{cut:,} of {job.spec.num_shards:,} shards are worked on in {num_pieces:,} pieces of about "
        f"{piece_secs(total_secs):,.0f} s, each of which is kept when the job is stopped"
    )
    spec = dataclasses.replace(job.spec, num_pieces=num_pieces)
    return dataclasses.replace(job, spec=spec, state={**job.state, PIECES_NAME: path})


def _describe(timing: Timing) -> str:
    least = "at least " if timing.at_least else ""
    text = f"steps take {least}{1000 * timing.secs:,.3g} ms a record"
    if not timing.records:
        return text
    share = timing.cpu_secs / timing.secs if timing.secs else 1.0
    return f"{text} on {timing.records} sampled records, {share:.0%} of it CPU"


def _advise(job: PlannedJob, timing: Timing) -> list[str]:
    """Returns what makes a job faster whose steps wait: not more processes."""
    if not timing.waits():
        return []
    calls = f"{timing.in_flight} at a time in each worker"
    return [f"the steps mostly wait, {calls}: a larger `max_in_flight` of the step helps, more processes hardly do"]


def num_tasks(job: PlannedJob) -> int:
    """Returns how many pieces of work there are to hand out at a time."""
    busy = sum(1 for planned_bytes in planned_shards(job.plan_path) if planned_bytes)
    return max(1, busy, job.spec.num_pieces)


def choose_workers(job: PlannedJob) -> int:
    """Returns the number of worker processes of this machine that are worth starting for a job; 0 for none."""
    return local_runner.choose_workers(local_runner.estimate_job_secs(job.spec, job), num_tasks(job))
