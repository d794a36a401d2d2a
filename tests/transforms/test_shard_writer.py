"""One attempt at a shard: parts, dead letters, books and the commit."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from array_record.python.array_record_module import ArrayRecordWriter
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes import (
    WorstStore,
    make_batch,
    make_letter,
    make_source,
    make_spec,
    make_task,
    read_array_record,
    toy_records,
)
from transforms import shard_writer
from transforms.dead_letters import JobInterrupted
from transforms.elements import JobSpec, RecordBatch, ShardInfo, Span
from transforms.ledger import ATTEMPTS, Ledger, find_ledger, ledger_name
from transforms.shard_writer import ShardWriter, file_crc32c
from transforms.store import LocalStore, OutputError, Store


@pytest.fixture(params=["local", "worst"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return LocalStore(str(tmp_path / "out")) if request.param == "local" else WorstStore()


def write_shard(store: Store, spec: JobSpec, batches: list[RecordBatch], shard: int = 0) -> ShardInfo:
    """Writes and commits one attempt."""
    writer = ShardWriter(store, spec, make_task(shard))
    for batch in batches:
        writer.add(batch)
    return writer.commit()


def committed(store: Store, spec: JobSpec, shard: int = 0) -> Ledger:
    """The shard's ledger, which must count."""
    found = find_ledger(store, spec, shard)
    assert found is not None
    assert found.ledger is not None
    return found.ledger


def names_of(store: Store) -> list[str]:
    """Everything in the store."""
    if isinstance(store, WorstStore):
        store.settle()
    return [name for name, _ in store.list("")]


def parts_of(store: Store, spec: JobSpec) -> list[list[bytes]]:
    """The records of a shard, part by part."""
    return [read_array_record(store, part.name) for part in committed(store, spec).parts]


class TestCommit:
    def test_ledger_names_what_was_written_with_size_and_checksum(self, store: Store) -> None:
        spec = make_spec(store.root)
        records, letters = toy_records(10), [make_letter(0), make_letter(1)]
        info = write_shard(store, spec, [make_batch(records, dead=letters)])
        ledger = committed(store, spec)
        assert names_of(store) == sorted([ledger_name(spec, 0), *(file.name for file in ledger.files())])
        for file in ledger.files():
            assert store.size(file.name) == file.size
            with store.local_copy(file.name) as path:
                assert file_crc32c(path) == file.crc32c
        assert [file.records for file in ledger.files()] == [10, 2, 2]
        assert parts_of(store, spec) == [records]
        assert info == ledger.to_info(make_task())

    def test_names_stand_in_a_folder_of_the_attempt(self, store: Store) -> None:
        spec = make_spec(store.root, num_shards=7)
        write_shard(store, spec, [make_batch(toy_records(1), dead=[make_letter(0)], shard=6)], shard=6)
        ledger = committed(store, spec, 6)
        folders = {file.name.rpartition("/")[0] for file in ledger.files()}
        assert len(folders) == 1
        assert folders.pop().startswith(f"{ATTEMPTS}00006-")
        assert [file.name.rpartition("/")[2] for file in ledger.files()] == [
            "part-00000.array_record",
            "dead.jsonl",
            "dead.payloads",
        ]

    def test_second_attempt_gets_the_first_ones_result_and_deletes_its_own_files_only(self, store: Store) -> None:
        spec = make_spec(store.root)
        first = ShardWriter(store, spec, make_task())
        second = ShardWriter(store, spec, make_task())
        for writer, start in ((first, 0), (second, 100)):
            writer.add(make_batch(toy_records(3, start), dead=[make_letter(start)]))
        won = second.commit()
        kept = names_of(store)
        assert first.commit() == won
        ledger = committed(store, spec)
        assert names_of(store) == sorted([ledger_name(spec, 0), *(file.name for file in ledger.files())])
        assert set(names_of(store)) <= set(kept)
        assert parts_of(store, spec) == [toy_records(3, 100)]

    def test_entry_that_was_created_although_the_store_said_no_is_mine(self) -> None:
        """A request is repeated by the network or its client: the first one won, the second says "exists"."""

        class Repeating(WorstStore):
            def put_if_absent(self, name: str, data: bytes) -> bool:
                super().put_if_absent(name, data)
                return super().put_if_absent(name, data)

        store = Repeating()
        spec = make_spec(store.root)
        write_shard(store, spec, [make_batch(toy_records(5), dead=[make_letter(0)])])
        assert parts_of(store, spec) == [toy_records(5)]

    def test_same_records_give_the_same_bytes(self, tmp_path: Path) -> None:
        contents = []
        for number in range(2):
            store = LocalStore(str(tmp_path / str(number)))
            spec = make_spec(store.root)
            write_shard(store, spec, [make_batch(toy_records(2000), dead=[make_letter(n) for n in range(50)])])
            contents.append([Path(store.root, file.name).read_bytes() for file in committed(store, spec).files()])
        assert contents[0] == contents[1]

    def test_repeated_range_notes_where_it_started(self, store: Store) -> None:
        spec = make_spec(store.root)
        ShardWriter(store, spec, dataclasses.replace(make_task(), start_at=77)).commit()
        assert committed(store, spec).start_at == 77


