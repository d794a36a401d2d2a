"""Streams that are closed, full or read by nobody, and signals before the job begins: one sentence, no traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

import jobs

FILES = 300


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of a job whose report is longer than what a pipe holds."""
    folder = tmp_path_factory.mktemp("streams")
    for file in range(FILES):
        jobs.write_tfrecord(folder / f"in/{file:05d}", [jobs.payload(file % 100, 0)])
    assert jobs.convert("--input", folder / "in", "--output", folder / "out", "--shards", "match") == 0
    return folder / "out"


def run(command: str, out: Path) -> subprocess.CompletedProcess[str]:
    """Runs a line of shell in which $G is the command and $OUT the output."""
    words = " ".join(jobs.GRISTMILL)
    environment = jobs.environment({"OUT": str(out)})
    line = f"set -o pipefail; {command.replace('$G', words)}"
    return subprocess.run(["bash", "-c", line], env=environment, capture_output=True, text=True, timeout=120)


class TestStreams:
    def test_a_reader_that_goes_away_is_no_error(self, out: Path) -> None:
        done = run('$G report "$OUT" --json | head -n 1', out)
        assert (done.stdout, done.stderr) == ("{\n", "")

    @pytest.mark.parametrize("arguments", ["", "--json"])
    def test_output_that_cannot_be_written_is_said_and_fails(self, arguments: str, out: Path) -> None:
        done = run(f'$G report "$OUT" {arguments} > /dev/full', out)
        assert done.returncode == 1
        assert "No space left on device" in done.stderr
        assert "Traceback" not in done.stderr

    def test_a_job_that_is_done_is_done_though_it_cannot_say_so(self, out: Path, tmp_path: Path) -> None:
        done = run(f'$G convert --workers 0 --input "$OUT/../in" --output {tmp_path}/out > /dev/full', out)
        assert (done.returncode, "Traceback" in done.stderr) == (0, False)
        assert len(jobs.records(tmp_path / "out")) == FILES

    @pytest.mark.parametrize("closed", ["2>&-", "<&-", "<&- 2>&-"])
    def test_closed_streams_change_nothing(self, closed: str, out: Path, tmp_path: Path) -> None:
        done = run(f'$G convert --workers 1 --input "$OUT/../in" --output {tmp_path}/out {closed}', out)
        assert done.returncode == 0
        assert f"{FILES} written" in done.stdout
        assert len(jobs.records(tmp_path / "out")) == FILES

    def test_closed_output_changes_nothing_else(self, out: Path, tmp_path: Path) -> None:
        done = run(f'$G convert --workers 0 --input "$OUT/../in" --output {tmp_path}/out >&-', out)
        assert (done.returncode, "Traceback" in done.stderr) == (0, False)
        assert len(jobs.records(tmp_path / "out")) == FILES


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("flags", [[], ["--dry-run"], ["--workers", "0"]])
def test_a_signal_while_it_plans_stops_the_command(number: signal.Signals, flags: list[str], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "list")  # Planning waits for whoever writes the names.
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    command = [*jobs.GRISTMILL, "convert", "--input", "@list", "--output", "out", *flags]
    environment = jobs.environment({"TMPDIR": str(temporary)})
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    while not any(temporary.glob("gristmill-*")) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.2)
    process.send_signal(number)
    printed, said = process.communicate(timeout=60)
    assert (process.returncode, printed) == (1, "")
    assert said == "gristmill convert: stopped. Nothing is lost: the same command goes on from here.\n"
    assert list(temporary.iterdir()) == []
    assert not (tmp_path / "out").exists()
