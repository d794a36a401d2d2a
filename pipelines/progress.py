"""Watches a job while it runs, from its ledgers alone: shows progress, and calls the job off when the budget breaks."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Iterator

from transforms.ahead import map_ahead
from transforms.budget import ESTIMATE, Budget, RunningTotals, call_off, say_letters
from transforms.elements import JobSpec
from transforms.ledger import LEDGERS, Ledger
from transforms.reasons import ReasonCounts, dead_by_reason, named_reasons
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
    """

    def __init__(self, store: Store, spec: JobSpec, *, may_call_off: bool = True) -> None:
        self._store = store
        self._spec = spec
        self._seen: set[str] = set()
        self._running = RunningTotals(Budget.of(spec))
        self._is_off = not may_call_off
        self._commits: list[tuple[float, dict[str, int]]] = []
        self._named = named_reasons(store, spec)
        self._dropped = ReasonCounts()
        self._dead = ReasonCounts(self._named)

    @property
    def num_committed(self) -> int:
        """Shards whose ledger stands."""
        return len(self._seen)

    def look(self) -> None:
        """Takes in new ledgers, which are fetched ahead; the budget is held against each."""
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
            dead = dead_by_reason(self._store, self._spec, ledger, self._named)
            broken = self._running.add(ledger.books(), dead)
            self._dropped.update(ledger.dropped_by_reason)
            self._dead.update(dead)
            self._commits.append((ledger.committed_at, ledger.books()))
            if broken is not None and not self._is_off:
                self._is_off = True
                _LOGGER.error("the budget is broken: %s; the job is called off", broken)
                call_off(self._store, broken)

    @property
    def totals(self) -> dict[str, int]:
        """The books of all committed shards, added up."""
        return self._running.totals

    @property
    def dropped_by_reason(self) -> dict[str, int]:
        """Dropped records by reason."""
        return self._dropped.to_fields()

    @property
    def dead_by_reason(self) -> dict[str, int]:
        """Dead letters by reason."""
        return self._dead.to_fields()

    def speed(self, since: float | None = None) -> dict[str, float] | None:
        """Returns shards, records and bytes read a second, in the ten minutes up to the last commit.

        Args:
            since: Unix time at which this run began, None where it is not known. Then the first of these commits is
                taken for the beginning, so that there must have been two moments of commits.

        Returns:
            "shards", "records" and "bytes"; None where it cannot be told yet.
        """
        if not self._commits:
            return None
        newest = max(moment for moment, _ in self._commits)
        recent = [one for one in self._commits if one[0] > max(newest - _SPEED_SECS, since or 0)]
        first = min((moment for moment, _ in recent), default=newest)
        began = first if since is None else max(since, newest - _SPEED_SECS)
        if newest <= began:
            return None
        books = [books for moment, books in recent if moment > began]
        secs = newest - began
        return {
            "shards": len(books) / secs,
            "records": sum(one["records_read"] for one in books) / secs,
            "bytes": sum(one["bytes_read"] for one in books) / secs,
        }

    def describe(self) -> str:
        """Returns how far the job is, in words."""
        totals = self._running.totals
        dead = say_letters(totals) if totals.get(ESTIMATE, 0) > totals["records_dead"] else ""
        dead = dead or f"{totals.get('records_dead', 0):,} dead"
        records = f"{totals.get('records_written', 0):,} records written, {dead}"
        return f"{self.num_committed:,} of {self._spec.num_shards:,} shards committed, {records}"


@contextlib.contextmanager
def watch_job(store: Store, spec: JobSpec) -> Iterator[None]:
    """Shows a bar on a terminal, logs a line each half minute elsewhere, and minds the budget."""
    watch = JobWatch(store, spec)
    with contextlib.suppress(OutputError, OSError):
        watch.look()  # What is committed already may break a budget that was made smaller.
    if watch.num_committed:
        _LOGGER.info("going on: %s", watch.describe())
    stop = threading.Event()
    show = _show_bar if sys.stderr.isatty() else _log_lines
    thread = threading.Thread(target=show, args=(watch, spec.num_shards, stop), name="gristmill-watch", daemon=True)
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


def _show_bar(watch: JobWatch, num_shards: int, stop: threading.Event) -> None:
    from tqdm import tqdm

    with tqdm(total=num_shards, unit="shard", leave=False) as bar:
        for _ in _looks(watch, stop):
            with contextlib.suppress(OSError):  # The terminal may go away.
                bar.update(watch.num_committed - bar.n)


def _log_lines(watch: JobWatch, num_shards: int, stop: threading.Event) -> None:
    started = time.monotonic()
    first = watch.num_committed
    next_line = started + _LOG_SECS
    for _ in _looks(watch, stop):
        if time.monotonic() < next_line:
            continue
        next_line += _LOG_SECS
        took, done = time.monotonic() - started, watch.num_committed
        left = f", about {took * (num_shards - done) / (done - first):,.0f} s left" if done > first else ""
        _LOGGER.info("%s after %.0f s%s", watch.describe(), took, left)
