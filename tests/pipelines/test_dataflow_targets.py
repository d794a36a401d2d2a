"""The Makefile's targets for Dataflow, from the shell to what the service gets."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import jobs
from dataflow.cloud import HOST, PROJECT, REGION, Cloud
from gcs_emulator import Emulator
from gcs_files import upload

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
ENDPOINT = f"--dataflow_endpoint=http://{HOST}"
BUDGET = "--set dead_letters.max_fraction=0.5"


class Checkout:
    """A folder with the Makefile and the configs, whose environment has the command as it is here."""

    def __init__(self, folder: Path, cloud: Cloud, bucket: str) -> None:
        self.folder = folder
        self._env = {**os.environ, **cloud.driver_environment()}
        (folder / ".venv/bin").mkdir(parents=True)
        shutil.copy(ROOT / "Makefile", folder)
        shutil.copytree(ROOT / "configs", folder / "configs")
        for name in ("setup.py", "pyproject.toml", ".venv/.installed"):
            (folder / name).touch()
        for name, program in (("python", ""), ("gristmill", " -P -m pipelines")):
            command = folder / ".venv/bin" / name
            command.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable}{program} "$@"\n')
            command.chmod(0o755)
        settings = {"PROJECT": PROJECT, "REGION": REGION, "BUCKET": bucket.removeprefix("gs://")}
        settings |= {"INPUT": f"{bucket}/raw/", "OUTPUT": f"{bucket}/out", "DETACH": "1"}
        (folder / ".env").write_text("".join(f"{name}={value}\n" for name, value in settings.items()))

    def make(self, *arguments: str) -> str:
        done = subprocess.run(["make", *arguments], cwd=self.folder, env=self._env, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr


def test_a_corpus_is_converted_watched_stopped_replayed_and_verified_by_targets_alone(
    emulator: Emulator, cloud: Cloud, tmp_path: Path
) -> None:
    bucket = emulator.new_bucket()
    for name, content in (("a", b"first"), ("b", b"second"), ("c", b"")):
        (tmp_path / "raw").mkdir(exist_ok=True)
        (tmp_path / "raw" / name).write_bytes(content)
    upload(tmp_path / "raw", f"{bucket}/raw")
    (tmp_path / "checkout").mkdir()
    checkout = Checkout(tmp_path / "checkout", cloud, bucket)

    checkout.make("dataflow-files", "MACHINE_TYPE=n2-standard-8", f"FLAGS={ENDPOINT} {BUDGET}")
    [job] = cloud.jobs
    options = job.options
    assert (options["machine_type"], options["max_num_workers"]) == ("n2-standard-8", 1)
    assert options["temp_location"].startswith(f"{bucket}/gristmill/temp/")
    assert "running" in checkout.make("dataflow-status")
    assert "is stopped; the same command goes on" in checkout.make("dataflow-cancel")
    assert job.state == "CANCELLED"

    local = ["convert", "--config", "configs/files.yaml", "--input", f"{bucket}/raw/", "--output", f"{bucket}/out"]
    done = jobs.spawn([*local, *BUDGET.split(), "--workers", "0"], checkout.folder)
    assert done.returncode == 0, done.stderr
    (tmp_path / "raw/c").write_bytes(b"third")
    upload(tmp_path / "raw", f"{bucket}/raw")
    checkout.make("dataflow-verify", f"FLAGS={ENDPOINT}")
    checkout.make("dataflow-replay", f"FLAGS={ENDPOINT}")
    names = [job.request["name"].rpartition("-")[0] for job in cloud.jobs]
    assert names[1] == "gristmill-verify"
    assert names[2].startswith("gristmill-g001-")
