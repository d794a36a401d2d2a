"""ArrayRecord as a source: each record once whatever the ranges, and what damage costs."""

from __future__ import annotations

import contextlib
import os
import random
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import corpora
from corpora import RangeResult
from transforms.elements import BATCH_MAX_BYTES, BATCH_MAX_RECORDS, Input, Span
from transforms.formats import array_record
from transforms.sources import LocalFile, open_input

MIB = 1 << 20


def read(source: Input, start: int = 0, end: int | None = None, **changes: Any) -> RangeResult:
    file = open_input(source)
    try:
        stop = source.size if end is None else end
        return corpora.gather(array_record.read_range(file, source, start, stop, corpora.make_spec(**changes)))
    finally:
        file.close()


@pytest.fixture
def corpus(tmp_path: Path) -> tuple[Input, list[bytes]]:
    payloads = corpora.make_payloads(200, 60)
    return corpora.write_array_record(tmp_path / "x", payloads), payloads


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 100, 1023, 1024, 1025, 5000])
def test_whole_file_gives_every_record_with_its_row(tmp_path: Path, count: int) -> None:
    payloads = corpora.make_payloads(count, 30)
    source = corpora.write_array_record(tmp_path / "x", payloads)
    result = read(source)
    assert result.records == payloads
    assert result.positions == list(range(count))
    assert result.dead == []
    assert result.span == Span(0, source.size, 0, source.size)
    assert result.num_bytes == sum(map(len, payloads))
    assert result.rolls == {False}


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 50, 131])
@pytest.mark.parametrize("seed", range(4))
def test_ranges_at_any_cuts_cover_each_record_once(tmp_path: Path, count: int, seed: int) -> None:
    payloads = corpora.make_payloads(count, 40, seed=seed)
    source = corpora.write_array_record(tmp_path / "x", payloads)
    rng = random.Random(seed)
    cuts = [rng.randrange(1, source.size) for _ in range(rng.choice([1, 3, 20]))]
    results = [read(source, *pair) for pair in corpora.cut_ranges(source.size, cuts)]
    assert [record for result in results for record in result.records] == payloads
    assert [position for result in results for position in result.positions] == list(range(count))
    assert corpora.add_up_ranges(results, source.size).apart == []


def test_cuts_on_either_side_of_a_records_position_move_it_across(tmp_path: Path) -> None:
    payloads = corpora.make_payloads(7, 40)
    source = corpora.write_array_record(tmp_path / "x", payloads)
    for row in range(1, 7):
        place = row * source.size / 7
        for cut in {int(place) - 1, int(place), int(place) + 1}:
            left, right = read(source, 0, cut), read(source, cut)
            assert left.positions == [number for number in range(7) if number * source.size < cut * 7]
            assert left.records + right.records == payloads


@pytest.mark.parametrize(
    "options", ["group_size:1,uncompressed", "group_size:2", "group_size:7,zstd:3", "group_size:65536,brotli:3"]
)
def test_input_of_any_options_is_read(tmp_path: Path, options: str) -> None:
    payloads = corpora.make_payloads(300, 80, kind="int64")
    source = corpora.write_array_record(tmp_path / "x", payloads, options)
    results = [read(source, *pair) for pair in corpora.cut_ranges(source.size, [source.size // 3, source.size // 2])]
    assert [record for result in results for record in result.records] == payloads
    assert [position for result in results for position in result.positions] == list(range(300))


def flipped(source: Input, at: int, bit: int = 0) -> Input:
    """The file with one bit flipped, under another name."""
    data = Path(source.name).read_bytes()
    return corpora.write_file(Path(source.name + "-damaged"), corpora.flip_bit(data, at, bit))


def where_it_stands(source: Input, payload: bytes) -> int:
    """Where an uncompressed payload stands in the file."""
    data = Path(source.name).read_bytes()
    assert data.count(payload) == 1
    return data.index(payload)


@pytest.mark.parametrize("row", [0, 57, 199])
def test_one_flipped_bit_loses_one_record_and_names_its_row(tmp_path: Path, row: int) -> None:
    payloads = [corpora.text_payload(1000 + index, 50) for index in range(200)]
    source = corpora.write_array_record(tmp_path / "x", payloads, "group_size:1,uncompressed")
    result = read(flipped(source, where_it_stands(source, payloads[row]) + 20))
    assert result.records == payloads[:row] + payloads[row + 1 :]
    assert result.positions == [number for number in range(200) if number != row]
    [letter] = result.dead
    assert (letter.position, letter.extra, letter.reason, letter.step) == (row, {"row": row}, "damaged_record", "read")
    assert letter.error
    assert len(letter.error) <= 2000
    assert letter.length == source.size // 200  # What the format does not tell is taken to be the mean.
    assert result.num_bytes == sum(map(len, result.records)) + letter.length
    assert not letter.whole_file


def test_flipped_bit_in_one_range_leaves_the_others_whole(tmp_path: Path) -> None:
    payloads = [corpora.text_payload(1000 + index, 50) for index in range(200)]
    source = corpora.write_array_record(tmp_path / "x", payloads, "group_size:1,uncompressed")
    damaged = flipped(source, where_it_stands(source, payloads[101]) + 20)
    results = [read(damaged, *pair) for pair in corpora.cut_ranges(damaged.size, range(1000, damaged.size, 5000))]
    assert [record for result in results for record in result.records] == payloads[:101] + payloads[102:]
    assert [letter.extra for result in results for letter in result.dead] == [{"row": 101}]
    assert corpora.add_up_ranges(results, damaged.size).apart == []


def test_flipped_bit_in_a_group_names_every_row_of_it(tmp_path: Path) -> None:
    payloads = [corpora.text_payload(1000 + index, 50) for index in range(100)]
    source = corpora.write_array_record(tmp_path / "x", payloads, "group_size:10,uncompressed")
    result = read(flipped(source, where_it_stands(source, payloads[34]) + 20))
    assert result.records == payloads[:30] + payloads[40:]
    assert [letter.extra["row"] for letter in result.dead] == list(range(30, 40))
    assert set(result.reasons) == {"damaged_record"}


@pytest.mark.parametrize("first", range(12))
def test_flipped_bit_anywhere_loses_nothing_silently(corpus: tuple[Input, list[bytes]], first: int) -> None:
    """Index and footer included: every row comes back right, or is named, or the whole file is."""
    source, payloads = corpus
    used = len(Path(source.name).read_bytes().rstrip(b"\0"))
    for at in [*range(first, min(used, 20_000), 997), source.size - 40 - first, source.size - 1 - first]:
        result = read(flipped(source, at, at % 8))
        assert all(payloads[row] == record for row, record in zip(result.positions, result.records, strict=True))
        rows = sorted([*result.positions, *(letter.position for letter in result.dead)])
        if result.reasons == ["not_array_record"]:
            assert result.dead[0].whole_file
            assert (result.records, result.regions) == ([], [(0, source.size, "not_array_record")])
        else:
            assert rows == list(range(200))
            assert len(result.dead) <= 1


@pytest.mark.parametrize("kept", [1, 2, 64, 100, 65_535, 65_536, 65_537, -40, -1])
def test_cut_file_is_one_dead_letter(corpus: tuple[Input, list[bytes]], tmp_path: Path, kept: int) -> None:
    data = Path(corpus[0].name).read_bytes()[:kept]
    source = corpora.write_file(tmp_path / "cut", data)
    result = read(source)
    assert result.records == []
    assert result.regions == [(0, len(data), "not_array_record")]
    assert result.dead[0].whole_file


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"a": 1}\n', "JSON"),
        (corpora.frame(b"abc"), "a TFRecord file"),
        (bytes(200_000), "zero"),
        (b"text", "plain text"),
    ],
)
def test_other_file_is_one_dead_letter_of_the_first_range(tmp_path: Path, content: bytes, words: str) -> None:
    source = corpora.write_file(tmp_path / "x", content)
    middle = len(content) // 2
    first, second = read(source, 0, middle), read(source, middle)
    assert first.regions == [(0, len(content), "not_array_record")]
    assert words in first.dead[0].error
    assert (second.dead, second.records) == ([], [])
    assert second.span == Span(middle, source.size, None, None)
    assert corpora.add_up_ranges([first, second], source.size).apart == []


