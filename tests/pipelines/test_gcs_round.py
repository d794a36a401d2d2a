"""The whole round on gs:// through faults, kills, rivals and zombies: what remains is what a local job writes."""

from __future__ import annotations

import concurrent.futures
import json
import os
import re
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import gcs_emulator
import jobs
from gcs_emulator import Emulator, Request
from gcs_files import download, upload
from gcs_jobs import BUDGET, attempt_shard, letters, out_of, shards, start
from pipelines.cli import main
from transforms.gcs_store import GcsStore

LEDGER = r"POST /upload.* out/_gristmill/shards/(\d+)\.json"
OPTIONS = ("--shards", "6", "--workers", "0", "--set", "source.format=tfrecord")
PASSING = (
    gcs_emulator.status(429),
    gcs_emulator.status(503),
    gcs_emulator.reset,
    gcs_emulator.lose_answer,
    gcs_emulator.cut_answer,
    gcs_emulator.slow(0.05),
)


def content(file: int) -> bytes:
    return b"".join(jobs.frame(jobs.payload(file, number)) for number in range(600))


def play(raw: str, out: str, put: Callable[[str, bytes], None], convert: Callable[[list[str]], None]) -> None:
    """Converts two files of which one is cut off, appends a third one, and replays the cut one once it is whole."""
    command = ["convert", "--input", f"{raw}/*", "--output", out, *OPTIONS]
    put("a", content(0))
    put("b", content(1)[:-20])
    convert(command)
    put("c", content(2))
    assert main([*command, "--append"]) == 0
    put("b", content(1))
    assert jobs.replay(out) == 0
    assert main(["verify", out]) == 0
    assert main(["report", out]) == 0


def convert_undisturbed(command: list[str]) -> None:
    assert main(command) == 0


def manifest(folder: Path) -> dict[str, object]:
    """Returns the manifest without what the names of the inputs decide."""
    fields = json.loads((folder / "manifest.json").read_text())
    del fields["plan_id"]
    return dict(fields)


class Misfortunes:
    """What befalls the `convert` of a round: two kills, a rival, and a race that is lost to nobody."""

    def __init__(self, emulator: Emulator, folder: Path, out: str) -> None:
        self._emulator = emulator
        self._folder = folder
        self._out = out
        self._process: subprocess.Popen[str] | None = None

    def convert(self, command: list[str]) -> None:
        self._emulator.fail(LEDGER, self._kill_after)
        self._run_until_killed(command)
        self._emulator.fail(LEDGER, self._let_a_rival_win, gcs_emulator.status(412))
        self._emulator.fail("rewriteTo", self._kill)
        self._run_until_killed(command)
        assert main(command) == 0
        assert self._emulator.left() == 0

    def _run_until_killed(self, command: list[str]) -> None:
        self._process = start(self._folder, command)
        text, _ = self._process.communicate(timeout=240)
        assert self._process.returncode == -signal.SIGKILL, text

    def _kill(self, request: Request) -> None:
        assert self._process is not None
        os.killpg(self._process.pid, signal.SIGKILL)
        request.reset()

    def _kill_after(self, request: Request) -> None:
        request.forward()
        self._kill(request)

    def _let_a_rival_win(self, request: Request) -> None:
        found = re.search(LEDGER, request.line)
        assert found is not None
        attempt_shard(self._out, int(found[1]))
        request.emulator.handle(request)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_a_round_through_faults_kills_and_races_gives_the_bytes_of_a_local_one(
    emulator: Emulator, tmp_path: Path, seed: int
) -> None:
    local, raw = tmp_path / "local", emulator.new_bucket() + "/raw"
    (tmp_path / "in").mkdir()
    play(
        str(tmp_path / "in"),
        str(local),
        lambda name, data: (tmp_path / "in" / name).write_bytes(data) and None,
        convert_undisturbed,
    )
    emulator.misbehave(seed, 0.05, *PASSING)
    play(raw, out_of(raw), GcsStore(raw).put, Misfortunes(emulator, tmp_path, out_of(raw)).convert)
    emulator.be_well()
    remote = download(out_of(raw), tmp_path / "remote")
    assert shards(remote) == shards(local) != {}
    assert manifest(remote) == manifest(local)
    assert letters(remote) == letters(local)
    assert jobs.tree(remote) == jobs.tree(local)
    for name in ("records_read", "records_written", "records_dead", "bytes_read", "files_read", "generations"):
        assert jobs.report(remote)[name] == jobs.report(local)[name]


