"""Watches a job while it runs: shows progress, and calls the job off when the budget breaks.

What is committed stands in the ledgers; how far the attempts are that run, in their notes.
"""

from __future__ import annotations

import contextlib
import dataclasses
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
from transforms.pieces import PieceEntry, entry_name, list_entries, pieces_header, shard_key_of
from transforms.reasons import ReasonCounts, dead_by_reason, named_reasons
from transforms.shard_progress import Running, list_running
from transforms.store import OutputError, Store

_LOGGER = logging.getLogger("gristmill")
_LOOK_SECS = 2.0
_LOG_SECS = 30.0
_SPEED_SECS = 600.0
_LOOK_SHARE = 0.1
"""The most of the time that looks may take: one at a job of 100,000 shards is a hundred pages of a listing."""


@dataclasses.dataclass(frozen=True)
class _Commit:
    """A shard or a piece that was committed.

    Attributes:
        moment: Unix time.
        kind: "shards" or "pieces".
        shard_key: The shard, as `JobSpec.shard_key` writes it.
        books: Its totals by name.
    """

    moment: float
    kind: str
    shard_key: str
    books: dict[str, int]


class JobWatch:
    """Adds up what was committed since the last look, and how far running attempts are.

    Args:
        store: The output directory, as the job's generation sees it.
        spec: The job.
        may_call_off: Whether it is ours to call the job off.
        runs: Whether somebody runs the job; what attempts of a killed one have noted is lost.

    Attributes:
        running: How far the attempts are at what is not committed.
    """

    def __init__(self, store: Store, spec: JobSpec, *, may_call_off: bool = True, runs: bool = True) -> None:
        self._store = store
        self._spec = spec
        self._seen: set[str] = set()
        self._running = RunningTotals(Budget.of(spec))
        self._is_off = not may_call_off
        self._commits: list[_Commit] = []
        self._runs = runs
        self._named = named_reasons(store, spec)
        self._dropped = ReasonCounts()
        self._dead = ReasonCounts(self._named)
        self._pieces: dict[str, dict[str, int]] = {}
        self._of_pieces = RunningTotals(Budget.of(spec))
        self._num_pieces: int | None = None  # Not known before the first look.
        self.running: list[Running] = []

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
    def done(self) -> float:
        """Shards and pieces that are done, and the parts that are done of others."""
        if self.num_committed >= self._spec.num_shards:
            return self.to_do
        return self.num_committed + self.committed_pieces + sum(one.share for one in self.running)

    def look(self) -> None:
        """Takes in new ledgers and entries of pieces, fetched ahead; the budget is held against each."""
        # Notes first: what is committed meanwhile counts by its ledger or entry alone.
        running = list(list_running(self._store, self._spec)) if self._runs else []
        if self._num_pieces is None:
            header = pieces_header(self._store) or {}
            self._num_pieces = header["num_pieces"] if header.get("plan_id") == self._spec.plan_id else 0
        if self._num_pieces:
            self._look_at_pieces()
        self._take_in_ledgers()
        self.running = [one for one in running if not self._is_done(one)]

    def _is_done(self, one: Running) -> bool:
        if ledger_name(self._spec, one.shard) in self._seen:
            return True
        return one.piece is not None and entry_name(self._spec, one.shard, one.piece) in self._pieces

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
            key = name.removeprefix(LEDGERS).removesuffix(".json")
            self._commits.append(_Commit(ledger.committed_at, "shards", key, ledger.books()))
            self._call_off(broken)

    def _look_at_pieces(self) -> None:
        names = [name for name in list_entries(self._store) if name not in self._pieces]
        found = map_ahead(self._store.get, names, self._store.requests_at_once)
        for name, data in zip(names, found, strict=True):
            with contextlib.suppress(ValueError):  # Half an entry; it will be made again.
                entry = None if data is None else PieceEntry.from_json(data[0])
                if entry is not None and entry.plan_id == self._spec.plan_id:
                    self._pieces[name] = entry.books
                    self._commits.append(_Commit(entry.committed_at, "pieces", shard_key_of(name), entry.books))
                    self._call_off(self._of_pieces.add(entry.books, entry.dead_by_reason))

    def _call_off(self, broken: str | None) -> None:
        if broken is not None and not self._is_off:
            self._is_off = True
            _LOGGER.error("the budget is broken: %s; the job is called off", broken)
            call_off(self._store, broken)

    @property
    def totals(self) -> dict[str, int]:
        """The books of all committed shards, and of what is done of others, added up."""
        totals = Counter(self._running.totals)
        for name, books in self._pieces.items():
            if f"{LEDGERS}{shard_key_of(name)}.json" not in self._seen:
                totals.update(books)
        for one in self._reading():
            totals.update(one.books)
        return dict(totals)

    def _reading(self) -> list[Running]:
        """Returns the attempts that read; a shard that is written from its pieces reads nothing that is new."""
        cut = set(map(shard_key_of, self._pieces))
        return [one for one in self.running if one.piece is not None or self._spec.shard_key(one.shard) not in cut]

    @property
    def dropped_by_reason(self) -> dict[str, int]:
        """Dropped records by reason, in shards that are committed or being read."""
        return _with_running((), self._dropped, (one.dropped_by_reason for one in self._reading()))

    @property
    def dead_by_reason(self) -> dict[str, int]:
        """Dead letters by reason, in shards that are committed or being read."""
        return _with_running(self._named, self._dead, (one.dead_by_reason for one in self._reading()))

    def speed(self, since: float | None = None) -> dict[str, float] | None:
        """Returns shards, records and bytes read a second, in the ten minutes up to the last commit or note.

        Args:
            since: Unix time at which this run began, None where it is not known. Then the first of these commits is
                taken for the beginning, so that there must have been two moments of commits.

        Returns:
            "shards", "pieces", "records" and "bytes"; None where it cannot be told yet.
        """
        moments = [commit.moment for commit in self._commits] + [one.at for one in self.running]
        if not moments:
            return None
        newest = max(moments)
        recent = [moment for moment in moments if moment > max(newest - _SPEED_SECS, since or 0)]
        began = min(recent, default=newest) if since is None else max(since, newest - _SPEED_SECS)
        return None if newest <= began else self._speed_between(began, newest)

    def _speed_between(self, began: float, newest: float) -> dict[str, float]:
        # What was read for a piece comes again with its shard, which is soon written.
        cut = set(map(shard_key_of, self._pieces))
        done: list[tuple[str, float, Mapping[str, float]]] = []
        for commit in self._commits:
            if commit.moment > began:
                again = commit.kind == "shards" and commit.shard_key in cut
                done.append((commit.kind, 1.0, {} if again else commit.books))
        reading = self._reading()
        for one in self.running:
            late = min(1.0, (one.at - began) / max(1e-9, one.at - one.started_at))  # What it did since then.
            books = {name: late * number for name, number in one.books.items()} if one in reading else {}
            done.append(("shards" if one.piece is None else "pieces", late * one.share, books))
        secs = newest - began
        return {
            **{name: sum(share for kind, share, _ in done if kind == name) / secs for name in ("shards", "pieces")},
            "records": sum(books.get("records_read", 0) for *_, books in done) / secs,
            "bytes": sum(books.get("bytes_read", 0) for *_, books in done) / secs,
        }

    def secs_left(self, speed: dict[str, float] | None) -> float | None:
        """Returns how long the job probably still takes at a speed; None where that cannot be told, or it is done."""
        is_cut = self.num_committed < self._spec.num_shards and self.committed_pieces < self.planned_pieces
        kind, planned, committed = (
            ("pieces", self.planned_pieces, self.committed_pieces)
            if is_cut
            else ("shards", self._spec.num_shards, self.num_committed)
        )
        under_way = sum(one.share for one in self.running if (one.piece is not None) == is_cut)
        left = planned - committed - under_way
        return left / speed[kind] if left > 0 and speed is not None and speed[kind] else None

    def describe(self) -> str:
        """Returns how far the job is, in words."""
        totals = self.totals
        dead = say_letters(totals) if totals.get(ESTIMATE, 0) > totals.get("records_dead", 0) else ""
        dead = dead or f"{totals.get('records_dead', 0):,} dead"
        records = f"{totals.get('records_written', 0):,} records written, {dead}"
        pieces = f", {self.committed_pieces:,} of {self.planned_pieces:,} pieces done" if self.planned_pieces else ""
        at_work = f", {len(self.running):,} on their way" if self.running else ""
        return f"{self.num_committed:,} of {self._spec.num_shards:,} shards committed{pieces}{at_work}, {records}"


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
                bar.set_postfix_str(f"{watch.totals.get('records_read', 0):,} records", refresh=False)
                bar.update(int(watch.done) - bar.n)


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
