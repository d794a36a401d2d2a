"""Plans shards from sizes: pure arithmetic, the same for the same inputs, in memory that does not grow with them.

A shard is an interval of the inputs laid end to end. Where a format can be split, the cuts lie at equal distances
to the byte; where it cannot (raw files, compressed input), at the end of the nearest input. Plan lines have
constant size, so a million inputs plan in one pass over inputs.jsonl.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
import re
from collections.abc import Callable, Iterable, Iterator

from transforms.elements import Input, ShardTask

AUTO_SHARD_RECORDS = 20_000
"""The cost of one random read grows with the records of its file (5 us at 1,000, 22 us at 10,000)."""

AUTO_SHARD_BYTES = 256 << 20
AUTO_MAX_SHARD_BYTES = 1 << 30
AUTO_MAX_SHARDS = 1_000
"""Every stock reader opens every file at start-up, so beyond this the shards grow instead."""

MAX_SHARDS = 1_000_000
"""What may be asked for: a number beyond this is a size without its unit."""

COMPRESSED_SUFFIXES = (".gz", ".gzip", ".zz", ".zlib")
"""Names that plan as one piece. Content decides how they are read; this only saves shards that would stay empty."""

_READ_COST_US = ((1_000, 5.0), (10_000, 22.0), (50_000, 100.0), (200_000, 360.0), (1_000_000, 2_500.0))
"""Measured: microseconds of one random read of a Grain data source by records in the shard."""

_SIZE = re.compile(r"^\s*([0-9]{1,18}(?:\.[0-9]{1,15})?)\s*([KMGT]i?B|B)?\s*$", re.IGNORECASE | re.ASCII)
_UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS.update({"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40})


def parse_size(text: str) -> int:
    """Returns the bytes of a size such as "256MiB" or "1.5GB".

    Raises:
        ValueError: It is not a size.
    """
    match = _SIZE.match(text)
    if match is None:
        raise ValueError(f"expected a size such as 256MiB, got {text!r}")
    return int(float(match[1]) * _UNITS[(match[2] or "B").lower()])


@dataclasses.dataclass(frozen=True)
class ShardsRequest:
    """What `write.shards` asks for.

    Attributes:
        mode: "auto", "match", "count" or "size".
        count: Shards, for "count".
        max_bytes: Payload bytes a shard, for "size", or the bound given with "match"; 0 for none.
    """

    mode: str
    count: int = 0
    max_bytes: int = 0

    @classmethod
    def parse(cls, text: str | int) -> ShardsRequest:
        """Reads `auto`, `match`, `match,SIZE`, a number or a size.

        Raises:
            ValueError: It is none of these.
        """
        text = str(text).strip()
        if text in ("auto", "match"):
            return cls(text)
        if re.fullmatch(r"[0-9]{1,18}", text):
            if int(text) < 1:
                raise ValueError(f"a number of shards must be at least 1, got {text}")
            if int(text) > MAX_SHARDS:
                raise ValueError(
                    f"a number of shards must be at most {MAX_SHARDS:,}, got {text}; for bytes say {text}B"
                )
            return cls("count", count=int(text))
        mode, _, size = text.rpartition(",")
        if mode not in ("", "match"):
            raise ValueError(f"expected auto, match, match,SIZE, a number or a size such as 256MiB, got {text!r}")
        try:
            if re.fullmatch(r"[0-9.\s]*", size) and not mode:
                raise ValueError(f"a size needs a unit, got {size!r}")
            max_bytes = parse_size(size)
        except ValueError as error:
            raise ValueError(f"expected auto, match, a number or a size such as 256MiB, got {text!r}") from error
        if max_bytes < 1:
            raise ValueError(f"a shard size must be at least 1 byte, got {text!r}")
        return cls(mode or "size", max_bytes=max_bytes)


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What the sample says of the corpus.

    Attributes:
        record_bytes: Bytes of a record in the decompressed stream.
        inflation: Decompressed bytes for each byte of compressed input.
        all_compressed: Whether inputs are compressed whose names do not say so: most of those that were looked at are.
    """

    record_bytes: float
    inflation: float = 1.0
    all_compressed: bool = False

    def is_compressed(self, source: Input) -> bool:
        """Whether an input is planned as one piece."""
        return self.all_compressed or source.name.lower().endswith(COMPRESSED_SUFFIXES)

    def weigh(self, source: Input) -> int:
        """Returns the estimated decompressed bytes of an input."""
        if self.is_compressed(source):
            return int(source.size * self.inflation)
        return source.size


@dataclasses.dataclass(frozen=True)
class Layout:
    """The chosen number of shards and the bounds at which a part is full.

    Attributes:
        num_shards: Shards to cut; 0 for one an input.
        part_max_records: Records a part; 0 for no bound.
        part_max_bytes: Payload bytes a part; 0 for no bound.
        roll_factor: See `JobSpec.roll_factor`.
    """

    num_shards: int
    part_max_records: int
    part_max_bytes: int
    roll_factor: int