class Zombie:
    """An attempt at a shard that stands still in front of its commit until it is released."""

    def __init__(self, emulator: Emulator, out: str, shard: int) -> None:
        self._arrived, self._released = threading.Event(), threading.Event()
        emulator.fail(rf"POST /upload.* out/_gristmill/shards/{shard:05d}\.json", self._hold)
        self._pool = concurrent.futures.ThreadPoolExecutor(1)
        self._attempt = self._pool.submit(attempt_shard, out, shard)
        assert self._arrived.wait(60)

    def _hold(self, request: Request) -> None:
        self._arrived.set()
        assert self._released.wait(100)
        request.emulator.handle(request)

    def release(self) -> object:
        """Lets it go on, and returns what it takes for the shard's outcome."""
        self._released.set()
        with self._pool:
            return self._attempt.result()


class TestZombies:
    """Attempts of workers that were taken for dead."""

    SHARD = 3

    @pytest.fixture
    def raw(self, emulator: Emulator, tmp_path: Path) -> str:
        raw = emulator.new_bucket() + "/raw"
        jobs.write_tfrecord(tmp_path / "in/a", [jobs.payload(0, number) for number in range(3_000)])
        (tmp_path / "in/b").write_bytes(content(1)[:-20])
        upload(tmp_path / "in", raw)
        assert jobs.convert("--input", tmp_path / "in", "--output", tmp_path / "local", *OPTIONS, *BUDGET) == 0
        return raw

    def convert(self, raw: str) -> int:
        return jobs.convert("--input", f"{raw}/*", "--output", out_of(raw), *OPTIONS, *BUDGET)

    def begin(self, emulator: Emulator, raw: str) -> Zombie:
        """Runs a job that ends early, and has an attempt at one of its shards stand still."""
        emulator.fail(rf"POST /upload.* out/_gristmill/shards/{self.SHARD:05d}\.json", gcs_emulator.status(403))
        assert self.convert(raw) == 1
        return Zombie(emulator, out_of(raw), self.SHARD)

    def check(self, raw: str, tmp_path: Path) -> None:
        remote = download(out_of(raw), tmp_path / "remote")
        assert shards(remote) == shards(tmp_path / "local") != {}
        assert letters(remote) == letters(tmp_path / "local")
        assert jobs.tree(remote) == jobs.tree(tmp_path / "local")
        assert main(["verify", out_of(raw)]) == 0

    def test_that_come_back_after_another_commit_take_its_outcome(
        self, emulator: Emulator, raw: str, tmp_path: Path
    ) -> None:
        zombie = self.begin(emulator, raw)
        outcome = attempt_shard(out_of(raw), self.SHARD)
        assert zombie.release() == outcome
        assert self.convert(raw) == 0
        self.check(raw, tmp_path)

    def test_that_come_back_when_all_is_done_change_nothing(self, emulator: Emulator, raw: str, tmp_path: Path) -> None:
        zombie = self.begin(emulator, raw)
        assert self.convert(raw) == 0
        before = download(out_of(raw), tmp_path / "before")
        zombie.release()
        after = download(out_of(raw), tmp_path / "after")
        assert {name: (after / name).read_bytes() for name in jobs.tree(after)} == {
            name: (before / name).read_bytes() for name in jobs.tree(before)
        }
        self.check(raw, tmp_path)

    def test_that_commit_first_without_their_files_do_not_count(
        self, emulator: Emulator, raw: str, tmp_path: Path
    ) -> None:
        zombie = self.begin(emulator, raw)
        emulator.fail(  # The next job deletes the zombie's files; then the zombie creates its ledger just before it.
            rf"POST /upload.* out/_gristmill/shards/{self.SHARD:05d}\.json", gcs_emulator.before(zombie.release)
        )
        assert self.convert(raw) == 0
        assert emulator.left() == 0
        self.check(raw, tmp_path)
