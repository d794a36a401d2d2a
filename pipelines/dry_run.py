"""`gristmill convert --dry-run`: the plan, a prediction, and what the steps do to a few records. Writes nothing."""

from __future__ import annotations

import contextlib

from pipelines.local_runner import estimate_job_secs, estimate_wall_secs
from pipelines.plan_job import PlannedJob, planned_shards
from pipelines.plan_pieces import choose_workers
from transforms.elements import Input, JobSpec, RecordBatch, ShardTask
from transforms.machine import num_cores
from transforms.steps.job_chain import Chain, load_chain
from transforms.steps.rate import forget_rates

_SHOWN_RECORDS = 5
_SHOWN_BYTES = 100


def show_dry_run(job: PlannedJob, num_records: int | None = None) -> None:
    """Prints what the job would do.

    Args:
        job: The planned job.
        num_records: How many sampled records to put through the steps.
    """
    spec, header = job.spec, job.header
    weights = planned_shards(job.plan_path)
    print(f"inputs    {header['num_inputs']:,} ({header['total_bytes']:,} bytes), format {spec.format}; ", end="")
    print(f"{header['num_skipped']:,} skipped, {header['num_duplicates']:,} duplicates")
    print(f"records   about {job.estimated_records:,}, {job.estimated_bytes:,} bytes decompressed")
    print(f"shards    {spec.num_shards:,} planned, {min(weights):,} to {max(weights):,} bytes; {spec.writer_options}")
    for note in header["notes"]:
        print(f"note      {note}")
    cpu_secs, workers = estimate_job_secs(spec, job), choose_workers(job)
    wall_secs, cores = estimate_wall_secs(spec, job, workers), num_cores()
    processes = f"in {workers} worker processes" if workers else "in one process"
    least = "at least" if job.timing is not None and job.timing.at_least else "about"
    print(
        f"time      {least} {cpu_secs:,.0f} CPU seconds, {wall_secs:,.0f} s here {processes}; {cores} cores may be used"
    )
    _show_steps(spec, job.sampled[: num_records or _SHOWN_RECORDS])


def _show_steps(spec: JobSpec, records: list[bytes]) -> None:
    with contextlib.closing(load_chain(spec)) as chain:
        for number, record in enumerate(records):
            _show_record(spec, chain, number, record)
    forget_rates(spec.plan_id, len(spec.steps))


def _show_record(spec: JobSpec, chain: Chain, number: int, record: bytes) -> None:
    # The last batch, so that a chain with calls in flight keeps nothing back.
    batch = RecordBatch(ShardTask(0, 0, 0, 0, 0, 0, 0), 0, last=True, source=Input(0, "sample", 0, 0))
    batch.records, batch.positions = [record], [number]
    print(f"record    {_brief(record)}")
    for out in chain.apply(batch):
        for output in out.records if spec.steps else []:
            print(f"  becomes {_brief(output)}")
        for reason in out.dropped:
            print(f"  dropped {reason}")
        for letter in out.dead:
            print(f"  dead    {letter.step}: {letter.reason}: {letter.error[:200]}")


def _brief(record: bytes) -> str:
    return f"{len(record):,} bytes {record[:_SHOWN_BYTES]!r}"
