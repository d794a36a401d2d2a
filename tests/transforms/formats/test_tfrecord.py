"""TFRecord: what TensorFlow writes, and every kind of damage to a plain file."""

from __future__ import annotations

import importlib
import itertools
import struct
from pathlib import Path
from typing import Any

import pytest

import corpora
from corpora import HUGE_LENGTH, MemoryFile, frame, frame_all, header
from transforms.elements import BATCH_MAX_BYTES, BATCH_MAX_RECORDS, Input, Span
from transforms.formats import tfrecord
from transforms.sources import open_input

PAYLOADS = [corpora.text_payload(index, 5 * index) for index in range(12)]
DATA = frame_all(PAYLOADS)
STARTS = corpora.frame_starts(PAYLOADS)
HIT = 6
MIB = 1 << 20


def read(data: bytes | MemoryFile, start: int = 0, end: int | None = None, **changes: Any) -> corpora.RangeResult:
    return corpora.read_bytes(tfrecord.read_range, data, start, end, **changes)


def all_but(*hits: int) -> list[bytes]:
    return [payload for index, payload in enumerate(PAYLOADS) if index not in hits]


@pytest.fixture(scope="module")
def tf() -> Any:
    return importlib.import_module("tensorflow")


@pytest.mark.parametrize("compression", ["", "GZIP", "ZLIB"])
@pytest.mark.parametrize("kind", corpora.PAYLOADS)
def test_what_tensorflow_writes_comes_back_byte_for_byte(tf: Any, tmp_path: Path, compression: str, kind: str) -> None:
    payloads = [*corpora.make_payloads(3000, 300, kind=kind), corpora.text_payload(7, 3 * MIB), b""]
    with tf.io.TFRecordWriter(str(tmp_path / "x"), compression) as writer:
        for payload in payloads:
            writer.write(payload)
    source = corpora.listed(tmp_path / "x")
    file = open_input(source)
    result = corpora.gather(tfrecord.read_range(file, source, 0, file.size, corpora.make_spec()))
    file.close()
    assert result.records == payloads
    assert result.positions == corpora.frame_starts(payloads)[:-1]
    assert result.dead == []
    assert result.span == Span(0, source.size, 0, source.size)
    assert result.rolls == {compression != ""}
    if not compression:
        assert (tmp_path / "x").read_bytes() == frame_all(payloads)


def test_tensorflow_reads_our_framing(tf: Any, tmp_path: Path) -> None:
    source = corpora.write_file(tmp_path / "x", DATA)
    assert list(tf.data.TFRecordDataset(source.name).as_numpy_iterator()) == PAYLOADS


def test_batches_are_bounded_by_bytes_and_records() -> None:
    small = [corpora.text_payload(index, 10) for index in range(3000)]
    large = [corpora.text_payload(index, 300_000) for index in range(20)]
    file = MemoryFile(frame_all(small + large))
    chunks = list(tfrecord.read_range(file, Input(0, "x", file.size, 0), 0, file.size, corpora.make_spec()))
    assert [record for chunk in chunks for record in chunk.records] == small + large
    assert max(len(chunk.records) for chunk in chunks) == BATCH_MAX_RECORDS
    assert max(sum(map(len, chunk.records)) for chunk in chunks) <= BATCH_MAX_BYTES
    assert file.largest_read <= 2 * MIB


def test_a_record_of_several_batches_is_read_whole() -> None:
    payloads = [b"a", corpora.text_payload(1, 5 * MIB), b"b"]
    result = read(frame_all(payloads))
    assert result.records == payloads
    assert result.dead == []


