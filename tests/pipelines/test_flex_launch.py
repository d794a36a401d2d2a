"""A launch of the Flex template as its launcher runs it: one job is written down for the service, nothing waits."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import jobs
from dataflow.cloud import PROJECT, REGION, Cloud
from gcs_emulator import Emulator
from transforms import gcs

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
IMAGE = "us-central1-docker.pkg.dev/my-project/gristmill/worker:0.1.0"
JOB_OBJECT = "staging/template_launches/2026-11-30_01_02_03-123/job_object"


@pytest.fixture
def url(emulator: Emulator, tmp_path: Path) -> str:
    """A bucket with a corpus and a config."""
    bucket = emulator.new_bucket()
    path = jobs.write_tfrecord(tmp_path / "f0", [jobs.payload(0, number) for number in range(300)])
    blob(bucket, "raw/f0").upload_from_filename(path)
    blob(bucket, "mine.yaml").upload_from_string("write: {shards: 3, name: mine}\n")
    return bucket


def blob(bucket: str, name: str) -> Any:
    return gcs.bucket(bucket.removeprefix("gs://")).blob(name)


def names(bucket: str, prefix: str = "") -> list[str]:
    return [one.name for one in gcs.client().list_blobs(bucket.removeprefix("gs://"), prefix=prefix)]


def launch(cloud: Cloud, folder: Path, bucket: str, **parameters: str) -> subprocess.CompletedProcess[str]:
    """Runs the image's script with the flags of a launcher, in a folder such as the image's."""
    [script] = re.findall(r"^RUN (printf (?:.*\\\n)*.*) > main.py$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    (folder / "launcher").mkdir(exist_ok=True)
    (folder / "template").mkdir(exist_ok=True)
    subprocess.run(["sh", "-c", f"{script} > main.py"], cwd=folder / "launcher", check=True)
    flags = [f"--{name}={value}" for name, value in {"input": f"{bucket}/raw/*", **parameters}.items()]
    flags += [f"--output={bucket}/out", f"--sdk_container_image={IMAGE}", f"--template_location={bucket}/{JOB_OBJECT}"]
    flags += ["--runner=DataflowRunner", f"--project={PROJECT}", f"--region={REGION}", "--job_name=my-job"]
    flags += [f"--temp_location={bucket}/temp", f"--staging_location={bucket}/staging", '--labels={"team": "a"}']
    flags += ["--max_num_workers=7", "--dataflow_endpoint=http://dataflow.sandbox"]
    return subprocess.run(
        [sys.executable, str(folder / "launcher/main.py"), *flags],
        cwd=folder / "template",
        env=jobs.environment(cloud.driver_environment()),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_launch_writes_one_job_for_the_service_and_leaves_the_lock_to_it(
    cloud: Cloud, url: str, tmp_path: Path
) -> None:
    done = launch(cloud, tmp_path, url, config=f"{url}/mine.yaml")
    assert done.returncode == 0, done.stderr
    job = json.loads(blob(url, JOB_OBJECT).download_as_bytes())
    [pool] = [one for one in job["environment"]["workerPools"] if one["kind"] == "harness"]
    assert (job["name"], job["labels"]) == ("my-job", {"team": "a"})
    assert (pool["workerHarnessContainerImage"], pool["autoscalingSettings"]["maxNumWorkers"]) == (IMAGE, 7)
    assert [name for name in names(url, "staging/") if name.endswith((".tar.gz", ".whl"))] == []  # The image has it.
    holder = json.loads(blob(url, "out/_gristmill/lock.json").download_as_bytes())
    fields = [holder["job"][name] for name in ("name", "project", "region", "detached")]
    assert fields == ["my-job", PROJECT, REGION, True]
    assert len(blob(url, "out/_gristmill/plan.jsonl").download_as_bytes().splitlines()) == 4
    assert cloud.jobs == []  # The service makes the job, from what was written.


def test_launch_that_cannot_plan_fails_and_writes_no_job(cloud: Cloud, url: str, tmp_path: Path) -> None:
    done = launch(cloud, tmp_path, url, input=f"{url}/nothing/*")
    assert done.returncode == 2
    assert "matches no file" in done.stderr
    assert names(url) == ["mine.yaml", "raw/f0"]
