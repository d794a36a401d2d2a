"""Steps that harm their process: the job ends as if they had been isolated from the start."""

from __future__ import annotations

import dataclasses
import subprocess
from pathlib import Path

import pytest

import jobs
from fakes import WorstStore
from pipelines.supervisor import may_be_of_steps, may_isolate
from transforms.elements import JobSpec
from transforms.store import LocalStore

STEPS = """
import builtins, os, resource, signal, subprocess, sys, threading, time, uuid

def fail(*arguments, **named):
    raise OSError("a function of the step's")

def everything(value):
    os.environ.clear()
    os.umask(0o777)
    sys.setrecursionlimit(60)
    os.chdir("/")
    for limit in (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE):
        resource.setrlimit(limit, (3, resource.getrlimit(limit)[1]))
    sys.stdout = sys.stderr = None
    builtins.open = time.sleep = os.open = os.link = os.urandom = uuid.uuid4 = fail
    return value

def closing(value):
    os.closerange(0, 1000)
    return value

def hard_limit(value):
    resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16))
    return value

def own_path(value):
    sys.path[:] = []
    return value

def leaving(value):
    if value.startswith(b"record-00-000005"):
        os._exit(0)
    return value

def noisy(value):
    print("working on", len(value), "bytes")
    sys.stdout.flush()
    os.write(1, b"raw \\x00\\xff\\n")
    os.write(2, b"x" * (1 << 16) + b"\\n")
    subprocess.run(["head", "-c", "100"], stdout=subprocess.DEVNULL, check=True)
    try:
        input()
    except (EOFError, OSError, UnicodeDecodeError):
        pass
    return value
"""
PAYLOADS = [jobs.payload(0, i) for i in range(40)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    jobs.write_tfrecord(tmp_path / "in/a", PAYLOADS)
    (tmp_path / "hostile.py").write_text(STEPS)
    return tmp_path


def run(folder: Path, step: str, workers: str) -> subprocess.CompletedProcess[str]:
    command = ["convert", "--input", "in/*", "--output", "out", "--shards", "2", "--workers", workers]
    return jobs.spawn([*command, "--step", f"hostile:{step}"], folder, timeout_secs=120)


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_state_that_can_be_put_right_is(workers: str, folder: Path) -> None:
    done = run(folder, "everything", workers)
    assert done.returncode == 0, done.stderr
    assert jobs.records(folder / "out") == PAYLOADS
    assert "WARNING" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "workers"), [("closing", "0"), ("closing", "2"), ("own_path", "0"), ("hard_limit", "2")]
)
def test_a_state_that_cannot_be_put_right_is_kept_away(step: str, workers: str, folder: Path) -> None:
    done = run(folder, step, workers)
    assert done.returncode == 0, done.stderr
    assert jobs.records(folder / "out") == PAYLOADS
    assert jobs.dead_letters(folder / "out") == []
    assert len(done.stderr) < 100_000
    assert not [name for name in jobs.tree(folder / "out") if "attempts" in name or "tries" in name]
    assert "processes of their own" in (folder / "out/_gristmill/job.log").read_text()


def test_an_exit_of_the_command_itself_is_a_dead_letter(folder: Path) -> None:
    done = run(folder, "leaving", "0")
    assert done.returncode == 0, done.stderr
    assert jobs.records(folder / "out") == PAYLOADS[:5] + PAYLOADS[6:]
    assert [letter["reason"] for letter in jobs.dead_letters(folder / "out")] == ["process_died"]


def test_a_fault_of_the_machine_is_not_taken_for_one_of_the_steps(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path))
    assert may_be_of_steps(store, "cannot write /out/x: Permission denied", unexplained=False)
    assert may_be_of_steps(WorstStore(), "RecursionError: maximum recursion depth exceeded", unexplained=True)
    assert not may_be_of_steps(store, "cannot write /out/x: [Errno 28] No space left on device", unexplained=True)
    assert not may_be_of_steps(WorstStore(), "gs://b/o does not answer", unexplained=False)
    assert not may_be_of_steps(store, "steps[0]: module 'x' cannot be imported", unexplained=False)


def test_only_steps_of_the_users_that_share_a_process_are_moved() -> None:
    spec = JobSpec("/out", "plan", 1, "tfrecord")
    for steps, expected in [
        ((), False),
        (({"use": "example.check"},), False),
        (({"use": "example.check"}, {"call": "mine:step"}), True),
        (({"call": "mine:step", "isolate": True},), False),
    ]:
        assert may_isolate(dataclasses.replace(spec, steps=steps)) is expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "given"), [("0", "closed"), ("0", "pipe"), ("2", "nothing"), ("2", "pipe"), ("isolated", "pipe")]
)
def test_a_step_may_print_and_read_in_every_way_to_run_it(way: str, given: str, folder: Path) -> None:
    workers, step = ("2", "noisy,isolate=true") if way == "isolated" else (way, "noisy")
    redirect = {"closed": "<&-", "nothing": "</dev/null", "pipe": "<input"}[given]
    (folder / "input").write_bytes(b"\xff\x00 bytes of a protocol\n" * 10_000)
    prefix = ["sh", "-c", f'exec "$@" {redirect}', "redirected"]
    command = ["convert", "--input", "in/*", "--output", "out", "--shards", "2", "--workers", workers]
    full = [*prefix, *jobs.GRISTMILL, *command, "--step", f"hostile:{step}"]
    done = subprocess.run(full, cwd=folder, env=jobs.environment(), capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert jobs.records(folder / "out") == PAYLOADS
    assert jobs.dead_letters(folder / "out") == []