@pytest.mark.parametrize("bit", [0, 7])
@pytest.mark.parametrize("offset", [0, 15, 29])
def test_flipped_payload_is_a_dead_letter_with_its_payload(offset: int, bit: int) -> None:
    data = corpora.flip_bit(DATA, STARTS[HIT] + 12 + offset, bit)
    result = read(data)
    assert result.records == all_but(HIT)
    assert result.regions == [(STARTS[HIT], 16 + 30, "data_checksum")]
    assert result.dead[0].payload == data[STARTS[HIT] + 12 : STARTS[HIT] + 42]
    assert not result.dead[0].whole_file


@pytest.mark.parametrize("offset", [42, 45])
def test_flipped_payload_checksum_keeps_the_intact_payload(offset: int) -> None:
    result = read(corpora.flip_bit(DATA, STARTS[HIT] + offset))
    assert result.records == all_but(HIT)
    assert result.regions == [(STARTS[HIT], 46, "data_checksum")]
    assert result.dead[0].payload == PAYLOADS[HIT]


@pytest.mark.parametrize("hit", [0, HIT, 11])
@pytest.mark.parametrize("offset", [0, 3, 7, 8, 11])
def test_flipped_length_or_its_checksum_costs_one_record(offset: int, hit: int) -> None:
    result = read(corpora.flip_bit(DATA, STARTS[hit] + offset, 2))
    assert result.records == all_but(hit)
    assert result.regions == [(STARTS[hit], STARTS[hit + 1] - STARTS[hit], "length_checksum")]
    assert not result.dead[0].whole_file


def test_two_damaged_neighbours_are_two_dead_letters() -> None:
    data = corpora.flip_bit(corpora.flip_bit(DATA, STARTS[HIT] + 12), STARTS[HIT + 1] + 12)
    result = read(data)
    assert result.records == all_but(HIT, HIT + 1)
    assert result.regions == [(STARTS[HIT], 46, "data_checksum"), (STARTS[HIT + 1], 51, "data_checksum")]


@pytest.mark.parametrize("missing", range(1, 16 + 55))
def test_cut_tail_is_one_dead_letter_up_to_the_end(missing: int) -> None:
    data = DATA[:-missing]
    result = read(data)
    assert result.records == PAYLOADS[:-1]
    assert result.regions == [(STARTS[-2], len(data) - STARTS[-2], "truncated")]
    assert not result.dead[0].whole_file


def test_cut_before_the_last_record_is_a_whole_file() -> None:
    result = read(DATA[: STARTS[-2]])
    assert (result.records, result.dead) == (PAYLOADS[:-1], [])


@pytest.mark.parametrize("size", [1, 12, 40, 200, 512])
@pytest.mark.parametrize("at", [STARTS[4] + 3, STARTS[5], STARTS[6] + 20])
def test_zeroed_block_is_named_to_the_byte(at: int, size: int) -> None:
    data = corpora.overwrite(DATA, at, bytes(size))
    result = read(data)
    standing = corpora.whole_frames(data, PAYLOADS)
    assert list(zip(result.positions, result.records, strict=True)) == standing
    assert result.num_bytes == len(data)
    assert sum(length for _, length, _ in result.regions) == len(data) - sum(16 + len(record) for _, record in standing)


@pytest.mark.parametrize("size", [1, 12, 100])
@pytest.mark.parametrize("filler", [b"\0", b"x", b"\xff"])
def test_bytes_inserted_between_records_are_one_dead_letter(filler: bytes, size: int) -> None:
    result = read(corpora.insert(DATA, STARTS[HIT], filler * size))
    assert result.records == PAYLOADS
    assert result.regions == [(STARTS[HIT], size, "length_checksum")]


@pytest.mark.parametrize("size", [1, 12, 100])
def test_bytes_inserted_into_a_payload_cost_that_record(size: int) -> None:
    result = read(corpora.insert(DATA, STARTS[HIT] + 20, b"y" * size))
    assert result.records == all_but(HIT)
    assert result.regions == [(STARTS[HIT], 46 + size, "data_checksum")]


