"""Any bytes, any ranges, every format: nothing is raised, and the books hold."""

from __future__ import annotations

import gzip
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import corpora
from corpora import RangeResult
from transforms.formats import array_record, files, streams, tfrecord
from transforms.sources import open_input

Edit = Callable[[bytes], bytes]

PAYLOADS = st.lists(st.one_of(st.binary(max_size=60), st.integers(0, 80).map(bytes)), max_size=12)
CUTS = st.lists(st.integers(1, 700), max_size=4)
MAX_RECORD_BYTES = st.sampled_from([0, 8, 40, 1 << 30])
FRAMED = PAYLOADS.map(corpora.frame_all)
PIECES = st.one_of(
    st.binary(max_size=40),
    FRAMED,
    st.binary(max_size=30).map(corpora.frame),
    st.integers(0, (1 << 64) - 1).map(corpora.header),
    st.integers(0, 300).map(corpora.header),
    st.sampled_from([b"\x1f\x8b\x08", b"x\x9c", bytes(16), b"\xff" * 12]),
)
ASSEMBLED = st.lists(PIECES, max_size=8).map(b"".join)
NESTED = st.lists(ASSEMBLED, max_size=4).map(corpora.frame_all)


def edit(kind: str, share: float, new: bytes) -> Edit:
    """One edit at a share of the length, so that it lies inside whatever is drawn."""

    def apply(data: bytes) -> bytes:
        at = int(share * len(data))
        changes: dict[str, Callable[[], bytes]] = {
            "flip": lambda: corpora.flip_bit(data, at, len(new) % 8) if at < len(data) else data,
            "overwrite": lambda: corpora.overwrite(data, at, new),
            "insert": lambda: corpora.insert(data, at, new),
            "remove": lambda: corpora.remove(data, at, len(new)),
            "cut": lambda: data[:at],
            "double": lambda: corpora.insert(data, at, data[at : at + 100]),
        }
        return changes[kind]()

    return apply


EDITS = st.lists(
    st.builds(
        edit,
        st.sampled_from(["flip", "overwrite", "insert", "remove", "cut", "double"]),
        st.floats(0, 1),
        st.binary(min_size=1, max_size=30),
    ),
    max_size=4,
)


def edited(data: bytes, edits: list[Edit]) -> bytes:
    for change in edits:
        data = change(data)
    return data


def check_tfrecord(data: bytes, cuts: list[int], **changes: Any) -> list[RangeResult]:
    """Reads ranges until they meet; all bytes, of the file or of the stream in it, are named once."""
    results, _ = corpora.read_until_they_meet(tfrecord.read_range, data, corpora.cut_ranges(len(data), cuts), **changes)
    num_bytes = sum(result.num_bytes for result in results)
    corpora.assert_every_byte_is_named_once(results, num_bytes)
    if {True} not in (result.rolls for result in results):
        assert num_bytes == len(data)
    for result in results:
        for letter in result.dead:
            assert letter.step == "read"
            assert letter.reason.isidentifier()
            assert letter.error
            assert letter.payload is None or letter.length == len(letter.payload) + corpora.FRAME_BYTES
    return results


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.binary(max_size=300), ASSEMBLED, NESTED), CUTS, MAX_RECORD_BYTES)
def test_any_bytes_read_as_tfrecord_balance(data: bytes, cuts: list[int], max_record_bytes: int) -> None:
    check_tfrecord(data, cuts, max_record_bytes=max_record_bytes)


@settings(max_examples=300, deadline=None)
@given(st.one_of(FRAMED, NESTED), EDITS, CUTS, MAX_RECORD_BYTES)
def test_edited_tfrecord_files_balance(data: bytes, edits: list[Edit], cuts: list[int], max_record_bytes: int) -> None:
    check_tfrecord(edited(data, edits), cuts, max_record_bytes=max_record_bytes)


