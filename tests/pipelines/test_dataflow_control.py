"""Jobs on Dataflow and those who watch them: the lock is the job's, whatever becomes of the command."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

import jobs
from dataflow import submit
from dataflow.cloud import Cloud, Job
from gcs_emulator import Emulator
from gcs_files import upload
from transforms.gcs_store import GcsStore
from transforms.job_lock import read_lock

pytestmark = pytest.mark.slow


class Place:
    """A bucket with a corpus, and a folder to submit from."""

    def __init__(self, bucket: str, folder: Path) -> None:
        self.folder = folder
        self.out = f"{bucket}/out"
        self._command = ["convert", "--input", f"{bucket}/raw/", "--output", self.out, "--shards", "3"]
        self.flags = submit.flags(bucket)

    def command(self, *changes: str) -> list[str]:
        return [*self._command, *self.flags, *changes]

    def here(self) -> list[str]:
        """Returns the same for this machine."""
        return [*self._command, "--workers", "0"]

    def holder(self) -> dict[str, Any] | None:
        found = read_lock(GcsStore(self.out))
        return None if found is None else found[0]


@pytest.fixture
def place(emulator: Emulator, cloud: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    for name, value in cloud.driver_environment().items():
        monkeypatch.setenv(name, value)
    bucket = emulator.new_bucket()
    jobs.write_tfrecord(tmp_path / "in/a", [jobs.payload(0, number) for number in range(90)])
    upload(tmp_path / "in", f"{bucket}/raw")
    return Place(bucket, tmp_path)


def detach(cloud: Cloud, place: Place) -> Job:
    """Submits a job that nobody watches."""
    with submit.submitting(cloud, place.folder, place.command("--detach")) as driver:
        job = driver.job()
        assert driver.wait() == 0, driver.text
        assert f"gristmill status {place.out}" in driver.text
    return job


def status_of(place: Place) -> dict[str, Any]:
    done = jobs.spawn(["status", place.out, "--json"], place.folder)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_detached_job_holds_the_lock_until_it_is_cancelled_and_then_the_same_command_goes_on(
    cloud: Cloud, place: Place
) -> None:
    job = detach(cloud, place)
    assert job.request["name"].startswith("gristmill-convert-corpus-train-")
    status = status_of(place)
    assert (status["status"], status["planned_shards"]) == ("running", 3)
    assert status["service"] in ("PENDING", "RUNNING")
    assert job.id in status["lock"]
    refused = jobs.spawn(place.command(), place.folder, cloud.driver_environment())
    assert refused.returncode == 1
    assert f"is being written by the DataflowRunner job {job.request['name']} ({job.id})" in refused.stderr
    assert len(cloud.jobs) == 1
    cancelled = jobs.spawn(["cancel", place.out], place.folder)
    assert cancelled.returncode == 0, cancelled.stderr
    assert (job.state, place.holder()) == ("CANCELLED", None)
    assert status_of(place)["status"] == "stopped"
    done = jobs.spawn(place.here(), place.folder)
    assert done.returncode == 0, done.stderr
    assert status_of(place)["records_written"] == 90


def test_a_driver_that_is_killed_leaves_the_job_running_and_locked(cloud: Cloud, place: Place) -> None:
    with submit.submitting(cloud, place.folder, place.command()) as driver:
        job = driver.job()  # Maybe before the driver could note the job's number: then it is found by its name.
        os.killpg(driver.pid, signal.SIGKILL)
        driver.wait()
    refused = jobs.spawn(place.command(), place.folder, cloud.driver_environment())
    assert (refused.returncode, len(cloud.jobs)) == (1, 1)
    assert job.request["name"] in refused.stderr
    job.end("FAILED", "out of disk")
    status = status_of(place)
    assert status["status"] == "stopped"
    done = jobs.spawn(place.here(), place.folder)
    assert done.returncode == 0, done.stderr
    assert place.holder() is None


def test_ctrl_c_ends_the_watching_and_not_the_job(cloud: Cloud, place: Place) -> None:
    with submit.submitting(cloud, place.folder, place.command()) as driver:
        job = driver.job()
        driver.wait_for("submitted DataflowRunner job")
        os.kill(driver.pid, signal.SIGINT)
        assert driver.wait() == 1
        assert f"to stop it: gristmill cancel {place.out}" in driver.text
    holder = place.holder()
    assert job.is_active
    assert holder is not None
    assert (holder["job"]["id"], holder["job"]["detached"]) == (job.id, True)


def test_a_job_that_the_service_refuses_leaves_no_lock(cloud: Cloud, place: Place) -> None:
    cloud.refusal = (403, "the API is not enabled")
    with submit.submitting(cloud, place.folder, place.command()) as driver:
        assert driver.wait() == 1
        assert "the API is not enabled" in driver.text
    assert place.holder() is None


def test_cancel_says_when_the_service_cannot_be_asked(
    cloud: Cloud, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = detach(cloud, place)
    for name in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    refused = jobs.spawn(["cancel", place.out], place.folder)
    assert refused.returncode == 2
    assert "cannot be stopped" in refused.stderr
    assert job.is_active
    assert place.holder() is not None
