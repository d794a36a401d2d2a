"""Two runs on one output: the first is suspended for so long that the second takes its lock over, then it goes on.

Both believe to be on hosts of their own, in PID namespaces of their own where that is permitted.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path

import psutil

import jobs
from torture.acts import SECS
from torture.misfortunes import with_tests
from torture.oracle import require
from torture.tally import Case, Tally

_BEAT_SECS = 0.25
_WAIT_SECS = 200
_LOOK_SECS = 0.002
_SIGNS = {"preparing": "_gristmill/lock.json", "converting": "_gristmill/shards/*", "publishing": "*array_record-*"}
_LEFT = ("attempts/", "lock", "tries/", ".gristmill-")


def run_case(case: Case, folder: Path) -> Tally:
    """Runs one case in an empty folder.

    Raises:
        DiscrepancyError: A law does not hold.
    """
    pair = _Pair(random.Random(f"{case.seed}/{case}"), folder)
    try:
        moment = pair.run()
    finally:
        pair.end()
    return Tally(owners=Counter([moment]))


class _Pair:
    """The two runs."""

    def __init__(self, rng: random.Random, folder: Path) -> None:
        self._rng = rng
        self._folder = folder
        self._out = folder / "out"
        for number in range(3):
            payloads = [jobs.payload(number, at) for at in range(rng.randint(40, 120))]
            jobs.write_tfrecord(folder / f"in/f{number}.tfrecord", payloads)
        self._first = self._arguments("in/*", rng.randint(20, 40), rng.choice(["0", "2"]))
        replaces = rng.random() < 0.7
        other = self._arguments("in/f0*", rng.randint(1, 5), "0")
        self._second = [*other, "--overwrite"] if replaces else self._first
        self._processes: list[subprocess.Popen[bytes]] = []

    @staticmethod
    def _arguments(pattern: str, shards: int, workers: str) -> list[str]:
        return ["--input", pattern, "--shards", str(shards), "--workers", workers, "--step", "torture.acts:slow"]

    def _start(self, out: str, host: str, arguments: list[str], secs: float = 0.0) -> subprocess.Popen[bytes]:
        env = jobs.environment(with_tests())
        env["PYTHONPATH"] += f":{Path(__file__).parents[1] / 'hooks'}"
        env |= {SECS: str(secs), "GRISTMILL_TEST_HOST": host, "GRISTMILL_TEST_BEAT": str(_BEAT_SECS)}
        command = [*_apart(), *jobs.GRISTMILL, "convert", "--output", out, *arguments]
        with (self._folder / f"{host}.log").open("ab") as log:
            process = subprocess.Popen(
                command, cwd=self._folder, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        self._processes.append(process)
        return process

    def run(self) -> str:
        """Runs both, checks the end, and returns at what the first run was suspended."""
        require(self._start("reference", "hostr", self._second).wait(_WAIT_SECS) == 0, "the undisturbed run failed")
        first = self._start("out", "hosta", self._first, secs=self._rng.choice([0.001, 0.004]))
        moment = self._wait_for_moment(first)
        suspended = self._suspend(first)
        time.sleep(9 * _BEAT_SECS)
        status = self._start("out", "hostb", self._second).wait(_WAIT_SECS)
        held_still = status == 1 and "in the middle of a change" in (self._folder / "hostb.log").read_text()
        require(status == 0 or held_still, f"the second run ended with {status}, see hostb.log")
        made = None if held_still else jobs.content(self._out)
        for process in suspended:
            with contextlib.suppress(psutil.Error):
                process.resume()
        ended = first.wait(_WAIT_SECS)
        if held_still:
            require(ended == 0, f"the first run, which nobody could disturb, ended with {ended}")
            return "suspended in a change"
        self._check(made, ended)
        return moment

    def _check(self, made: dict[str, str] | None, status: int) -> None:
        require(status == 1, f"the run that had lost its lock ended with {status}, see hosta.log")
        require("lost its lock" in (self._folder / "hosta.log").read_text(), "it did not say so, see hosta.log")
        require(jobs.content(self._out) == made, "it changed what the next owner had made")
        require(made == jobs.content(self._folder / "reference"), "the outcome is not that of the undisturbed run")
        left = [name for name in jobs.tree(self._out) if any(part in name for part in _LEFT)]
        require(left == [], f"left behind: {left}")
        done = jobs.spawn(["verify", "out"], self._folder, timeout_secs=_WAIT_SECS)
        require(done.returncode == 0, f"verify: {done.stdout}")

    def _wait_for_moment(self, process: subprocess.Popen[bytes]) -> str:
        """Waits until the run has prepared its output, committed some shards, or given some names."""
        kind = self._rng.choice(["preparing", "converting", "publishing", "publishing"])
        pattern = {"preparing": "_gristmill/lock.json", "converting": "_gristmill/shards/*"}.get(
            kind, "*array_record-*"
        )
        wanted = self._rng.randint(1, 15) if kind != "preparing" else 1
        deadline = time.monotonic() + _WAIT_SECS
        while len(list(self._out.glob(pattern))) < wanted:
            require(process.poll() is None, "the first run ended too early, see hosta.log")
            require(time.monotonic() < deadline, "the moment never came, see hosta.log")
            time.sleep(_LOOK_SECS)
        return f"suspended while {kind}"

    def _suspend(self, process: subprocess.Popen[bytes]) -> list[psutil.Process]:
        """Stops the run, all its processes, and those that they had just begun."""
        found: list[psutil.Process] = []
        while True:
            with contextlib.suppress(psutil.Error):
                whole = psutil.Process(process.pid)
                new = [one for one in [whole, *whole.children(recursive=True)] if one not in found]
                for one in new:
                    one.suspend()
                found += new
                if new:
                    continue
            return found

    def end(self) -> None:
        """Ends what this case started, however it came out."""
        for process in self._processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@functools.cache
def _apart() -> list[str]:
    """Returns what starts a command in a PID namespace of its own, nothing where that is not permitted."""
    command = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    try:
        done = subprocess.run([*command, "true"], capture_output=True, timeout=20, check=False)
    except OSError:
        return []
    return command if done.returncode == 0 else []