@settings(max_examples=100, deadline=None)
@given(ASSEMBLED, EDITS, CUTS, st.integers(12, 200), st.integers(17, 200))
def test_block_sizes_do_not_show(data: bytes, edits: list[Edit], cuts: list[int], search: int, batch: int) -> None:
    data = edited(data, edits)
    expected = check_tfrecord(data, cuts, compression="none")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tfrecord, "_FIRST_SEARCH_BYTES", search)
        patch.setattr(tfrecord, "_SEARCH_BYTES", search)
        patch.setattr(tfrecord, "BATCH_MAX_BYTES", batch)
        patch.setattr(tfrecord, "BATCH_MAX_RECORDS", 2)
        found = check_tfrecord(data, cuts, compression="none")
    assert [result.records for result in found] == [result.records for result in expected]
    assert [result.positions for result in found] == [result.positions for result in expected]
    assert [result.regions for result in found] == [result.regions for result in expected]
    assert [result.spans for result in found] == [result.spans for result in expected]


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(ASSEMBLED, st.integers(0, 9)), min_size=1, max_size=3),
    EDITS,
    CUTS,
    MAX_RECORD_BYTES,
    st.sampled_from(["gzip", "auto"]),
    st.sampled_from([1, 30, 1 << 18]),
)
def test_edited_gzip_members_balance(
    members: list[tuple[bytes, int]], edits: list[Edit], cuts: list[int], max_bytes: int, compression: str, piece: int
) -> None:
    data = edited(b"".join(gzip.compress(member, level, mtime=0) for member, level in members), edits)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams, "_COMPRESSED_PIECE_BYTES", piece)
        patch.setattr(streams, "_INFLATED_PIECE_BYTES", 4 * piece)
        patch.setattr(tfrecord, "_FIRST_SEARCH_BYTES", 8 * piece)
        patch.setattr(tfrecord, "_SEARCH_BYTES", 16 * piece)
        check_tfrecord(data, cuts, max_record_bytes=max_bytes, compression=compression)


@settings(max_examples=200, deadline=None)
@given(
    st.one_of(st.binary(max_size=200), ASSEMBLED.map(zlib.compress)),
    EDITS,
    CUTS,
    st.sampled_from(["zlib", "gzip", "none"]),
)
def test_any_bytes_read_as_any_compression_balance(
    data: bytes, edits: list[Edit], cuts: list[int], compression: str
) -> None:
    check_tfrecord(edited(data, edits), cuts, compression=compression)


def check_array_record(path: Path, data: bytes, cuts: list[float], num_records: int | None) -> None:
    """Every row is read or named in exactly one range, or the whole file is named by the first."""
    source = corpora.write_file(path, data)
    results = []
    for start, end in corpora.cut_ranges(len(data), [int(cut * len(data)) for cut in cuts]):
        file = open_input(source)
        results.append(corpora.gather(array_record.read_range(file, source, start, end, corpora.make_spec())))
        file.close()
    assert corpora.add_up_ranges(results, len(data)).apart == []
    rows = sorted(row for result in results for row in result.positions)
    letters = [letter for result in results for letter in result.dead]
    if any(letter.reason == "not_array_record" for letter in letters):
        assert [(letter.position, letter.length, letter.whole_file) for letter in letters] == [(0, len(data), True)]
        assert rows == []
        return
    rows = sorted([*rows, *(letter.extra["row"] for letter in letters)])
    assert rows == list(range(len(rows) if num_records is None else num_records))


@settings(max_examples=40, deadline=None)
@given(st.binary(min_size=1, max_size=300), st.lists(st.floats(0, 1), max_size=3))
def test_any_bytes_read_as_array_record_balance(data: bytes, cuts: list[float]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        check_array_record(Path(folder) / "x", data, cuts, None)


@pytest.fixture(scope="module")
def array_record_file(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, list[bytes]]:
    """The bytes of a file as written, and its records."""
    payloads = corpora.make_payloads(60, 40)
    path = tmp_path_factory.mktemp("array_record") / "x"
    corpora.write_array_record(path, payloads, "group_size:1,uncompressed")
    return path.read_bytes(), payloads


@settings(max_examples=80, deadline=None)
@given(EDITS, st.lists(st.floats(0, 1), max_size=3), st.integers(1, 40))
def test_edited_array_record_files_balance(
    array_record_file: tuple[bytes, list[bytes]], edits: list[Edit], cuts: list[float], crowd: int
) -> None:
    """Edits are crowded towards the front, where the records stand; most of the file is padding."""
    data, _ = array_record_file
    front = len(data) // crowd
    data = edited(data[:front], edits) + data[front:]
    with tempfile.TemporaryDirectory() as folder:
        check_array_record(Path(folder) / "x", data or b"x", cuts, None)


@settings(deadline=None)
@given(st.binary(min_size=1, max_size=200), st.integers(0, 200))
def test_any_bytes_read_as_a_raw_file_are_one_record_or_one_dead_letter(data: bytes, max_record_bytes: int) -> None:
    result = corpora.read_bytes(files.read_range, data, max_record_bytes=max_record_bytes)
    if len(data) <= max_record_bytes:
        assert (result.records, result.positions, result.dead) == ([data], [0], [])
    else:
        assert (result.records, result.regions) == ([], [(0, len(data), "record_too_large")])
    assert result.num_bytes == len(data)