class TestEmptyShard:
    def test_writes_no_part_and_no_dead_letter_file(self, store: Store) -> None:
        spec = make_spec(store.root)
        info = write_shard(store, spec, [make_batch([])])
        assert names_of(store) == [ledger_name(spec, 0)]
        assert (info.num_parts, info.books["records_read"], info.books["files_empty"]) == (0, 0, 1)

    def test_with_dead_letters_only_has_the_pair_and_no_part(self, store: Store) -> None:
        spec = make_spec(store.root)
        info = write_shard(store, spec, [make_batch([], dead=[make_letter(0)])])
        assert [name.rpartition("/")[2] for name in names_of(store)] == ["dead.jsonl", "dead.payloads", "00000.json"]
        assert (info.num_parts, info.books["records_dead"]) == (0, 1)


class TestDeadLetterPair:
    def test_lines_and_payloads_are_in_step(self, store: Store) -> None:
        spec = make_spec(store.root)
        letters = [make_letter(n, payload=None if n % 3 == 1 else b"") for n in range(10)]
        write_shard(store, spec, [make_batch(toy_records(2), dead=letters[:4]), make_batch([], dead=letters[4:])])
        ledger = committed(store, spec)
        assert ledger.dead_lines is not None
        assert ledger.dead_payloads is not None
        with store.open(ledger.dead_lines.name) as file:
            lines = [json.loads(line) for line in file]
        payloads = read_array_record(store, ledger.dead_payloads.name)
        assert [line["position"] for line in lines] == list(range(10))
        for letter, line in zip(letters, lines, strict=True):
            index = line["payload_index"]
            assert letter.payload == (None if index is None else payloads[index])
        assert [line["payload_index"] for line in lines if line["payload_index"] is not None] == list(
            range(len(payloads))
        )
        assert (ledger.dead_lines.records, ledger.dead_payloads.records) == (10, 7)

    def test_without_payloads_has_no_payload_file(self, store: Store) -> None:
        spec = make_spec(store.root)
        write_shard(store, spec, [make_batch([], dead=[make_letter(0, payload=None)])])
        assert committed(store, spec).dead_payloads is None
        assert [name.rpartition("/")[2] for name in names_of(store)] == ["dead.jsonl", "00000.json"]

    def test_long_payloads_are_cut_and_the_line_says_so(self, store: Store) -> None:
        spec = make_spec(store.root, max_payload_bytes=100)
        letters = [make_letter(0, payload=b"x" * 100), make_letter(1, payload=b"y" * 101)]
        write_shard(store, spec, [make_batch([], dead=letters)])
        ledger = committed(store, spec)
        assert ledger.dead_lines is not None
        assert ledger.dead_payloads is not None
        assert read_array_record(store, ledger.dead_payloads.name) == [b"x" * 100, b"y" * 100]
        with store.open(ledger.dead_lines.name) as file:
            lines = [json.loads(line) for line in file]
        assert [(line["payload_bytes"], line["payload_truncated"]) for line in lines] == [(100, False), (101, True)]

    def test_empty_payload_is_kept_as_an_empty_record(self, store: Store) -> None:
        spec = make_spec(store.root)
        letter = make_letter(0)
        letter.payload = b""
        write_shard(store, spec, [make_batch([], dead=[letter])])
        ledger = committed(store, spec)
        assert ledger.dead_payloads is not None
        assert read_array_record(store, ledger.dead_payloads.name) == [b""]


