"""Measures what a record costs that a step fails on or drops, beyond the step itself, until it is committed."""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transforms.elements import Input, JobSpec, RecordBatch, ShardTask
from transforms.shard_writer import ShardWriter
from transforms.steps import Drop
from transforms.steps.job_chain import load_chain
from transforms.store import LocalStore

ROOT = str(Path(__file__).resolve().parents[2])
RUNS = 5
BATCH = 1_000
MOST_US = {"raising": 40, "dropping": 10}
"""Microseconds a record that each kind may cost."""


def raising(record: bytes) -> bytes:
    """A step that fails two calls deep, and inside a library."""
    return _parse(record)


def _parse(record: bytes) -> bytes:
    return bytes(json.loads(record))


def dropping(record: bytes) -> Drop:
    """A step that drops everything."""
    return Drop("unwanted")


def measure_failures(records: int) -> dict[str, float]:
    """Returns the microseconds a record by kind: the median of some runs.

    Args:
        records: How many records a run has.
    """
    found = {}
    for step in (raising, dropping):
        runs = [_time_chain(step, records) - _time_bare(step, records) for _ in range(RUNS)]
        found[step.__name__] = statistics.median(runs) / records * 1e6
        print(f"records, {step.__name__}: {found[step.__name__]:.1f} us a record", file=sys.stderr)
    return found


def _record(number: int) -> bytes:
    return b"record number %d" % number + b" of some words" * 14


def _time_bare(step: Callable[[bytes], Any], records: int) -> float:
    """Returns the CPU seconds of the step alone."""
    started = time.process_time()
    for number in range(records):
        with contextlib.suppress(ValueError):
            step(_record(number))
    return time.process_time() - started


def _time_chain(step: Callable[[bytes], Any], records: int) -> float:
    """Returns the CPU seconds from the batches of a shard to its ledger."""
    steps = ({"call": f"{__name__}:{step.__name__}"},)
    task, source = ShardTask(0, 0, 0, 0, 0, 0, 0), Input(0, "bench", 1, 0)
    with tempfile.TemporaryDirectory(prefix="gristmill-bench-") as folder:
        spec = JobSpec(root=folder, plan_id="bench", num_shards=1, format="tfrecord", steps=steps, import_paths=(ROOT,))
        with contextlib.closing(load_chain(spec)) as chain:
            started = time.process_time()
            writer = ShardWriter(LocalStore(folder), spec, task)
            for first in range(0, records, BATCH):
                numbers = range(first, min(first + BATCH, records))
                batch = RecordBatch(task, 0, source=source, records=[_record(number) for number in numbers])
                batch.positions = list(numbers)
                for out in chain.apply(batch):
                    writer.add(out)
            info = writer.commit()
            seconds = time.process_time() - started
    assert info.books["records_dead"] + info.books["records_dropped"] == records
    return seconds
