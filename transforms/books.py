"""The books: what became of every record, by source file, shard and job.

    records_read + records_added = records_written + records_dropped + records_dead

A shard keeps one row an input (`SourceRow`). Files that several shards share are put together again from the shards'
edges, in plan order, which also shows whether neighbouring ranges met.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable
from typing import Any

from transforms.budget import ESTIMATE, Budget, dead_fraction
from transforms.checksums import RunChecksums
from transforms.elements import Edge, ShardInfo, Span

COUNTS = ("records_read", "records_written", "records_added", "records_dropped", "records_dead")
BYTES = ("bytes_read", "bytes_written", "bytes_dead")
FILES = ("files_read", "files_empty", "files_dead")


def is_balanced(books: dict[str, Any]) -> bool:
    """Whether everything that was read or added was written, dropped or kept as a dead letter."""
    came = books["records_read"] + books["records_added"]
    went = books["records_written"] + books["records_dropped"] + books["records_dead"]
    return bool(came == went)


@dataclasses.dataclass(slots=True)
class SourceRow:
    """The books of one input within one shard, or of a run of whole inputs with equal books.

    Attributes:
        index: Line of the (first) input in inputs.jsonl.
        count: Inputs in the run; record counts are for each of them, bytes for all.
        size: Bytes of the (last) input as listed.
        span: What was covered; None for inputs without a span (empty or unreadable ones).
        read: Source records, dead letters of the reader included.
        written: Records written.
        added: Outputs beyond the first of each source record.
        dropped: Records dropped.
        dead: Dead letters.
        num_bytes: Bytes consumed of the decompressed stream.
        dead_bytes: Bytes of dead letters.
        run: Checksums of a run of inputs; that of a single one stands in its span.
        hidden: Records that dead letters of regions probably held, beyond the one that each of them counts as.
    """

    index: int
    count: int
    size: int
    span: Span | None
    read: int = 0
    written: int = 0
    added: int = 0
    dropped: int = 0
    dead: int = 0
    num_bytes: int = 0
    dead_bytes: int = 0
    hidden: int = 0
    run: RunChecksums | None = None

    def is_whole(self) -> bool:
        """Whether the shard holds the input alone."""
        return self.span is None or (self.span.asked_start == 0 and self.span.asked_end >= self.size)

    def outcomes(self) -> tuple[int, ...]:
        """What must be equal for two inputs to share a row."""
        return (self.read, self.written, self.added, self.dropped, self.dead)

    def to_fields(self) -> list[Any]:
        """Returns the row as it stands in a ledger."""
        span = None if self.span is None else list(dataclasses.astuple(self.span))
        if span is not None and span[-1] is None:
            del span[-1]
        fields = [self.index, self.count, self.size, span, *self.outcomes(), self.num_bytes, self.dead_bytes]
        if self.run is not None:
            return [*fields, self.hidden, self.run.to_text()]
        return [*fields, self.hidden] if self.hidden else fields

    def add(self, other: SourceRow) -> None:
        """Adds what another shard holds of the same input."""
        for name in ("read", "written", "added", "dropped", "dead", "num_bytes", "dead_bytes", "hidden"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @classmethod
    def from_fields(cls, fields: list[Any]) -> SourceRow:
        """Reads a row of a ledger."""
        index, count, size, span, *rest = fields
        row = cls(index, count, size, None if span is None else Span(*span), *rest[:8])
        if len(rest) > 8:
            row.run = RunChecksums.from_text(rest[8])
        return row

    def has_checksum(self) -> bool:
        """Whether the checksum of each input is known."""
        return self.run is not None or (self.span is not None and self.span.crc is not None)


def append_row(rows: list[SourceRow], row: SourceRow) -> None:
    """Appends a finished row, joining it to the one before if both are whole, clean and alike.

    So a shard of 20,000 one-record files keeps one row, not 20,000.
    """
    if rows and row.is_whole() and not row.dead and not row.dropped:
        before = rows[-1]
        follows = before.is_whole() and before.index + before.count == row.index
        if follows and before.outcomes() == row.outcomes() and before.has_checksum() == row.has_checksum():
            _join_checksums(before, row)
            before.count += 1
            before.size = row.size
            before.span = row.span
            before.num_bytes += row.num_bytes
            return
    rows.append(row)


def _join_checksums(before: SourceRow, row: SourceRow) -> None:
    if row.span is None or row.span.crc is None:
        return
    if before.run is None:
        assert before.span is not None
        assert before.span.crc is not None
        before.run = RunChecksums()
        before.run.add(before.span.crc, before.size)
    before.run.add(row.span.crc, row.size)


def file_outcome(read: int, dead: int) -> str:
    """Returns which of `FILES` an input counts as."""
    if read == 0:
        return "files_empty"
    return "files_dead" if dead == read else "files_read"


def add_rows(rows: Iterable[SourceRow]) -> dict[str, int]:
    """Returns the totals of a shard's rows; only inputs that the shard holds alone count as files."""
    books = dict.fromkeys((*COUNTS, ESTIMATE, "bytes_read", "bytes_dead", *FILES), 0)
    for row in rows:
        for name, value in zip(COUNTS, row.outcomes(), strict=True):
            books[name] += value * row.count
        books["bytes_read"] += row.num_bytes
        books["bytes_dead"] += row.dead_bytes
        books[ESTIMATE] += row.dead * row.count + row.hidden
        if row.is_whole():
            books[file_outcome(row.read, row.dead)] += row.count
    return books