@pytest.mark.parametrize("size", [1, 4, 20])
def test_bytes_removed_from_a_payload_cost_that_record(size: int) -> None:
    result = read(corpora.remove(DATA, STARTS[HIT] + 13, size))
    assert result.records == all_but(HIT)
    assert result.regions == [(STARTS[HIT], 46 - size, "data_checksum")]


def test_bytes_removed_across_two_records_cost_both() -> None:
    result = read(corpora.remove(DATA, STARTS[HIT] + 20, 46))
    assert result.records == all_but(HIT, HIT + 1)
    assert result.regions == [(STARTS[HIT], 51, "data_checksum")]


def test_swapped_records_come_in_the_order_in_which_they_stand() -> None:
    payloads = [corpora.text_payload(index, 48) for index in range(10)]
    data = corpora.swap_blocks(frame_all(payloads), 64 * 2, 64 * 6, 64)
    result = read(data)
    assert result.records == [payloads[index] for index in (0, 1, 6, 3, 4, 5, 2, 7, 8, 9)]
    assert result.dead == []


def test_swapped_blocks_inside_records_cost_these_records() -> None:
    payloads = [corpora.text_payload(index, 48) for index in range(10)]
    result = read(corpora.swap_blocks(frame_all(payloads), 64 * 2 + 20, 64 * 6 + 20, 10))
    assert result.records == [payload for index, payload in enumerate(payloads) if index not in (2, 6)]
    assert result.regions == [(128, 64, "data_checksum"), (384, 64, "data_checksum")]


@pytest.mark.parametrize("length", [HUGE_LENGTH, (1 << 63) + 5, (1 << 64) - 1, 1 << 31])
@pytest.mark.parametrize("compression", ["none", "auto"])
def test_huge_length_with_a_right_checksum_is_never_allocated(length: int, compression: str) -> None:
    file = MemoryFile(corpora.insert(DATA, STARTS[HIT], header(length) + b"nothing of that size"))
    result = read(file, compression=compression)
    assert result.records == PAYLOADS
    [(position, size, _)] = result.regions
    assert (position, size) == (STARTS[HIT], 32)
    assert file.largest_read <= 2 * MIB


def test_length_that_points_past_the_end_is_not_called_the_end_while_records_follow() -> None:
    """A dead letter that says the file ends here sends its reader to the wrong place."""
    result = read(corpora.insert(DATA, STARTS[HIT], header(HUGE_LENGTH)))
    [letter] = result.dead
    assert letter.reason != "truncated"
    assert "the file ends" not in letter.error


def test_huge_length_in_a_file_that_could_hold_it_is_never_allocated() -> None:
    file = MemoryFile(frame(b"first") + header(HUGE_LENGTH), size=HUGE_LENGTH + 1000)
    file.max_reads = 1000
    result = read(file, 0, 22)
    assert result.records == [b"first"]
    assert file.largest_read <= 2 * MIB


@pytest.mark.parametrize("cut", [None, *range(20, 6000, 700)])
def test_record_larger_than_allowed_is_passed_over_without_reading_it(cut: int | None) -> None:
    payloads = [b"a", corpora.text_payload(1, 5000), b"b", corpora.text_payload(3, 1001), b"c" * 1000]
    data = frame_all(payloads)
    results = [read(data, *pair, max_record_bytes=1000) for pair in corpora.cut_ranges(len(data), [cut or 0])]
    assert [record for result in results for record in result.records] == [b"a", b"b", b"c" * 1000]
    regions = [region for result in results for region in result.regions]
    assert regions == [(17, 5016, "record_too_large"), (5050, 1017, "record_too_large")]
    assert [letter.payload for result in results for letter in result.dead] == [None, None]
    assert corpora.add_up_ranges(results, len(data)).apart == []


def test_record_of_many_megabytes_that_is_not_allowed_is_not_read() -> None:
    file = MemoryFile(frame_all([b"a", bytes(8 * MIB), b"b"]))
    assert read(file, max_record_bytes=MIB).records == [b"a", b"b"]
    assert file.largest_read <= 2 * MIB


