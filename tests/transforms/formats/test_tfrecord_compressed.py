"""Compressed TFRecord: members, ends, damage and bombs, against `zlib` fed one byte at a time."""

from __future__ import annotations

import gc
import random
import struct
import tracemalloc
import zlib
from typing import Any, cast

import pytest

import corpora
from corpora import HUGE_LENGTH, MemoryFile, RangeResult, frame, frame_all, gzip_of, header
from transforms.elements import Input, Span
from transforms.formats import streams, tfrecord

PAYLOADS = [corpora.text_payload(index, index % 90) for index in range(300)]
DATA = frame_all(PAYLOADS)
GZIP = gzip_of(DATA)
STARTS = corpora.frame_starts(PAYLOADS)
MIB = 1 << 20


def read(data: bytes | MemoryFile, **changes: Any) -> RangeResult:
    return corpora.read_bytes(tfrecord.read_range, data, **changes)


def inflate_bytewise(data: bytes, window_bits: int = 31) -> bytes:
    """Everything that one member gives before its end, a fault or the end of the file."""
    inflater = zlib.decompressobj(window_bits)
    out = b""
    for at in range(len(data)):
        try:
            out += inflater.decompress(data[at : at + 1])
        except zlib.error:
            break
        if inflater.eof:
            break
    return out


def count_unread(data: bytes, window_bits: int = 31) -> int:
    """The bytes of one member from the first on that cannot be inflated."""
    inflater = zlib.decompressobj(window_bits)
    for at in range(len(data)):
        try:
            inflater.decompress(data[at : at + 1])
        except zlib.error:
            return len(data) - at
    return 0


def assert_tiles(result: RangeResult, num_bytes: int) -> None:
    corpora.assert_every_byte_is_named_once([result], num_bytes)
    assert result.num_bytes == num_bytes


def bgzip_of(data: bytes) -> bytes:
    """A block of `bgzip`: a gzip member that says its length in an extra field; an empty one ends the file."""
    packer = zlib.compressobj(6, zlib.DEFLATED, -15)
    packed = packer.compress(data) + packer.flush()
    head = b"\x1f\x8b\x08\x04" + bytes(5) + b"\xff\x06\0BC\x02\0" + struct.pack("<H", len(packed) + 25)
    return head + packed + struct.pack("<II", zlib.crc32(data), len(data))


@pytest.fixture(params=[None, 1, 2, 7, 100])
def piece_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int | None:
    """How much is fetched and inflated at once: seams must not show."""
    if request.param:
        monkeypatch.setattr(streams, "_COMPRESSED_PIECE_BYTES", request.param)
        monkeypatch.setattr(streams, "_INFLATED_PIECE_BYTES", 3 * request.param)
    return cast("int | None", request.param)


@pytest.mark.parametrize(
    "packed",
    [
        pytest.param(GZIP, id="one member"),
        pytest.param(gzip_of(DATA[:1000]) + gzip_of(DATA[1000:]), id="cut inside a record"),
        pytest.param(b"".join(gzip_of(DATA[at : at + 97]) for at in range(0, len(DATA), 97)), id="many members"),
        pytest.param(gzip_of(b"") + gzip_of(b"") + GZIP + gzip_of(b""), id="empty members"),
        pytest.param(GZIP + bytes(700), id="zero padding at the end"),
        pytest.param(gzip_of(DATA[:46]) + bytes(300) + gzip_of(DATA[46:]), id="zero padding between members"),
        pytest.param(
            b"".join(bgzip_of(DATA[at : at + 97]) for at in (*range(0, len(DATA), 97), len(DATA))), id="bgzip"
        ),
        pytest.param(zlib.compress(DATA), id="zlib"),
        pytest.param(zlib.compress(DATA, 0), id="zlib stored"),
        pytest.param(zlib.compress(DATA, 9) + bytes(5), id="zlib with padding"),
        pytest.param(zlib.compress(DATA[:50]) + zlib.compress(DATA[50:], 0), id="two zlib streams"),
        pytest.param(b"".join(zlib.compress(DATA[at : at + 9]) + bytes(3) for at in range(0, len(DATA), 9)), id="many"),
    ],
)
def test_whole_streams_give_every_record(packed: bytes, piece_bytes: int | None) -> None:
    result = read(packed)
    assert result.records == PAYLOADS
    assert result.positions == STARTS[:-1]
    assert result.dead == []
    assert result.span == Span(0, len(packed), 0, len(packed))
    assert result.num_bytes == len(DATA)
    assert result.rolls == {True}


