"""Checksums of inputs: each byte of a range is hashed once, in order, whatever the reader asks for."""

from __future__ import annotations

import random
from pathlib import Path

import google_crc32c
import pytest

import corpora
from corpora import MemoryFile
from transforms.checksums import MAX_ENTRIES, HashedFile, RunChecksums, combine
from transforms.elements import Span
from transforms.shard_reader import read_input


@pytest.mark.parametrize("seed", range(20))
def test_a_range_has_its_checksum_whatever_is_read_of_the_file(seed: int) -> None:
    rng = random.Random(seed)
    data = rng.randbytes(50_000)
    start, end = sorted(rng.sample(range(len(data) + 1), 2))
    file = HashedFile(MemoryFile(data), start, end)
    for _ in range(rng.randrange(30)):
        position, size = rng.randrange(len(data)), rng.choice([12, 500, 9_000])
        assert file.read_at(position, size) == data[position : position + size]
    assert file.checksum() == google_crc32c.value(data[start:end])


def test_what_the_reader_reads_in_order_is_read_once() -> None:
    data = bytes(range(250)) * 100
    memory = MemoryFile(data)
    file = HashedFile(memory, 5_000, 20_000)
    for position in range(5_000, 20_000, 5_000):
        file.read_at(position, 5_000)
        file.read_at(position + 4_000, 12)
    assert file.checksum() == google_crc32c.value(data[5_000:20_000])
    assert memory.num_reads == 6


def test_a_range_with_a_bad_block_has_no_checksum() -> None:
    file = HashedFile(MemoryFile(bytes(20_000), bad=(9_000, 9_001)), 0, 20_000)
    assert file.read_at(10_000, 5_000) == bytes(5_000)
    assert file.checksum() is None


@pytest.mark.parametrize("sizes", [(0, 9), (9, 0), (1, 1), (100_000, 33_333)])
def test_two_checksums_combine_to_that_of_both_pieces(sizes: tuple[int, int]) -> None:
    first, second = (random.Random(size).randbytes(size) for size in sizes)
    both = combine(google_crc32c.value(first), google_crc32c.value(second), len(second))
    assert both == google_crc32c.value(first + second)


@pytest.mark.parametrize("count", [1, 5, MAX_ENTRIES, MAX_ENTRIES + 1, 3 * MAX_ENTRIES + 7])
def test_a_run_of_any_length_keeps_a_bounded_number_of_checksums(count: int) -> None:
    run = RunChecksums()
    pieces = [b"%d" % number for number in range(count)]
    for piece in pieces:
        run.add(google_crc32c.value(piece), len(piece))
    assert len(run.crcs) <= MAX_ENTRIES
    joined = [b"".join(pieces[at : at + run.step]) for at in range(0, count, run.step)]
    assert list(run.crcs) == list(map(google_crc32c.value, joined))
    assert RunChecksums.from_text(run.to_text()) == run
    assert len(run.to_text()) < 23_000


def test_each_range_of_a_file_leaves_its_checksum_in_its_span(tmp_path: Path) -> None:
    data = corpora.frame_all(corpora.make_payloads(500))
    source = corpora.write_file(tmp_path / "x", data)
    spec = corpora.make_spec()
    for start, end in corpora.cut_ranges(len(data), [1_000, 1_003, 20_000]):
        spans = [chunk.span for chunk in read_input(spec, source, start, end) if chunk.span is not None]
        assert [span.crc for span in spans] == [google_crc32c.value(data[start:end])]


def test_checksums_of_spans_do_not_count_when_they_are_compared() -> None:
    assert Span(0, 1, 0, 1, 7) == Span(0, 1, 0, 1)
