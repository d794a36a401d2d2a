"""A job that takes a while without taking CPU, to be killed, stopped or watched."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import jobs

STEP = "import time\n\ndef slow(value):\n    time.sleep({secs})\n    return value\n"
HOOKS = str(Path(__file__).parent / "hooks")


@dataclasses.dataclass
class Job:
    """A corpus whose conversion takes a while without taking CPU."""

    folder: Path
    num_shards: int
    workers: int

    def command(self, out: str) -> list[str]:
        steps = ["--step", "slow_step:slow", "--shards", str(self.num_shards), "--workers", str(self.workers)]
        return ["convert", "--input", "in/*", "--output", out, *steps]

    def start(self, out: str, stop: str = "") -> subprocess.Popen[bytes]:
        env = jobs.environment({"GRISTMILL_TEST_STOP": stop} if stop else None)
        env["PYTHONPATH"] = os.pathsep.join([HOOKS, env["PYTHONPATH"]])
        log = (self.folder / f"{out}.log").open("wb")
        command = [*jobs.GRISTMILL, *self.command(out)]
        return subprocess.Popen(
            command, cwd=self.folder, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )

    def committed(self, out: str) -> dict[str, int]:
        """Returns the inode of every ledger: a shard that is made again gets another one."""
        folder = self.folder / out / "_gristmill/shards"
        return {path.name: path.stat().st_ino for path in folder.glob("*.json")} if folder.exists() else {}

    def kill_when(self, out: str, ready: Callable[[], bool], stop: str = "") -> None:
        process = self.start(out, stop)
        deadline = time.monotonic() + 240
        while not ready():
            assert process.poll() is None, (self.folder / f"{out}.log").read_text()
            assert time.monotonic() < deadline, "the moment never came"
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def finish(self, out: str) -> None:
        """Runs the same command again and checks that nothing committed was made again."""
        before = self.committed(out)
        for path in jobs.shards(self.folder / out):
            jobs.read_array_record(path)  # Nothing under a final name is partial.
        process = self.start(out)
        assert process.wait(timeout=240) == 0, (self.folder / f"{out}.log").read_text()
        after = self.committed(out)
        assert {name: after[name] for name in before} == before


def make_job(folder: Path, files: int, records: int, secs: float, num_shards: int, workers: int) -> Job:
    for file in range(files):
        jobs.write_tfrecord(folder / f"in/f{file}.tfrecord", [jobs.payload(file, i) for i in range(records)])
    with (folder / "in/f0.tfrecord").open("ab") as file:
        file.write(b"damaged tail")
    (folder / "slow_step.py").write_text(STEP.format(secs=secs))
    return Job(folder, num_shards, workers)
