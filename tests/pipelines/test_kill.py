"""`kill -9` of the whole process group at any moment; then the same command gives the same bytes."""

from __future__ import annotations

import concurrent.futures
import json
import signal
import time
from pathlib import Path

import pytest

import jobs
from slow_job import Job, make_job
from transforms.job_lock import where_processes_are


def check_outcome(job: Job, out: str, reference: dict[str, str]) -> None:
    assert jobs.content(job.folder / out) == reference
    left = [
        name for name in jobs.tree(job.folder / out) if "attempts" in name or "lock" in name or ".gristmill-" in name
    ]
    assert left == []


def test_killed_job_is_finished_by_the_same_command(tmp_path: Path) -> None:
    job = make_job(tmp_path, files=2, records=400, secs=0.005, num_shards=12, workers=0)
    assert job.start("reference").wait() == 0
    job.kill_when("out", lambda: len(job.committed("out")) >= 5)
    job.finish("out")
    check_outcome(job, "out", jobs.content(tmp_path / "reference"))


def test_what_a_job_left_that_was_killed_when_it_was_done_goes_with_the_next_command(tmp_path: Path) -> None:
    jobs.write_tfrecord(tmp_path / "in/a", [jobs.payload(0, at) for at in range(10)])
    command = ["--input", tmp_path / "in/*", "--output", tmp_path / "out"]
    assert jobs.convert(*command) == 0
    before = jobs.tree(tmp_path / "out")
    holder = {**where_processes_are(), "pid": 1 << 22, "pid_started": "1", "heartbeat": time.time()}
    (tmp_path / "out/_gristmill/lock.json").write_text(json.dumps(holder))
    (tmp_path / "out/_gristmill/tries").mkdir(exist_ok=True)
    (tmp_path / "out/_gristmill/tries/00000-1").write_text(json.dumps(holder))
    assert jobs.convert(*command) == 0
    assert jobs.tree(tmp_path / "out") == before


MOMENTS = {
    "before_commit": "before-put_if_absent _gristmill/shards/00007 {marker}",
    "after_commit": "after-put_if_absent _gristmill/shards/00021 {marker}",
    "after_writing_before_commit": "before-put_if_absent _gristmill/shards/00040 {marker}",
    "before_a_name_is_given": "before-copy array_record-00012-of {marker}",
    "after_a_name_was_given": "after-copy array_record-00030-of {marker}",
    "before_manifest": "before-put manifest.json {marker}",
}
SHARES = [0.05, 0.25, 0.5, 0.75, 0.95]


@pytest.mark.slow
def test_killed_at_any_moment_the_same_command_gives_the_same_bytes(tmp_path: Path) -> None:
    job = make_job(tmp_path, files=8, records=500, secs=0.016, num_shards=48, workers=2)
    started = time.monotonic()
    assert job.start("reference").wait() == 0, (tmp_path / "reference.log").read_text()
    assert time.monotonic() - started > 30
    reference = jobs.content(tmp_path / "reference")
    assert sum(name.startswith("corpus") and "-of-" in name for name in reference) >= 40

    def at_share(share: float) -> None:
        out = f"share{share}"
        job.kill_when(out, lambda: len(job.committed(out)) >= share * job.num_shards)
        job.finish(out)
        check_outcome(job, out, reference)

    def at_moment(name: str) -> None:
        marker = tmp_path / f"{name}.marker"
        job.kill_when(name, marker.exists, MOMENTS[name].format(marker=marker))
        job.finish(name)
        check_outcome(job, name, reference)

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(at_share, share) for share in SHARES]
        waiting += [pool.submit(at_moment, name) for name in MOMENTS]
        for result in waiting:
            result.result()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_job_loses_no_record_and_is_finished_by_the_same_command(
    workers: int, number: signal.Signals, tmp_path: Path
) -> None:
    job = make_job(tmp_path, files=2, records=400, secs=0.01, num_shards=12, workers=workers)
    process = job.start("out")
    deadline = time.monotonic() + 120
    while len(job.committed("out")) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(number)
    assert process.wait(timeout=60) == 1, (tmp_path / "out.log").read_text()
    assert "the same command goes on" in (tmp_path / "out.log").read_text()
    assert jobs.shards(tmp_path / "out") == []
    job.finish("out")
    assert jobs.records(tmp_path / "out") == [jobs.payload(file, i) for file in range(2) for i in range(400)]
    assert [letter["reason"] for letter in jobs.dead_letters(tmp_path / "out")] == ["length_checksum"]
