"""Inputs with a new time: where their bytes are the same, a set grows and resumes as if nothing had happened."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

import jobs

FILES = 3


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three files that shards share and twenty that are a run in one of them."""
    monkeypatch.chdir(tmp_path)
    for file in range(FILES):
        jobs.write_tfrecord(Path(f"in/f{file}"), [jobs.payload(file, number) for number in range(200)])
    for file in range(20):
        jobs.write_tfrecord(Path(f"in/g{file:02}"), [jobs.payload(file, number) for number in range(3)])
    return tmp_path


def convert(*flags: str) -> int:
    return jobs.convert("--input", "in", "--output", "out", "--shards", "5", *flags)


def touch() -> None:
    """Gives each input a time that it never had; its number of digits too."""
    for number, path in enumerate(sorted(Path("in").iterdir())):
        os.utime(path, ns=(number, number + 10 ** (number % 9)))


def everything() -> list[bytes]:
    big = [jobs.payload(file, number) for file in range(FILES) for number in range(200)]
    return big + [jobs.payload(file, number) for file in range(20) for number in range(3)]


def change(path: str) -> None:
    data = bytearray(Path(path).read_bytes())
    data[-6] ^= 1
    Path(path).write_bytes(bytes(data))


def forget_checksums() -> None:
    """Makes the ledgers those of a version that kept none."""
    for path in Path("out/_gristmill/shards").iterdir():
        fields = json.loads(path.read_text())
        for row in fields["sources"]:
            del row[11:]
            if row[3] is not None:
                del row[3][4:]
        path.write_text(json.dumps(fields))


def test_touched_inputs_are_no_concern_of_an_append(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert convert() == 0
    touch()
    jobs.write_tfrecord(Path("in/new"), [b"new"])
    assert convert("--append") == 0
    assert sorted(jobs.records(place / "out")) == sorted([*everything(), b"new"])
    assert "23 inputs have a new time" in caplog.text
    caplog.clear()
    assert convert("--append") == 0
    assert "have a new time" not in caplog.text  # They are known now.
    assert jobs.verify("out") == 0


def test_touched_inputs_are_no_concern_of_the_same_command(place: Path) -> None:
    assert convert() == 0
    before = jobs.content(place / "out")
    touch()
    assert convert() == 0
    after = jobs.content(place / "out")
    assert before.pop("manifest.json") != after.pop("manifest.json")  # It names the plan.
    assert after == before
    touched = jobs.report(place / "out")
    assert (touched["status"], touched["records_written"]) == ("done", len(everything()))
    assert convert("--append") == 0


def test_a_job_that_was_stopped_goes_on_with_touched_inputs(place: Path) -> None:
    assert convert() == 0
    before = jobs.content(place / "out")
    for name in ("manifest.json", "_gristmill/report.json", "_gristmill/shards/00002.json"):
        (place / "out" / name).unlink()
    touch()
    assert convert() == 0
    after = jobs.content(place / "out")
    assert before.pop("manifest.json") != after.pop("manifest.json")
    assert after == before
    assert jobs.verify("out") == 0


@pytest.mark.parametrize("name", ["in/f1", "in/g07"])
@pytest.mark.parametrize("flags", [[], ["--append"]], ids=["resume", "append"])
def test_an_input_of_the_same_size_with_other_bytes_is_named_with_the_ways_out(
    name: str, flags: list[str], place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert convert() == 0
    touch()
    change(name)
    assert convert(*flags) == 2
    message = capsys.readouterr().err
    assert f"{place}/{name}. " in message
    assert "--accept-touched" in message
    assert "--overwrite" in message
    assert convert(*flags, "--accept-touched") == 0
    assert sorted(jobs.records(place / "out")) == sorted(everything())


@pytest.mark.parametrize("flags", [[], ["--append"]], ids=["resume", "append"])
def test_a_set_without_checksums_takes_the_word_for_touched_inputs(
    flags: list[str], place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert convert() == 0
    forget_checksums()
    assert jobs.verify("out") == 0
    touch()
    assert convert(*flags) == 2
    message = capsys.readouterr().err
    assert "no checksum tells" in message
    assert "f0, " in message
    assert "and 18 more" in message
    assert "--accept-touched" in message
    assert convert(*flags, "--accept-touched") == 0
    assert convert(*flags) == 0
    assert sorted(jobs.records(place / "out")) == sorted(everything())


def test_inputs_that_were_restored_from_a_copy_are_the_same_for_array_record_too(place: Path) -> None:
    jobs.write_array_record(Path("ar/a.array_record"), everything())
    arguments = ["--input", "ar", "--output", "out", "--shards", "3"]
    assert jobs.convert(*arguments) == 0
    shutil.copy("ar/a.array_record", "copy")
    os.replace("copy", "ar/a.array_record")
    assert jobs.convert(*arguments, "--append") == 0
    assert jobs.convert(*arguments) == 0