@dataclasses.dataclass(frozen=True)
class SharedFile:
    """What several shards read of one input."""

    index: int
    read: int
    dead: int


@dataclasses.dataclass
class JobBooks:
    """All shards put together.

    Attributes:
        totals: Sums by name.
        apart: Shards whose first range does not begin where the range before it ended, with the boundary at
            which it should begin.
        dead_by_reason: Dead letters by reason, of those reasons that the budget names.
    """

    totals: dict[str, int]
    apart: list[tuple[ShardInfo, int]]
    dead_by_reason: dict[str, int] = dataclasses.field(default_factory=dict)


def add_up(infos: Iterable[ShardInfo]) -> JobBooks:
    """Adds up shards in plan order.

    Args:
        infos: One an planned shard, in plan order.

    Returns:
        The totals, shared files counted once, and the ranges that do not meet.
    """
    totals = dict.fromkeys((*COUNTS, ESTIMATE, *BYTES, *FILES), 0)
    dead: Counter[str] = Counter()
    walk = EdgeWalk()
    for info in infos:
        dead.update(info.dead_by_reason)
        for name, value in info.books.items():
            totals[name] = totals.get(name, 0) + value
        walk.step(info)
    for shared in walk.finish():
        totals[file_outcome(shared.read, shared.dead)] += 1
    return JobBooks(totals, walk.apart, dict(dead))


class EdgeWalk:
    """Follows files across shards, in plan order.

    Attributes:
        apart: Shards that did not begin where reading had come to, with the boundary at which they should.
    """

    def __init__(self) -> None:
        self.apart: list[tuple[ShardInfo, int]] = []
        self._open: SharedFile | None = None
        self._boundary: int | None = None  # Where reading of the open file has come to; None when unknown.
        self._closed: list[SharedFile] = []

    def step(self, info: ShardInfo) -> None:
        """Goes on over a shard."""
        if info.first is not None:
            self._meet(info, info.first)
            self._count(info.first)
        if info.last is not None and info.last != info.first:
            self._boundary = info.last.span.end
            self._count(info.last)

    def expected_start(self, info: ShardInfo) -> int | None:
        """Returns the boundary at which the next shard should begin, None when it does or begins with a fresh input."""
        edge, boundary = info.first, self._boundary
        if edge is None or boundary is None:
            return None
        if edge.span.asked_start == 0 or self._open is None or self._open.index != edge.index:
            return None
        begins_right = boundary >= edge.span.asked_end if edge.span.start is None else edge.span.start == boundary
        return None if begins_right else boundary

    def _meet(self, info: ShardInfo, edge: Edge) -> None:
        span, boundary = edge.span, self._boundary
        expected = self.expected_start(info)
        begins_fresh = span.asked_start == 0 or self._open is None or self._open.index != edge.index
        if expected is not None:
            self.apart.append((info, expected))
            # Read again it begins at the boundary, and ends where it ended before unless nothing is left of it.
            if span.start is not None and expected < span.asked_end:
                self._boundary = span.end
        elif begins_fresh or boundary is None or span.start is not None:
            self._boundary = span.end

    def _count(self, edge: Edge) -> None:
        before = self._open
        if before is not None and before.index == edge.index:
            self._open = SharedFile(edge.index, before.read + edge.read, before.dead + edge.dead)
            return
        if before is not None:
            self._closed.append(before)
        self._open = SharedFile(edge.index, edge.read, edge.dead)

    def finish(self) -> list[SharedFile]:
        """Returns the files that several shards share, once all shards were gone over."""
        if self._open is not None:
            self._closed.append(self._open)
            self._open = None
        return self._closed


def edges_of(rows: list[SourceRow]) -> tuple[Edge | None, Edge | None]:
    """Returns the edges of a shard: the inputs that it shares with the shard before and after."""
    shared = [row for row in rows if not row.is_whole()]
    first = next((_edge(row) for row in shared if row.span and row.span.asked_start > 0), None)
    last = next((_edge(row) for row in reversed(shared) if row.span and row.span.asked_end < row.size), None)
    return first, last


def _edge(row: SourceRow) -> Edge:
    assert row.span is not None
    return Edge(row.index, row.span, row.read, row.dead)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What the books say of the job.

    Attributes:
        status: "done", "over_budget", "nothing_written" or "unbalanced".
        message: In words.
        dead_fraction: Dead of all, by records, bytes and files.
    """

    status: str
    message: str
    dead_fraction: dict[str, float]


def judge(books: JobBooks, budget: Budget) -> Verdict:
    """Holds the totals against the budget of dead letters."""
    totals = books.totals
    fraction = dead_fraction(totals)
    if books.apart:
        shards = [info.task.shard for info, _ in books.apart][:10]
        return Verdict(
            "unbalanced", f"ranges do not meet before shards {shards}; an input changed while it was read", fraction
        )
    if not is_balanced(totals):
        return Verdict("unbalanced", f"the books do not balance: { ({k: totals[k] for k in COUNTS}) }", fraction)
    broken = budget.broken(totals, books.dead_by_reason)
    if broken is not None:
        return Verdict("over_budget", broken, fraction)
    if not totals["records_written"]:
        return Verdict("nothing_written", "no record was written", fraction)
    return Verdict("done", "", fraction)
