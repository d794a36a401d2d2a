"""One planned shard, input by input: what is read, and what becomes of inputs and readers that fail."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import corpora
from corpora import MemoryFile, RangeResult, frame_all, write_file
from transforms import shard_reader
from transforms.elements import Chunk, Input, JobSpec, RecordBatch, ShardTask, Span
from transforms.formats import streams
from transforms.ledger import Ledger, StoredFile, commit, ledger_name
from transforms.shard_reader import read_input, read_shard
from transforms.sources import explain_error
from transforms.store import LocalStore

INPUTS = "_gristmill/inputs.jsonl"
Opens = Callable[[MemoryFile | OSError], None]


@dataclasses.dataclass
class Job:
    """An output folder with a list of inputs, one shard planned over all of them."""

    store: LocalStore
    spec: JobSpec
    sources: list[Input]
    task: ShardTask
    offsets: list[int]

    def read(self, task: ShardTask | None = None, **changes: Any) -> list[RecordBatch]:
        spec = dataclasses.replace(self.spec, **changes)
        batches = list(read_shard(self.store, spec, task or self.task))
        assert [batch.sequence for batch in batches] == list(range(len(batches)))
        assert [batch.last for batch in batches] == [False] * (len(batches) - 1) + [True]
        assert all(batch.records_read == len(batch.records) + len(batch.dead) for batch in batches)
        return batches

    def shard(self, number: int, start: int, end: int, start_at: int | None = None) -> ShardTask:
        """A shard of a range of the first input."""
        return ShardTask(number, 0, 0, start, 0, end, 0, start_at)


Plan = Callable[..., Job]
ReadShards = Callable[..., list[RangeResult]]


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    def make(sources: list[Input], **changes: Any) -> Job:
        store = LocalStore(str(tmp_path / "out"))
        sources = [dataclasses.replace(source, index=index) for index, source in enumerate(sources)]
        lines = corpora.input_lines(sources)
        offsets = list(itertools.accumulate(map(len, lines[:-1]), initial=0))
        store.put(INPUTS, b"".join(lines))
        task = ShardTask(0, 0, 0, 0, offsets[-1], sources[-1].size, 0)
        return Job(store, corpora.make_spec(store.root, num_shards=3, **changes), sources, task, offsets)

    return make


def records_of(batches: list[RecordBatch]) -> list[bytes]:
    return [record for batch in batches for record in batch.records]


def letters_of(batches: list[RecordBatch]) -> list[tuple[str, int, int, str]]:
    """(name of the file, position, length, reason) of every dead letter."""
    return [
        (os.path.basename(letter.source), letter.position, letter.length, letter.reason)
        for batch in batches
        for letter in batch.dead
    ]


def as_range(batches: list[RecordBatch]) -> RangeResult:
    """The batches of one range of one input."""
    return corpora.gather(
        Chunk(batch.records, batch.positions, batch.dead, batch.num_bytes, batch.span) for batch in batches[:-1]
    )


def three_files(tmp_path: Path) -> tuple[list[Input], list[list[bytes]]]:
    payloads = [[corpora.text_payload(100 * file + index, 20) for index in range(10)] for file in range(3)]
    return [write_file(tmp_path / f"f{file}", frame_all(payloads[file])) for file in range(3)], payloads


def test_inputs_are_read_in_order_and_an_empty_batch_ends_the_shard(tmp_path: Path, plan: Plan) -> None:
    sources, payloads = three_files(tmp_path)
    job = plan(sources)
    batches = job.read()
    assert records_of(batches) == payloads[0] + payloads[1] + payloads[2]
    assert [batch.source and batch.source.index for batch in batches] == [0, 0, 1, 1, 2, 2, None]
    assert [batch.span for batch in batches if batch.span] == [Span(0, 360, 0, 360)] * 3
    assert batches[-1] == RecordBatch(job.task, 6, last=True, try_number=1)
    assert sum(batch.num_bytes for batch in batches) == 3 * 360


def test_a_shard_is_an_interval_of_the_inputs(tmp_path: Path, plan: Plan) -> None:
    sources, payloads = three_files(tmp_path)
    job = plan(sources)
    task = ShardTask(1, job.offsets[1], 1, 100, job.offsets[2], 180, 0)
    batches = job.read(task)
    assert records_of(batches) == payloads[1][3:] + payloads[2][:5]
    assert [batch.span for batch in batches if batch.span] == [Span(100, 360, 108, 360), Span(0, 180, 0, 180)]


def test_shards_of_one_file_hold_each_record_once(tmp_path: Path, plan: Plan) -> None:
    payloads = corpora.make_payloads(100, 100)
    job = plan([write_file(tmp_path / "x", frame_all(payloads))])
    ranges = corpora.cut_ranges(job.sources[0].size, [10, 1000, 1001, 4000])
    shards = [job.read(job.shard(number, *pair)) for number, pair in enumerate(ranges)]
    assert [record for batches in shards for record in records_of(batches)] == payloads
    assert corpora.add_up_ranges(list(map(as_range, shards)), job.sources[0].size).apart == []


@pytest.mark.parametrize("limit", [1, 3, 9, 10, 11, 25, 29, 30, 31, 1000])
def test_limit_reads_that_many_records(tmp_path: Path, plan: Plan, limit: int) -> None:
    sources, payloads = three_files(tmp_path)
    batches = plan(sources).read(limit=limit)
    assert records_of(batches) == (payloads[0] + payloads[1] + payloads[2])[:limit]


@pytest.mark.parametrize("limit", range(1, 13))
def test_limit_counts_dead_letters_as_records(tmp_path: Path, plan: Plan, limit: int) -> None:
    data = frame_all([corpora.text_payload(index, 20) for index in range(12)])
    job = plan([write_file(tmp_path / "x", corpora.flip_bit(corpora.flip_bit(data, 36 * 2 + 15), 36 * 7 + 15))])
    batches = job.read(limit=limit)
    assert sum(batch.records_read for batch in batches) == limit
    assert len(letters_of(batches)) == sum(limit > row for row in (2, 7))
    positions = [position for batch in batches for position in batch.positions]
    assert positions == [36 * row for row in range(limit) if row not in (2, 7)]


def test_inputs_that_cannot_be_read_are_dead_letters_between_the_others(tmp_path: Path, plan: Plan) -> None:
    sources, payloads = three_files(tmp_path)
    gone, grown, shrunk = (write_file(tmp_path / name, frame_all(payloads[0])) for name in ("gone", "grown", "shrunk"))
    (tmp_path / "gone").unlink()
    (tmp_path / "grown").write_bytes(frame_all(payloads[1]) + b"more")
    (tmp_path / "shrunk").write_bytes(b"x")
    os.mkfifo(tmp_path / "pipe")
    listed = Input(0, str(tmp_path / "listed"), 0, 0, ("permission_denied", "may not be read"))
    pipe = dataclasses.replace(gone, name=str(tmp_path / "pipe"))
    sources[1:1] = [gone, listed, grown, pipe]
    batches = plan([*sources, shrunk]).read()
    assert records_of(batches) == payloads[0] + payloads[1] + payloads[2]
    assert letters_of(batches) == [
        ("gone", 0, 360, "not_found"),
        ("listed", 0, 0, "permission_denied"),
        ("grown", 0, 360, "input_changed"),
        ("pipe", 0, 360, "not_a_file"),
        ("shrunk", 0, 360, "input_changed"),
    ]
    letters = [letter for batch in batches for letter in batch.dead]
    assert all(letter.whole_file and letter.step == "read" and letter.error for letter in letters)


@pytest.mark.parametrize(("name", "reasons"), [("tfrecord", []), ("array_record", []), ("files", ["empty_file"])])
def test_an_empty_file_is_dead_only_as_a_raw_file(tmp_path: Path, plan: Plan, name: str, reasons: list[str]) -> None:
    batches = plan([write_file(tmp_path / "x", b"")], format=name).read()
    assert records_of(batches) == []
    assert [letter[3] for letter in letters_of(batches)] == reasons


def test_a_file_listed_with_no_bytes_that_holds_some_is_changed() -> None:
    """Files under /proc say 0 bytes."""
    chunks = list(read_input(corpora.make_spec(), corpora.listed(Path("/proc/self/status")), 0, 0))
    assert [letter.reason for chunk in chunks for letter in chunk.dead] == ["input_changed"]


@pytest.fixture
def opens(monkeypatch: pytest.MonkeyPatch) -> Opens:
    """Puts another file, or a failure, in the place of every input."""

    def put(file: MemoryFile | OSError) -> None:
        def open_instead(_: Input) -> MemoryFile:
            if isinstance(file, OSError):
                raise file
            return file

        monkeypatch.setattr(shard_reader, "open_input", open_instead)

    return put


PAYLOADS = [corpora.text_payload(index, 984) for index in range(4000)]
DATA = frame_all(PAYLOADS)
SOURCE = Input(0, "/disk/file", len(DATA), 0)
BAD = (2_000_000, 2_004_096)


def read_data(start: int, end: int, **changes: Any) -> RangeResult:
    return corpora.gather(read_input(corpora.make_spec(**changes), SOURCE, start, end))


def test_a_bad_block_costs_the_rest_of_the_file(opens: Opens) -> None:
    file = MemoryFile(DATA, bad=BAD)
    opens(file)
    result = read_data(0, len(DATA))
    count = len(result.records)
    assert 900 < count <= 2000
    assert result.records == PAYLOADS[:count]
    assert result.regions == [(1000 * count, len(DATA) - 1000 * count, "io_error")]
    assert result.num_bytes == len(DATA)
    assert not result.dead[0].whole_file
    assert file.closed


@pytest.mark.parametrize("start", [1, 300_300, 400_001])
def test_a_bad_block_in_a_later_range_costs_no_record_that_was_read(opens: Opens, start: int) -> None:
    """The range begins at a boundary behind its start: what is left must be counted from there."""
    opens(MemoryFile(DATA, bad=BAD))
    result = read_data(start, 3_500_000)
    assert result.records
    next_position = result.positions[-1] + 1000
    assert result.regions == [(next_position, 3_500_000 - next_position, "io_error")]


def test_a_bad_block_in_a_compressed_file_is_placed_in_the_decompressed_stream(
    opens: Opens, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "_COMPRESSED_PIECE_BYTES", 1000)
    packed = zlib.compress(DATA, 1)
    opens(MemoryFile(packed, bad=(len(packed) * 3 // 4, len(packed))))
    source = dataclasses.replace(SOURCE, size=len(packed))
    result = corpora.gather(read_input(corpora.make_spec(), source, 0, len(packed)))
    assert len(result.records) > 1000
    assert result.records == PAYLOADS[: len(result.records)]
    assert result.reasons == ["io_error"]
    assert result.dead[0].position == 1000 * len(result.records)


@pytest.fixture
def read_shards(plan: Plan, opens: Opens) -> ReadShards:
    """Reads the ranges between cuts, each from a file of its own, and those that are apart again, as the job does."""

    def read(files: list[MemoryFile | OSError], cuts: list[int]) -> list[RangeResult]:
        job, ranges = plan([SOURCE]), corpora.cut_ranges(len(DATA), cuts)

        def read_one(number: int, start_at: int | None = None) -> RangeResult:
            opens(files[number])
            return as_range(job.read(job.shard(number, *ranges[number], start_at)))

        results = [read_one(number) for number in range(len(ranges))]
        for _ in ranges:
            for info, boundary in corpora.add_up_ranges(results, len(DATA)).apart:
                results[info.task.shard] = read_one(info.task.shard, boundary)
        return results

    return read


@pytest.mark.parametrize("cut", [1_500_000, 1_500_300])
@pytest.mark.parametrize("number", [errno.ENOENT, errno.EIO, errno.EACCES])
def test_a_file_that_vanishes_between_its_ranges_is_a_dead_letter_and_no_end_of_the_job(
    read_shards: ReadShards, number: int, cut: int
) -> None:
    gone = OSError(number, os.strerror(number))
    results = read_shards([MemoryFile(DATA), gone], [cut])
    assert [info.task.shard for info, _ in corpora.add_up_ranges(results, len(DATA)).apart] == []
    corpora.assert_every_byte_is_named_once(results, len(DATA))
    assert results[1].reasons == [explain_error(gone)[0]]


@pytest.mark.parametrize(
    ("bad", "cuts"),
    [
        pytest.param((2_300_000, 2_304_096), [1_500_300], id="within the search for a range's start"),
        pytest.param((1_200_000, 1_204_096), [1_500_500, 3_000_500], id="before a record across a cut"),
        pytest.param((0, 4096), [1_500_500], id="at the start of the file"),
        pytest.param((3_999_000, 4_000_000), [1_500_500], id="at its end"),
    ],
)
def test_every_byte_around_a_bad_block_is_recovered_or_named_once(
    read_shards: ReadShards, bad: tuple[int, int], cuts: list[int]
) -> None:
    results = read_shards([MemoryFile(DATA, bad=bad) for _ in range(len(cuts) + 1)], cuts)
    assert [info.task.shard for info, _ in corpora.add_up_ranges(results, len(DATA)).apart] == []
    corpora.assert_every_byte_is_named_once(results, len(DATA))


def test_a_bad_block_behind_a_range_costs_the_range_nothing(opens: Opens) -> None:
    opens(MemoryFile(DATA, bad=(1_502_000, 1_506_096)))
    result = read_data(0, 1_500_500)
    assert (len(result.records), result.regions) == (1501, [])
    assert result.records == PAYLOADS[:1501]


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_a_fault_of_the_machine_ends_the_shard(opens: Opens, number: int) -> None:
    opens(OSError(number, os.strerror(number)))
    with pytest.raises(OSError, match=os.strerror(number)):
        read_data(0, len(DATA))


FAILURES = [MemoryError, ZeroDivisionError, KeyError, IndexError, RuntimeError, RecursionError, ValueError, TypeError]
FAILURES += [struct.error, zlib.error, AttributeError, AssertionError]


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: f"{failure.__module__}.{failure.__name__}")
def test_a_reader_that_fails_costs_the_rest_of_its_range(
    opens: Opens, monkeypatch: pytest.MonkeyPatch, failure: type[Exception]
) -> None:
    def read_range(*_: object, **_options: object) -> Iterator[Chunk]:
        yield Chunk([b"first"], [0], num_bytes=100)
        raise failure("the reader is wrong")

    monkeypatch.setattr(shard_reader, "load_format", lambda _: SimpleNamespace(read_range=read_range))
    file = MemoryFile(DATA)
    opens(file)
    result = read_data(0, len(DATA))
    assert result.records == [b"first"]
    assert result.regions == [(100, len(DATA) - 100, "reader_failed")]
    assert "the reader is wrong" in result.dead[0].error
    assert result.dead[0].error_type in (failure.__name__, failure.__qualname__)
    assert "read_range" in result.dead[0].traceback
    assert file.closed


def commit_empty(job: Job, *parts: StoredFile, start_at: int | None = None, plan_id: str = "plan") -> None:
    commit(job.store, job.spec, Ledger(plan_id, 0, parts, None, None, (), {}, {}, start_at))


@pytest.mark.parametrize(("committed_at", "start_at"), [(None, None), (72, 72), (72, None)])
def test_a_committed_shard_yields_one_batch_and_reads_nothing(
    tmp_path: Path, plan: Plan, opens: Opens, committed_at: int | None, start_at: int | None
) -> None:
    job = plan(three_files(tmp_path)[0])
    commit_empty(job, start_at=committed_at)
    opens(OSError(errno.EMFILE, "nothing may be opened"))
    task = job.shard(0, 30, 360, start_at)
    assert job.read(task) == [RecordBatch(task, 0, last=True, committed=True)]


PART = StoredFile("_gristmill/attempts/a/part", 5, "00000000", 1)


@pytest.mark.parametrize(("parts", "plan_id"), [([], "other"), ([PART], "plan")])
def test_a_ledger_that_does_not_count_is_read_over(
    tmp_path: Path, plan: Plan, parts: list[StoredFile], plan_id: str
) -> None:
    sources, payloads = three_files(tmp_path)
    job = plan(sources)
    commit_empty(job, *parts, plan_id=plan_id)
    assert records_of(job.read()) == payloads[0] + payloads[1] + payloads[2]


def test_a_shard_to_be_read_from_another_boundary_makes_room(tmp_path: Path, plan: Plan) -> None:
    job = plan(three_files(tmp_path)[0])
    job.store.put(PART.name, b"12345")
    commit_empty(job, PART)
    batches = job.read(job.shard(0, 30, 360, start_at=72))
    assert [position for batch in batches for position in batch.positions] == list(range(72, 360, 36))
    assert job.store.get(ledger_name(job.spec, 0)) is None
    assert job.store.size(PART.name) is None


@pytest.mark.parametrize("start_at", [200, 201, 360])
def test_a_boundary_at_or_behind_the_end_leaves_nothing_to_read(tmp_path: Path, plan: Plan, start_at: int) -> None:
    job = plan(three_files(tmp_path)[0])
    batches = job.read(job.shard(0, 100, 200, start_at=start_at))
    assert records_of(batches) == []
    assert [batch.span for batch in batches] == [Span(100, 200, None, None), None]


def test_nested_framing_is_exact_once_the_shards_that_are_apart_were_read_again(tmp_path: Path, plan: Plan) -> None:
    inner = frame_all([b"inside %d" % index for index in range(40)])
    payloads = [b"first", inner, b"second", inner, b"third"]
    job = plan([write_file(tmp_path / "x", frame_all(payloads))])
    ranges = corpora.cut_ranges(job.sources[0].size, [200, 500, 1300, 1700])
    tasks = [job.shard(number, *pair) for number, pair in enumerate(ranges)]
    results = [as_range(job.read(task)) for task in tasks]
    apart = corpora.add_up_ranges(results, job.sources[0].size).apart
    ends = corpora.frame_starts(payloads)
    assert [info.task.shard for info, _ in apart] == [1, 2, 3, 4]
    assert [boundary for _, boundary in apart] == [ends[2], ends[2], ends[4], ends[4]]
    for info, boundary in apart:
        task = dataclasses.replace(tasks[info.task.shard], start_at=boundary)
        results[info.task.shard] = as_range(job.read(task))
    assert [record for result in results for record in result.records] == payloads
    assert [letter for result in results for letter in result.dead] == []
    assert corpora.add_up_ranges(results, job.sources[0].size).apart == []
    assert [result.span.asked_start for result in results] == [start for start, _ in ranges]


def test_an_abandoned_shard_closes_its_input(opens: Opens) -> None:
    file = MemoryFile(DATA)
    opens(file)
    chunks = read_input(corpora.make_spec(), SOURCE, 0, len(DATA))
    next(chunks)
    chunks.close()  # type: ignore[attr-defined]
    assert file.closed
