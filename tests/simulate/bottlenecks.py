"""What one process does alone, and how long that takes at scale: requests at their assumed times, CPU as measured here.

The CPU is that of the real code on shards as the plan has them; their books are made up.
"""

from __future__ import annotations

import dataclasses
import time
import tracemalloc
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from apache_beam.coders.coders import FastPrimitivesCoder

from simulate.operations import Job, blocks_of, pages_of
from simulate.rates import Rates
from simulate.work import Shard
from transforms.books import SourceRow, add_up
from transforms.elements import JobSpec, ShardInfo, Span
from transforms.gcs_store import GcsStore
from transforms.ledger import ATTEMPTS, Ledger, StoredFile
from transforms.publish import CollectShards

T = TypeVar("T")

_SAMPLED_LEDGERS = 500
_TIMES_ADDED = 6  # FindApart, Settle, Number (to decide), Finish (numbers, decides, and the report).


@dataclasses.dataclass(frozen=True)
class Bottleneck:
    """Work that nothing shares.

    Attributes:
        name: What it is.
        where: Who does it.
        secs: How long it takes.
        bound: What bounds it.
        grows: With what it grows.
    """

    name: str
    where: str
    secs: float
    bound: str
    grows: str

    @property
    def meanwhile(self) -> bool:
        """Whether it goes on while workers convert, so that nobody waits for it."""
        return self.where.endswith("meanwhile")


@dataclasses.dataclass(frozen=True)
class Gathering:
    """What gathering the metadata of all shards costs.

    Attributes:
        cpu_secs: Gathering, coding and adding up.
        coded_bytes: The one list of all shards, as it travels.
        memory_bytes: The same in memory.
        ledger_bytes: Bytes of all ledgers.
        ledger_secs: CPU of reading all ledgers.
        largest_rows: Most rows of books in a ledger.
    """

    cpu_secs: float
    coded_bytes: int
    memory_bytes: int
    ledger_bytes: int
    ledger_secs: float
    largest_rows: int


def make_ledger(shard: Shard, spec: JobSpec, sizes: np.ndarray, record_bytes: float, *, every_file: bool) -> Ledger:
    """Returns a shard's ledger without losses, with a row for every file or for three of them at most."""
    rows = [_row(index, shard, sizes, record_bytes) for index in _rows_of(shard, every_file=every_file)]
    key = spec.shard_key(shard.task.shard)
    records = sum(row.written for row in rows)
    part = StoredFile(f"{ATTEMPTS}{key}-0123456789ab/part-00000.array_record", 1 << 29, "01234567", records)
    return Ledger(spec.plan_id, shard.task.shard, (part,), None, None, tuple(rows), {}, {})


def _rows_of(shard: Shard, *, every_file: bool) -> list[int]:
    if every_file:
        return list(range(shard.first, shard.last + 1))
    return sorted({shard.first, min(shard.first + 1, shard.last), shard.last})


def _row(index: int, shard: Shard, sizes: np.ndarray, record_bytes: float) -> SourceRow:
    size = int(sizes[index])
    start = shard.task.start if index == shard.first else 0
    end = shard.task.end if index == shard.last else size
    records = max(1, int((end - start) / record_bytes))
    return SourceRow(index, 1, size, Span(start, end, start, end), records, records, num_bytes=end - start)


def measure_gathering(shards: list[Shard], spec: JobSpec, sizes: np.ndarray, record_bytes: float) -> Gathering:
    """Gathers the metadata of shards with the real code."""
    infos = [make_ledger(shard, spec, sizes, record_bytes, every_file=False).to_info(shard.task) for shard in shards]
    gathered, gather_secs = _timed(lambda: _gather(infos))
    coder = FastPrimitivesCoder()
    data, encode_secs = _timed(lambda: coder.encode(gathered))
    decoded, decode_secs = _timed(lambda: coder.decode(data))
    books, add_secs = _timed(lambda: add_up(decoded))
    assert not books.apart
    ledgers = _measure_ledgers(shards, spec, sizes, record_bytes)
    cpu_secs = 2 * (gather_secs + encode_secs + decode_secs) + _TIMES_ADDED * add_secs
    return Gathering(cpu_secs, len(data), _memory_of(lambda: coder.decode(data)), *ledgers)


def _gather(infos: list[ShardInfo]) -> list[ShardInfo]:
    combine = CollectShards()
    accumulator = combine.create_accumulator()
    for info in infos:
        accumulator = combine.add_input(accumulator, info)
    return combine.extract_output(combine.merge_accumulators([accumulator]))


def _measure_ledgers(
    shards: list[Shard], spec: JobSpec, sizes: np.ndarray, record_bytes: float
) -> tuple[int, float, int]:
    """Returns (bytes, CPU seconds to read) of all ledgers, from a sample, and the most rows of one."""
    step = max(1, len(shards) // _SAMPLED_LEDGERS)
    sample = shards[::step]
    stored = [make_ledger(shard, spec, sizes, record_bytes, every_file=True).to_json() for shard in sample]
    pairs = list(zip(sample, stored, strict=True))
    _, secs = _timed(lambda: [Ledger.from_json(data).to_info(shard.task) for shard, data in pairs])
    factor = sum(shard.num_files for shard in shards) / sum(shard.num_files for shard in sample)
    return int(factor * sum(map(len, stored))), factor * secs, max(shard.num_files for shard in shards)


def _timed(call: Callable[[], T]) -> tuple[T, float]:
    started = time.process_time()
    return call(), time.process_time() - started


def _memory_of(call: Callable[[], Any]) -> int:
    tracemalloc.start()
    kept = call()
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    del kept
    return size


def find_bottlenecks(
    job: Job, facts: dict[str, Any], gathering: Gathering, hand_out_secs: float, rates: Rates
) -> list[Bottleneck]:
    """Returns what one process does alone, in the order of a job."""
    count, page = len(job.shards), rates.list_secs
    stored = facts["inputs_bytes"] + facts["plan_bytes"]
    plan_reads = blocks_of(job.plan_bytes) * rates.request_secs
    many = f"client, {GcsStore.requests_at_once} requests at a time"
    found = [
        ("list", "driver", job.pages * page + facts["list_secs"], "one page after the other", "files"),
        ("cut", "driver", facts["cut_secs"], "CPU", "files"),
        ("put inputs and plan there", "driver", stored / rates.upload_rate, "one upload", "files"),
        ("hand out", "one worker", plan_reads + hand_out_secs, "CPU", "shards"),
        ("watch: get new ledgers", "driver, meanwhile", rates.many_secs(count), many, "shards"),
        ("collect, settle", "one worker", gathering.cpu_secs, "CPU", "shards"),
        ("finish: read ledgers and notes", "one worker", rates.many_secs(2 * count), many, "shards"),
        ("finish: parse ledgers", "one worker", gathering.ledger_secs, "CPU", "files"),
        (
            "finish: list",
            "one worker",
            (pages_of(4 * count) + pages_of(count)) * page,
            "one page after the other",
            "shards",
        ),
        ("finish: delete attempts", "one worker", rates.many_secs(count), many, "shards"),
    ]
    return [Bottleneck(*one) for one in found]
