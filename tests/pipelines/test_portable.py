"""The portable way, as Flink and Spark take it: a job service, and workers with an environment of their own."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import jobs
from dataflow import execute
from dataflow.execute import STEP, Machines

_SERVICE_SECS = 420
_START_SECS = 60.0


@pytest.fixture
def machines(base_python: Path, tmp_path: Path) -> Iterator[Machines]:
    with execute.machines(tmp_path / "machines", base_python, {}) as found:
        yield found


@pytest.fixture
def endpoint(machines: Machines) -> Iterator[str]:
    """Where Beam's job service listens, which runs a job in two containers."""
    process = machines.start("job_server.py", machines.folder, 2, _SERVICE_SECS)
    try:
        yield f"localhost:{_wait_for_port(machines, process)}"
    finally:
        process.kill()
        process.wait()


def _wait_for_port(machines: Machines, process: subprocess.Popen[bytes]) -> int:
    port = machines.folder / "port"
    deadline = time.monotonic() + _START_SECS
    while not port.exists():
        assert process.poll() is None, machines.log()
        assert time.monotonic() < deadline, machines.log()
        time.sleep(0.05)
    return int(port.read_text())


@pytest.mark.slow
def test_a_job_service_with_clean_workers_writes_what_a_local_job_writes(
    machines: Machines, endpoint: str, tmp_path: Path
) -> None:
    for file in range(3):
        jobs.write_tfrecord(tmp_path / f"in/f{file}.tfrecord", [jobs.payload(file, i) for i in range(1_000)])
    with (tmp_path / "in/f1.tfrecord").open("ab") as damaged:
        damaged.write(b"tail")
    (tmp_path / "my_steps.py").write_text(STEP)
    command = ["convert", "--input", "in/*", "--shards", "6", "--step", "my_steps:keep", "--output"]
    portable = [
        *("--runner=PortableRunner", f"--job_endpoint={endpoint}", "--environment_type=DOCKER"),
        f"--job_server_timeout={_SERVICE_SECS}",
    ]
    for words in (["local", "--workers", "0"], ["portable", *portable]):
        done = jobs.spawn([*command, *words], tmp_path)
        assert done.returncode == 0, done.stderr[-3000:] + machines.log()
    assert jobs.content(tmp_path / "portable") == jobs.content(tmp_path / "local")
    assert len(jobs.shards(tmp_path / "portable")) == 6
    assert len(jobs.dead_letters(tmp_path / "portable")) > 20
    assert execute.foreign_modules(machines) == {0: [], 1: []}
