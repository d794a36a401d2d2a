"""One job whose processes are killed at random, again and again, until the same command has finished it."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import psutil

import corpora
import jobs
from torture import oracle
from torture.acts import SECS
from torture.misfortunes import with_tests
from torture.oracle import require
from torture.tally import Case, Tally

GENTLE = ("step", "warden", "reader")
"""Processes whose death the job can only blame on the record that they were at."""

_WAIT_SECS = 200
_MOMENT_SECS = 25
_END_SECS = 20
_LOOK_SECS = 0.05


def run_case(case: Case, folder: Path) -> Tally:
    """Runs one case in an empty folder.

    Raises:
        DiscrepancyError: A law does not hold.
    """
    job = KillJob(random.Random(f"{case.seed}/{case}"), folder)
    try:
        job.run()
        job.check()
    finally:
        job.end()
    tally = Tally(kills=job.kills)
    tally.counts["jobs killed"] += 1
    tally.counts["starts of killed jobs"] += job.starts
    return tally


class KillJob:
    """A job, and what was done to it.

    Attributes:
        kills: Kills so far, by the process that was hit.
        starts: How often its command was started.
    """

    def __init__(self, rng: random.Random, folder: Path) -> None:
        self._rng = rng
        self._folder = folder
        self._out = folder / "out"
        self._streams = self._make_inputs()
        isolate = rng.choice(["", "", ",isolate=true"])
        workers = rng.choice(["0", "auto", "2"])
        shards = rng.randint(6, 14)
        self._options = ["--shards", str(shards), "--workers", workers, "--step", f"torture.acts:slow{isolate}"]
        self._secs = rng.choice([0.02, 0.03, 0.05])
        self._to_kill = rng.randint(5, 8)
        self._ledgers: dict[str, int] = {}
        self._seen: dict[int, psutil.Process] = {}
        self.kills: Counter[str] = Counter()
        self.starts = 0

    def _make_inputs(self) -> dict[str, bytes]:
        """Two files, each damaged in its middle and at its end; no framing in payloads, so no range is read twice."""
        streams = {}
        for number in range(2):
            records = [jobs.payload(number, at) for at in range(self._rng.randint(200, 350))]
            data = corpora.frame_all(records)
            data = corpora.flip_bit(data, self._rng.randrange(len(data))) + b"damaged tail"
            path = self._folder / f"in/f{number}.tfrecord"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(data)
            streams[str(path)] = data
        return streams

    def _start(self, out: str, secs: float, options: list[str]) -> subprocess.Popen[bytes]:
        env = jobs.environment({**with_tests(), SECS: str(secs)})
        command = [*jobs.GRISTMILL, "convert", "--input", "in/*", "--output", out, *options]
        with (self._folder / f"{out}.log").open("ab") as log:
            return subprocess.Popen(
                command, cwd=self._folder, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def run(self) -> None:
        """Starts the command until it is done, and kills what it runs meanwhile."""
        reference = self._start("reference", 0, [*self._options[:2], "--workers", "0", *self._options[4:]])
        require(reference.wait(_WAIT_SECS) == 0, "the undisturbed job failed")
        while True:
            process = self._start("out", self._secs, self._options)
            self.starts += 1
            before = self.kills.total()
            while process.poll() is None and self.kills.total() < self._to_kill:
                self._disturb(process)
            status = self._wait(process)
            self._check_ended()
            if status == 0:
                return
            may_give_up = status == 1 and self.kills.total() > before + 1  # Killed too often to go on by itself.
            require(status == -signal.SIGKILL or may_give_up, f"the command ended with {status}, see out.log")

    def _disturb(self, process: subprocess.Popen[bytes]) -> None:
        """Waits for a random moment and kills a random process."""
        if not self._wait_for_moment(process):
            return
        found = self._processes(process.pid)
        kind = self._rng.choice(sorted(found))
        victim = self._rng.choice(found[kind])
        with contextlib.suppress(ProcessLookupError):
            (os.killpg if kind == "group" else os.kill)(victim, signal.SIGKILL)
            self.kills[kind] += 1
        if kind in ("command", "group"):
            process.wait()

    def _wait_for_moment(self, process: subprocess.Popen[bytes]) -> bool:
        """Returns whether the command still runs at the moment: some commits away, or some seconds."""
        more, pause = self._rng.randint(1, 3), self._rng.uniform(0, 0.4)
        if self._rng.random() < 0.25:
            more, pause = 0, self._rng.uniform(0.3, 5)
        target = len(self._committed()) + more
        deadline = time.monotonic() + _MOMENT_SECS
        while process.poll() is None and len(self._committed()) < target and time.monotonic() < deadline:
            time.sleep(_LOOK_SECS)
        time.sleep(pause)
        return process.poll() is None

    def _committed(self) -> dict[str, int]:
        """Returns the inode of every ledger, and sees to it that none is ever made again."""
        for path in (self._out / "_gristmill/shards").glob("*.json"):
            inode = path.stat().st_ino
            require(self._ledgers.setdefault(path.name, inode) == inode, f"the shard of {path.name} was made again")
        return self._ledgers

    def _processes(self, command: int) -> dict[str, list[int]]:
        """Returns what runs now, by what it does."""
        found = {"command": [command], "group": [command]}
        with contextlib.suppress(psutil.Error):
            for process in psutil.Process(command).children(recursive=True):
                self._seen[process.pid] = process
                with contextlib.suppress(psutil.Error):
                    found.setdefault(_kind(process), []).append(process.pid)
        return found

    def _wait(self, process: subprocess.Popen[bytes]) -> int:
        deadline = time.monotonic() + _WAIT_SECS
        while process.poll() is None:
            require(time.monotonic() < deadline, "the job does not come to an end, see out.log")
            self._processes(process.pid)
            self._committed()
            time.sleep(_LOOK_SECS)
        return int(process.returncode)

    def _check_ended(self) -> None:
        """Nothing runs any more, nothing is partial, and nothing that was committed has gone."""
        _, alive = psutil.wait_procs(list(self._seen.values()), timeout=_END_SECS)
        alive = [process for process in alive if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
        require(alive == [], f"these outlived the command: {alive}")
        self._seen.clear()
        names = {path.name for path in (self._out / "_gristmill/shards").glob("*.json")}
        require(set(self._committed()) == names, "a committed shard has gone")
        for path in jobs.shards(self._out):
            jobs.read_array_record(path)

    def check(self) -> None:
        """The outcome is that of the undisturbed job, but for records whose own process was killed."""
        gentle = sum(self.kills[kind] for kind in GENTLE)
        if not gentle:
            same = jobs.content(self._out) == jobs.content(self._folder / "reference")
            require(same, "the outcome is not that of the undisturbed job")
        letters = [self._as_read(letter) for letter in jobs.dead_letters(self._out)]
        undisturbed = jobs.dead_letters(self._folder / "reference")
        require(len(letters) <= len(undisturbed) + gentle, f"{gentle} kills cost {letters}")
        records = iter(jobs.records(self._out))
        for name, data in self._streams.items():
            oracle.tile(data, [letter for letter in letters if letter["source"] == name], records, name)
        require(next(records, None) is None, "more records than the files account for")
        left = [name for name in jobs.tree(self._out) if any(part in name for part in _LEFT)]
        require(left == [], f"left behind: {left}")
        done = jobs.spawn(["verify", "out"], self._folder, timeout_secs=_WAIT_SECS)
        require(done.returncode == 0, f"verify: {done.stdout}")

    @staticmethod
    def _as_read(letter: oracle.Letter) -> oracle.Letter:
        """The dead letter of a step counts the record without its framing."""
        framing = 0 if letter["step"] == "read" else corpora.FRAME_BYTES
        return {**letter, "length": letter["length"] + framing}

    def end(self) -> None:
        """Ends what this job started, however it came out."""
        for process in self._seen.values():
            with contextlib.suppress(psutil.Error):
                process.kill()


_LEFT = ("attempts/", "lock", "tries/", ".gristmill-")
_KINDS: list[tuple[str, Callable[[str], bool]]] = [
    ("job", lambda text: "pipelines.job_process" in text),
    ("worker", lambda text: "pipelines.worker_process" in text),
    ("reader", lambda text: "call_child.py" in text),
    ("step", lambda text: "steps/child.py" in text),
]


def _kind(process: psutil.Process) -> str:
    """Says what a process does; the warden of a step's process has the same command line."""
    text = " ".join(process.cmdline())
    kind = next((kind for kind, is_it in _KINDS if is_it(text)), "other")
    is_warden = kind == "step" and any("steps/child.py" in " ".join(child.cmdline()) for child in process.children())
    return "warden" if is_warden else kind