@pytest.mark.parametrize("packed", [gzip_of(b""), gzip_of(b"") * 3 + bytes(9), zlib.compress(b"")])
def test_stream_of_nothing_holds_no_records(packed: bytes, piece_bytes: int | None) -> None:
    result = read(packed)
    assert (result.records, result.dead, result.num_bytes) == ([], [], 0)


def test_ranges_of_a_compressed_file_leave_it_all_to_the_first() -> None:
    results = [
        corpora.read_bytes(tfrecord.read_range, GZIP, *pair) for pair in corpora.cut_ranges(len(GZIP), [1, 100, 2000])
    ]
    assert [len(result.records) for result in results] == [300, 0, 0, 0]
    assert [result.span.start for result in results] == [0, None, None, None]
    assert corpora.add_up_ranges(results, len(GZIP)).apart == []


@pytest.mark.parametrize("garbage", [b"x", b"\x1f", b"hello, world", bytes(9) + b"x", DATA[:40]])
def test_garbage_after_a_zlib_stream_is_told_after_every_record(garbage: bytes, piece_bytes: int | None) -> None:
    result = read(zlib.compress(DATA) + garbage)
    assert result.regions == [(len(DATA), len(garbage.lstrip(b"\0")), "trailing_garbage")]


@pytest.mark.parametrize("garbage", [b"x", b"\x1f", b"hello, world", bytes(9) + b"x", DATA[:40]])
def test_trailing_garbage_is_told_after_every_record(garbage: bytes, piece_bytes: int | None) -> None:
    result = read(GZIP + garbage)
    assert result.records == PAYLOADS
    assert result.regions == [(len(DATA), len(garbage.lstrip(b"\0")), "trailing_garbage")]
    assert result.num_bytes == len(DATA) + len(garbage.lstrip(b"\0"))
    assert str(len(GZIP) + len(garbage) - len(garbage.lstrip(b"\0"))) in result.dead[0].error
    assert not result.dead[0].whole_file


@pytest.mark.parametrize("kept", [*range(3, 40, 3), *range(40, len(GZIP), 331), *range(len(GZIP) - 12, len(GZIP))])
def test_cut_stream_gives_what_stands_before_the_cut(kept: int) -> None:
    result = read(GZIP[:kept])
    inflated = inflate_bytewise(GZIP[:kept])
    assert list(zip(result.positions, result.records, strict=True)) == corpora.whole_frames(inflated, PAYLOADS)
    assert result.reasons == ["truncated_stream"]
    assert_tiles(result, len(inflated))
    assert result.dead[0].whole_file == (not result.records)


@pytest.mark.parametrize("seed", range(8))
def test_cut_stream_of_any_piece_size_gives_what_stands_before_the_cut(seed: int, piece_bytes: int | None) -> None:
    packed = zlib.compress(DATA, 9)
    kept = random.Random(seed).randrange(2, len(packed))
    result = read(packed[:kept])
    inflated = inflate_bytewise(packed[:kept], 15)
    assert list(zip(result.positions, result.records, strict=True)) == corpora.whole_frames(inflated, PAYLOADS)
    assert result.reasons == ["truncated_stream"]
    assert_tiles(result, len(inflated))


