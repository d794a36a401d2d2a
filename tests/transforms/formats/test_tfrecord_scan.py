"""`find_headers` against an oracle that looks at one position at a time."""

from __future__ import annotations

import random
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import corpora
from transforms.formats import tfrecord_scan
from transforms.formats.tfrecord_scan import find_headers, is_header, masked_crc

ANY_LENGTH = (1 << 64) - 1
BACKGROUNDS = {
    "zeros": lambda rng, size: bytes(size),
    "ones": lambda rng, size: b"\xff" * size,
    "random": lambda rng, size: rng.randbytes(size),
    "text": lambda rng, size: corpora.text_payload(rng.randrange(1000), size),
    "int64": lambda rng, size: corpora.int64_payload(rng.randrange(1000), size),
    "int32": lambda rng, size: struct.pack(f"<{size // 4 + 1}i", *(rng.randrange(1000) for _ in range(size // 4 + 1)))[
        :size
    ],
}


def test_masked_crc_of_the_published_check_value() -> None:
    """CRC-32C of "123456789" is 0xE3069283 in every catalogue."""
    crc = 0xE3069283
    assert masked_crc(b"123456789") == (((crc >> 15) | (crc << 17) & 0xFFFFFFFF) + 0xA282EAD8) & 0xFFFFFFFF


@pytest.mark.parametrize(
    "length", [0, 1, 255, 1 << 16, (1 << 16) - 1, (1 << 32) + 7, 1 << 40, (1 << 63) + 1, ANY_LENGTH]
)
def test_header_of_any_length_is_recognised(length: int) -> None:
    assert is_header(corpora.header(length))
    assert find_headers(corpora.header(length), ANY_LENGTH) == [0]


@pytest.mark.parametrize("length", [0, 5, 1 << 33])
def test_no_single_bit_flip_leaves_a_header_valid(length: int) -> None:
    header = corpora.header(length)
    flipped = [corpora.flip_bit(header, at, bit) for at in range(12) for bit in range(8)]
    assert not any(map(is_header, flipped))
    assert [find_headers(one, ANY_LENGTH) for one in flipped] == [[]] * 96


@pytest.mark.parametrize("size", range(14))
def test_blocks_shorter_than_a_header_hold_none(size: int) -> None:
    block = (corpora.header(3) + b"x")[:size]
    assert find_headers(block, ANY_LENGTH) == ([0] if size >= 12 else [])
    assert is_header(block) == (size == 12)


@pytest.mark.parametrize("background", BACKGROUNDS)
@pytest.mark.parametrize("before", range(17))
def test_header_is_found_at_every_alignment_and_at_both_ends(background: str, before: int) -> None:
    filler = BACKGROUNDS[background](random.Random(before), before + 40)
    for after in range(17):
        block = filler[:before] + corpora.header(after) + filler[:after]
        assert find_headers(block, 1000) == corpora.naive_headers(block, 1000)
        assert before in find_headers(block, 1000)


def test_headers_side_by_side_are_all_found() -> None:
    block = b"".join(corpora.header(length) for length in range(100))
    assert find_headers(block, 99) == list(range(0, 1200, 12))


@pytest.mark.parametrize("max_length", [0, 1, 49, 98, 99, (1 << 16) - 1, 1 << 16, (1 << 32) - 1, 1 << 48, ANY_LENGTH])
def test_lengths_above_the_maximum_are_left_out(max_length: int) -> None:
    lengths = [*range(100), (1 << 16) - 1, 1 << 16, (1 << 32) - 1, 1 << 32, (1 << 48) - 1, 1 << 48, ANY_LENGTH]
    block = b"".join(map(corpora.header, lengths))
    assert find_headers(block, max_length) == [12 * at for at, length in enumerate(lengths) if length <= max_length]


@pytest.mark.parametrize("background", BACKGROUNDS)
@pytest.mark.parametrize("seed", range(4))
def test_seeded_arrays_agree_with_the_oracle(background: str, seed: int) -> None:
    rng = random.Random(f"{background} {seed}")
    block = bytearray(BACKGROUNDS[background](rng, 3000 + seed))
    for _ in range(40):
        header = corpora.header(rng.choice([0, 1, rng.randrange(300), rng.randrange(1 << 20), rng.randrange(1 << 50)]))
        at = rng.randrange(len(block) - 12)
        block[at : at + 12] = header
    for max_length in (0, 255, 5000, 1 << 30, ANY_LENGTH):
        assert find_headers(bytes(block), max_length) == corpora.naive_headers(bytes(block), max_length)


def test_more_candidates_than_one_piece_are_all_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Survivors of the filter are checked piece by piece: a hit on either side of every seam must be seen."""
    block = corpora.frame_all([corpora.int64_payload(index, 40) for index in range(200)])
    expected = corpora.naive_headers(block, 1000)
    assert len(expected) == 200
    for piece in (1, 2, 3, 7, 8192):
        monkeypatch.setattr(tfrecord_scan, "_PIECE", piece)
        assert find_headers(block, 1000) == expected


def test_planted_headers_in_a_megabyte_of_short_lengths_are_all_found() -> None:
    rng = random.Random(5)
    block = bytearray(np.arange(1 << 17, dtype="<i8").tobytes())
    planted = sorted(rng.sample(range(0, len(block) - 12, 16), 500))
    for at in planted:
        block[at : at + 12] = corpora.header(at % 977)
    assert find_headers(bytes(block), 1 << 20) == planted


@settings(deadline=None)
@given(st.binary(max_size=200), st.integers(0, ANY_LENGTH))
def test_arbitrary_bytes_agree_with_the_oracle(block: bytes, max_length: int) -> None:
    assert find_headers(block, max_length) == corpora.naive_headers(block, max_length)


PIECES = st.one_of(
    st.binary(max_size=30),
    st.integers(0, 40).map(bytes),
    st.integers(0, ANY_LENGTH).map(corpora.header),
    st.integers(0, 300).map(corpora.header),
    st.binary(max_size=40).map(corpora.frame),
    st.tuples(st.integers(0, 300), st.integers(0, 95)).map(
        lambda pair: corpora.flip_bit(corpora.header(pair[0]), pair[1] // 8, pair[1] % 8)
    ),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(PIECES, max_size=12).map(b"".join), st.sampled_from([0, 100, 1 << 20, 1 << 40, ANY_LENGTH]))
def test_headers_among_anything_agree_with_the_oracle(block: bytes, max_length: int) -> None:
    assert find_headers(block, max_length) == corpora.naive_headers(block, max_length)


def test_compressed_bytes_hold_no_headers() -> None:
    block = zlib.compress(corpora.frame_all(corpora.make_payloads(2000)), 9)
    assert find_headers(block, len(block)) == corpora.naive_headers(block, len(block)) == []
