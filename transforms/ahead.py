"""Asks a store that is far away for many things at a time: requests run ahead, results come in order. No Beam here.

Some phases of a job are one process going through all its shards: before the pipeline (is it done already? what did
killed attempts leave?), while it runs (progress), at its end (report, manifest, deletion of attempts), and the commands
`verify`, `report` and `replay`. For N shards and a latency of L seconds such a phase takes N / `requests_at_once` * L
for each request a shard: progress makes one, "is it done already?" and the report two (ledger and note of names),
deletion one a file. So 100,000 shards at 50 ms and 32 requests at a time are 160 s for each, where one after the other
they would be 83 minutes. Listings bring sizes, 1,000 names a request. Where the latency is small, the client's CPU is
the bound, some 2 ms a request.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

_WINDOW = 2
"""Calls begun but not yet yielded, a thread: so that one slow answer does not hold up all threads."""


def map_ahead(function: Callable[[T], R], items: Iterable[T], threads: int) -> Iterator[R]:
    """Yields what a function returns for each item, in order, while it runs for items further on.

    Args:
        function: Runs in other threads, several at a time.
        items: Are taken in the caller's thread, at most 2 * `threads` ahead of what is yielded.
        threads: Calls at a time. With 1, and for a single item, the caller's thread makes them, none ahead.

    Raises:
        Exception: What the function raises, for the first item in order; calls further on are not begun any more,
            and those that run are waited for, as they also are when the caller stops early.
    """
    items = iter(items)
    first = list(itertools.islice(items, 2 if threads > 1 else 0))
    if len(first) < 2:
        yield from map(function, itertools.chain(first, items))
        return
    running: deque[Future[R]] = deque()
    pool = ThreadPoolExecutor(threads, "gristmill-ahead")
    try:
        for item in itertools.chain(first, items):
            running.append(pool.submit(function, item))
            if len(running) == _WINDOW * threads:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def call_ahead(function: Callable[[T], object], items: Iterable[T], threads: int) -> None:
    """Calls a function for each item, as `map_ahead` does, and drops the results."""
    deque(map_ahead(function, items, threads), maxlen=0)
