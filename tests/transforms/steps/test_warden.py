"""What the warden sees to while its process lives: what that says, where it stands with the kernel, its orphans."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import psutil
import pytest

from fakes import make_batch
from isolation import Steps, outputs, wait_until

MODULE = """
import os, resource, subprocess, sys

def act(record):
    if record == b"say":
        print("on standard output")
        print("on standard error", file=sys.stderr)
    if record == b"orphan":
        subprocess.run(["sh", "-c", "sleep 0 & sleep 1000 &"], stdin=subprocess.DEVNULL)
    if record == b"score":
        return open("/proc/self/oom_score_adj", "rb").read().strip()
    if record == b"core":
        return b"%d" % resource.getrlimit(resource.RLIMIT_CORE)[0]
    if record == b"data":
        return b"%d" % resource.getrlimit(resource.RLIMIT_DATA)[0]
    if record == b"group":
        return b"%d %d" % (os.getpgrp(), os.getppid())
    return record
"""


@pytest.fixture
def steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Steps:
    (tmp_path / "watched_steps.py").write_text(MODULE)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return Steps(tmp_path)


def run(steps: Steps, *records: bytes, **options: object) -> list[bytes]:
    return outputs(steps.run(records, {"call": "watched_steps:act", "isolate": True, **options}))


def test_what_steps_say_is_passed_on(steps: Steps, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(steps, b"say") == [b"say"]
    assert capfd.readouterr() == ("on standard output\n", "on standard error\n")


def test_kernel_takes_the_steps_before_the_worker(steps: Steps) -> None:
    before = Path("/proc/self/oom_score_adj").read_text()
    assert run(steps, b"score") == [b"600"]
    assert Path("/proc/self/oom_score_adj").read_text() == before


def test_process_leaves_no_core_and_is_bounded_only_as_asked(steps: Steps) -> None:
    soft = resource.getrlimit(resource.RLIMIT_DATA)[0]
    assert run(steps, b"core", b"data") == [b"0", b"%d" % soft]
    assert run(steps, b"data", max_memory_bytes=1 << 30) == [b"%d" % (1 << 30)]


def test_orphans_are_taken_in_and_ended_with_the_process(steps: Steps) -> None:
    with steps.chain({"call": "watched_steps:act", "isolate": True}) as chain:
        [_, found] = outputs(list(chain.apply(make_batch([b"orphan", b"group"]))))
        group, warden = map(int, found.split())
        assert group == warden
        descendants = psutil.Process(warden).children(recursive=True)
        wait_until(lambda: len(psutil.Process(warden).children()) == 2)  # The process, and the one that still sleeps.
    assert not any(process.is_running() for process in descendants)
