"""Cuts planned shards into pieces by the time that they take. Arithmetic over the plan and the list of inputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import BinaryIO

from transforms.elements import Input, JobSpec, ShardTask
from transforms.formats import load_format
from transforms.inputs import read_inputs
from transforms.plan import Estimate, cut_shards

PIECE_SECS = 90.0
"""What a kill may cost a worker, and what an entry and one more writing of the records are nothing beside."""

MIN_PIECE_SECS = 5.0
"""Shorter ones are not worth an entry and a file each; it is also twice what a worker process takes to start."""

_MIN_PIECES = 16
"""A job that is shorter than so many pieces has shorter ones, so that each of a few workers gets several."""

MAX_PIECES = 10_000
"""A job of weeks has longer pieces: each is an entry, a file, and a line that the worker of its shard reads."""

_INFLATION = 4.0
"""Weight of a compressed byte beside one that is not: it only matters where a shard holds both kinds."""


def piece_secs(total_secs: float) -> float:
    """Returns how long a piece of a job should take."""
    most = max(PIECE_SECS, total_secs / MAX_PIECES)
    return min(most, max(MIN_PIECE_SECS, total_secs / _MIN_PIECES))


def count_pieces(planned_bytes: Iterable[int], total_secs: float, num_records: int) -> list[int]:
    """Returns into how many pieces each shard is to be cut.

    Args:
        planned_bytes: Of every shard, which tell its share of the work.
        total_secs: What one worker takes for the whole job.
        num_records: Records of the job; no piece is meant to have less than one.

    Returns:
        A number for each shard, 1 where it stays whole.
    """
    weights = list(planned_bytes)
    total_bytes = max(1, sum(weights))
    wanted = total_secs / piece_secs(total_secs)
    shares = [weight / total_bytes for weight in weights]
    return [max(1, min(round(wanted * share), int(num_records * share))) for share in shares]


def can_split(spec: JobSpec, estimate: Estimate) -> Callable[[Input], bool]:
    """Returns what tells whether a cut may lie inside an input."""
    splittable = load_format(spec.format).SPLITTABLE and spec.compression in ("auto", "none")
    return lambda source: splittable and not estimate.is_compressed(source)


def cut_pieces(
    tasks: Iterable[ShardTask],
    counts: Iterable[int],
    lines: BinaryIO,
    spec: JobSpec,
    mean_bytes: float,
    *,
    all_compressed: bool = False,
) -> Iterator[ShardTask]:
    """Yields the pieces of all shards that are cut, in order.

    Args:
        tasks: The planned shards.
        counts: Pieces wanted of each.
        lines: The open inputs.jsonl.
        spec: The job.
        mean_bytes: Mean bytes of a record, what a file that is one record costs however small it is.
        all_compressed: See `Estimate`.
    """
    estimate = Estimate(mean_bytes, _INFLATION, all_compressed)
    splits = can_split(spec, estimate)

    def weigh(source: Input) -> int:
        return estimate.weigh(source) + (int(mean_bytes) if spec.format == "files" else 0)

    for task, count in zip(tasks, counts, strict=True):
        if count > 1:
            yield from _cut_shard(task, count, lines, weigh, splits)


def _cut_shard(
    task: ShardTask, count: int, lines: BinaryIO, weigh: Callable[[Input], int], splits: Callable[[Input], bool]
) -> Iterator[ShardTask]:
    total = sum(weigh(source) for _, source in _slice(task, lines))
    pieces = list(cut_shards(_slice(task, lines), total, count, weigh, splits))
    if len(pieces) < 2:
        return
    for number, piece in enumerate(pieces):
        # The first input was handed over as if it began where the shard does.
        start = piece.start + (task.start if piece.first_offset == task.first_offset else 0)
        end = piece.end + (task.start if piece.last_offset == task.first_offset else 0)
        yield dataclasses.replace(piece, shard=task.shard, piece=number, start=start, end=end)


def _slice(task: ShardTask, lines: BinaryIO) -> Iterator[tuple[int, Input]]:
    """Yields the inputs of a shard with its part of them for their size."""
    for offset, source in read_inputs(lines, task.first_offset, task.first_index):
        end = task.end if offset == task.last_offset else source.size
        start = task.start if offset == task.first_offset else 0
        yield offset, dataclasses.replace(source, size=end - start)
        if offset == task.last_offset:
            return
