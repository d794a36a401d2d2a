"""The flags of a job on Dataflow: what must be given, what suits these jobs where nothing is, and what finds it again.

The defaults are for what these jobs are: compression on every core, nothing shuffled, a disk that holds the shards that
are being written. Every flag of the user's goes before.
"""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

from pipelines.beam_options import flag_value
from pipelines.errors import UsageError

RUNNER = "DataflowRunner"
MACHINE_TYPE = "n2-standard-4"
MAX_WORKERS = 100

_EXAMPLES = {"project": "my-project", "region": "us-central1", "temp_location": "gs://my-bucket/temp"}
_BASE_DISK_GB = 30
"""Operating system, worker image and what pip installs."""
_PATIENCE_SECS = 1_800
"""So many workers are asked for at the start that they would take this long, if the plan's estimate is right."""


def is_dataflow(flags: list[str]) -> bool:
    """Whether Beam flags ask for Dataflow."""
    return (flag_value(flags, "runner") or "").rpartition(".")[2].lower() == RUNNER.lower()


def check_flags(flags: list[str]) -> None:
    """Checks that a job can be submitted.

    Raises:
        UsageError: Something is missing; the message has an example.
    """
    for name, example in _EXAMPLES.items():
        value = flag_value(flags, name)
        if not value:
            raise UsageError(f"Dataflow needs --{name}; for example --{name}={example}")
        if name == "temp_location" and not value.startswith("gs://"):
            raise UsageError(f"--temp_location must be a folder in a bucket such as {example}, got {value}")


@dataclasses.dataclass(frozen=True)
class Load:
    """What a job asks of its workers.

    Attributes:
        num_tasks: Shards to work on.
        cpu_secs: What they take, by estimate.
        largest_bytes: What one of them puts on a worker's disk.
        waits: Whether a step waits for a service.
        max_per_sec: Whether a step may be called only so often.
    """

    num_tasks: int
    cpu_secs: float
    largest_bytes: int
    waits: bool = False
    max_per_sec: bool = False


def complete_flags(flags: list[str], job_name: str, load: Load) -> list[str]:
    """Returns the flags with our defaults where the user has none.

    Args:
        flags: Beam flags.
        job_name: Name for the job.
        load: What it asks of its workers.

    Raises:
        UsageError: `max_per_sec` cannot be divided, because the number of workers has no bound.
    """
    machine = _machine_type(flags)
    processes = count_cpus(machine)
    threads = int(flag_value(flags, "number_of_worker_harness_threads") or (2 if load.waits else 1))
    asked = flag_value(flags, "max_num_workers")
    if asked is None and load.max_per_sec:
        raise UsageError("max_per_sec is divided among the workers; say how many at most: --max_num_workers=8")
    useful = max(1, math.ceil(load.num_tasks / (processes * threads)))
    most = int(asked) if asked is not None else min(useful, MAX_WORKERS)
    first = min(most, useful, max(1, math.ceil(load.cpu_secs / (processes * _PATIENCE_SECS))))
    defaults = {
        "job_name": job_name,
        "worker_machine_type": machine,
        "disk_size_gb": math.ceil(_BASE_DISK_GB + 1.5 * processes * threads * load.largest_bytes / 1e9),
        "number_of_worker_harness_threads": threads,
        "max_num_workers": most,
        "num_workers": first,
    }
    missing = [f"--{name}={value}" for name, value in defaults.items() if not _is_given(flags, name)]
    return [*flags, *missing, "--no_save_main_session"]


def _is_given(flags: list[str], name: str) -> bool:
    also = {"worker_machine_type": "machine_type", "disk_size_gb": "worker_disk_size_gb"}.get(name, name)
    return flag_value(flags, name) is not None or flag_value(flags, also) is not None


def rate_share(flags: list[str]) -> float:
    """Returns the part of `max_per_sec` that is one process's: they stand in containers of their own."""
    return 1 / (int(flag_value(flags, "max_num_workers") or 1) * count_cpus(_machine_type(flags)))


def _machine_type(flags: list[str]) -> str:
    return flag_value(flags, "worker_machine_type") or flag_value(flags, "machine_type") or MACHINE_TYPE


def count_cpus(machine_type: str) -> int:
    """Returns the cores of a machine type by its name; Dataflow starts a process of the worker on each."""
    found = re.search(r"custom-(\d+)-\d+", machine_type) or re.search(r"-(\d+)(?:-lssd)?$", machine_type)
    return int(found[1]) if found else 1


def make_job_name(command: str, name: str, plan_id: str) -> str:
    """Returns a name that Dataflow takes; two runs of a plan share it, and of that name one job may be active."""
    text = re.sub(r"[^a-z0-9]+", "-", f"gristmill-{command}-{name}".lower()).strip("-")
    return f"{text[:50].rstrip('-')}-{plan_id[:8]}"


def describe_job(flags: list[str]) -> dict[str, Any]:
    """Returns what finds the job again, for the lock."""
    names = ("project", "region", "dataflow_endpoint")
    found = {name: flag_value(flags, name) for name in names}
    fields = {"runner": RUNNER, "name": flag_value(flags, "job_name")}
    return {**fields, **{name: value for name, value in found.items() if value}}
