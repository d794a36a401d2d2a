"""Submits jobs with the command itself."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import jobs
from dataflow.cloud import HOST, PROJECT, REGION, Cloud, Job

ROOT = Path(__file__).resolve().parents[2]
_SUBMIT_SECS = 180.0
_END_SECS = 120.0


def flags(bucket: str) -> list[str]:
    """Returns the flags that send a pipeline to the service."""
    return [
        "--runner=DataflowRunner",
        f"--project={PROJECT}",
        f"--region={REGION}",
        f"--temp_location={bucket}/tmp",
        f"--dataflow_endpoint=http://{HOST}",
    ]


class Driver:
    """A `gristmill` command that submits a job."""

    def __init__(self, cloud: Cloud, before: int, process: subprocess.Popen[bytes], log: Path) -> None:
        self._cloud = cloud
        self._before = before
        self._process = process
        self._log = log

    @property
    def text(self) -> str:
        """What it has printed."""
        return self._log.read_text(errors="replace")

    def job(self) -> Job:
        """Returns the job, as soon as it is submitted."""
        deadline = time.monotonic() + _SUBMIT_SECS
        while time.monotonic() < deadline:
            has_ended = self._process.poll() is not None
            if len(self._cloud.jobs) > self._before:
                return self._cloud.jobs[self._before]
            assert not has_ended, f"ended with {self._process.returncode} and submitted nothing:\n{self.text}"
            time.sleep(0.05)
        raise TimeoutError(self.text)

    @property
    def pid(self) -> int:
        """Its process, which leads a group of its own."""
        return self._process.pid

    def wait_for(self, text: str) -> None:
        """Waits until it has printed a text."""
        deadline = time.monotonic() + _END_SECS
        while text not in self.text:
            assert time.monotonic() < deadline, self.text
            assert self._process.poll() is None, self.text
            time.sleep(0.05)

    def wait(self) -> int:
        """Waits for its end and returns the exit status."""
        return self._process.wait(_END_SECS)


@contextlib.contextmanager
def submitting(cloud: Cloud, folder: Path, arguments: Sequence[str | Path]) -> Iterator[Driver]:
    """Runs a `gristmill` command in a folder; it is killed when the context ends first."""
    before = len(cloud.jobs)
    log = folder / f"driver-{before}.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*jobs.GRISTMILL, *map(str, arguments)],
            cwd=folder,
            env=jobs.environment(cloud.driver_environment()),
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield Driver(cloud, before, process, log)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
