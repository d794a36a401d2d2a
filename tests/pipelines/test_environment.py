"""Faults of the machine: full disks, few descriptors, outputs and inputs that cannot be used."""

from __future__ import annotations

import itertools
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import jobs
from pipelines import run_job, space
from privileges import as_anybody
from transforms import budget, job_lock, report


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for file in range(3):
        jobs.write_tfrecord(tmp_path / f"in/f{file}", [jobs.payload(file, i) for i in range(100)])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def all_payloads() -> list[bytes]:
    return [jobs.payload(file, i) for file in range(3) for i in range(100)]


class TestSpace:
    """A disk that the output will not fit on."""

    @pytest.fixture(autouse=True)
    def _full(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
        assert space.shutil is shutil

    def test_is_foreseen_before_any_work(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert jobs.convert("--input", "in/*", "--output", "out") == 2
        message = capsys.readouterr().err
        assert "where 1,000 are free" in message
        assert "write.check_space=false" in message
        assert not (folder / "out/_gristmill/plan.jsonl").exists()

    def test_can_be_overruled(self, folder: Path) -> None:
        assert jobs.convert("--input", "in/*", "--output", "out", "--set", "write.check_space=false") == 0
        assert jobs.records(folder / "out") == all_payloads()

    def test_is_a_warning_where_steps_may_leave_much_out(self, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
        (folder / "passing.py").write_text("def same(value):\n    return value\n")
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(str(folder))
            assert jobs.convert("--input", "in/*", "--output", "out", "--step", "passing:same") == 0
        assert "unless its steps leave much out" in caplog.text


@pytest.mark.parametrize("workers", ["auto", "2"])
def test_64_descriptors_are_enough(workers: str, folder: Path) -> None:
    for file in range(3, 120):
        jobs.write_tfrecord(folder / f"in/f{file:03d}", [jobs.payload(file % 90, i) for i in range(3)])
    command = ["convert", "--input", "in/*", "--output", "out", "--shards", "20", "--workers", workers]
    limited = ["sh", "-c", 'ulimit -n 64; exec "$@"', "limited"]
    done = jobs.spawn(command, cwd=folder, prefix=limited)
    assert done.returncode == 0, done.stderr
    assert jobs.report(folder / "out")["records_written"] == 300 + 117 * 3
    assert jobs.report(folder / "out")["records_dead"] == 0


@pytest.mark.parametrize("command", ["convert", "verify", "inspect"])
def test_too_little_address_space_ends_with_a_message(command: str, folder: Path) -> None:
    arguments = {
        "convert": ["--input", "in/*", "--output", "new"],
        "verify": ["out"],
        "inspect": ["in/f0"],
    }[command]
    assert jobs.convert("--input", "in/*", "--output", "out") == 0
    limited = ["sh", "-c", 'ulimit -v 1000000; exec "$@"', "limited"]
    done = jobs.spawn([command, *arguments], cwd=folder, prefix=limited, timeout_secs=60)
    assert done.returncode == 1
    assert f"gristmill {command}: a process cannot start the threads" in done.stderr
    assert "ulimit -v is 1000000" in done.stderr


def test_an_output_that_cannot_be_written_is_found_before_any_work(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert jobs.convert("--input", "in/*", "--output", "in/f0/out") == 2
    assert "write.output: cannot write" in capsys.readouterr().err


def test_dead_letters_that_cannot_be_written_end_the_job(folder: Path) -> None:
    with (folder / "in/f0").open("ab") as file:
        file.write(b"tail")
    (folder / "out").mkdir()
    (folder / "out/_dead_letters").write_bytes(b"a file stands where the folder should be")
    done = jobs.spawn(["convert", "--input", "in/*", "--output", "out"], cwd=folder)
    assert done.returncode == 1
    assert "_dead_letters" in done.stderr
    assert not (folder / "out/manifest.json").exists()
    (folder / "out/_dead_letters").unlink()
    assert jobs.convert("--input", "in/*", "--output", "out") == 0
    assert jobs.records(folder / "out") == all_payloads()
    assert [letter["reason"] for letter in jobs.dead_letters(folder / "out")] == ["truncated"]


def test_an_input_that_may_not_be_read_is_a_dead_letter_and_replayed_once_it_may(folder: Path) -> None:
    (folder / "in/f1").chmod(0)
    with as_anybody():
        lenient = ("--set", "dead_letters.max_fraction=0.9")
        assert jobs.convert("--input", "in/*", "--output", "out", *lenient) == 0
    [letter] = jobs.dead_letters(folder / "out")
    assert (Path(letter["source"]).name, letter["reason"]) == ("f1", "permission_denied")
    assert jobs.records(folder / "out") == [payload for payload in all_payloads() if b"record-01" not in payload]
    assert jobs.replay("out") == 0
    assert sorted(jobs.records(folder / "out")) == sorted(all_payloads())


def test_an_input_that_changed_since_it_was_listed_is_a_dead_letter(folder: Path) -> None:
    (folder / "growing.py").write_text(
        "def grow(value):\n    with open('in/f2', 'ab') as file:\n        file.write(value)\n    return value\n"
    )
    command = ["convert", "--input", "in/*", "--output", "out", "--shards", "1", "--step", "growing:grow"]
    done = jobs.spawn([*command, "--set", "dead_letters.max_fraction=1"], folder)
    assert done.returncode == 0, done.stderr
    assert jobs.records(folder / "out") == all_payloads()[:200]
    [letter] = jobs.dead_letters(folder / "out")
    assert (letter["source"], letter["reason"]) == (str(folder / "in/f2"), "input_changed")


def test_an_input_that_grows_while_it_is_read_gives_what_was_listed(folder: Path) -> None:
    many = [jobs.payload(2, i) for i in range(60_000)]
    jobs.write_tfrecord(folder / "in/f2", many)
    (folder / "growing.py").write_text(
        "def grow(value):\n    if value.startswith(b'record-02-000000 '):\n        with open('in/f2', 'ab') as file:\n"
        "            file.write(b'more')\n    return value\n"
    )
    command = ["convert", "--input", "in/f2", "--output", "out", "--shards", "1", "--step", "growing:grow"]
    command += ["--set", "write.secs_per_record=0"]  # Else the step grows it before it is listed.
    done = jobs.spawn(command, folder)
    assert done.returncode == 0, done.stderr
    assert jobs.records(folder / "out") == many
    assert jobs.dead_letters(folder / "out") == []


def test_a_clock_that_jumps_does_not_matter(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()
    clock = SimpleNamespace(**{name: getattr(time, name) for name in ("monotonic", "sleep", "time_ns")})
    clock.time = lambda: time.time() + (-1) ** next(ticks) * 1e6
    for module in (budget, job_lock, report, run_job):
        monkeypatch.setattr(module, "time", clock)
    for _ in range(2):
        assert jobs.convert("--input", "in/*", "--output", "out", "--shards", "3") == 0
        assert jobs.records(folder / "out") == all_payloads()
    assert next(ticks) > 2