class TestParts:
    def test_part_is_full_at_its_records(self, store: Store) -> None:
        spec = make_spec(store.root, part_max_records=4, roll_factor=1)
        write_shard(store, spec, [make_batch(toy_records(10))])
        assert parts_of(store, spec) == [toy_records(4), toy_records(4, 4), toy_records(2, 8)]

    def test_part_is_full_at_its_payload_bytes(self, store: Store) -> None:
        records = toy_records(7)
        spec = make_spec(store.root, part_max_bytes=3 * len(records[0]), roll_factor=1)
        write_shard(store, spec, [make_batch(records)])
        assert parts_of(store, spec) == [records[:3], records[3:6], records[6:]]

    def test_exactly_full_part_starts_no_further_one(self, store: Store) -> None:
        spec = make_spec(store.root, part_max_records=4, roll_factor=1)
        write_shard(store, spec, [make_batch(toy_records(8))])
        assert parts_of(store, spec) == [toy_records(4), toy_records(4, 4)]

    def test_record_beyond_the_bound_has_a_part_of_its_own(self, store: Store) -> None:
        spec = make_spec(store.root, part_max_bytes=10, roll_factor=1)
        records = [b"1234", b"x" * 50, b"5678", b"y" * 11, b"z" * 10, b"1"]
        write_shard(store, spec, [make_batch(records)])
        assert parts_of(store, spec) == [[b"1234"], [b"x" * 50], [b"5678"], [b"y" * 11], [b"z" * 10], [b"1"]]

    def test_splittable_input_rolls_over_at_the_factor(self, store: Store) -> None:
        spec = make_spec(store.root, part_max_records=3, roll_factor=2)
        write_shard(store, spec, [make_batch(toy_records(8))])
        assert parts_of(store, spec) == [toy_records(6), toy_records(2, 6)]

    def test_factor_zero_never_rolls_over_splittable_input(self, store: Store) -> None:
        spec = make_spec(store.root, part_max_records=3, part_max_bytes=20, roll_factor=0)
        write_shard(store, spec, [make_batch(toy_records(50))])
        assert parts_of(store, spec) == [toy_records(50)]

    def test_input_that_cannot_be_split_rolls_over_at_the_bound_itself(self, store: Store) -> None:
        spec = make_spec(store.root, part_max_records=3, roll_factor=0)
        write_shard(store, spec, [make_batch(toy_records(7), rolls=True)])
        assert parts_of(store, spec) == [toy_records(3), toy_records(3, 3), toy_records(1, 6)]

    def test_bounds_of_zero_are_no_bounds(self, store: Store) -> None:
        spec = make_spec(store.root, roll_factor=1)
        write_shard(store, spec, [make_batch(toy_records(1000), rolls=True)])
        assert parts_of(store, spec) == [toy_records(1000)]

    @given(
        sizes=st.lists(st.integers(0, 40), max_size=30),
        cuts=st.lists(st.integers(0, 30), max_size=8),
        max_records=st.integers(0, 6),
        max_bytes=st.integers(0, 60),
        rolls=st.booleans(),
    )
    @settings(max_examples=60, deadline=None)
    def test_any_cutting_into_batches_gives_the_same_bytes(
        self, sizes: list[int], cuts: list[int], max_records: int, max_bytes: int, rolls: bool
    ) -> None:
        records = [bytes([65 + number]) * size for number, size in enumerate(sizes)]
        bounds = {"part_max_records": max_records, "part_max_bytes": max_bytes, "roll_factor": 1}
        edges = sorted({0, len(records), *(min(cut, len(records)) for cut in cuts)})
        together, cut_up, one_by_one = WorstStore(), WorstStore(), WorstStore()
        write_shard(together, make_spec(together.root, **bounds), [make_batch(records, rolls=rolls)])
        batches = [make_batch(records[a:b], rolls=rolls) for a, b in itertools.pairwise(edges)]
        write_shard(cut_up, make_spec(cut_up.root, **bounds), batches or [make_batch([])])
        singles = [make_batch([record], rolls=rolls) for record in records]
        write_shard(one_by_one, make_spec(one_by_one.root, **bounds), singles or [make_batch([])])
        expected = _part_bytes(together)
        assert _part_bytes(cut_up) == expected
        assert _part_bytes(one_by_one) == expected
        parts = parts_of(together, make_spec(together.root))
        assert list(itertools.chain(*parts)) == records
        for part in parts:
            assert not max_records or len(part) <= max_records
            assert not max_bytes or len(part) == 1 or sum(map(len, part)) <= max_bytes


def _part_bytes(store: WorstStore) -> list[bytes]:
    return [store.tree()[part.name] for part in committed(store, make_spec(store.root)).parts]


class TestBooks:
    def test_one_row_an_input_in_order(self, store: Store) -> None:
        spec = make_spec(store.root)
        first, second = make_source(4, size=100), make_source(5, size=70)
        batches = [
            make_batch(toy_records(3), source=first, num_bytes=60, records_added=1),
            make_batch(toy_records(2), source=first, num_bytes=40, dropped={"short": 2}, span=Span(0, 100, 0, 100)),
            make_batch([], source=second, dead=[make_letter(0)], num_bytes=70, span=Span(0, 70, 0, 70)),
            RecordBatch(make_task(), 3, last=True),
        ]
        write_shard(store, spec, batches)
        ledger = committed(store, spec)
        rows = [row.to_fields() for row in ledger.rows]
        assert rows == [
            # index, count, size, span, read, written, added, dropped, dead, bytes, dead bytes
            [4, 1, 100, [0, 100, 0, 100], 6, 5, 1, 2, 0, 100, 0],
            [5, 1, 70, [0, 70, 0, 70], 1, 0, 0, 0, 1, 70, 11],
        ]
        assert (ledger.dropped_by_reason, ledger.dead_by_reason) == ({"short": 2}, {"data_checksum": 1})

    def test_a_run_of_like_inputs_is_one_row(self, store: Store) -> None:
        spec = make_spec(store.root)
        span = Span(0, 10, 0, 10)
        sources = [make_source(index, size=10) for index in range(20)]
        write_shard(store, spec, [make_batch([b"one"], source=source, num_bytes=10, span=span) for source in sources])
        [row] = committed(store, spec).rows
        assert (row.index, row.count, row.read, row.written, row.num_bytes) == (0, 20, 1, 1, 200)
        assert committed(store, spec).books()["files_read"] == 20


