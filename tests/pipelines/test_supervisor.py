"""Local jobs live through the deaths of their processes, and through their terminal going away."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

import jobs
import slow_job
from slow_job import Job, make_job

CRASHING_STEP = """
import ctypes, os
def hurt(value):
    if value == b"segfault":
        ctypes.string_at(0)
    if value == b"exit":
        os._exit(0)
    return value
"""


def wait_for(ready: Callable[[], object], process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 120
    while not ready():
        assert process.poll() is None
        assert time.monotonic() < deadline, "the moment never came"
        time.sleep(0.05)


def processes(parent: int, what: str) -> list[int]:
    """Processes below one that run a module."""
    found = psutil.Process(parent).children(recursive=True)
    return [process.pid for process in found if process.name() != "sh" and what in " ".join(process.cmdline())]


def reference_of(job: Job) -> dict[str, str]:
    assert job.start("reference").wait() == 0, (job.folder / "reference.log").read_text()
    return jobs.content(job.folder / "reference")


def left_behind(out: Path) -> list[str]:
    return [name for name in jobs.tree(out) if "attempts" in name or "lock" in name or "tries" in name]


@pytest.mark.parametrize("victim", ["worker_process", "job_process"])
def test_killed_process_is_replaced_and_the_job_ends_as_if_nothing_had_been(victim: str, tmp_path: Path) -> None:
    job = make_job(tmp_path, files=2, records=400, secs=0.005, num_shards=12, workers=2)
    reference = reference_of(job)
    process = job.start("out")
    wait_for(lambda: len(job.committed("out")) >= 3, process)
    others = psutil.Process(process.pid).children(recursive=True)
    os.kill(processes(process.pid, victim)[-1], signal.SIGKILL)
    before = job.committed("out")
    assert process.wait(timeout=120) == 0, (tmp_path / "out.log").read_text()
    assert "starting again from what is committed" in (tmp_path / "out.log").read_text()
    assert jobs.content(tmp_path / "out") == reference
    after = job.committed("out")
    assert {name: after[name] for name in before} == before
    assert left_behind(tmp_path / "out") == []
    assert not [other for other in others if other.is_running() and other.status() != psutil.STATUS_ZOMBIE]


def test_no_process_outlives_a_killed_command(tmp_path: Path) -> None:
    job = make_job(tmp_path, files=2, records=400, secs=0.02, num_shards=12, workers=2)
    process = job.start("out")
    wait_for(lambda: len(job.committed("out")) >= 1, process)
    others = psutil.Process(process.pid).children(recursive=True)
    assert len(others) >= 3
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    _, alive = psutil.wait_procs(others, timeout=10)
    assert alive == []


@pytest.mark.parametrize("workers", ["auto", "2"])
def test_records_that_kill_their_worker_are_dead_letters(workers: str, tmp_path: Path) -> None:
    good = [jobs.payload(0, i) for i in range(300)]
    records = [*good[:100], b"segfault", *good[100:200], b"exit", *good[200:]]
    jobs.write_tfrecord(tmp_path / "in/a", records)
    (tmp_path / "hurting.py").write_text(CRASHING_STEP)
    command = ["convert", "--input", "in/*", "--output", "out", "--shards", "3", "--workers", workers]
    done = jobs.spawn([*command, "--step", "hurting:hurt"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert jobs.records(tmp_path / "out") == good
    letters = [(letter["reason"], letter["step"]) for letter in jobs.dead_letters(tmp_path / "out")]
    assert letters == [("process_died", "hurting:hurt")] * 2
    assert left_behind(tmp_path / "out") == []


def test_bytes_that_kill_the_reader_are_one_dead_letter(tmp_path: Path) -> None:
    good = [jobs.payload(0, i) for i in range(300)]
    jobs.write_array_record(tmp_path / "in/a.array_record", [*good[:100], b"POISON", *good[100:]])
    env = {"GRISTMILL_TEST_CRASH": "POISON"}
    env["PYTHONPATH"] = os.pathsep.join([slow_job.HOOKS, jobs.environment()["PYTHONPATH"]])
    command = ["convert", "--input", "in/*", "--output", "out", "--shards", "3"]
    done = jobs.spawn(command, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    assert jobs.records(tmp_path / "out") == good
    assert [letter["reason"] for letter in jobs.dead_letters(tmp_path / "out")] == ["reader_died"]
    assert left_behind(tmp_path / "out") == []


def test_a_terminal_that_goes_away_does_not_stop_the_job(tmp_path: Path) -> None:
    job = make_job(tmp_path, files=2, records=200, secs=0.01, num_shards=8, workers=2)
    (tmp_path / "slow_step.py").write_text(
        "import time\ndef slow(value):\n    print(value)\n    time.sleep(0.01)\n    return value\n"
    )
    leader, follower = os.openpty()
    command = [*jobs.GRISTMILL, *job.command("out")]
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=jobs.environment(),
        stdin=follower,
        stdout=follower,
        stderr=follower,
        start_new_session=True,
    )
    os.close(follower)
    wait_for(lambda: len(job.committed("out")) >= 1, process)
    os.close(leader)
    process.send_signal(signal.SIGHUP)
    assert process.wait(timeout=120) == 0
    assert jobs.records(tmp_path / "out") == [jobs.payload(file, i) for file in range(2) for i in range(200)]


def test_a_second_command_says_who_works_and_how_far_it_is(tmp_path: Path) -> None:
    job = make_job(tmp_path, files=2, records=400, secs=0.01, num_shards=12, workers=2)
    process = job.start("out")
    wait_for(lambda: len(job.committed("out")) >= 2, process)
    second = jobs.spawn(job.command("out"), cwd=tmp_path)
    assert second.returncode == 1
    assert f"is being written by process {process.pid} on" in second.stderr
    assert "of 12 shards committed" in second.stderr
    assert process.wait(timeout=120) == 0
    assert jobs.records(tmp_path / "out") == [jobs.payload(file, i) for file in range(2) for i in range(400)]


def test_a_stopped_job_leaves_no_suspicion(tmp_path: Path) -> None:
    job = make_job(tmp_path, files=2, records=400, secs=0.01, num_shards=12, workers=2)
    process = job.start("out")
    wait_for(lambda: len(job.committed("out")) >= 2, process)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 1
    assert not list((tmp_path / "out/_gristmill").glob("tries/*"))


KILLED_FOR_MEMORY = """
import os, signal, sys
from pathlib import Path
from transforms import machine
machine.count_memory_kills = lambda *_: len(list(Path("kills").iterdir()))
machine.available_bytes = lambda *_: int(os.environ["FREE_MIB"]) << 20
if "pipelines.job_process" in " ".join(sys.orig_argv):
    from pipelines import job_process, local_runner
    def run(spec, flags, num_workers):
        Path("kills", str(len(list(Path("kills").iterdir())))).write_text(str(local_runner.asked_workers(flags)))
        os.kill(os.getpid(), signal.SIGKILL)
    local_runner.describe_run = run
