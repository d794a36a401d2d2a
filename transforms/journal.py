"""The journal of a shard: what its expensive steps returned, kept until the shard is committed. No Beam here.

A shard is committed as a whole, but what a service was paid for should not be paid for again when a process is killed
before that. So each answer is appended to a file beside the attempt as soon as it is there, and a later attempt at the
shard looks there first. A journal only ever saves calls: without it, or with parts of it, the same shard is written.

Every process writes a file of its own. On a local disk it stands under its final name and is synced each second. Other
stores have no appending: there the file lies in the folder for temporary files, and what has come since is put every
few seconds as an object of its own; the next attempt puts the pieces together again.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import shutil
import threading
import time
import uuid
from collections.abc import Iterable, Iterator

from transforms.ahead import call_ahead, map_ahead
from transforms.elements import JobSpec, ShardTask
from transforms.generations import base_name, base_of, unfenced
from transforms.ledger import find_ledger
from transforms.shard_journal import JournalHome, ShardJournal, journal_files
from transforms.spool import SpoolFile, check_room
from transforms.store import LocalStore, OutputError, Store

_LOGGER = logging.getLogger("gristmill")

JOURNALS = "_gristmill/journal/"
SYNC_SECS = 1.0
"""How often a local file is synced: what a machine that fails may lose. A process that is killed loses nothing."""

PUT_SECS = 5.0
"""How often what is new goes to a store without appending: 10,000 workers make 2,000 requests a second at most, and a
killed one loses the answers of so long."""

_PIECE_BYTES = 8 << 20
"""The most that is put, and stands in memory, at a time."""

_FETCHES = 4
"""Pieces that are fetched at a time; twice as many may stand in memory."""


class OpenJournal:
    """The journal of a shard at the worker that is at it: makes durable what processes of this attempt write.

    Attributes:
        home: For the processes that use it.
    """

    def __init__(self, store: Store, spec: JobSpec, task: ShardTask, *, fetch: bool) -> None:
        self._store = unfenced(store)  # Names of its own, which hurt nobody.
        self._prefix = journal_prefix(spec, task)
        self._spool: SpoolFile | None = None
        self._done: dict[str, int] = collections.defaultdict(int)  # Bytes that are durable, by file.
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._journal: ShardJournal | None = None
        self._has_old = False
        stream = f"{time.time_ns():020d}-{uuid.uuid4().hex[:12]}"
        self.home = JournalHome(self._open_folder(fetch=fetch), stream, (spec.plan_id, *spec.earlier_plans))

    def _open_folder(self, *, fetch: bool) -> str:
        base = base_of(self._store)
        if isinstance(base, LocalStore):
            folder = os.path.join(base.root, base_name(self._store, self._prefix)).rstrip("/")
            self._has_old = bool(journal_files(folder))
            return folder
        self._spool = SpoolFile()
        os.mkdir(self._spool.path)
        if fetch:
            with contextlib.suppress(OutputError, OSError):
                self._has_old = _fetch(self._store, self._prefix, self._spool.path)
        return self._spool.path

    @property
    def stands(self) -> bool:
        """Whether there is anything of this journal in the store, to be deleted once the shard is committed."""
        return self._has_old or bool(self._done)

    def own(self) -> ShardJournal:
        """Returns the journal for this process, always the same."""
        if self._journal is None:
            self._journal = ShardJournal(self.home)
        self._watch()
        return self._journal

    def shared(self) -> JournalHome:
        """Returns what another process needs to use the journal."""
        self._watch()
        return self.home

    def _watch(self) -> None:
        """Begins to make durable what is written."""
        if self._thread is None and not self._stop.is_set():
            self._thread = threading.Thread(target=self._tend, name="gristmill-journal", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Makes durable what is new, for an attempt that may be killed before it commits."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            self._keep()
        if self._spool is not None:
            shutil.rmtree(self._spool.path, ignore_errors=True)
            self._spool.close()
            self._spool = None

    def _tend(self) -> None:
        while not self._stop.wait(SYNC_SECS if self._spool is None else PUT_SECS):
            self._keep()

    def _keep(self) -> None:
        try:
            for path in journal_files(self.home.folder):
                name = os.path.basename(path)
                if name.startswith(self.home.stream) and (size := os.path.getsize(path)) > self._done[name]:
                    self._keep_file(path, name, size)
        except FileNotFoundError:
            pass  # The shard was committed by another attempt, which has deleted the journal.
        except (OutputError, OSError) as error:
            # What could not be put is tried again next time; the attempt itself does not depend on it.
            _LOGGER.warning("the journal of %s cannot be kept: %s", self._prefix, error)

    def _keep_file(self, path: str, name: str, size: int) -> None:
        if self._spool is None:
            _sync(path, is_new=not self._done[name])
            self._done[name] = size
            return
        check_room(0)
        while (start := self._done[name]) < size:
            with open(path, "rb") as file:
                file.seek(start)
                data = file.read(min(size - start, _PIECE_BYTES))
            self._store.put(f"{self._prefix}{name}.{start:016d}", data)
            self._done[name] = start + len(data)


def _sync(path: str, *, is_new: bool) -> None:
    for target in (path, os.path.dirname(path))[: 1 + is_new]:
        fd = os.open(target, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _fetch(store: Store, prefix: str, folder: str) -> bool:
    """Puts the pieces of a journal together in a local folder; returns whether there are any."""
    pieces = [(name, size) for name, size in store.list(prefix)]
    check_room(sum(size for _, size in pieces))
    names = [name for name, _ in pieces]
    for name, found in zip(names, map_ahead(store.get, names, min(_FETCHES, store.requests_at_once)), strict=True):
        stream, _, start = name.removeprefix(prefix).rpartition(".")
        if found is None or not start.isdigit() or "/" in stream:
            continue
        path = os.path.join(folder, stream)
        # Behind a piece that is missing nothing can be used, since frames are found from one to the next.
        if (os.path.getsize(path) if os.path.exists(path) else 0) == int(start):
            with open(path, "ab") as file:
                file.write(found[0])
    return bool(pieces)


def journal_prefix(spec: JobSpec, task: ShardTask) -> str:
    """Returns how the names of the journal of a shard, or of a piece of one, begin."""
    return f"{JOURNALS}{spec.piece_key(task.shard, task.piece)}/"


def forget_journal(store: Store, spec: JobSpec, task: ShardTask) -> None:
    """Deletes the journal of a shard that is committed; what cannot be deleted goes when the job is done."""
    with contextlib.suppress(OutputError, OSError):
        names = [name for name, _ in store.list(journal_prefix(spec, task))]
        call_ahead(store.delete, names, store.requests_at_once)


def stray_journals(store: Store, spec: JobSpec) -> Iterator[str]:
    """Yields the files of journals that no attempt can use: of shards that are committed, or that are none."""
    by_shard: dict[str, list[str]] = collections.defaultdict(list)
    for name, _ in store.list(JOURNALS):
        key = name.removeprefix(JOURNALS).partition("/")[0]
        by_shard[key.partition("-")[0]].append(name)  # A piece's goes when its shard is committed.

    def strays(key: str) -> Iterable[str]:
        if not key.isdigit() or spec.shard_key(int(key)) != key:
            return by_shard[key]
        found = find_ledger(store, spec, int(key))
        return by_shard[key] if found is not None and found.ledger is not None else ()

    for names in map_ahead(strays, by_shard, store.requests_at_once):
        yield from names


class JobJournals:
    """Opens the journals of a job's shards, one after the other, at one worker.

    Args:
        store: The output directory as the job sees it.
        spec: The job.
    """

    def __init__(self, store: Store, spec: JobSpec) -> None:
        self._store = store
        self._spec = spec
        self._any_stood: bool | None = None
        self._opened: set[str] = set()

    def open(self, task: ShardTask, try_number: int, *, surely_used: bool) -> OpenJournal:
        """Opens the journal of a shard.

        Args:
            task: The shard.
            try_number: Which try of the shard this is.
            surely_used: Whether the job has steps whose answers are always kept. Where it may have none, a store
                that is far away is asked only for shards that can have a journal.
        """
        prefix = journal_prefix(self._spec, task)
        fetch = surely_used or try_number > 1 or prefix in self._opened or self._stood()
        self._opened.add(prefix)
        return OpenJournal(self._store, self._spec, task, fetch=fetch)

    def _stood(self) -> bool:
        """Whether there was a journal of any shard when this worker began."""
        if self._any_stood is None:
            self._any_stood = True
            with contextlib.suppress(OutputError, OSError):
                self._any_stood = next(iter(self._store.list(JOURNALS)), None) is not None
        return self._any_stood
