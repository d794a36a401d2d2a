"""Foresees a full disk before the job begins."""

from __future__ import annotations

import os
import shutil
import tempfile

from pipelines.errors import UsageError
from pipelines.plan_job import PlannedJob, planned_shards
from transforms.generations import unfenced
from transforms.ledger import ATTEMPTS
from transforms.machine import num_cores
from transforms.store import LocalStore, Store

_SHARD_BYTES = 128 << 10
"""What an ArrayRecord takes beside its records."""


def check_space(store: Store, job: PlannedJob) -> str | None:
    """Holds what the job will probably write against what is free.

    Args:
        store: The output directory.
        job: The planned job.

    Returns:
        A warning where the job has steps, which may drop or add anything, or where shards only pass through this
        machine on their way to a store; None when all is well.

    Raises:
        UsageError: A job without steps will not fit.
    """
    if not isinstance(unfenced(store), LocalStore):
        return _check_spool(job)
    present = sum(size for _, size in store.list(ATTEMPTS))
    needed = job.estimated_output_bytes + job.spec.num_shards * _SHARD_BYTES - present
    free = shutil.disk_usage(_existing(store.root)).free
    if needed <= free:
        return None
    text = f"the job will write about {needed:,} bytes more to {store.root}, where {free:,} are free"
    if job.spec.steps or job.spec.limit:
        return f"{text}, unless its steps leave much out"
    raise UsageError(
        f"{text}; make room, take another disk, or set write.check_space=false if the estimate (from a sample) is wrong"
    )


def _check_spool(job: PlannedJob) -> str | None:
    """Returns a warning when this machine has no room for the shards that its workers write at the same time."""
    planned = planned_shards(job.plan_path)
    share = max(planned, default=0) / max(1, sum(planned))
    needed = int(job.estimated_output_bytes * share) * num_cores()
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    if needed <= free:
        return None
    return (
        f"shards are written to {folder} before they are uploaded, about {needed:,} bytes at a time, and {free:,} are "
        "free there; set TMPDIR to a folder with more, or make the shards smaller"
    )


def _existing(path: str) -> str:
    while not os.path.exists(path):
        path = os.path.dirname(path)
    return path