"""


@pytest.mark.parametrize(
    ("workers", "free_mib", "tries"),
    [
        pytest.param("4", 9_000, ["4", "2", "1", "0"], marks=pytest.mark.slow),
        ("auto", 300, []),
        pytest.param("2", 300, ["2", "1", "0"], marks=pytest.mark.slow),
    ],
)
def test_after_a_kill_for_want_of_memory_fewer_workers_go_on(
    workers: str, free_mib: int, tries: list[str], tmp_path: Path
) -> None:
    payloads = [jobs.payload(0, i) for i in range(100)]
    jobs.write_tfrecord(tmp_path / "in/a", payloads)
    for name in ("hooks", "kills"):
        (tmp_path / name).mkdir()
    (tmp_path / "hooks/sitecustomize.py").write_text(KILLED_FOR_MEMORY)
    env = {"PYTHONPATH": os.pathsep.join([str(tmp_path / "hooks"), jobs.environment()["PYTHONPATH"]])}
    command = ["convert", "--input", "in/*", "--output", "out", "--shards", "4", "--workers", workers]
    done = jobs.spawn(command, tmp_path, {**env, "FREE_MIB": str(free_mib)})
    assert done.returncode == 0, done.stderr
    assert [path.read_text() for path in sorted((tmp_path / "kills").iterdir())] == tries
    assert jobs.records(tmp_path / "out") == payloads
    assert done.stderr.count("for want of memory") == max(0, len(tries) - 1)
    assert ("in this process" in done.stderr) == (not tries)
    assert left_behind(tmp_path / "out") == []


def test_a_job_whose_every_process_dies_ends_with_the_reason(tmp_path: Path) -> None:
    jobs.write_tfrecord(tmp_path / "in/a", [jobs.payload(0, i) for i in range(10)])
    hooks = tmp_path / "hooks"
    hooks.mkdir()
    (hooks / "sitecustomize.py").write_text(
        "import os, sys\nif 'pipelines.job_process' in ' '.join(sys.orig_argv):\n    os._exit(9)\n"
    )
    env = {"PYTHONPATH": os.pathsep.join([str(hooks), jobs.environment()["PYTHONPATH"]])}
    done = jobs.spawn(["convert", "--input", "in/*", "--output", "out"], cwd=tmp_path, env=env)
    assert done.returncode == 1
    assert "5 times in a row the job's process died (exit status 9)" in done.stderr
    assert "the same command goes on from here" in done.stderr
