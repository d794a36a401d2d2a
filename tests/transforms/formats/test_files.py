"""Raw files: one record a file."""

from __future__ import annotations

from pathlib import Path

import pytest

import corpora
from corpora import MemoryFile
from transforms.elements import Span
from transforms.formats import FORMATS, files, guess_format, load_format
from transforms.sources import open_input


@pytest.mark.parametrize("data", [b"x", bytes(100), b"\r\n\0\xff" * 50, corpora.text_payload(1, 3_000_000)])
def test_a_file_is_one_record_of_its_bytes(tmp_path: Path, data: bytes) -> None:
    source = corpora.write_file(tmp_path / "x", data)
    file = open_input(source)
    result = corpora.gather(files.read_range(file, source, 0, source.size, corpora.make_spec(format="files")))
    file.close()
    assert (result.records, result.positions, result.dead) == ([data], [0], [])
    assert result.num_bytes == len(data)
    assert result.span == Span(0, len(data), 0, len(data))


@pytest.mark.parametrize("size", [999, 1000])
def test_a_file_up_to_the_maximum_is_a_record(size: int) -> None:
    assert corpora.read_bytes(files.read_range, bytes(size), max_record_bytes=1000).records == [bytes(size)]


def test_a_file_above_the_maximum_is_a_dead_letter_and_is_not_read() -> None:
    file = MemoryFile(b"", size=1 << 50)
    result = corpora.read_bytes(files.read_range, file, max_record_bytes=1 << 20)
    assert result.records == []
    assert result.regions == [(0, 1 << 50, "record_too_large")]
    assert result.dead[0].whole_file
    assert file.num_reads == 0
    assert result.num_bytes == 1 << 50


@pytest.mark.parametrize("kept", [0, 1, 99])
def test_a_file_that_shrinks_while_it_is_read_is_a_dead_letter(kept: int) -> None:
    result = corpora.read_bytes(files.read_range, MemoryFile(bytes(kept), size=100))
    assert result.records == []
    assert result.regions == [(0, 100, "input_changed")]
    assert result.dead[0].whole_file
    assert f"100 bytes at first, {kept} now" in result.dead[0].error
    assert result.num_bytes == 100


def test_files_cannot_be_split() -> None:
    assert not files.SPLITTABLE


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_offers_the_same_names(name: str) -> None:
    module = load_format(name)
    assert isinstance(module.SPLITTABLE, bool)
    assert callable(module.read_range)


def test_unknown_format_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'csv'.*tfrecord, array_record, files"):
        load_format("csv")


@pytest.mark.parametrize(
    ("name", "head", "expected"),
    [
        ("/a/b.bin", corpora.frame(b"abc"), "tfrecord"),
        ("/a/b.jpg", corpora.header(7), "tfrecord"),
        ("/a/b.array_record", corpora.header(7), "tfrecord"),
        ("/a/corpus-train.array_record-00000-of-00002", b"", "array_record"),
        ("/a/b.ArrayRecord", b"damaged", "array_record"),
        ("/a/b.tfrecord-00000-of-00010", b"damaged", "tfrecord"),
        ("/a/b.tfrecords.gz", b"\x1f\x8b\x08", "tfrecord"),
        ("/a/b.tfrec", b"", "tfrecord"),
        ("/a.tfrecord/b", b"", None),
        ("/a/tfrecord", b"", None),
        ("/a/b.jpg", b"\xff\xd8\xff", None),
        ("/a/b.bin", bytes.fromhex("83af70d10d884a3f000000000000000040000000000000009187"), "array_record"),
    ],
)
def test_format_is_guessed_from_the_bytes_and_then_from_the_name(name: str, head: bytes, expected: str | None) -> None:
    assert guess_format(name, head) == expected
