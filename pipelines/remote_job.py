"""Runs a pipeline elsewhere: the job is submitted, the lock is its own from then on, and the driver may go away."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
import re
import sys
from collections.abc import Iterable
from typing import Any

from pipelines import dataflow, local_runner
from pipelines.beam_options import flag_value
from pipelines.config import JobConfig
from pipelines.errors import UsageError
from pipelines.packages import code_flags
from pipelines.plan_job import PlannedJob, planned_shards
from transforms.elements import JobSpec
from transforms.inputs import read_inputs
from transforms.job_lock import JobLock
from transforms.steps.in_flight import max_in_flight
from transforms.steps.load import load_steps
from transforms.store import OutputError, Store

_LOGGER = logging.getLogger("gristmill")
_OUTLIVING = {"dataflowrunner", "portablerunner", "flinkrunner", "sparkrunner"}
_CHECKED_INPUTS = 1_000


def outlives(flags: list[str]) -> bool:
    """Whether the runner that Beam flags ask for may run a job on without its driver."""
    return local_runner.runner_name(flags).rpartition(".")[2].lower() in _OUTLIVING


def check_remote(flags: list[str], output: str, patterns: Iterable[str] = (), *, detach: bool) -> None:
    """Checks what can be known of a job elsewhere before anything is listed.

    Args:
        flags: Beam flags.
        output: Output directory.
        patterns: Input patterns.
        detach: Whether the command is to end once the job is submitted.

    Raises:
        UsageError: It could not run; the message says what to do.
    """
    if detach and not outlives(flags):
        raise UsageError("--detach is for runners elsewhere, such as --runner=DataflowRunner; here, use nohup")
    if not dataflow.is_dataflow(flags):
        return
    dataflow.check_flags(flags)
    if "://" not in output:
        raise UsageError(
            f"output: workers on Dataflow cannot reach {output}; take a bucket, such as gs://my-bucket/corpus"
        )
    for pattern in patterns:
        if not pattern.startswith("@"):
            _check_reachable(pattern)


def _check_reachable(name: str) -> None:
    if "://" not in name:
        raise UsageError(f"input {name}: workers on Dataflow cannot reach it; copy it to a bucket: gs://my-bucket/raw")


def prepare(
    spec: JobSpec, job: PlannedJob, config: JobConfig, flags: list[str], scratch: str
) -> tuple[JobSpec, list[str]]:
    """Returns the job and the flags to submit it with.

    Args:
        spec: The job.
        job: As it was planned.
        config: Its config.
        flags: Beam flags of the user's.
        scratch: Folder for the code that travels along.

    Raises:
        UsageError: The job cannot run there; the message says what to do.
    """
    has_rates = any(step.get("max_per_sec") for step in spec.steps)
    if dataflow.is_dataflow(flags):
        _check_inputs(job)
    elif has_rates:
        raise UsageError(
            f"max_per_sec is one limit for all workers, and how many {local_runner.runner_name(flags)} has is not "
            "known here; use max_in_flight, or the local runner"
        )
    load = dataflow.Load(
        num_tasks=max(spec.num_shards, spec.num_pieces),
        cpu_secs=local_runner.estimate_job_secs(spec, job),
        largest_bytes=max(planned_shards(job.plan_path), default=0),
        waits=max_in_flight(load_steps(spec.steps, (os.getcwd(),))) > 1,
        max_per_sec=has_rates,
    )
    name = dataflow.make_job_name(spec.generation or "convert", f"{spec.name}-{spec.split}", spec.plan_id)
    flags = complete_flags(flags, name, load, config.py_modules, scratch)
    share = dataflow.rate_share(flags) if has_rates else 1.0
    paths = spec.import_paths if _is_here(flags) else ()
    return dataclasses.replace(spec, rate_share=share, import_paths=paths), flags


def _check_inputs(job: PlannedJob) -> None:
    """Looks at the first inputs of lists as well."""
    with open(job.inputs_path, "rb") as lines:
        for _, source in itertools.islice(read_inputs(lines), _CHECKED_INPUTS):
            _check_reachable(source.name)


def _is_here(flags: list[str]) -> bool:
    """Whether the workers are the command itself, and so have the code."""
    return flag_value(flags, "environment_type") == "LOOPBACK"


def complete_flags(
    flags: list[str], job_name: str, load: dataflow.Load, py_modules: list[str], scratch: str
) -> list[str]:
    """Returns the flags of the user's with what the runner needs beside.

    Args:
        flags: Beam flags.
        job_name: Name for the job, where the runner knows names.
        load: What it asks of its workers, where the runner wants to know.
        py_modules: Modules of the user's that travel along, see `pipelines.packages`.
        scratch: Folder for what is packed; it must live until the job is submitted.

    Raises:
        UsageError: The job cannot run there; the message says what to do.
    """
    if dataflow.is_dataflow(flags):
        flags = dataflow.complete_flags(flags, job_name, load)
    return flags if _is_here(flags) else flags + code_flags(flags, py_modules, scratch)


def run_remote(store: Store, spec: JobSpec, flags: list[str], lock: JobLock, *, detach: bool) -> bool:
    """Submits a pipeline and waits for its end, unless it is to be left alone.

    Args:
        store: The output directory.
        spec: The job; its plan stands in the output directory.
        flags: Beam flags.
        lock: The lock, which the caller holds. It is the job's from the moment that there may be one.
        detach: Whether to return as soon as the job is submitted.

    Returns:
        Whether the job goes on without this command.

    Raises:
        OutputError: The job could not be submitted, or could not finish; the message is the cause.
        KeyboardInterrupt: The user does not want to wait; the job goes on.
    """
    detach = detach or flag_value(flags, "template_location") is not None  # Whoever runs the template has the job.
    job = {**_describe(flags), "detached": detach}
    spec = dataclasses.replace(spec, lock_token=lock.token)
    lock.hand_over(job)
    try:
        from transforms.convert import ConvertCorpus

        result = local_runner.submit_pipeline(ConvertCorpus(spec), flags)
    except BaseException:
        lock.hand_over(None)
        raise
    job["id"] = _job_id(result) or _launched_id(flags)
    lock.hand_over(job)
    _LOGGER.info("submitted %s job %s %s", job["runner"], job["name"], job["id"] or "")
    if detach:
        print(f"the job runs on without this command. How far it is: gristmill status {store.root}")
        return True
    try:
        local_runner.wait_for(result)
    except KeyboardInterrupt:
        lock.hand_over({**job, "detached": True})
        print(
            f"\nthe job runs on without this command. How far it is: gristmill status {store.root}; to stop it: "
            f"gristmill cancel {store.root}",
            file=sys.stderr,
        )
        raise
    except OutputError:
        lock.hand_over(None)
        raise
    lock.hand_over(None)
    return False


def _describe(flags: list[str]) -> dict[str, Any]:
    if dataflow.is_dataflow(flags):
        return dataflow.describe_job(flags)
    return {"runner": local_runner.runner_name(flags), "name": flag_value(flags, "job_name") or "gristmill"}


def _launched_id(flags: list[str]) -> str | None:
    """Returns the number that the job of a template gets: its launcher is told where to write the job, by number."""
    found = re.search(r"/template_launches/([^/]+)/", flag_value(flags, "template_location") or "")
    return found[1] if found else None


def _job_id(result: Any) -> str | None:
    """Returns the number that the runner gave the job, None where it has none."""
    if not getattr(result, "has_job", True):
        return None
    found = getattr(result, "job_id", None) or getattr(result, "_job_id", None)
    return str(found() if callable(found) else found) if found else None