def test_records_larger_than_a_batch_come_one_at_a_time(tmp_path: Path) -> None:
    payloads = [corpora.text_payload(index, 3 * MIB) for index in range(6)]
    source = corpora.write_array_record(tmp_path / "x", payloads)
    result = read(source)
    assert result.records == payloads
    assert result.largest_chunk == 3 * MIB


def test_large_records_behind_many_small_ones_do_not_fill_the_memory(tmp_path: Path) -> None:
    """A piece that grew on small records must not hold a thousand large ones."""
    payloads = [b"%d" % index for index in range(2 * BATCH_MAX_RECORDS)]
    payloads += [corpora.text_payload(index, 2 * MIB) for index in range(24)]
    source = corpora.write_array_record(tmp_path / "x", payloads)
    result = read(source)
    assert result.records == payloads
    assert result.largest_chunk <= 2 * MIB + BATCH_MAX_BYTES


def test_small_records_fill_their_batches(tmp_path: Path) -> None:
    source = corpora.write_array_record(tmp_path / "x", [b"%d" % index for index in range(10_000)])
    file = open_input(source)
    sizes = [len(chunk.records) for chunk in array_record.read_range(file, source, 0, file.size, corpora.make_spec())]
    file.close()
    assert sum(sizes) == 10_000
    assert max(sizes) <= BATCH_MAX_RECORDS
    assert len(sizes) <= 25


def test_records_larger_than_allowed_are_dead_letters_in_their_place(tmp_path: Path) -> None:
    payloads = [corpora.text_payload(index, 2000 if index % 10 == 3 else 100) for index in range(50)]
    source = corpora.write_array_record(tmp_path / "x", payloads)
    result = read(source, max_record_bytes=1000)
    assert result.records == [payload for payload in payloads if len(payload) == 100]
    assert result.regions == [(row, 2000, "record_too_large") for row in range(3, 50, 10)]
    assert [letter.extra for letter in result.dead] == [{"row": row} for row in range(3, 50, 10)]
    assert result.num_bytes == sum(map(len, payloads))


@pytest.fixture
def no_descriptors_left(corpus: tuple[Input, list[bytes]]) -> Iterator[LocalFile]:
    """The open input, and no further file may be opened."""
    file = LocalFile(corpus[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, hard))
    held: list[int] = []
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(os.open("/dev/null", os.O_RDONLY))
        yield file
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in held:
            os.close(descriptor)
        file.close()


def test_running_out_of_descriptors_is_not_the_files_fault(
    corpus: tuple[Input, list[bytes]], no_descriptors_left: LocalFile
) -> None:
    """The library opens the file once more by itself; when that fails, the machine is at fault."""
    source = corpus[0]
    with pytest.raises(OSError):  # noqa: PT011  (whatever the library makes of it)
        corpora.gather(array_record.read_range(no_descriptors_left, source, 0, source.size, corpora.make_spec()))