@pytest.mark.parametrize("filler", [b"\0", b"\x01", b"{", b"\xff", b"\x1f\x8b\x08", b"x\x9c"])
@pytest.mark.parametrize("size", range(21))
def test_file_of_a_few_bytes_is_one_dead_letter(size: int, filler: bytes) -> None:
    data = (filler * 21)[:size]
    result = read(data)
    assert result.records == []
    assert len(result.dead) == (1 if size else 0)
    assert all(letter.whole_file and letter.position == 0 for letter in result.dead)
    assert result.span == Span(0, size, 0, size)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"text": "one"}\n' * 100, "JSON"),
        (b"just some prose, line after line\n" * 100, "plain text"),
        (b"<!DOCTYPE html><html><body>Sign in</body></html>" * 10, "HTML"),
        (b"\x89PNG\r\n\x1a\n" + bytes(500), "PNG"),
        (b"\xff\xd8\xff\xe0" + bytes(500), "JPEG"),
        (b"PAR1" + bytes(500), "Parquet"),
        (b"PK\x03\x04" + bytes(500), "zip"),
        (b"\x28\xb5\x2f\xfd" + bytes(500), "zstd"),
        (b"BZh9" + bytes(500), "bzip2"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "git lfs pull"),
        (bytes(3 * MIB), "zero"),
        (b"\x80\x81\x82\x83" * 1000, "80 81 82 83"),
    ],
)
def test_other_file_is_one_dead_letter_that_says_what_it_is(content: bytes, words: str) -> None:
    result = read(content)
    assert result.records == []
    assert result.regions == [(0, len(content), "not_tfrecord")]
    assert result.dead[0].whole_file
    assert words in result.dead[0].error


def test_other_file_in_ranges_is_named_by_the_first_range_alone() -> None:
    data = b"just some prose, line after line\n" * 100
    results = [read(data, *pair) for pair in corpora.cut_ranges(len(data), [7, 1000, 2000])]
    assert [result.regions for result in results] == [[(0, len(data), "not_tfrecord")], [], [], []]
    assert corpora.add_up_ranges(results, len(data)).apart == []


@pytest.mark.parametrize("length", [0x0178, 0x088B1F, 0x9C78, 0x1D08])
def test_plain_file_whose_first_length_looks_compressed_is_read_as_plain(length: int) -> None:
    """0x0178, 0x9c78 and 0x1d08 are stored as zlib's first bytes, 0x088b1f as gzip's."""
    payloads = [corpora.text_payload(0, length), b"b", b"c"]
    result = read(frame_all(payloads))
    assert (result.records, result.dead) == (payloads, [])


@pytest.mark.parametrize("length", [0x0178, 0x088B1F, 0x9C78, 0x1D08])
def test_damaged_first_header_that_looks_compressed_costs_one_record(length: int) -> None:
    payloads = [corpora.text_payload(0, length), *PAYLOADS]
    result = read(corpora.flip_bit(frame_all(payloads), 9))
    assert result.records == PAYLOADS
    assert result.regions == [(0, length + 16, "length_checksum")]


def test_named_compression_overrules_what_the_bytes_say() -> None:
    packed = corpora.gzip_of(DATA)
    assert read(packed, compression="gzip").records == PAYLOADS
    assert read(packed, compression="none").regions == [(0, len(packed), "not_tfrecord")]
    result = read(DATA, compression="gzip")
    assert (result.records, result.reasons) == ([], ["damaged_stream"])


