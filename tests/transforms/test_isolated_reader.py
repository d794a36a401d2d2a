"""Ranges that kill their reader: exactly what kills it is lost, in one dead letter, and everything else is read."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from array_record.python.array_record_module import ArrayRecordWriter

import corpora
import jobs
from corpora import frame_all, write_file
from transforms.child_call import ChildCall
from transforms.elements import Chunk, Input
from transforms.isolated_reader import read_isolated
from transforms.shard_reader import Progress, read_input

HOOKS = Path(__file__).parent.parent / "hooks"
POISON = "POISON"


@pytest.fixture
def crashing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has children of this process, but not this one, crash on poisoned records."""
    monkeypatch.setenv("GRISTMILL_TEST_CRASH", POISON)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HOOKS), jobs.environment()["PYTHONPATH"]]))


def payloads(*poisoned: int, count: int = 60) -> list[bytes]:
    return [b"%s-%04d" % (b"POISON" if index in poisoned else b"sound", index) * 9 for index in range(count)]


def read(source: Input, start: int = 0, end: int | None = None, **changes: object) -> corpora.RangeResult:
    spec = corpora.make_spec("/out", **changes)
    return corpora.gather(read_isolated(spec, source, start, source.size if end is None else end))


def letters(result: corpora.RangeResult) -> list[tuple[int, int, str]]:
    return [(letter.position, letter.length, letter.reason) for letter in result.dead]


@pytest.mark.parametrize("poisoned", [(), (30,), (0, 59), (20, 21)])
def test_poisoned_records_are_lost_and_no_others(poisoned: tuple[int, ...], tmp_path: Path, crashing: None) -> None:
    records = payloads(*poisoned)
    source = write_file(tmp_path / "f", frame_all(records))
    result = read(source)
    assert result.records == [record for index, record in enumerate(records) if index not in poisoned]
    named = [(position, length) for position, length, _ in letters(result)]
    assert {reason for *_, reason in letters(result)} == ({"reader_died"} if poisoned else set())
    assert sum(length for _, length in named) == sum(len(frame_all([records[index]])) for index in poisoned)
    assert all("SIGABRT" in letter.error for letter in result.dead)
    if poisoned == (30,):
        assert named == [(len(frame_all(records[:30])), len(frame_all(records[30:31])))]
    assert result.num_bytes == source.size
    assert result.span is not None
    assert (result.span.start, result.span.end) == (0, source.size)


def test_ranges_beside_the_poison_meet(tmp_path: Path, crashing: None) -> None:
    records = payloads(30)
    source = write_file(tmp_path / "f", frame_all(records))
    middle = source.size // 3
    first, second = read(source, 0, middle), read(source, middle, source.size)
    assert first.records + second.records == records[:30] + records[31:]
    assert first.span is not None
    assert second.span is not None
    assert first.span.end == second.span.start


def test_a_compressed_stream_loses_what_follows_the_last_batch(tmp_path: Path, crashing: None) -> None:
    records = [corpora.text_payload(index, 300) for index in range(3000)]
    records[2500] = b"POISON"
    source = write_file(tmp_path / "f.gz", zlib.compress(frame_all(records)))
    result = read(source)
    assert 500 < len(result.records) <= 2500
    assert result.records == records[: len(result.records)]
    assert [letter.reason for letter in result.dead] == ["reader_died"]
    assert result.dead[0].position == len(frame_all(result.records))


def test_an_array_record_loses_one_record(tmp_path: Path, crashing: None) -> None:
    records = payloads(17)
    writer = ArrayRecordWriter(str(tmp_path / "f"), "group_size:1")
    for record in records:
        writer.write(record)
    writer.close()
    info = os.stat(tmp_path / "f")
    source = Input(0, str(tmp_path / "f"), info.st_size, info.st_mtime_ns)
    result = read(source, format="array_record")
    assert result.records == records[:17] + records[18:]
    assert [letter.reason for letter in result.dead] == ["reader_died"]


@pytest.mark.parametrize("damage", [b"", b"cut"])
def test_without_poison_the_same_is_read_as_in_this_process(damage: bytes, tmp_path: Path) -> None:
    source = write_file(tmp_path / "f", frame_all(payloads()) + damage)
    spec = corpora.make_spec("/out")
    plain: list[Chunk] = list(read_input(spec, source, 100, source.size))
    assert list(read_isolated(spec, source, 100, source.size)) == plain


def test_an_input_that_cannot_be_opened_is_its_dead_letter(tmp_path: Path) -> None:
    result = read(Input(0, str(tmp_path / "gone"), 10, 0))
    assert [letter.reason for letter in result.dead] == ["not_found"]


def test_a_reader_that_something_else_kills_loses_what_it_had_not_read(
    tmp_path: Path, crashing: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The part in front of the poison was found harmless, then its reader dies after a batch all the same."""
    records = payloads(2900, count=3000)
    source = write_file(tmp_path / "f", frame_all(records))
    original = ChildCall.items

    def items(self: ChildCall) -> Iterator[Any]:
        for number, chunk in enumerate(original(self)):
            yield chunk
            if chunk.records and number == 0:
                self.death = "SIGKILL"
                return

    monkeypatch.setattr(ChildCall, "items", items)
    result = read(source)
    assert POISON.encode() not in b"".join(result.records)
    corpora.assert_every_byte_is_named_once([result], source.size)
    assert {letter.reason for letter in result.dead} == {"reader_died"}


def test_what_is_left_of_a_range_is_never_negative() -> None:
    """Records of an ArrayRecord are compressed: they may be longer than the file."""
    progress = Progress(Input(0, "f", 100, 0), 0, 100)
    progress.follow(Chunk([b"x" * 5000], [0], num_bytes=5000))
    [letter] = progress.rest("reader_died", "").dead
    assert (letter.position, letter.length) == (100, 0)
