"""Folders for temporary files: what nobody needs any more goes, and nothing else."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

import jobs
from slow_job import make_job
from transforms import scratch

KILLED = """
import os
from transforms.scratch import ScratchFolder
folder = ScratchFolder()
open(folder.path + "/x", "w")
os._exit(9)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def left(folder: Path) -> Path:
    """A folder that a killed process has left."""
    subprocess.run(
        [sys.executable, "-P", "-c", KILLED], env=jobs.environment({"TMPDIR": str(folder)}), check=False, timeout=60
    )
    [path] = folder.iterdir()
    return path


def test_what_a_killed_process_left_goes_and_what_is_in_use_stays(folder: Path, left: Path) -> None:
    with scratch.scratch_folder() as living:
        scratch.delete_left_over()
        assert not left.exists()
        assert os.path.isdir(living)
    assert list(folder.iterdir()) == []


def test_what_may_be_in_use_on_another_machine_stays(left: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "_is_local", lambda _: False)
    monkeypatch.setattr(scratch, "_boot_id", lambda: b"another")
    scratch.delete_left_over()
    assert left.exists()
    monkeypatch.undo()


def test_what_was_left_before_the_machine_started_anew_goes_where_no_other_has_the_disk(
    left: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scratch, "_is_local", lambda _: True)
    monkeypatch.setattr(scratch, "_boot_id", lambda: b"another")
    scratch.delete_left_over()
    assert not left.exists()


def test_another_users_stays(left: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    scratch.delete_left_over()
    assert left.exists()


def test_links_and_files_of_others_stay(folder: Path) -> None:
    (folder / "mine").mkdir()
    (folder / "mine/lock").touch()
    (folder / "gristmill-link").symlink_to(folder / "mine")
    (folder / "gristmill-young").mkdir()
    (folder / "gristmill-full").mkdir()
    (folder / "gristmill-full/x").touch()
    os.utime(folder / "gristmill-full", (0, 0))
    scratch.delete_left_over()
    assert sorted(path.name for path in folder.iterdir()) == [
        "gristmill-full", "gristmill-link", "gristmill-young", "mine"
    ]  # fmt: skip


def test_old_rates_and_old_empty_folders_go(folder: Path) -> None:
    for name in ("gristmill-rate-0-job-0", "gristmill-rate-0-job-1"):
        (folder / name).touch()
    (folder / "gristmill-empty").mkdir()
    for name in ("gristmill-rate-0-job-0", "gristmill-empty"):
        os.utime(folder / name, (time.time() - 2 * 24 * 3600,) * 2)
    scratch.delete_left_over()
    assert [path.name for path in folder.iterdir()] == ["gristmill-rate-0-job-1"]


def test_a_folder_that_is_cleared_up_before_its_lock_is_made_anew(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock = scratch.fcntl.flock
    gone: list[str] = []

    def racing(lock: int, how: int) -> None:
        if not gone:
            [path] = folder.iterdir()
            gone.append(str(path))
            scratch.shutil.rmtree(path)
        flock(lock, how)

    monkeypatch.setattr(scratch.fcntl, "flock", racing)
    with contextlib.closing(scratch.ScratchFolder()) as found:
        assert found.path not in gone
        assert os.path.isdir(found.path)


def test_the_next_job_clears_up_after_one_that_was_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    job = make_job(tmp_path, files=1, records=100, secs=0.01, num_shards=4, workers=2)
    process = job.start("out")
    deadline = time.monotonic() + 60
    while not job.committed("out"):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert list((tmp_path / "tmp").glob("gristmill-*"))
    job.finish("out")
    assert list((tmp_path / "tmp").glob("gristmill-*")) == []
