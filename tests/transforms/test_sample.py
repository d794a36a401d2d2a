"""What a look at a few inputs says of the corpus: its record sizes, and whether compressing it pays."""

from __future__ import annotations

import gzip
import random
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

import corpora
from transforms.elements import Input
from transforms.plan import ShardsRequest, choose_layout
from transforms.sample import choose_compression, iter_sample, take_sample

MIB = 1 << 20


def noise(num_bytes: int) -> bytes:
    return random.Random(num_bytes).randbytes(num_bytes)


def record_bytes(sources: list[Input], format_name: str) -> float:
    return take_sample(sources, corpora.make_spec(format=format_name)).estimate().record_bytes


def test_records_of_one_size_are_measured_with_their_framing(tmp_path: Path) -> None:
    source = corpora.write_file(tmp_path / "a.tfrecord", corpora.frame_all([b"x" * 984] * 50))
    assert record_bytes([source], "tfrecord") == pytest.approx(1000)


def test_compressed_records_are_measured_as_they_inflate(tmp_path: Path) -> None:
    data = gzip.compress(corpora.frame_all([noise(984)] * 50))
    for name in ("a.tfrecord.gz", "a.tfrecord"):
        assert record_bytes([corpora.write_file(tmp_path / name, data)], "tfrecord") == pytest.approx(1000, rel=0.01)


@pytest.mark.parametrize("name", ["huge.tfrecord", "huge.tfrecord.gz"])
def test_one_huge_record_is_not_taken_for_millions_of_small_ones(tmp_path: Path, name: str) -> None:
    huge = corpora.frame(noise(3 * MIB))
    small = corpora.frame_all([b"x" * 4] * 100)
    sources = [corpora.write_file(tmp_path / f"{number}.tfrecord", small) for number in range(6)]
    sources.append(corpora.write_file(tmp_path / name, gzip.compress(huge, 1) if name.endswith("gz") else huge))
    sample = take_sample(sources, corpora.make_spec(format="tfrecord"))
    total = 6 * len(small) + len(huge)
    assert total / sample.estimate().record_bytes == pytest.approx(601, rel=0.01)
    assert choose_compression(sample) == "uncompressed"  # Nearly all bytes are those of the huge record.


def test_each_input_counts_as_large_as_it_is(tmp_path: Path) -> None:
    few = corpora.write_file(tmp_path / "few.tfrecord", corpora.frame_all([b"x" * 84] * 10))
    many = corpora.write_file(tmp_path / "many.tfrecord", corpora.frame_all([b"y" * 9984] * 1000))
    total = few.size + many.size
    assert total / record_bytes([few, many], "tfrecord") == pytest.approx(1010)


def test_array_record_is_measured_in_bytes_of_its_compressed_file(tmp_path: Path) -> None:
    source = corpora.write_array_record(tmp_path / "a.array_record", [b"much of the same " * 1000] * 3000)
    assert source.size < MIB < 3000 * 17_000
    assert record_bytes([source], "array_record") == pytest.approx(source.size / 3000)


def test_damage_and_what_is_not_there_say_nothing(tmp_path: Path) -> None:
    good = corpora.write_file(tmp_path / "good.tfrecord", corpora.frame_all([b"x" * 984] * 50))
    page = corpora.write_file(tmp_path / "page.tfrecord", b"<!doctype html>" + b" " * 100_000)
    gone = corpora.write_file(tmp_path / "gone.tfrecord", b"x")
    Path(gone.name).unlink()
    assert record_bytes([page, good, gone], "tfrecord") == pytest.approx(1000)
    assert record_bytes([page, gone], "tfrecord") == 1024


def test_a_length_that_no_file_has_does_not_make_the_sample_large(tmp_path: Path) -> None:
    source = corpora.write_file(tmp_path / "a.tfrecord", corpora.header(1 << 40) + noise(MIB))
    [sample] = iter_sample([source], corpora.make_spec(format="tfrecord"))
    assert sum(map(len, sample.payloads)) <= MIB
    assert sample.estimate().record_bytes == source.size


@pytest.mark.parametrize(
    ("payload", "expected"),
    [(noise(2000), "uncompressed"), (b"words and words " * 125, "zstd:3"), (b"", "uncompressed")],
)
def test_compression_is_chosen_where_it_saves(tmp_path: Path, payload: bytes, expected: str) -> None:
    for format_name, data in (("tfrecord", corpora.frame_all([payload] * 20)), ("files", payload or b"\0")):
        source = corpora.write_file(tmp_path / f"a.{format_name}", data)
        assert choose_compression(take_sample([source], corpora.make_spec(format=format_name))) == expected


def test_records_of_another_size_further_on_make_shards_by_bytes(tmp_path: Path) -> None:
    small = corpora.frame_all([b"%08d" % number for number in range(40_000)])
    huge = corpora.frame(bytes(60 << 20))
    source = corpora.write_file(tmp_path / "x", small + huge)
    sample = take_sample([source], corpora.make_spec())
    assert sample.uneven == str(tmp_path / "x")
    layout = choose_layout(ShardsRequest.parse("auto"), source.size, sample.estimate().record_bytes)
    assert layout.num_shards == 1  # By the records at its beginning they would be 131.


def test_even_records_of_a_large_input_are_counted_by_its_beginning(tmp_path: Path) -> None:
    source = corpora.write_file(tmp_path / "x", corpora.frame_all([bytes(1_000)]) * 40_000)
    sample = take_sample([source], corpora.make_spec())
    assert sample.uneven is None
    assert sample.estimate().record_bytes == 1_016


@pytest.mark.parametrize("compress", [corpora.gzip_of, zlib.compress])
def test_compressed_inputs_are_known_by_content(compress: Callable[[bytes], bytes], tmp_path: Path) -> None:
    data = corpora.frame_all(corpora.make_payloads(5_000))
    sources = [corpora.write_file(tmp_path / f"{number}", compress(data)) for number in range(3)]
    plain = corpora.write_file(tmp_path / "plain", corpora.frame_all([b"x"]))
    estimate = take_sample([*sources, plain], corpora.make_spec()).estimate()
    assert estimate.all_compressed
    assert estimate.inflation == pytest.approx(len(data) / sources[0].size, rel=0.1)
    assert estimate.weigh(sources[0]) == pytest.approx(len(data), rel=0.1)
    few = take_sample([sources[0], corpora.write_file(tmp_path / "data", data)], corpora.make_spec()).estimate()
    assert not few.all_compressed