def test_cut_stream_of_repeats_is_emptied_to_the_last_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few compressed bytes stand for many: what the inflater still holds when its input ends counts as well."""
    payloads = [b"%d" % (index % 10) * 500 for index in range(60)]
    packed = zlib.compress(frame_all(payloads), 9)
    for piece in (1, 10, 100, 1000, MIB):
        monkeypatch.setattr(streams, "_INFLATED_PIECE_BYTES", piece)
        for kept in range(2, len(packed), 3):
            result = read(packed[:kept])
            inflated = inflate_bytewise(packed[:kept], 15)
            assert result.num_bytes == len(inflated)
            assert list(zip(result.positions, result.records, strict=True)) == corpora.whole_frames(inflated, payloads)


@pytest.mark.parametrize("offset", [-8, -5, -4, -1])
def test_wrong_trailer_costs_no_record(offset: int, piece_bytes: int | None) -> None:
    """Every record has passed its own checksum; the trailer's fault is one dead letter beside them."""
    damaged = corpora.flip_bit(GZIP, len(GZIP) + offset, 5)
    result = read(damaged)
    assert result.records == PAYLOADS
    assert result.regions == [(len(DATA), count_unread(damaged), "damaged_stream")]


def test_wrong_trailer_of_a_member_keeps_the_records_before_it(piece_bytes: int | None) -> None:
    first, second, third = (gzip_of(frame_all(PAYLOADS[at : at + 100])) for at in (0, 100, 200))
    result = read(first + corpora.flip_bit(second, len(second) - 6) + third)
    assert result.records[:200] == PAYLOADS[:200]
    assert result.reasons[:1] == ["damaged_stream"]
    assert_tiles(result, result.num_bytes)


@pytest.mark.parametrize("at", [*range(3, 20), *range(20, len(GZIP) - 8, 199)])
def test_flipped_bit_costs_only_what_follows_it(at: int) -> None:
    damaged = corpora.flip_bit(GZIP, at, at % 8)
    inflated = inflate_bytewise(damaged)
    result = read(damaged)
    assert list(zip(result.positions, result.records, strict=True)) == corpora.whole_frames(inflated, PAYLOADS)
    assert_tiles(result, len(inflated) + count_unread(damaged))
    if inflated != DATA:
        assert result.reasons[-1:] in (["damaged_stream"], ["truncated_stream"])


@pytest.mark.parametrize("at", [0, 1])
def test_flipped_magic_is_a_file_that_is_not_tfrecord(at: int) -> None:
    damaged = corpora.flip_bit(GZIP, at, 3)
    result = read(damaged)
    assert result.regions == [(0, len(damaged), "not_tfrecord")]
    assert result.dead[0].whole_file


@pytest.mark.parametrize("piece", [1, 50, MIB])
def test_damaged_records_inside_a_good_stream_are_found_as_in_a_plain_file(
    piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "_INFLATED_PIECE_BYTES", piece)
    rng = random.Random(7)
    for _ in range(60):
        _, damaged = corpora.damage_near(rng, DATA[: STARTS[40]], range(50, STARTS[40]))
        plain, packed = read(damaged, compression="none"), read(gzip_of(damaged))
        assert (packed.records, packed.positions) == (plain.records, plain.positions)
        assert packed.regions == plain.regions
        assert packed.num_bytes == len(damaged)


@pytest.mark.parametrize("length", [MIB, 1 << 29, HUGE_LENGTH, (1 << 64) - 1])
def test_huge_length_in_a_stream_costs_no_memory_and_no_byte_of_the_books(length: int) -> None:
    at = STARTS[100]
    data = corpora.insert(DATA, at, header(length))
    result = read(gzip_of(data))
    assert result.records[:100] == PAYLOADS[:100]
    assert_tiles(result, len(data))
    assert (result.records, result.regions[0][:2]) == (PAYLOADS, (at, 12))


def test_records_larger_than_allowed_are_passed_over_in_flat_memory() -> None:
    payloads = [b"a", bytes(24 * MIB), b"b", bytes(MIB + 1), b"c" * MIB]
    packed = gzip_of(frame_all(payloads))
    result, peak = read_traced(packed, max_record_bytes=MIB)
    assert result.records == [b"a", b"b", b"c" * MIB]
    assert result.regions == [(17, 24 * MIB + 16, "record_too_large"), (24 * MIB + 50, MIB + 17, "record_too_large")]
    assert_tiles(result, len(frame_all(payloads)))
    assert peak < 14 * MIB


