"""Shows how many shards are committed while a job runs, from the ledgers alone."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Iterator

from transforms.ledger import LEDGERS
from transforms.store import Store

_LOGGER = logging.getLogger("gristmill")
_LOOK_SECS = 2.0
_LOG_SECS = 30.0


@contextlib.contextmanager
def show_progress(store: Store, num_shards: int) -> Iterator[None]:
    """Shows a bar on a terminal, and logs a line each half minute elsewhere."""
    stop = threading.Event()
    watch = _watch_terminal if sys.stderr.isatty() else _watch_log
    thread = threading.Thread(target=watch, args=(store, num_shards, stop), name="gristmill-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _committed(store: Store) -> int:
    return sum(1 for _ in store.list(LEDGERS))


def _watch_terminal(store: Store, num_shards: int, stop: threading.Event) -> None:
    from tqdm import tqdm

    with tqdm(total=num_shards, unit="shard", leave=False) as bar:
        while not stop.wait(_LOOK_SECS):
            bar.update(_committed(store) - bar.n)


def _watch_log(store: Store, num_shards: int, stop: threading.Event) -> None:
    started = time.monotonic()
    first = _committed(store)
    while not stop.wait(_LOG_SECS):
        done = _committed(store)
        took = time.monotonic() - started
        left = f", about {took * (num_shards - done) / (done - first):,.0f} s left" if done > first else ""
        _LOGGER.info("%d of %d shards committed after %.0f s%s", done, num_shards, took, left)
