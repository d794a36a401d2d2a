"""Whole jobs on file systems and stores that cannot do what a local disk can."""

from __future__ import annotations

import errno
import os
import threading
import time
import urllib.parse
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import gcs_emulator
import gcs_files
import jobs
from gcs_emulator import Emulator, Fault, Request


def make_inputs(folder: Path) -> None:
    for file in range(4):
        jobs.write_tfrecord(folder / f"in/w{file}.tfrecord", [jobs.payload(file, at) for at in range(10)])


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM], ids=errno.errorcode.get)
def test_folder_without_hard_links_gets_the_same_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """A bucket mounted with gcsfuse, a network share, a USB stick."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    make_inputs(tmp_path)
    command = ["--input", tmp_path / "in/*", "--shards", "4", "--output"]
    assert jobs.convert(*command, tmp_path / "expected") == 0
    monkeypatch.setattr(os, "link", refuse)
    assert jobs.convert(*command, tmp_path / "out") == 0
    assert jobs.content(tmp_path / "out") == jobs.content(tmp_path / "expected")
    assert jobs.tree(tmp_path / "out") == jobs.tree(tmp_path / "expected")
    assert len(jobs.records(tmp_path / "out")) == 40
    assert jobs.verify(tmp_path / "out") == 0


@pytest.fixture
def refused(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Has the service refuse a change of an object within a second of the one before; counts refusals by name."""
    counted: Counter[str] = Counter()
    changed: dict[str, float] = {}
    lock, answer = threading.Lock(), emulator._answer

    def limit(request: Request, fault: Fault | None) -> None:
        path, is_soon = gcs_emulator._object_path(request), False
        if request.method in ("POST", "DELETE", "PATCH"):
            with lock:
                is_soon = time.monotonic() - changed.get(path, -1.0) < 1.0
                changed[path] = changed[path] if is_soon else time.monotonic()
        if is_soon:
            counted[urllib.parse.unquote(path.rpartition("/o/")[2]).rpartition("/")[2]] += 1
            request.say(429)
        else:
            answer(request, fault)

    monkeypatch.setattr(emulator, "_answer", limit)
    return counted


def test_bucket_that_takes_one_change_of_an_object_a_second_gets_the_same_set(
    emulator: Emulator, refused: Counter[str], tmp_path: Path
) -> None:
    make_inputs(tmp_path)
    command: list[Any] = ["--input", tmp_path / "in/*", "--shards", "4", "--output"]
    assert jobs.convert(*command, tmp_path / "expected") == 0
    url = emulator.new_bucket()
    assert jobs.convert(*command, f"{url}/out") == 0
    out = gcs_files.download(f"{url}/out", tmp_path / "out")
    assert jobs.content(out) == jobs.content(tmp_path / "expected")
    assert jobs.verify(f"{url}/out") == 0
    # What is written and deleted again within a second: the probe, the marks of tries, parts of a short job, the lock.
    often = {name for name in refused if not name.startswith((".writable", "0", "part-", "lock.json"))}
    assert often == set(), refused
