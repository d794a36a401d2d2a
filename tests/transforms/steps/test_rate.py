"""The rate of a step holds over all processes and threads, and comes from a file that may be gone, old or damaged."""

from __future__ import annotations

import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

import jobs
from transforms.steps.rate import RateLimiter, forget_rates


@pytest.fixture(autouse=True)
def temp_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


class Clock:
    """A clock that only sleeping moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ns = 1_000_000_000_000
        monkeypatch.setattr(time, "monotonic_ns", lambda: self.now_ns)
        monkeypatch.setattr(time, "sleep", self.sleep)

    def sleep(self, secs: float) -> None:
        assert secs > 0
        self.now_ns += round(secs * 1e9)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def times(clock: Clock, limiter: RateLimiter, count: int) -> list[int]:
    """Milliseconds from now at which calls get their turn."""
    start = clock.now_ns
    found = []
    for _ in range(count):
        limiter.wait()
        found.append((clock.now_ns - start) // 1_000_000)
    return found


def test_calls_are_evenly_spaced(clock: Clock) -> None:
    assert times(clock, RateLimiter("job", 0, 10), 5) == [0, 100, 200, 300, 400]


def test_time_without_calls_is_not_saved_up(clock: Clock) -> None:
    limiter = RateLimiter("job", 0, 10)
    limiter.wait()
    clock.now_ns += 10**10
    assert times(clock, limiter, 3) == [0, 100, 200]


def test_limiters_of_one_step_share_the_rate_and_others_do_not(clock: Clock) -> None:
    first, second = RateLimiter("job", 0, 10), RateLimiter("job", 0, 10)
    first.wait()
    assert times(clock, second, 1) == [100]
    assert times(clock, RateLimiter("job", 1, 10), 1) == [0]
    assert times(clock, RateLimiter("other", 0, 10), 1) == [0]


@pytest.mark.parametrize("content", [b"", b"abc", struct.pack("<q", 1 << 62), struct.pack("<q", -5)])
def test_damaged_or_stale_file_is_made_anew(content: bytes, temp_folder: Path, clock: Clock) -> None:
    limiter = RateLimiter("job", 0, 10)
    limiter.wait()
    [path] = temp_folder.iterdir()
    path.write_bytes(content)
    assert times(clock, limiter, 3) == [0, 100, 200]


def test_file_that_is_deleted_meanwhile_is_made_anew(temp_folder: Path, clock: Clock) -> None:
    limiter = RateLimiter("job", 0, 10)
    limiter.wait()
    forget_rates("job", 1)
    assert list(temp_folder.iterdir()) == []
    assert times(clock, limiter, 2) == [0, 100]


def test_link_in_its_place_is_not_followed(temp_folder: Path) -> None:
    limiter = RateLimiter("job", 0, 10)
    limiter.wait()
    [path] = temp_folder.iterdir()
    path.unlink()
    path.symlink_to(temp_folder / "target")
    with pytest.raises(OSError, match="symbolic links"):
        limiter.wait()
    assert not (temp_folder / "target").exists()


def test_call_waits_and_passes_on(clock: Clock) -> None:
    limited = RateLimiter("job", 0, 1).limit(lambda value: value + b"!")
    start = clock.now_ns
    assert [limited(b"a"), limited(b"b")] == [b"a!", b"b!"]
    assert clock.now_ns - start == 10**9


PROGRAM = """
import sys, time
from transforms.steps.rate import RateLimiter
limiter = RateLimiter("job", 0, 200)
for _ in range(15):
    limiter.wait()
    print(time.monotonic_ns())
"""


def test_processes_and_threads_share_the_rate(temp_folder: Path) -> None:
    """No two turns are nearer than they should be, whoever takes them; the file has moved on by all of them."""
    before = time.monotonic_ns()
    env = jobs.environment({"TMPDIR": str(temp_folder)})
    command = [sys.executable, "-c", PROGRAM]
    processes = [subprocess.Popen(command, env=env, stdout=subprocess.PIPE) for _ in range(2)]
    limiter = RateLimiter("job", 0, 200)
    threads = [threading.Thread(target=lambda: [limiter.wait() for _ in range(15)]) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = sorted(int(line) for process in processes for line in process.communicate()[0].split())
    assert len(found) == 30
    # The nth turn of n is never before its time; that single ones are late says nothing.
    assert all(turn - before >= 5_000_000 * number for number, turn in enumerate(found))
    [path] = temp_folder.iterdir()
    assert struct.unpack("<q", path.read_bytes())[0] - before >= 60 * 5_000_000
    assert path.stat().st_mode & 0o777 == 0o600
