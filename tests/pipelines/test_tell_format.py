"""`--format auto`: what all sampled inputs are decides, and a mixture is refused by name before any work."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

import jobs

JPEG = b"\xff\xd8\xff\xe0\0\x10JFIF" + bytes(200)
PDF = b"%PDF-1.7\n" + bytes(100)
JSONL = b'{"text": "a"}\n' * 3


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("in").mkdir()
    return tmp_path


def write(count: int, name: str, data: bytes | None = None) -> None:
    for number in range(count):
        path = Path(f"in/{name}-{number:02}")
        if data is None:
            jobs.write_tfrecord(path, [jobs.payload(number, at) for at in range(20)])
        else:
            path.write_bytes(data)


def convert(*flags: str) -> int:
    return jobs.convert("--input", "in", "--output", "out", *flags)


def test_formats_that_are_both_read_are_refused_with_counts_and_examples(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(5, "a")
    jobs.write_array_record(Path("in/b"), [b"x"])
    assert convert() == 2
    message = capsys.readouterr().err
    assert f"5 x a TFRecord file ({place}/in/a-00); 1 x an ArrayRecord file ({place}/in/b)" in message
    assert "--format tfrecord" in message
    assert "--input" in message
    assert not Path("out/_gristmill").exists() or not list(Path("out").rglob("*.jsonl"))


@pytest.mark.parametrize(
    ("data", "noun"),
    [
        (JPEG, "a JPEG picture"),
        (PDF, "a PDF document"),
        (JSONL, "JSON lines"),
        (gzip.compress(JSONL, mtime=0), "gzip data of JSON lines"),
    ],
)
def test_as_many_files_of_another_kind_as_data_are_refused(
    data: bytes, noun: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(3, "a")
    write(3, "b", data)
    assert convert() == 2
    assert f"3 x a TFRecord file ({place}/in/a-00); 3 x {noun} ({place}/in/b-00)" in capsys.readouterr().err
    assert convert("--format", "tfrecord", "--set", "dead_letters.max_fraction=0.9") == 0
    assert len(jobs.records(place / "out")) == 60


def test_few_files_of_another_kind_are_dead_letters_and_told_by_a_note(place: Path) -> None:
    write(30, "a")
    write(2, "b", JPEG)
    assert convert() == 0
    assert [letter["reason"] for letter in jobs.dead_letters(place / "out")] == ["not_tfrecord"] * 2
    assert "it is a JPEG picture" in jobs.dead_letters(place / "out")[0]["error"]
    notes = " ".join(jobs.report(place / "out")["notes"])
    assert f"of 32 inputs that were looked at: 30 x a TFRecord file ({place}/in/a-00); 2 x a JPEG picture" in notes


def test_companions_of_data_may_be_as_many_as_they(place: Path) -> None:
    write(2, "part")
    Path("in/README.md").write_text("# About\n\nTwo parts.\n")
    Path("in/dataset_info.json").write_text('{"name": "demo"}\n')
    assert convert("--set", "dead_letters.max_fraction=0.6") == 0
    assert len(jobs.dead_letters(place / "out")) == 2


def test_damaged_files_do_not_count(place: Path) -> None:
    write(2, "a")
    write(5, "b", bytes(300))
    assert convert("--set", "dead_letters.max_fraction=1") == 0


def test_files_of_which_none_is_read_are_named(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(4, "a", JPEG)
    write(2, "b", PDF)
    assert convert() == 2
    message = capsys.readouterr().err
    assert f"4 x a JPEG picture ({place}/in/a-00); 2 x a PDF document ({place}/in/b-00)" in message
    assert "--format files" in message


def test_compressed_tfrecord_needs_no_name(place: Path) -> None:
    write(1, "a")
    whole = Path("in/a-00").read_bytes()
    Path("in/a-00").write_bytes(gzip.compress(whole))
    assert convert() == 0
    assert len(jobs.records(place / "out")) == 20
