"""The file of a piece gives back the very batches that went into it, or nothing of it is used."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from fakes import WorstStore, make_spec, make_task, toy_records
from transforms.elements import DeadLetter, Input, RecordBatch, Span
from transforms.piece_log import PieceWriter, open_log, read_log
from transforms.pieces import PieceEntry, find_piece
from transforms.store import OutputError

PIECE = dataclasses.replace(make_task(), piece=0)
ODD = Input(7, "/corpus/caf\udce9\n", 1000, 1_700_000_000_000_000_000)
LETTER = DeadLetter(
    ODD.name, 5, 11, "a step", "no_luck", "ValueError", "half a pair: \udc80", "frames", b"\x00\xff", True, {"row": 3}
)
BATCHES = [
    RecordBatch(PIECE, 0, source=ODD, records=[b"", b"\x00" * 3], records_read=3, dead=[LETTER], rolls=True),
    RecordBatch(PIECE, 0, source=ODD, num_bytes=99, span=Span(0, 50, None, None), dropped={"why\u00e9": 2}),
    RecordBatch(
        PIECE,
        0,
        source=dataclasses.replace(ODD, index=8, error=("not_found", "gone")),
        records=toy_records(2_000),
        records_read=1_000,
        records_added=1_000,
        dead=[dataclasses.replace(LETTER, payload=None), LETTER],
        span=Span(0, 50, 3, 60),
    ),
]


def commit(store: WorstStore, batches: list[RecordBatch]) -> PieceEntry:
    spec = make_spec(store.root, num_pieces=1)
    writer = PieceWriter(store, spec, PIECE)
    for batch in batches:
        writer.add(batch)
    writer.commit()
    entry = find_piece(store, spec, PIECE)
    assert entry is not None
    return entry


def test_batches_come_back_as_they_were_but_marked_as_done() -> None:
    store = WorstStore()
    entry = commit(store, BATCHES)
    with open_log(store, entry) as path:
        assert path is not None
        assert list(read_log(path, PIECE)) == [dataclasses.replace(batch, applied=True) for batch in BATCHES]


def test_a_piece_without_a_record_is_one_without_batches() -> None:
    store = WorstStore()
    entry = commit(store, [])
    with open_log(store, entry) as path:
        assert path is not None
        assert list(read_log(path, PIECE)) == []


def test_of_a_damaged_file_nothing_is_used() -> None:
    store = WorstStore()
    entry = commit(store, BATCHES)
    data = bytearray(store.tree()[entry.file.name])
    data[len(data) // 2] ^= 1
    store.put(entry.file.name, bytes(data))
    with open_log(store, entry) as path:
        assert path is None


def test_a_file_that_is_gone_is_none() -> None:
    store = WorstStore()
    entry = commit(store, BATCHES)
    store.delete(entry.file.name)
    with open_log(store, entry) as path:
        assert path is None


@pytest.mark.parametrize("kept", [0.0, 0.5, 0.99])
def test_a_file_that_is_cut_while_it_is_read_ends_the_attempt(tmp_path: Path, kept: float) -> None:
    store = WorstStore()
    entry = commit(store, BATCHES)
    data = store.tree()[entry.file.name]
    path = tmp_path / "batches.array_record"
    path.write_bytes(data[: int(kept * len(data))])
    with pytest.raises(OutputError, match=r"batches.array_record, a piece of shard 0, cannot be read"):
        list(read_log(str(path), PIECE))