@pytest.mark.parametrize("start", [0, STARTS[3] + 5])
@pytest.mark.parametrize("kept", [1, STARTS[5], STARTS[5] + 7, STARTS[5] + 12, STARTS[11] + 60])
def test_file_that_shrinks_while_it_is_read_comes_to_an_end(kept: int, start: int) -> None:
    file = MemoryFile(DATA[:kept], size=len(DATA))
    file.max_reads = 1000
    result = read(file, start)
    whole = [start_of for start_of, end in itertools.pairwise(STARTS) if start_of >= start and end <= kept]
    assert result.positions == whole
    end = result.positions[-1] + 16 + len(result.records[-1]) if result.records else (0 if start == 0 else None)
    if end is not None:
        assert [region[:2] for region in result.regions] == [(end, len(DATA) - end)]


def test_error_of_the_disk_is_raised_after_what_was_read_before() -> None:
    payloads = [corpora.text_payload(index, 1000) for index in range(3000)]
    file = MemoryFile(frame_all(payloads), bad=(2_000_000, 2_000_512))
    chunks = tfrecord.read_range(file, Input(0, "x", file.size, 0), 0, file.size, corpora.make_spec())
    records: list[bytes] = []
    with pytest.raises(OSError, match="Input/output error"):
        records.extend(record for chunk in chunks for record in chunk.records)
    assert len(records) >= 900
    assert records == payloads[: len(records)]


def test_length_seen_before_is_still_checked_against_its_checksum() -> None:
    """Header checksums of known lengths are remembered; a wrong one beside a known length must not pass."""
    payloads = [corpora.text_payload(index, 20) for index in range(10)]
    data = corpora.overwrite(frame_all(payloads), 36 * 5 + 8, struct.pack("<I", 12345))
    result = read(data)
    assert result.records == payloads[:5] + payloads[6:]
    assert result.regions == [(36 * 5, 36, "length_checksum")]


def numbers(count: int) -> list[bytes]:
    """Records of 8 bytes, of which each begins a valid header in its middle."""
    return [corpora.int64_payload(index, 8) for index in range(count)]


@pytest.mark.parametrize("compression", ["none", "gzip"])
def test_bytes_removed_from_a_payload_never_cost_the_records_behind_it(compression: str) -> None:
    """The length then reaches over them, at times to where one of them begins or seems to."""
    first, labels = corpora.text_payload(1, 1000), numbers(100)
    for removed in range(1, 500):
        data = corpora.remove(frame(first), 500, removed) + frame_all(labels)
        packed = corpora.gzip_of(data) if compression == "gzip" else data
        result = corpora.read_bytes(tfrecord.read_range, packed)
        assert result.records == labels, removed
        assert result.regions[0][:2] == (0, 1016 - removed)


def test_damaged_record_that_holds_framing_is_one_dead_letter() -> None:
    for inner in (frame_all(numbers(20)), frame_all(numbers(20)) + b"x" * 5):
        payloads = [b"before", inner, b"behind"]
        data = corpora.flip_bit(frame_all(payloads), 22 + 12 + 100)
        result = corpora.read_bytes(tfrecord.read_range, data)
        assert result.records == [b"before", b"behind"]
        assert result.regions == [(22, len(inner) + 16, "data_checksum")]


@pytest.mark.parametrize("shards", [1, 7])
def test_of_two_writers_into_one_file_every_record_that_is_whole_is_read(shards: int) -> None:
    writers = [[b"w%d-%04d " % (writer, number) * (6 + 2 * writer) for number in range(150)] for writer in range(2)]
    streams = list(map(corpora.frame_all, writers))
    flushes = range(0, max(map(len, streams)), 4096)
    data = b"".join(stream[at : at + 4096] for at in flushes for stream in streams)
    ranges = corpora.cut_ranges(len(data), [len(data) * number // shards for number in range(1, shards)])
    results, _ = corpora.read_until_they_meet(tfrecord.read_range, data, ranges)
    whole = corpora.whole_frames(data, writers[0] + writers[1])
    found = [pair for result in results for pair in zip(result.positions, result.records, strict=True)]
    assert found == whole
    assert len(found) > 280
    corpora.assert_every_byte_is_named_once(results, len(data))
