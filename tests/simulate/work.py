"""What a plan has workers do, shard by shard: the files and bytes of each, and the requests that they take."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from simulate.rates import Rates
from transforms.elements import ShardTask
from transforms.gcs_reader import _PAST_END_BYTES, BLOCK_BYTES, HEAD_BYTES
from transforms.plan_file import PLAN_NAME, read_tasks

_BLOCKS = (HEAD_BYTES, 4 * HEAD_BYTES, 4 * HEAD_BYTES, 16 * HEAD_BYTES)
"""What a reader that goes forwards asks for, before blocks of their largest size."""

_GROWN = tuple(itertools.accumulate(_BLOCKS))


def count_blocks(num_bytes: np.ndarray) -> np.ndarray:
    """Returns the requests that it takes to read so many bytes forwards, at least one each."""
    growing = np.searchsorted(_GROWN[:-1], num_bytes, side="left") + 1
    return growing + np.ceil(np.maximum(num_bytes - _GROWN[-1], 0) / BLOCK_BYTES).astype(np.int64)


def blocks_of(num_bytes: int) -> int:
    """Returns the same for one number of bytes."""
    return int(count_blocks(np.array([num_bytes]))[0])


@dataclasses.dataclass(frozen=True)
class Shard:
    """One planned shard.

    Attributes:
        task: As it stands in the plan.
        line_offset: Where in the plan.
        first: Index of its first file.
        last: Index of its last file.
        slice_bytes: Bytes of its lines of the inputs, but for the last one.
    """

    task: ShardTask
    line_offset: int
    first: int
    last: int
    slice_bytes: int

    @property
    def num_files(self) -> int:
        """Files that it opens."""
        return self.last - self.first + 1


def read_shards(folder: Path, num_files: int) -> Iterator[Shard]:
    """Yields the shards of a plan.

    Args:
        folder: Where the plan stands, under the name that it has in an output.
        num_files: Files of the corpus.
    """
    with (folder / PLAN_NAME).open("rb") as plan:
        lines = list(read_tasks(plan))
    ends = [task.first_index - (task.start == 0) for _, task in lines[1:]] + [num_files - 1]
    for (offset, task), last in zip(lines, ends, strict=True):
        yield Shard(task, offset, task.first_index, last, task.last_offset - task.first_offset)


def shard_secs(shards: list[Shard], rates: Rates) -> list[float]:
    """Returns how long a worker of speed 1 takes for each shard."""
    return [rates.shard_secs(shard.task.planned_bytes, shard.num_files) for shard in shards]


def count_source_reads(shards: list[Shard], sizes: np.ndarray) -> int:
    """Returns the requests that read the files: whole ones, and the ranges of those that shards share."""
    reads = int(count_blocks(sizes).sum())
    for shard in shards:
        for index, start, end in _parts_of_files(shard, sizes):
            size = int(sizes[index])
            if start == 0:
                reads -= blocks_of(size)  # It was counted as if it were read whole.
            stop = min(size, end + _PAST_END_BYTES)
            reads += blocks_of(stop) if start == 0 else 1 + blocks_of(stop - start)
    return reads


def _parts_of_files(shard: Shard, sizes: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """Yields (index, start, end) of the files that a shard reads but a part of."""
    task = shard.task
    if shard.first == shard.last:
        if task.start > 0 or task.end < sizes[shard.last]:
            yield shard.first, task.start, task.end
        return
    if task.start > 0:
        yield shard.first, task.start, int(sizes[shard.first])
    if task.end < sizes[shard.last]:
        yield shard.last, 0, task.end


def count_lookups(offset: int, num_bytes: int, size: int) -> int:
    """Returns the requests for some lines of a stored file: its head, and blocks from the place on.

    Lines are read through a buffer of the head's size. Blocks that follow each other have the next one fetched ahead.
    """
    stop = min(size, offset + -(-num_bytes // HEAD_BYTES) * HEAD_BYTES)
    if stop <= HEAD_BYTES:
        return 1
    if offset < HEAD_BYTES:
        return min(blocks_of(stop) + 1, blocks_of(size))
    blocks = blocks_of(stop - offset)
    return 1 + (1 if blocks == 1 else min(blocks + 1, blocks_of(size - offset)))
