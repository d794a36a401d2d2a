"""Runs a pipeline on this machine: how many worker processes are worth starting, and with what environment."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
from collections.abc import Iterator
from typing import Any

from pipelines.beam_options import flag_value
from pipelines.errors import CAUSES
from pipelines.imports import without_collecting
from transforms.elements import JobSpec
from transforms.machine import available_bytes, num_cores
from transforms.store import OutputError

_LOGGER = logging.getLogger(__name__)

WORKER_START_SECS = 2.5
"""What one more worker process costs in CPU: Python, Beam and its libraries."""

_COMMAND_SECS = 1.5
"""What a job takes of which there is nothing to convert."""

_WORKER_BYTES = 300 << 20
_BYTES_PER_SEC = {"uncompressed": 500e6, "snappy": 200e6, "zstd": 60e6, "brotli": 20e6}
_STEP_SECS_PER_RECORD = 5e-6
_LOCAL_RUNNERS = {"", "directrunner", "fnapirunner"}


def estimate_cpu_secs(codec: str, num_bytes: int, num_records: int, num_steps: int) -> float:
    """Returns the CPU seconds that a job probably takes; compression is nearly all of it."""
    return num_bytes / _BYTES_PER_SEC.get(codec, 60e6) + num_records * num_steps * _STEP_SECS_PER_RECORD


def estimate_job_secs(spec: Any, job: Any) -> float:
    """Returns the CPU seconds that a planned job probably takes; those of its steps as they took on the sample."""
    codec = spec.writer_options.split(",", 1)[1].split(":")[0]
    if job.timing is None:
        return estimate_cpu_secs(codec, job.estimated_bytes, job.estimated_records, len(spec.steps))
    own_secs = estimate_cpu_secs(codec, job.estimated_bytes, job.estimated_records, 0)
    return float(own_secs + job.timing.cpu_secs * job.estimated_records)


def estimate_wall_secs(spec: Any, job: Any, workers: int) -> float:
    """Returns how long a planned job probably takes on this machine with so many worker processes."""
    start_secs = _COMMAND_SECS + (WORKER_START_SECS if workers else 0.0)
    if job.timing is None:
        return start_secs + estimate_job_secs(spec, job) / max(1, workers)
    own_secs = estimate_job_secs(spec, job) - job.timing.cpu_secs * job.estimated_records
    return float(start_secs + own_secs / max(1, workers) + job.timing.total_secs(job.estimated_records, workers))


def choose_workers(cpu_secs: float, num_shards: int) -> int:
    """Returns the number of worker processes; 0 for work in this process, where starting one would not pay."""
    cores = num_cores()
    worth = math.floor(cpu_secs / WORKER_START_SECS)
    workers = min(cores, worth, num_shards, max(1, available_bytes() // _WORKER_BYTES))
    return int(workers) if workers > 1 else 0


def is_local(flags: list[str]) -> bool:
    """Whether Beam flags ask for the local runner, or for none."""
    return runner_name(flags).lower() in _LOCAL_RUNNERS


def runner_name(flags: list[str]) -> str:
    """Returns the runner that Beam flags ask for, "" for none."""
    return flag_value(flags, "runner") or ""


def asked_workers(flags: list[str]) -> int | None:
    """Returns the workers that Beam flags ask for, None when they leave it open."""
    mode = flag_value(flags, "direct_running_mode")
    count = flag_value(flags, "direct_num_workers")
    if mode == "in_memory":
        return 0
    if count is None:
        return None if mode is None else 1
    return int(count) or num_cores()


def local_flags(flags: list[str], workers: int) -> list[str]:
    """Returns Beam flags for the local runner.

    It is named, because the default one tries to download another runner first where there is internet.
    """
    kept = [flag for flag in flags if not flag.startswith("--runner")]
    kept = [flag for flag in kept if flag.lower() not in _LOCAL_RUNNERS]
    if flag_value(flags, "direct_running_mode") == "multi_threading":
        return ["--runner=FnApiRunner", *kept]
    mode = "multi_processing" if workers else "in_memory"
    kept = [flag for flag in kept if not flag.startswith(("--direct_running_mode", "--direct_num_workers"))]
    return ["--runner=FnApiRunner", f"--direct_running_mode={mode}", f"--direct_num_workers={max(1, workers)}", *kept]


@contextlib.contextmanager
def worker_environment() -> Iterator[None]:
    """Sets what worker processes need: no folder of the caller's may shadow our packages there."""
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("PYTHONSAFEPATH", None)  # A step may have taken it away already.
        else:
            os.environ["PYTHONSAFEPATH"] = before


