"""Names of inputs in whole jobs: objects with empty parts, markers of folders, leftovers, and what a person sees."""

from __future__ import annotations

from pathlib import Path

import pytest

import jobs
from gcs_emulator import Emulator
from gcs_files import download
from gcs_jobs import out_of
from pipelines.cli import main
from transforms import gcs

OBJECTS = ("raw/a", "raw//b", "raw//c", "raw/sub//d", "raw/sub/e", "raw//sub/f")


def payloads(name: str) -> list[bytes]:
    return [b"%s-%d" % (name.encode(), number) for number in range(10)]


def put(url: str, name: str, data: bytes) -> None:
    gcs.bucket(url.removeprefix("gs://")).blob(name).upload_from_string(data)


@pytest.fixture
def bucket(emulator: Emulator) -> str:
    url = emulator.new_bucket()
    for name in OBJECTS:
        put(url, name, b"".join(map(jobs.frame, payloads(name))))
    return url


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("raw/", ["raw//b", "raw//c", "raw//sub/f", "raw/a", "raw/sub//d", "raw/sub/e"]),
        ("raw//", ["raw//b", "raw//c", "raw//sub/f"]),
        ("raw//*", ["raw//b", "raw//c"]),
    ],
)
def test_objects_with_empty_parts_are_converted_replayed_and_verified(
    bucket: str, tmp_path: Path, pattern: str, expected: list[str]
) -> None:
    out = f"{bucket}/out"
    arguments = ["--input", f"{bucket}/{pattern}", "--output", out]
    assert jobs.convert(*arguments) == 0
    assert jobs.records(download(out, tmp_path / "out")) == [one for name in expected for one in payloads(name)]
    assert jobs.report(tmp_path / "out")["files_skipped"] == 0
    put(bucket, "raw//c2", jobs.frame(b"new") + b"cut")
    assert jobs.convert(*arguments, "--append", "--set", "dead_letters.max_fraction=1") == 0
    assert jobs.records(download(out, tmp_path / "more"))[-1] == b"new"
    [letter] = jobs.dead_letters(tmp_path / "more")
    assert (letter["source"], letter["reason"]) == (f"{bucket}/raw//c2", "truncated")
    assert main(["verify", out]) == 0


def test_markers_of_folders_are_no_records_of_the_format_files(emulator: Emulator, tmp_path: Path) -> None:
    url = emulator.new_bucket()
    for name, data in (
        ("raw/", b""),
        ("raw/sub", b""),
        ("raw/sub/a", b"one"),
        ("raw/x_$folder$", b""),
        ("raw/z", b"two"),
    ):
        put(url, name, data)
    assert jobs.convert("--input", f"{url}/raw/", "--output", out_of(f"{url}/raw"), "--format", "files") == 0
    out = download(f"{url}/out", tmp_path / "out")
    assert jobs.records(out) == [b"one", b"two"]
    report = jobs.report(out)
    assert (report["files_seen"], report["files_skipped"], report["records_dead"]) == (2, 3, 0)
    assert report["notes"][-1] == "passed over by their names: 2 folder markers, 1 *_$folder$"


def test_leftovers_of_other_tools_are_neither_doubled_nor_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each is a whole TFRecord file, as if it had been cut where a record ends."""
    monkeypatch.chdir(tmp_path)
    jobs.write_tfrecord(tmp_path / "in/a.tfrecord", payloads("a"))
    leftovers = ("a.tfrecord.incompleteAB12CD", "a.tfrecord_.gstmp", "a.tfrecord.part", "a.tfrecord._COPYING_")
    leftovers += ("beam-temp-a-5f1d3c0a9b8e11ee8c990242ac120002/x.a.tfrecord", "a.tfrecord.idx", "a.tfrecord.md5")
    for name in leftovers:
        jobs.write_tfrecord(tmp_path / "in" / name, payloads("a"))
    arguments = ["--input", "in", "--output", "out"]
    assert jobs.convert(*arguments, "--dry-run") == 0
    said = capsys.readouterr().out
    assert "7 skipped" in said
    assert "passed over by their names: 1 *._copying_, 1 *.gstmp, 1 *.idx, 1 *.incomplete*, 1 *.md5 and 2 kinds" in said
    assert jobs.convert(*arguments) == 0
    assert jobs.records(tmp_path / "out") == payloads("a")
    assert jobs.report(tmp_path / "out")["files_skipped"] == 7
    assert jobs.convert("--input", "in/a.tfrecord.part", "in/*.gstmp", "--output", "asked") == 0
    assert jobs.records(tmp_path / "asked") == payloads("a") * 2


def test_an_input_that_is_the_output_is_refused_as_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    jobs.write_tfrecord(tmp_path / "both/a.tfrecord", payloads("a"))
    assert jobs.convert("--input", "both/*", "--output", "both") == 2
    assert "lies in the output folder, whose files are never inputs" in capsys.readouterr().err
    assert jobs.convert("--input", "both", "--output", "both/out") == 0
    assert "the output folder lies inside the input" in "".join(jobs.report(tmp_path / "both/out")["notes"])
    capsys.readouterr()
    assert jobs.convert("--input", "both", "--output", "both/out") == 0
    assert "nothing left to do" in capsys.readouterr().out
