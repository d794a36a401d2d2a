"""Batches and outcomes come through as they are, wherever the memory between is full."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transforms.dead_letters import Failure
from transforms.steps import exchange as shared
from transforms.steps.chain import Outcome
from transforms.steps.exchange import (
    FILLED,
    Exchange,
    OutcomeReader,
    OutcomeWriter,
    make_file,
    make_memory,
    pack_batch,
    read_batch,
)


@pytest.fixture
def exchange(monkeypatch: pytest.MonkeyPatch) -> Iterator[Exchange]:
    """One whose room for frames is small."""
    monkeypatch.setattr(shared, "ARENA_BYTES", 100)
    fd = make_memory()
    memory = Exchange(fd)
    os.close(fd)
    yield memory
    memory.close()


def through(exchange: Exchange, outcomes: list[Outcome]) -> list[Outcome]:
    """Writes all outcomes and reads them, whenever there is no more room and at the end."""
    found: list[Outcome] = []
    reader = OutcomeReader()

    def read() -> None:
        found.extend(reader.feed(exchange.arena[: exchange.slots[FILLED]]))
        exchange.slots[FILLED] = 0

    writer = OutcomeWriter(exchange, read)
    for outcome in outcomes:
        writer.write(outcome)
    read()
    return found


TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=40)
FAILURES = st.builds(Failure, TEXT, TEXT, TEXT, TEXT, TEXT)
OUTCOMES = st.builds(
    Outcome, st.lists(st.binary(max_size=300), max_size=4), st.dictionaries(TEXT, st.integers(0, 99)), st.none()
) | st.builds(Outcome, failure=FAILURES)


@given(outcomes=st.lists(OUTCOMES, max_size=12))
@settings(max_examples=60, deadline=None)
def test_outcomes_come_through(outcomes: list[Outcome]) -> None:
    fd = make_memory()
    memory = Exchange(fd)
    os.close(fd)
    memory.arena = memory.arena[:100]
    assert through(memory, outcomes) == outcomes


@pytest.mark.parametrize("size", [0, 1, 67, 68, 69, 100, 168, 169, 1000])
def test_frames_around_the_size_of_the_room(size: int, exchange: Exchange) -> None:
    outcomes = [Outcome([b"x" * size]), Outcome([b"y"]), Outcome([b"x" * size, b"", b"z" * size])]
    assert through(exchange, outcomes) == outcomes


def test_unfinished_frame_is_no_outcome(exchange: Exchange) -> None:
    OutcomeWriter(exchange, lambda: None).write(Outcome([b"a"]))
    whole = exchange.slots[FILLED]
    assert OutcomeReader().feed(exchange.arena[:whole]) == [Outcome([b"a"])]
    for cut in range(whole):
        assert OutcomeReader().feed(exchange.arena[:cut]) == []


@given(records=st.lists(st.binary(max_size=50), max_size=20), joined=st.booleans())
def test_batches_come_through(records: list[bytes], joined: bool) -> None:
    parts = pack_batch(records, b"a note")
    found = read_batch(io.BytesIO(b"".join(parts)))
    assert found is not None
    assert (list(found[0]), found[1]) == (records, b"a note")


def test_large_records_are_sent_as_they_are() -> None:
    records = [b"a" * 3_000_000, b"b" * 3_000_000]
    parts = pack_batch(records)
    assert [part for part in parts if part in records] == records
    found = read_batch(io.BytesIO(b"".join(parts)))
    assert found is not None
    assert (list(found[0]), found[1]) == (records, b"")


@pytest.mark.parametrize("data", [b"", b"\1\0\0"])
def test_end_of_input_is_no_batch(data: bytes) -> None:
    assert read_batch(io.BytesIO(data)) is None


def test_notes_keep_the_end_of_long_texts(exchange: Exchange) -> None:
    assert exchange.note(shared.STDERR) == b""
    exchange.put_note(shared.STDERR, b"x" * 20_000 + b"end")
    exchange.put_note(shared.TRACE, b"short")
    assert exchange.note(shared.STDERR) == b"x" * 7_997 + b"end"
    assert exchange.note(shared.TRACE) == b"short"


def test_text_stands_in_the_place_of_frames(exchange: Exchange) -> None:
    exchange.put_text("half \ud83d")
    assert exchange.text() == "half \\ud83d"


def test_file_on_disk_where_there_is_none_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    fd = make_file("name")
    os.ftruncate(fd, 10)
    assert os.pread(fd, 20, 0) == bytes(10)
    assert os.fstat(fd).st_nlink == 0
    os.close(fd)