def choose_layout(request: ShardsRequest, total_bytes: int, record_bytes: float) -> Layout:
    """Chooses the number of shards.

    Args:
        request: What was asked for.
        total_bytes: Estimated decompressed bytes of all inputs.
        record_bytes: Estimated bytes of a record.

    Returns:
        The layout. Bounds of "auto" come from estimates, so splittable input rolls over only at twice the bound.
    """
    if request.mode == "match":
        return Layout(0, 0, request.max_bytes, 1 if request.max_bytes else 0)
    if request.mode == "count":
        return Layout(request.count, 0, max(1, math.ceil(total_bytes / request.count)), 0)
    if request.mode == "size":
        return Layout(max(1, math.ceil(total_bytes / request.max_bytes)), 0, request.max_bytes, 2)
    by_records = math.ceil(total_bytes / record_bytes / AUTO_SHARD_RECORDS)
    by_bytes = math.ceil(total_bytes / AUTO_SHARD_BYTES)
    num_shards = max(1, by_records, by_bytes)
    if num_shards <= AUTO_MAX_SHARDS:
        return Layout(num_shards, AUTO_SHARD_RECORDS, AUTO_SHARD_BYTES, 2)
    num_shards = max(AUTO_MAX_SHARDS, math.ceil(total_bytes / AUTO_MAX_SHARD_BYTES))
    records = max(AUTO_SHARD_RECORDS, math.ceil(total_bytes / record_bytes / num_shards))
    return Layout(num_shards, records, max(AUTO_SHARD_BYTES, math.ceil(total_bytes / num_shards)), 2)


def read_cost_us(records: float) -> float:
    """Returns the estimated microseconds of one random read from a shard of that many records."""
    below = (0, 3.0)
    for above in _READ_COST_US:
        if records <= above[0]:
            share = (records - below[0]) / (above[0] - below[0])
            return below[1] + share * (above[1] - below[1])
        below = above
    return below[1] * records / below[0]


def cut_shards(
    inputs: Iterable[tuple[int, Input]],
    total_weight: int,
    num_shards: int,
    weigh: Callable[[Input], int],
    splits: Callable[[Input], bool],
) -> Iterator[ShardTask]:
    """Cuts the inputs, laid end to end, into shards of equal weight.

    Args:
        inputs: (byte offset of the line, input), in order.
        total_weight: Sum of the weights.
        num_shards: Wanted shards; 0 for one an input.
        weigh: Weight of an input. An input that can be split must weigh its size.
        splits: Whether a cut may lie inside the input.

    Yields:
        The shards in order; fewer than wanted where inputs that cannot be split are too large. Together they hold
        every input exactly once, empty ones and those that cannot be read included.
    """
    cutter = _Cutter()
    target_number = 1
    before = 0  # Weight of the inputs before the current one.
    for offset, source in inputs:
        weight = weigh(source)
        cutter.enter(offset, source)
        while 0 < target_number < num_shards and total_weight:
            target = total_weight * target_number // num_shards
            if target >= before + weight:
                break
            inside = target - before
            if not splits(source):
                if 2 * inside >= weight:
                    break  # Nearer to its end: cut there, once the next input begins.
                inside = 0
            yield from cutter.cut(before + inside, inside)
            target_number += 1
        before += weight
        cutter.leave(offset, source)
        if num_shards == 0:
            yield from cutter.cut_after(before)
        elif not splits(source):
            passed = target_number
            while target_number < num_shards and total_weight * target_number // num_shards <= before:
                target_number += 1
            if target_number > passed:
                yield from cutter.cut_after(before)
    yield from cutter.cut_after(before)


class _Cutter:
    """Holds the open interval and numbers the shards it becomes."""

    def __init__(self) -> None:
        self._shard = 0
        self._start: tuple[int, int, int] | None = None  # (offset, index, position)
        self._end: tuple[int, int] | None = None  # (offset of the last line, position in it) so far
        self._weight = 0
        self._current: tuple[int, Input] = (0, Input(0, "", 0, 0))

    def enter(self, offset: int, source: Input) -> None:
        self._current = (offset, source)
        if self._start is None:
            self._start = (offset, source.index, 0)

    def leave(self, offset: int, source: Input) -> None:
        self._end = (offset, source.size)

    def cut(self, weight: int, inside: int) -> Iterator[ShardTask]:
        """Cuts in the current input at a position, before it at position 0."""
        offset, source = self._current
        if inside == 0:
            if self._end is not None:
                yield self._task(self._end, weight)
                self._start = (offset, source.index, 0)
            return
        assert self._start is not None
        if (self._start[1], self._start[2]) == (source.index, inside):
            return  # More shards than bytes: the same cut twice.
        yield self._task((offset, inside), weight)
        self._start = (offset, source.index, inside)

    def cut_after(self, weight: int) -> Iterator[ShardTask]:
        """Cuts after the last input that was left."""
        if self._start is not None and self._end is not None:
            yield self._task(self._end, weight)
            self._start = None

    def _task(self, end: tuple[int, int], weight: int) -> ShardTask:
        assert self._start is not None
        task = ShardTask(self._shard, *self._start, *end, planned_bytes=weight - self._weight)
        self._shard += 1
        self._weight = weight
        self._end = None
        return task


def spread(weights: list[int], num_workers: int) -> list[int]:
    """Orders shards so that a runner which deals them out in turn gives every worker equal weight.

    Beam's local runner hands element i to worker i modulo the number of workers, once. Each worker is therefore
    given a list of its own (longest processing time first), and shorter lists are filled up with -1.

    Args:
        weights: Planned bytes by shard.
        num_workers: Workers of the runner.

    Returns:
        Shard numbers in the order to hand out, -1 for nothing. Every shard stands in it once.
    """
    hands: list[list[int]] = [[] for _ in range(num_workers)]
    least = [(0, 0, worker) for worker in range(num_workers)]  # A heap of (weight, shards, worker).
    for shard in sorted(range(len(weights)), key=lambda s: (-weights[s], s)):
        weight, count, worker = least[0]
        hands[worker].append(shard)
        heapq.heapreplace(least, (weight + weights[shard], count + 1, worker))
    for hand in hands:
        hand.sort()  # Input order within a worker reads the disk forwards.
    longest = max(map(len, hands), default=0)
    return [hand[turn] if turn < len(hand) else -1 for turn in range(longest) for hand in hands]
