"""Watches a job while it runs: shows progress, and calls the job off when the budget breaks.

What is committed stands in the ledgers; how far the attempts are that run, in their notes.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from transforms.ahead import map_ahead
from transforms.budget import ESTIMATE, Budget, RunningTotals, call_off, say_letters
from transforms.elements import JobSpec
from transforms.ledger import LEDGERS, Ledger, ledger_name
from transforms.reasons import ReasonCounts, dead_by_reason, named_reasons
from transforms.shard_progress import Running, list_running
from transforms.store import OutputError, Store

_LOGGER = logging.getLogger("gristmill")
_LOOK_SECS = 2.0
_LOG_SECS = 30.0
_SPEED_SECS = 600.0
_LOOK_SHARE = 0.1
"""The most of the time that looks may take: one at a job of 100,000 shards is a hundred pages of a listing."""


class JobWatch:
    """Adds up the ledgers that have come since the last look, and how far running attempts are.

    Args:
        store: The output directory, as the job's generation sees it.
        spec: The job.
        may_call_off: Whether it is ours to call the job off.
        runs: Whether somebody runs the job; what attempts of a killed one have noted is lost.

    Attributes:
        running: How far the attempts are whose shard is not committed.
    """

    def __init__(self, store: Store, spec: JobSpec, *, may_call_off: bool = True, runs: bool = True) -> None:
        self._store = store
        self._spec = spec
        self._seen: set[str] = set()
        self._running = RunningTotals(Budget.of(spec))
        self._is_off = not may_call_off
        self._commits: list[tuple[float, Mapping[str, float]]] = []
        self._runs = runs
        self._named = named_reasons(store, spec)
        self._dropped = ReasonCounts()
        self._dead = ReasonCounts(self._named)
        self.running: list[Running] = []

    @property
    def num_committed(self) -> int:
        """Shards whose ledger stands."""
        return len(self._seen)

    def look(self) -> None:
        """Takes in new ledgers, which are fetched ahead; the budget is held against each."""
        # Notes first: what is committed meanwhile counts by its ledger alone.
        running = list(list_running(self._store, self._spec)) if self._runs else []
        self._take_in_ledgers()
        self.running = [one for one in running if ledger_name(self._spec, one.shard) not in self._seen]

    def _take_in_ledgers(self) -> None:
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
        """The books of all committed shards and of running attempts, added up."""
        return dict(sum((Counter(one.books) for one in self.running), Counter(self._running.totals)))

    @property
    def dropped_by_reason(self) -> dict[str, int]:
        """Dropped records by reason, as far as the totals go."""
        return _with_running((), self._dropped, (one.dropped_by_reason for one in self.running))

    @property
    def dead_by_reason(self) -> dict[str, int]:
        """Dead letters by reason, as far as the totals go."""
        return _with_running(self._named, self._dead, (one.dead_by_reason for one in self.running))

    @property
    def shards_done(self) -> float:
        """Shards that are committed, and the parts that are done of those that are not."""
        return self.num_committed + sum(one.share for one in self.running)

    def speed(self, since: float | None = None) -> dict[str, float] | None:
        """Returns shards, records and bytes read a second, in the ten minutes up to the last commit or note.

        Args:
            since: Unix time at which this run began, None where it is not known. Then the first of these commits is
                taken for the beginning, so that there must have been two moments of commits.

        Returns:
            "shards", "records" and "bytes"; None where it cannot be told yet.
        """
        moments = [moment for moment, _ in self._commits] + [one.at for one in self.running]
        if not moments:
            return None
        newest = max(moments)
        recent = [moment for moment in moments if moment > max(newest - _SPEED_SECS, since or 0)]
        began = min(recent, default=newest) if since is None else max(since, newest - _SPEED_SECS)
        if newest <= began:
            return None
        done = [(1.0, books) for moment, books in self._commits if moment > began]
        for one in self.running:
            late = min(1.0, (one.at - began) / max(1e-9, one.at - one.started_at))  # What it did since then.
            done.append((late * one.share, {name: late * number for name, number in one.books.items()}))
        return {
            "shards": sum(share for share, _ in done) / (newest - began),
            "records": sum(books.get("records_read", 0) for _, books in done) / (newest - began),
            "bytes": sum(books.get("bytes_read", 0) for _, books in done) / (newest - began),
        }

    def describe(self) -> str:
        """Returns how far the job is, in words."""
        totals = self.totals
        dead = say_letters(totals) if totals.get(ESTIMATE, 0) > totals["records_dead"] else ""
        dead = dead or f"{totals.get('records_dead', 0):,} dead"
        records = f"{totals.get('records_written', 0):,} records written, {dead}"
        at_work = f", {len(self.running):,} on their way" if self.running else ""
        return f"{self.num_committed:,} of {self._spec.num_shards:,} shards committed{at_work}, {records}"


def _with_running(named: Iterable[str], done: ReasonCounts, running: Iterable[dict[str, int]]) -> dict[str, int]:
    whole = ReasonCounts(named)
    for counts in (done.to_fields(), *running):
        whole.update(counts)
    return whole.to_fields()


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
                bar.set_postfix_str(f"{watch.totals.get('records_read', 0):,} records", refresh=False)
                bar.update(watch.num_committed - bar.n)


def _log_lines(watch: JobWatch, num_shards: int, stop: threading.Event) -> None:
    started = time.monotonic()
    first = watch.shards_done
    next_line = started + _LOG_SECS
    for _ in _looks(watch, stop):
        if time.monotonic() < next_line:
            continue
        next_line += _LOG_SECS
        took, done = time.monotonic() - started, watch.shards_done
        left = f", about {took * (num_shards - done) / (done - first):,.0f} s left" if done > first else ""
        _LOGGER.info("%s after %.0f s%s", watch.describe(), took, left)