def run_pipeline(spec: Any, flags: list[str], num_workers: int) -> None:
    """Builds and runs the pipeline to its end.

    Args:
        spec: The job, whose plan stands in the output directory; or what is to be verified there.
        flags: Beam flags.
        num_workers: Workers to spread over; 1 where the runner balances by itself.

    Raises:
        OutputError: The job could not finish; the message is the cause.
    """
    wait_for(submit_pipeline(root_transform(spec, num_workers), flags))


def root_transform(spec: Any, num_workers: int) -> Any:
    """Returns the transform that does what is asked for.

    Args:
        spec: A job, or what is to be verified.
        num_workers: See `run_pipeline`.
    """
    with without_collecting():
        if isinstance(spec, JobSpec):
            from transforms.convert import ConvertCorpus

            return ConvertCorpus(spec, num_workers)
        from transforms.verify_shards import VerifyShards

        return VerifyShards(spec, num_workers)


def submit_pipeline(transform: Any, flags: list[str]) -> Any:
    """Builds a pipeline of one transform and has its runner begin.

    Args:
        transform: The root transform.
        flags: Beam flags.

    Returns:
        Beam's result, to wait for. A local runner has ended by then.

    Raises:
        OutputError: The runner does not take it, or has failed already; the message is the cause.
    """
    with without_collecting():
        import apache_beam as beam
        from apache_beam.options.pipeline_options import PipelineOptions

    with _telling_causes(), worker_environment():
        pipeline = beam.Pipeline(_make_runner(flags), PipelineOptions(_without_mode(flags)))
        _ = pipeline | transform
        return pipeline.run()


def wait_for(result: Any) -> None:
    """Waits for the end of a pipeline that was submitted.

    Raises:
        OutputError: It could not finish; the message is the cause.
    """
    with _telling_causes(), worker_environment():
        result.wait_until_finish()


@contextlib.contextmanager
def _telling_causes() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        _LOGGER.debug("the pipeline failed", exc_info=True)
        raise OutputError(find_cause(error)) from error


def has_worker_processes(flags: list[str]) -> bool:
    """Whether Beam flags ask for the local runner with worker processes."""
    return flag_value(flags, "direct_running_mode") == "multi_processing" and is_local(flags)


def _make_runner(flags: list[str]) -> Any:
    """Returns the local runner with worker processes of our own; None where the flags ask for another."""
    if not has_worker_processes(flags):
        return None
    from apache_beam.runners.portability.fn_api_runner.fn_runner import FnApiRunner
    from apache_beam.transforms.environments import SubprocessSDKEnvironment

    from pipelines.worker_process import COMMAND

    return FnApiRunner(default_environment=SubprocessSDKEnvironment.from_command_string(COMMAND))


def _without_mode(flags: list[str]) -> list[str]:
    """Returns the flags without the mode that would put Beam's own worker command in the place of ours."""
    if not has_worker_processes(flags):
        return flags
    return [flag for flag in flags if not flag.startswith(("--runner=", "--direct_running_mode="))]


def describe_run(spec: Any, flags: list[str], num_workers: int) -> dict[str, Any]:
    """Runs the pipeline and returns how it ended, as JSON can carry it.

    Returns:
        "done"; or "error", a text, with "unexplained" when it is none of ours: a dead worker may be behind it.
    """
    try:
        run_pipeline(spec, flags, num_workers)
    except OutputError as error:
        return {"error": str(error), "unexplained": not is_explained(error)}
    return {"done": True}


_CAUSE = re.compile(rf"(?:{'|'.join(CAUSES)}): (.*?)(?: \[while running| \[\[while running|\n|$)")


def is_explained(error: OutputError) -> bool:
    """Whether an error that ended a pipeline is one of ours, with a message of its own."""
    return isinstance(error.__cause__, OutputError) or _CAUSE.search(str(error.__cause__)) is not None


def find_cause(error: BaseException) -> str:
    """Returns the message of the error that ended a pipeline, without the runner's layers of tracebacks."""
    text = str(error)
    if isinstance(error, OutputError | KeyboardInterrupt):
        return text.split(" [while running", 1)[0] or type(error).__name__
    found = _CAUSE.search(text)
    if found:
        return found[1]
    ended = re.search(r"State: (\w+), Error:\s*None\s*$", text)
    if ended:
        return f"the job ended as {ended[1]}"
    last = text.strip().splitlines()[-1:] or [""]
    return f"{type(error).__name__}: {last[0][:500]}"
