"""Whole jobs on gs://: corpora go up, outputs come down, and commands run as processes of their own."""

from __future__ import annotations

import subprocess
from pathlib import Path

import jobs
from slow_job import STEP
from transforms.elements import JobSpec, ShardInfo
from transforms.gcs_store import GcsStore
from transforms.plan_file import PLAN_NAME, read_tasks
from transforms.repeat import repeat_shard
from transforms.report import load_spec
from transforms.steps.job_chain import load_chain

BUDGET = ("--set", "dead_letters.max_fraction=0.5")


def shards(folder: Path) -> dict[str, bytes]:
    """Returns the shard files of an output by name."""
    return {path.name: path.read_bytes() for path in jobs.shards(folder)}


def letters(folder: Path) -> list[dict[str, object]]:
    """Returns the dead letters without what names the place of their sources."""
    found = [dict(letter) for letter in jobs.dead_letters(folder)]
    for letter in found:
        letter["source"] = str(letter["source"]).rpartition("/")[2]
        del letter["traceback"]
    return found


def out_of(raw: str) -> str:
    """Returns the output's URL beside that of a corpus."""
    return raw.removesuffix("/raw") + "/out"


def start(folder: Path, arguments: list[str]) -> subprocess.Popen[str]:
    """Starts a command as a process with a session of its own."""
    return subprocess.Popen(
        [*jobs.GRISTMILL, *arguments],
        cwd=folder,
        env=jobs.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def slow_job(tmp_path: Path, raw: str, out: str, workers: int = 0) -> list[str]:
    """Returns a `convert` that takes some seconds."""
    (tmp_path / "slow_step.py").write_text(STEP.format(secs=0.001))
    steps = ["--step", "slow_step:slow", "--shards", "12", "--workers", str(workers), *BUDGET]
    return ["convert", "--input", f"{raw}/*", "--output", out, *steps]


def attempt_shard(out: str, shard: int) -> ShardInfo:
    """Makes an attempt at a planned shard, from reading it to its commit, as one more worker would."""
    store = GcsStore(out)
    spec: JobSpec = load_spec(store)[0]
    with store.open(PLAN_NAME) as plan:
        [task] = [task for _, task in read_tasks(plan) if task.shard == shard]
    return repeat_shard(store, spec, load_chain(spec), task)