@pytest.mark.parametrize(
    "tail",
    [
        pytest.param(b"junk", id="junk"),
        pytest.param(b"", id="nothing"),
        pytest.param(bytes(30), id="zeros"),
        pytest.param(frame(b"after")[:-1], id="cut record"),
        pytest.param(b"junk" + frame(b"after"), id="junk and a record"),
    ],
)
@pytest.mark.parametrize("size", [5_000, MIB + 100_000, 3 * MIB])
@pytest.mark.parametrize("num_after", [10, 250])
def test_record_larger_than_allowed_that_ends_badly_keeps_the_books(num_after: int, size: int, tail: bytes) -> None:
    """The stream cannot go back: what was passed over must not be looked for in bytes that are gone."""
    head = frame_all(PAYLOADS[:50])
    after = [corpora.text_payload(1000 + index, 4000) for index in range(num_after)]
    data = head + frame(corpora.text_payload(1, size))[:-2] + tail + frame_all(after)
    result = read(gzip_of(data), max_record_bytes=4500)
    standing = corpora.whole_frames(data, [*PAYLOADS[:50], *after, b"after"])
    assert set(zip(result.positions, result.records, strict=True)) <= set(standing)
    assert result.records[:50] == PAYLOADS[:50]
    assert_tiles(result, len(data))
    assert list(zip(result.positions, result.records, strict=True)) == standing


def read_traced(packed: bytes, **changes: Any) -> tuple[RangeResult, int]:
    """Reads with the peak of traced memory, records not kept count as given back."""
    file = MemoryFile(packed)
    gc.collect()
    tracemalloc.start()
    try:
        chunks = tfrecord.read_range(file, Input(0, "x", file.size, 0), 0, file.size, corpora.make_spec(**changes))
        result = corpora.gather(chunks)
        return result, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("content", [b"\0", b"\xff", b"never a record, "])
def test_bomb_of_no_records_is_met_a_megabyte_at_a_time(content: bytes) -> None:
    packed = gzip_of(content * (96 * MIB // len(content)))
    assert len(packed) < MIB
    result, peak = read_traced(packed)
    assert result.regions == [(0, 96 * MIB, "not_tfrecord")]
    assert result.dead[0].whole_file
    assert peak < 24 * MIB


def test_bomb_behind_good_records_costs_one_dead_letter() -> None:
    result, peak = read_traced(gzip_of(DATA + bytes(64 * MIB)))
    assert result.records == PAYLOADS
    assert result.regions == [(len(DATA), 64 * MIB, "length_checksum")]
    assert peak < 24 * MIB


def test_bomb_behind_a_length_that_is_not_allowed_is_passed_over() -> None:
    data = DATA + header(HUGE_LENGTH) + bytes(64 * MIB)
    result, peak = read_traced(gzip_of(data))
    assert result.records == PAYLOADS
    assert [region[:2] for region in result.regions] == [(len(DATA), 64 * MIB + 12)]
    assert peak < 24 * MIB


@pytest.mark.parametrize("count", [100, 1000, 4000])
def test_measured_inflation_is_that_of_the_file(count: int) -> None:
    data = frame_all([corpora.text_payload(index, 1000) for index in range(count)])
    inflated, compressed = tfrecord.measure_inflation(MemoryFile(gzip_of(data)))
    assert inflated <= 2 * MIB
    assert len(data) / len(gzip_of(data)) == pytest.approx(inflated / compressed, rel=0.3)
    assert tfrecord.measure_inflation(MemoryFile(data)) == (0, 0)


@pytest.mark.parametrize("head", [b"", b"\x1f", b"\x1f\x8b", b"\x1f\x8b\x07", b"x\x9d", struct.pack("<Q", 5)])
def test_heads_of_no_known_compression_are_plain(head: bytes) -> None:
    assert tfrecord.detect_compression(MemoryFile(head)) == "none"


@pytest.mark.parametrize(
    ("head", "expected"), [(GZIP[:12], "gzip"), (b"x\x01", "zlib"), (b"x\x9c", "zlib"), (b"x\xda", "zlib")]
)
def test_compression_is_known_by_its_first_bytes(head: bytes, expected: str) -> None:
    assert tfrecord.detect_compression(MemoryFile(head)) == expected
