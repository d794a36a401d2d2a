"""Any bytes under any name: what only looks at a file never fails either, and `inspect` names every byte."""

from __future__ import annotations

import json
import os
import tempfile
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import corpora
from pipelines.errors import UsageError
from pipelines.inspect import inspect_file
from transforms.dead_letters import to_line
from transforms.elements import DeadLetter, name_from_fields
from transforms.formats import FORMATS, guess_format, streams, tfrecord
from transforms.formats.sniff import what_is_it
from transforms.sample import choose_compression, iter_sample
from transforms.sources import open_input

FRAMED = st.lists(st.binary(max_size=60), max_size=12).map(corpora.frame_all)
SIGNATURES = st.sampled_from([b"\x1f\x8b\x08\0", b"x\x9c", b"BZh", b"PAR1", b"{", b"<HTML", b"\x89PNG", bytes(20)])
ANY = st.one_of(
    st.binary(max_size=300),
    st.builds(lambda *parts: b"".join(parts), SIGNATURES, st.binary(max_size=60), FRAMED),
    FRAMED,
    FRAMED.map(corpora.gzip_of),
    FRAMED.map(zlib.compress),
)
CHANGES = st.lists(st.tuples(st.floats(0, 0.999), st.integers(0, 3), st.binary(max_size=20)), max_size=4)
NAMES = st.sampled_from(["x", "x.tfrecord", "x.tfrecord.gz", "x.array_record", "x.payloads", "x.gz", "x.zz"])


def change(data: bytes, changes: list[tuple[float, int, bytes]]) -> bytes:
    """Overwrites, inserts, removes and cuts at shares of the length."""
    for share, kind, new in changes:
        at = int(share * len(data))
        if kind == 0:
            data = corpora.overwrite(data, at, new)
        elif kind == 1:
            data = corpora.insert(data, at, new)
        else:
            data = corpora.remove(data, at, len(new)) if kind == 2 else data[: len(data) - at // 8]
    return data


@settings(max_examples=150, deadline=None)
@given(ANY, CHANGES, NAMES)
def test_any_file_can_be_inspected(data: bytes, changes: list[tuple[float, int, bytes]], name: str) -> None:
    data = change(data, changes)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(data)
        try:
            found = inspect_file(str(path), 3)
        except UsageError:  # Neither its bytes nor its name say what it is.
            return
    json.dumps(found)
    if found["format"] == "tfrecord" and found["compression"] == "none":
        framed = found["record_bytes"]["total"] + corpora.FRAME_BYTES * found["records"]
        assert framed + sum(damage["length"] for damage in found["damage"]) == len(data)
    if found["format"] == "array_record" and data:
        assert [damage["length"] for damage in found["damage"]] == [len(data)]


@settings(max_examples=60, deadline=None)
@given(CHANGES, st.integers(1, 40), st.sampled_from(["group_size:1", "group_size:5,zstd:3", "group_size:1,brotli:2"]))
def test_any_damaged_array_record_can_be_inspected(
    changes: list[tuple[float, int, bytes]], crowd: int, options: str
) -> None:
    """Every row is counted or named, or the whole file is."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.array_record"
        corpora.write_array_record(path, corpora.make_payloads(40, 60), options)
        data = path.read_bytes()
        front = len(data) // crowd
        data = change(data[:front], changes) + data[front:]
        path.write_bytes(data)
        found = inspect_file(str(path), 0)
    reasons = [damage["reason"] for damage in found["damage"]]
    if reasons == ["not_array_record"]:
        assert (found["records"], found["damage"][0]["length"]) == (0, len(data))
    else:
        assert set(reasons) <= {"damaged_record"}
        assert found["records"] + len(reasons) == 40


@settings(max_examples=300, deadline=None)
@given(ANY, CHANGES, st.text(max_size=30))
def test_any_bytes_can_be_looked_at(data: bytes, changes: list[tuple[float, int, bytes]], name: str) -> None:
    data = change(data, changes)
    assert guess_format(name, data) in (*FORMATS, None)
    assert what_is_it(data[:64]).startswith("it")
    compression = tfrecord.detect_compression(corpora.MemoryFile(data))
    assert compression in ("none", "gzip", "zlib")
    inflated, compressed = tfrecord.measure_inflation(corpora.MemoryFile(data))
    assert (inflated, compressed) == (0, 0) if compression == "none" else 0 <= compressed <= len(data)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(ANY, CHANGES), min_size=1, max_size=3), st.sampled_from(FORMATS), NAMES)
def test_any_files_can_be_sampled(
    files: list[tuple[bytes, list[tuple[float, int, bytes]]]], format_name: str, name: str
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        inputs = [
            corpora.write_file(Path(folder) / f"{number}{name}", change(*file)) for number, file in enumerate(files)
        ]
        [sample] = iter_sample(inputs, corpora.make_spec(format=format_name))
        for source in inputs:
            open_input(source).close()
    assert sample.estimate().record_bytes >= 1
    assert choose_compression(sample) in ("zstd:3", "uncompressed")


@settings(max_examples=150, deadline=None)
@given(FRAMED, CHANGES, st.integers(0, 9), st.sampled_from([1, 30, 1 << 18]), st.sampled_from(["zlib", "auto"]))
def test_damaged_zlib_streams_balance(
    data: bytes, changes: list[tuple[float, int, bytes]], level: int, piece: int, compression: str
) -> None:
    data = change(zlib.compress(data, level), changes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams, "_COMPRESSED_PIECE_BYTES", piece)
        patch.setattr(streams, "_INFLATED_PIECE_BYTES", 4 * piece)
        result = corpora.read_bytes(tfrecord.read_range, data, compression=compression)
    corpora.assert_every_byte_is_named_once([result], result.num_bytes)
    assert result.rolls == {True} or result.num_bytes == len(data)


NUMBERS = st.integers(0, 1 << 62)
VALUES = st.one_of(NUMBERS, st.text(st.characters(), max_size=30))


@given(
    st.binary(min_size=1, max_size=40),
    st.tuples(NUMBERS, NUMBERS),
    st.dictionaries(st.sampled_from(["line", "row", "member"]), VALUES),
    st.one_of(st.none(), st.binary(max_size=20)),
    st.integers(0, 20),
)
def test_any_dead_letter_is_one_line_that_tells_it_all(
    name: bytes, region: tuple[int, int], extra: dict[str, Any], payload: bytes | None, max_payload_bytes: int
) -> None:
    source = os.fsdecode(name)
    letter = DeadLetter(source, *region, "read", "truncated", payload=payload, extra=extra)
    line = to_line(letter, None if payload is None else 7, max_payload_bytes)
    assert line.count(b"\n") == 1
    fields = json.loads(line)
    assert name_from_fields("source", fields) == source
    assert (fields["position"], fields["length"]) == region
    assert {key: fields[key] for key in extra if isinstance(extra[key], int)} == {
        key: value for key, value in extra.items() if isinstance(value, int)
    }
    assert fields["payload_truncated"] == (payload is not None and len(payload) > max_payload_bytes)
