"""`status` and `cancel`: how far a job is and who runs it, told by one who only looks; and how it is stopped."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import jobs
from pipelines import dataflow_service
from pipelines.cli import main
from pipelines.progress import JobWatch
from slow_job import Job, make_job
from transforms.job_lock import LOCK_NAME, where_processes_are
from transforms.report import load_spec
from transforms.shard_progress import Running, progress_name
from transforms.store import LocalStore

JOB = {"runner": "DataflowRunner", "name": "gristmill-x", "id": "1", "project": "p", "region": "r"}


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A finished job: nine records written, one dead."""
    jobs.write_tfrecord(tmp_path / "in/a", [jobs.payload(0, number) for number in range(9)])
    with (tmp_path / "in/a").open("ab") as file:
        file.write(b"damaged tail")
    assert jobs.convert("--input", tmp_path / "in", "--output", tmp_path / "out", "--shards", "2") == 0
    return tmp_path / "out"


def status_of(out: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["status", str(out), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def hold(out: Path, **fields: Any) -> None:
    """Puts a lock there."""
    entry = {"host": "elsewhere", "pid": 1, "token": "t", "heartbeat": time.time(), **fields}
    LocalStore(str(out)).put(LOCK_NAME, json.dumps(entry).encode())


def wait_until(ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def wait_for(job: Job, shards: int) -> None:
    wait_until(lambda: len(job.committed("out")) >= shards)


def note(shard: int, plan_id: str, secs: float = 10.0) -> Running:
    """An attempt that has read 40 of 100 bytes in so many seconds."""
    books = {"records_read": 4, "records_written": 3, "records_dead": 1, "bytes_read": 40}
    return Running(plan_id, shard, 100, books, {}, {"not_utf8": 1}, 1_000.0, 1_000.0 + secs)


class TestRunningAttempts:
    def watch(self, out: Path, *notes: Running, **fields: Any) -> JobWatch:
        store = LocalStore(str(out))
        spec = load_spec(store)[0]
        for one in notes:
            store.put(progress_name(spec, one.shard), json.dumps(dataclasses.asdict(one)).encode())
        watch = JobWatch(store, spec, may_call_off=False, **fields)
        watch.look()
        return watch

    def test_count_beside_what_is_committed_and_never_twice(self, out: Path) -> None:
        plan_id = jobs.report(out)["plan_id"]
        (out / "_gristmill/shards/00001.json").unlink()
        committed = self.watch(out)
        both = self.watch(out, note(0, plan_id), note(1, plan_id))  # The first one's ledger stands.
        assert [one.shard for one in both.running] == [1]
        assert both.totals["records_read"] == committed.totals["records_read"] + 4
        assert both.totals["bytes_read"] == committed.totals["bytes_read"] + 40
        assert both.dead_by_reason["not_utf8"] == 1
        assert both.done == 1.4
        assert "1 of 2 shards committed, 1 on their way, " in both.describe()

    def test_of_a_job_that_nobody_runs_do_not_count(self, out: Path) -> None:
        plan_id = jobs.report(out)["plan_id"]
        (out / "_gristmill/shards/00001.json").unlink()
        assert self.watch(out, note(1, plan_id), runs=False).totals == self.watch(out, runs=False).totals

    def test_are_no_ground_to_call_the_job_off(self, out: Path) -> None:
        plan_id = jobs.report(out)["plan_id"]
        for path in (out / "_gristmill/shards").glob("*"):
            path.unlink()
        bad = dataclasses.replace(note(0, plan_id), books={"records_read": 5, "records_dead": 5, "bytes_read": 9})
        self.watch(out, bad)
        assert not (out / "_gristmill/abort.json").exists()

    def test_tell_the_speed(self, out: Path) -> None:
        plan_id = jobs.report(out)["plan_id"]
        for path in (out / "_gristmill/shards").glob("*"):
            path.unlink()
        watch = self.watch(out, note(0, plan_id), note(1, plan_id))
        assert watch.speed(since=1_000.0) == {"shards": 0.08, "pieces": 0.0, "records": 0.8, "bytes": 8.0}
        assert watch.speed(since=995.0) == {"shards": 0.8 / 15, "pieces": 0.0, "records": 8 / 15, "bytes": 80 / 15}
        long = self.watch(out, note(0, plan_id, 6_000.0), note(1, plan_id, 6_000.0))
        found = long.speed(since=1_000.0)  # A tenth of the time lies in the last ten minutes.
        assert found == pytest.approx({"shards": 0.08 / 600, "pieces": 0.0, "records": 0.8 / 600, "bytes": 8.0 / 600})


class TestStatus:
    def test_of_a_finished_job_is_what_the_report_says(self, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
        before = jobs.tree(out)
        status = status_of(out, capsys)
        report = jobs.report(out)
        same = ("records_read", "records_written", "records_dead", "bytes_read", "dead_by_reason")
        assert {name: status[name] for name in same} == {name: report[name] for name in same}
        assert (status["status"], status["lock"], status["secs_left"]) == ("done", None, None)
        assert (status["committed_shards"], status["planned_shards"]) == (2, 2)
        assert jobs.tree(out) == before

    def test_is_printed_for_people(self, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
        capsys.readouterr()
        assert main(["status", str(out)]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == f"done: {out}, convert, 2 of 2 shards"
        assert lines[1] == "  records  10 read, 0 added, 9 written, 0 dropped, 1 dead"
        assert "  dead     length_checksum 1" in lines

    def test_of_a_folder_without_a_job_is_wrong_usage(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["status", str(tmp_path)]) == 2
        assert "holds no job of gristmill" in capsys.readouterr().err

    def test_of_a_running_job_names_its_process_and_speed_and_of_a_killed_one_says_so(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        job = make_job(tmp_path, files=1, records=60, secs=0.05, num_shards=6, workers=0)
        process = job.start("out")
        wait_for(job, 3)
        running = status_of(tmp_path / "out", capsys)
        process.kill()
        process.wait()
        assert running["status"] == "running"
        assert running["lock"].startswith(f"process {process.pid} on {socket.gethostname()}")
        assert 3 <= running["committed_shards"] < 6
        assert running["per_sec"]["records"] > 0
        assert running["secs_left"] > 0
        stopped = status_of(tmp_path / "out", capsys)
        assert (stopped["status"], stopped["lock"]) == ("stopped", None)
        assert main(["status", str(tmp_path / "out")]) == 0
        assert "the same command goes on from here" in capsys.readouterr().out

    @pytest.mark.parametrize("isolate", [False, True])
    def test_of_a_job_of_one_shard_tells_how_far_that_is(
        self, isolate: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        job = make_job(tmp_path, files=1, records=2_000, secs=0.05, num_shards=1, workers=0)
        command = job.command
        job.command = lambda out: [  # type: ignore[method-assign]
            f"slow_step:slow,isolate={str(isolate).lower()}" if part == "slow_step:slow" else part
            for part in command(out)
        ]
        process = job.start("out")
        try:
            wait_until(lambda: list((tmp_path / "out/_gristmill/progress").glob("*")) != [])
            running = status_of(tmp_path / "out", capsys)
            assert main(["status", str(tmp_path / "out")]) == 0
            shown = capsys.readouterr().out
        finally:
            process.kill()
            process.wait()
        assert (running["status"], running["committed_shards"], running["running"]["shards"]) == ("running", 0, 1)
        assert 0 < running["records_read"] == running["running"]["records_read"] < 2_000
        assert running["records_written"] == running["records_read"]
        assert running["bytes_read"] > 0
        assert running["per_sec"]["records"] > 0
        assert running["secs_left"] > 1
        assert "read in 1 shards that are not done" in shown
        stopped = status_of(tmp_path / "out", capsys)  # What it had read is read again.
        assert (stopped["status"], stopped["records_read"], stopped["running"]["shards"]) == ("stopped", 0, 0)

    def test_tells_of_the_append_that_was_planned_last(self, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
        jobs.write_tfrecord(out.parent / "in/b", [b"new"])
        arguments = ["--input", out.parent / "in", "--output", out, "--shards", "2", "--append"]
        assert jobs.convert(*arguments) == 0
        status = status_of(out, capsys)
        assert (status["kind"], status["generation"], status["records_read"]) == ("append", "g001", 1)

    @pytest.mark.parametrize(
        ("state", "status", "service"),
        [
            ("RUNNING", "running", "RUNNING"),
            ("FAILED", "done", "FAILED"),
            (None, "done", "there is no such job"),
            (OSError("no way"), "running", "cannot be asked: no way"),
        ],
    )
    def test_asks_the_service_that_runs_the_job(
        self,
        state: str | OSError | None,
        status: str,
        service: str,
        out: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        def answer(_: object) -> str | None:
            if isinstance(state, OSError):
                raise state
            return state

        monkeypatch.setattr(dataflow_service.Service, "state", answer)
        hold(out, job=JOB)
        found = status_of(out, capsys)
        assert (found["status"], found["service"]) == (status, service)


class TestCancel:
    def test_stops_a_job_of_this_machine_which_then_goes_on(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        job = make_job(tmp_path, files=1, records=60, secs=0.05, num_shards=6, workers=0)
        process = job.start("out")
        wait_for(job, 2)
        assert main(["cancel", str(tmp_path / "out")]) == 0
        assert process.wait(60) == 1
        assert "is stopped; the same command goes on" in capsys.readouterr().out
        assert 2 <= len(job.committed("out")) < 6
        job.finish("out")

    def test_of_nothing_is_done(self, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["cancel", str(out)]) == 0
        assert "nothing runs" in capsys.readouterr().out

    def test_of_a_process_that_is_gone_takes_its_lock_away(self, out: Path) -> None:
        hold(out, **where_processes_are(), pid=2**30, pid_started="1")
        assert main(["cancel", str(out)]) == 0
        assert not (out / LOCK_NAME).exists()

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({}, "is written by process 1 on elsewhere"),
            ({"job": {"runner": "FlinkRunner", "name": "x"}}, "can be stopped only where it runs"),
        ],
    )
    def test_of_a_job_elsewhere_says_where_it_can_be_stopped(
        self, fields: dict[str, Any], message: str, out: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        hold(out, **fields)
        assert main(["cancel", str(out)]) == 2
        assert message in capsys.readouterr().err
        assert (out / LOCK_NAME).exists()


def test_two_looks_at_a_broken_budget_do_not_call_the_job_off(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs.write_tfrecord(tmp_path / "in/a", [b"one"])
    with (tmp_path / "in/a").open("ab") as file:
        file.write(b"x" * 10_000)
    arguments = ["--input", tmp_path / "in", "--output", tmp_path / "out"]
    assert jobs.convert(*arguments) == 3
    os.remove(tmp_path / "out/_gristmill/report.json")
    (tmp_path / "out/_gristmill/abort.json").unlink()  # A worker calls off what it sees; who only looks does not.
    assert status_of(tmp_path / "out", capsys)["status"] == "stopped"
    assert not (tmp_path / "out/_gristmill/abort.json").exists()
