"""Watches a job while it runs, from its ledgers alone: shows progress, and calls the job off when the budget breaks."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator

from transforms.ahead import map_ahead
from transforms.budget import Budget, RunningTotals, call_off
from transforms.elements import JobSpec
from transforms.ledger import LEDGERS, Ledger
from transforms.pieces import PieceEntry, list_entries, pieces_header, shard_key_of
from transforms.store import OutputError, Store

_LOGGER = logging.getLogger("gristmill")
_LOOK_SECS = 2.0
_LOG_SECS = 30.0
_SPEED_SECS = 600.0
_LOOK_SHARE = 0.1
"""The most of the time that looks may take: one at a job of 100,000 shards is a hundred pages of a listing."""


class JobWatch:
    """Adds up the ledgers that have come since the last look.

    Args:
        store: The output directory, as the job's generation sees it.
        spec: The job.
        may_call_off: Whether it is ours to call the job off.

    Attributes:
        dropped_by_reason: Dropped records by reason.
        dead_by_reason: Dead letters by reason.
    """

    def __init__(self, store: Store, spec: JobSpec, *, may_call_off: bool = True) -> None:
        self._store = store
        self._spec = spec
        self._seen: set[str] = set()
        self._running = RunningTotals(Budget.of(spec))
        self._is_off = not may_call_off
        self._commits: list[tuple[float, str, str, dict[str, int]]] = []  # (moment, kind, shard key, books)
        self._pieces: dict[str, dict[str, int]] = {}
        self._of_pieces = RunningTotals(Budget.of(spec))
        self._num_pieces: int | None = None  # Not known before the first look.
        self.dropped_by_reason: Counter[str] = Counter()
        self.dead_by_reason: Counter[str] = Counter()

    @property
    def num_committed(self) -> int:
        """Shards whose ledger stands."""
        return len(self._seen)

    @property
    def planned_pieces(self) -> int:
        """Pieces that shards are worked on in, 0 for none."""
        return self._num_pieces or 0

    @property
    def committed_pieces(self) -> int:
        """Pieces that are done."""
        return len(self._pieces)

    @property
    def to_do(self) -> int:
        """Shards and pieces of the job."""
        return self._spec.num_shards + self.planned_pieces

    @property
    def done(self) -> int:
        """Shards and pieces that are done; those of a shard that is committed count as done."""
        return self.num_committed + (self.planned_pieces if self._is_whole() else self.committed_pieces)

    def _is_whole(self) -> bool:
        return self.num_committed >= self._spec.num_shards

    def look(self) -> None:
        """Takes in new ledgers and entries of pieces, fetched ahead; the budget is held against each."""
        if self._num_pieces is None:
            header = pieces_header(self._store) or {}
            self._num_pieces = header["num_pieces"] if header.get("plan_id") == self._spec.plan_id else 0
        if self._num_pieces:
            self._look_at_pieces()
        names = [name for name, _ in self._store.list(LEDGERS) if name not in self._seen]
        found = map_ahead(self._store.get, names, self._store.requests_at_once)
        for name, entry in zip(names, found, strict=True):
            if entry is not None:
                self._take_in(name, entry[0])

    def _take_in(self, name: str, entry: bytes) -> None:
        with contextlib.suppress(ValueError):  # Half an entry; it will be made again.
            ledger = Ledger.from_json(entry)
            if not self._spec.accepts(ledger.plan_id):
                return
            self._seen.add(name)
            broken = self._running.add(ledger.books(), ledger.dead_by_reason)
            self.dropped_by_reason.update(ledger.dropped_by_reason)
            self.dead_by_reason.update(ledger.dead_by_reason)
            key = name.removeprefix(LEDGERS).removesuffix(".json")
            self._commits.append((ledger.committed_at, "shards", key, ledger.books()))
            self._call_off(broken)

    def _look_at_pieces(self) -> None:
        names = [name for name in list_entries(self._store) if name not in self._pieces]
        found = map_ahead(self._store.get, names, self._store.requests_at_once)
        for name, data in zip(names, found, strict=True):
            with contextlib.suppress(ValueError):  # Half an entry; it will be made again.
                entry = None if data is None else PieceEntry.from_json(data[0])
                if entry is not None and entry.plan_id == self._spec.plan_id:
                    self._pieces[name] = entry.books
                    self._commits.append((entry.committed_at, "pieces", shard_key_of(name), entry.books))
                    self._call_off(self._of_pieces.add(entry.books, entry.dead_by_reason))

    def _call_off(self, broken: str | None) -> None:
        if broken is not None and not self._is_off:
            self._is_off = True
            _LOGGER.error("the budget is broken: %s; the job is called off", broken)
            call_off(self._store, broken)

    @property
    def totals(self) -> dict[str, int]:
        """The books of all committed shards, and of the pieces that are done of others, added up."""
        totals = Counter(self._running.totals)
        for name, books in self._pieces.items():
            if f"{LEDGERS}{shard_key_of(name)}.json" not in self._seen:
                totals.update(books)
        return dict(totals)

    def speed(self, since: float | None = None) -> dict[str, float] | None:
        """Returns shards, records and bytes read a second, in the ten minutes up to the last commit.

        Args:
            since: Unix time at which this run began, None where it is not known. Then the first of these commits is
                taken for the beginning, so that there must have been two moments of commits.

        Returns:
            "shards", "pieces", "records" and "bytes"; None where it cannot be told yet.
        """
        if not self._commits:
            return None
        newest = max(moment for moment, *_ in self._commits)
        recent = [one for one in self._commits if one[0] > max(newest - _SPEED_SECS, since or 0)]
        first = min((moment for moment, *_ in recent), default=newest)
        began = first if since is None else max(since, newest - _SPEED_SECS)
        if newest <= began:
            return None
        counted = [one for one in recent if one[0] > began]
        # What was read for a piece comes again with its shard, which is soon written.
        cut = set(map(shard_key_of, self._pieces))
        read = [books for _, kind, key, books in counted if kind == "pieces" or key not in cut]
        secs = newest - began
        return {
            **{name: sum(kind == name for _, kind, *_ in counted) / secs for name in ("shards", "pieces")},
            "records": sum(one["records_read"] for one in read) / secs,
            "bytes": sum(one["bytes_read"] for one in read) / secs,
        }

    def secs_left(self, speed: dict[str, float] | None) -> float | None:
        """Returns how long the job probably still takes at a speed; None where that cannot be told, or it is done."""
        kind, left = "shards", self._spec.num_shards - self.num_committed
        if left and self.committed_pieces < self.planned_pieces:
            kind, left = "pieces", self.planned_pieces - self.committed_pieces
        return left / speed[kind] if left and speed is not None and speed[kind] else None

    def describe(self) -> str:
        """Returns how far the job is, in words."""
        totals = self.totals
        records = f"{totals.get('records_written', 0):,} records written, {totals.get('records_dead', 0):,} dead"
        pieces = f", {self.committed_pieces:,} of {self.planned_pieces:,} pieces done" if self.planned_pieces else ""
        return f"{self.num_committed:,} of {self._spec.num_shards:,} shards committed{pieces}, {records}"


@contextlib.contextmanager
def watch_job(store: Store, spec: JobSpec) -> Iterator[None]:
    """Shows a bar on a terminal, logs a line each half minute elsewhere, and minds the budget."""
    watch = JobWatch(store, spec)
    with contextlib.suppress(OutputError, OSError):
        watch.look()  # What is committed already may break a budget that was made smaller.
    if watch.num_committed or watch.committed_pieces:
        _LOGGER.info("going on: %s", watch.describe())
    stop = threading.Event()
    show = _show_bar if sys.stderr.isatty() else _log_lines
    thread = threading.Thread(target=show, args=(watch, stop), name="gristmill-watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _looks(watch: JobWatch, stop: threading.Event) -> Iterator[None]:
    pause = _LOOK_SECS
    while not stop.wait(pause):
        began = time.monotonic()
        with contextlib.suppress(OutputError, OSError):  # A full disk is the workers' to report.
            watch.look()
        pause = max(_LOOK_SECS, (time.monotonic() - began) / _LOOK_SHARE)
        yield


def _show_bar(watch: JobWatch, stop: threading.Event) -> None:
    from tqdm import tqdm

    with tqdm(total=watch.to_do, unit="piece" if watch.planned_pieces else "shard", leave=False) as bar:
        for _ in _looks(watch, stop):
            with contextlib.suppress(OSError):  # The terminal may go away.
                bar.update(watch.done - bar.n)


def _log_lines(watch: JobWatch, stop: threading.Event) -> None:
    started = time.monotonic()
    first = watch.done
    next_line = started + _LOG_SECS
    for _ in _looks(watch, stop):
        if time.monotonic() < next_line:
            continue
        next_line += _LOG_SECS
        took, done = time.monotonic() - started, watch.done
        left = f", about {took * (watch.to_do - done) / (done - first):,.0f} s left" if done > first else ""
        _LOGGER.info("%s after %.0f s%s", watch.describe(), took, left)
