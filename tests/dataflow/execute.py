"""Runs captured jobs in clean environments: what the service would do once it has started its machines."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import apache_beam

from dataflow.cloud import Cloud, Job
from dataflow.machine import docker

STEP = """
import pathlib
import time

import transforms

def keep(value, secs=0.0):
    pathlib.Path("modules").write_text(f"{transforms.__file__}\\n{__file__}")
    time.sleep(secs)
    number = int(value[10:16])
    if number % 97 == 0:
        return None
    if number % 101 == 0:
        raise ValueError(f"number {number}")
    return value
"""
"""A step of the user's own, which also leaves in its working directory where it and the library came from."""
SCRIPTS = Path(docker.__file__).parent
_INSTALL_SECS = 900.0
_JOB_SECS = 420.0
_FOREIGN = ("PYTHONPATH", "PYTHONHOME", "PYTHONSAFEPATH", "VIRTUAL_ENV")


def make_base(folder: Path) -> Path:
    """Makes the environment that stands for the container image, and returns its python.

    It has Beam of our version for Google Cloud, nothing else.
    """
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = folder / "bin/python"
    command = [python, "-m", "pip", "install", "--quiet", f"apache-beam[gcp]=={apache_beam.__version__}"]
    subprocess.run(command, check=True, timeout=_INSTALL_SECS, env=_clean_environment())
    return python


def _clean_environment() -> dict[str, str]:
    """Returns our variables without what leads to this checkout or to the environment that the tests run in."""
    env = {name: value for name, value in os.environ.items() if name not in _FOREIGN}
    ours = str(Path(sys.executable).parent)
    env["PATH"] = os.pathsep.join(place for place in env["PATH"].split(os.pathsep) if place != ours)
    return env


@dataclasses.dataclass(frozen=True)
class Machines:
    """Where jobs run: a folder for everything, containers on top of a base environment.

    Attributes:
        folder: Holds all files.
        python: Python of the base environment.
        env: Variables of everything that runs there.
    """

    folder: Path
    python: Path
    env: dict[str, str]

    def containers(self) -> list[Path]:
        """Returns the folders of all containers, in the order of their start."""
        return sorted((self.folder / "containers").iterdir())

    def start(self, script: str, *arguments: str | Path | float) -> subprocess.Popen[bytes]:
        """Starts one of the scripts in the base environment, its output in a file beside the containers."""
        command = [self.python, SCRIPTS / script, *arguments]
        with (self.folder / "log").open("wb") as log:
            return subprocess.Popen(
                [*map(str, command)], cwd=self.folder, env=self.env, stdout=log, stderr=log, start_new_session=True
            )

    def log(self) -> str:
        """Returns the end of what the script and the containers said."""
        logs = [self.folder / "log", *(place / "log" for place in self.containers())]
        return "\n".join(f"{path}:\n{path.read_text(errors='replace')[-3000:]}" for path in logs if path.exists())


@contextlib.contextmanager
def machines(folder: Path, python: Path, env: Mapping[str, str]) -> Iterator[Machines]:
    """Prepares a folder in which jobs can run; ends all that runs there afterwards.

    Args:
        folder: To be made.
        python: Python of the base environment.
        env: Further variables, such as those of the cloud.
    """
    (folder / "bin").mkdir(parents=True)
    (folder / "containers").mkdir()
    command = folder / "bin/docker"
    command.write_text(f'#!/bin/sh\nexec "{python}" -I "{SCRIPTS / "docker.py"}" "$@"\n')
    command.chmod(command.stat().st_mode | stat.S_IXUSR)
    variables = {**_clean_environment(), **env, "CONTAINERS": str(folder / "containers")}
    variables["PATH"] = f"{folder / 'bin'}{os.pathsep}{variables['PATH']}"
    place = Machines(folder, python, variables)
    try:
        yield place
    finally:
        for container in place.containers():
            docker.kill(container)


@contextlib.contextmanager
def executing(job: Job, place: Machines, num_workers: int = 2) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a job beside what the caller does; it is ended with the context."""
    (place.folder / "job.json").write_text(json.dumps(job.request))
    (place.folder / "staged").mkdir()
    process = place.start("run_job.py", "job.json", place.folder / "staged", str(num_workers), str(_JOB_SECS))
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def execute(job: Job, place: Machines, num_workers: int = 2) -> None:
    """Runs a job to its end, and lets the service say how it ended: DONE, or FAILED with what was in the logs."""
    with executing(job, place, num_workers) as process:
        finish(job, place, process)


def finish(job: Job, place: Machines, process: subprocess.Popen[bytes]) -> None:
    """Waits for a job that runs, and lets the service say how it ended."""
    if process.wait(_JOB_SECS + 30) == 0:
        counters = json.loads((place.folder / "staged/counters.json").read_text())
        job.counters = [(step, namespace, name, value) for step, namespace, name, value in counters]
        job.end("DONE")
    else:
        job.end("FAILED", place.log())


def foreign_modules(place: Machines) -> dict[int, list[str]]:
    """Returns for each container by number which modules of the step's came from elsewhere than its own environment.

    The step leaves their paths in a file `modules` in its working directory; a container that ran none is left out.
    """
    found = {}
    for number, container in enumerate(place.containers()):
        if (container / "modules").exists():
            paths = (container / "modules").read_text().splitlines()
            found[number] = [path for path in paths if not Path(path).is_relative_to(container / "venv")]
    return found


def machine_environment(cloud: Cloud) -> dict[str, str]:
    """Returns the variables by which a worker finds Google Cloud."""
    return {"STORAGE_EMULATOR_HOST": os.environ["STORAGE_EMULATOR_HOST"], **cloud.machine_environment()}