class LossyWriter:
    """A writer that loses the third record, as a bug in a library or a full disk may do."""

    def __init__(self, path: bytes, options: str) -> None:
        self._writer = ArrayRecordWriter(path, options)
        self._count = 0

    def write(self, record: bytes) -> None:
        self._count += 1
        if self._count != 3:
            self._writer.write(record)

    def close(self) -> None:
        self._writer.close()


class TestFailure:
    def test_file_that_reads_back_short_is_not_committed(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(shard_writer, "ArrayRecordWriter", LossyWriter)
        spec = make_spec(store.root)
        writer = ShardWriter(store, spec, make_task())
        writer.add(make_batch(toy_records(10)))
        with pytest.raises(OutputError, match="written with 10 records but reads back as 9"):
            writer.commit()
        assert find_ledger(store, spec, 0) is None
        writer.abandon()
        assert names_of(store) == []

    def test_abandoned_attempt_leaves_nothing(self, store: Store) -> None:
        spec = make_spec(store.root, part_max_records=2, roll_factor=1)
        writer = ShardWriter(store, spec, make_task())
        writer.add(make_batch(toy_records(5), dead=[make_letter(0), make_letter(1)]))
        writer.abandon()
        assert names_of(store) == []

    def test_attempt_that_is_interrupted_right_after_its_commit_keeps_its_files(
        self, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def interrupt(*_: object) -> None:
            raise JobInterrupted

        monkeypatch.setattr(shard_writer, "forget_tries", interrupt)
        spec = make_spec(store.root)
        writer = ShardWriter(store, spec, make_task())
        writer.add(make_batch(toy_records(5), dead=[make_letter(0)]))
        with pytest.raises(JobInterrupted):
            writer.commit()
        writer.abandon()
        found = find_ledger(store, spec, 0)
        assert found is not None
        assert found.ledger is not None
        assert [file.records for file in found.ledger.files()] == [5, 1, 1]

    @pytest.mark.parametrize("number", range(1, 8))
    def test_call_that_fails_is_an_output_error_and_commits_nothing(self, number: int) -> None:
        store = WorstStore()
        spec = make_spec(store.root)
        writer = ShardWriter(store, spec, make_task())
        store.fail_at(number)

        def attempt() -> None:
            writer.add(make_batch(toy_records(5), dead=[make_letter(0)]))
            writer.commit()

        with pytest.raises(OutputError, match="quota exceeded"):
            attempt()
        writer.abandon()
        assert store.tree() == {}

    def test_full_disk_is_an_output_error_on_closing_and_leaves_nothing(self, tmp_path: Path) -> None:
        done = run_with_file_limit(tmp_path, "make_batch([os.urandom(1000) for _ in range(1000)])")
        assert done.stdout == "refused\n", done.stderr
        assert "cannot write" in done.stderr
        assert [str(path) for path in tmp_path.rglob("*") if path.is_file()] == []

    def test_full_disk_under_dead_letters_is_an_output_error_and_leaves_nothing(self, tmp_path: Path) -> None:
        done = run_with_file_limit(tmp_path, "make_batch([], dead=[make_letter(n, None) for n in range(5000)])")
        assert done.stdout == "refused\n", done.stderr
        assert "cannot write" in done.stderr
        assert [str(path) for path in tmp_path.rglob("*") if path.is_file()] == []


def run_with_file_limit(root: Path, batch: str) -> subprocess.CompletedProcess[str]:
    """Writes a batch in a process whose files may have 300,000 bytes at most."""
    program = """
        import os, resource, sys
        from fakes import make_batch, make_letter, make_spec, make_task
        from transforms.shard_writer import ShardWriter
        from transforms.store import LocalStore, OutputError
        store = LocalStore(sys.argv[1])
        writer = ShardWriter(store, make_spec(store.root), make_task())
        resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))
        try:
            writer.add({batch})
            writer.commit()
        except OutputError as error:
            writer.abandon()
            print(error, file=sys.stderr)
            print("refused")
    """
    program = textwrap.dedent(program).format(batch=batch)
    tests = Path(__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": f"{tests.parent}{os.pathsep}{tests}"}
    return subprocess.run(
        [sys.executable, "-c", program, str(root)],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
        check=False,
    )
