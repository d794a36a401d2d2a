"""Measures what `isolate` adds to a step that does nothing, batch by batch as a worker does it."""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from transforms.elements import BATCH_MAX_BYTES, BATCH_MAX_RECORDS, Input, JobSpec, RecordBatch, ShardTask
from transforms.steps.job_chain import Chain, load_chain

RECORD_BYTES = 1000
STEP = "tests.bench.isolation:same"
ROOT = str(Path(__file__).resolve().parents[2])


def same(record: bytes) -> bytes:
    """A step that does nothing."""
    return record


def measure_isolation(batches: int) -> float:
    """Returns the microseconds that isolation adds to each record of 1 KB.

    Args:
        batches: How many batches to take the median of; the two kinds are run in turn.
    """
    plain: dict[str, Any] = {"call": STEP}
    with contextlib.closing(_chain(plain)) as usual, contextlib.closing(_chain({**plain, "isolate": True})) as isolated:
        pairs = [(_time(usual), _time(isolated)) for _ in range(batches + 1)][1:]  # The first one starts the process.
    added = statistics.median(isolated for _, isolated in pairs) - statistics.median(usual for usual, _ in pairs)
    print(f"isolation: {added * 1e6:.1f} us a record", file=sys.stderr)
    return added * 1e6


def _chain(step: dict[str, Any]) -> Chain:
    return load_chain(
        JobSpec(root="", plan_id="bench", num_shards=1, format="tfrecord", steps=(step,), import_paths=(ROOT,))
    )


def _time(chain: Chain) -> float:
    """Returns the seconds a record that a batch takes."""
    count = min(BATCH_MAX_RECORDS, BATCH_MAX_BYTES // RECORD_BYTES)
    records = [b"%06d" % number * (RECORD_BYTES // 6) for number in range(count)]
    batch = RecordBatch(ShardTask(0, 0, 0, 0, 0, 0, 0), 0, source=Input(0, "bench", 0, 0))
    batch.records, batch.positions = records, list(range(count))
    started = time.perf_counter()
    written = sum(len(out.records) for out in chain.apply(batch))
    seconds = time.perf_counter() - started
    assert written == count
    return seconds / count
