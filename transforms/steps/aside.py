"""Stepping aside: a record that waits for a retry gives its place to the next one meanwhile. No Beam here.

Whoever runs records in threads says so by `giving_way`; where nobody does, waiting is just waiting.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Protocol

_local = threading.local()


class Host(Protocol):
    """What runs records, each in a thread of its own."""

    def step_aside(self) -> bool:
        """Lets another record run in this one's place, if there can be a thread for it.

        Returns:
            Whether there can; then `come_back` has to follow.
        """
        ...

    def come_back(self) -> None:
        """Waits until there is a place for this thread's record again.

        Raises:
            RuntimeError: Nobody wants the record any more.
        """
        ...


@contextlib.contextmanager
def giving_way(host: Host) -> Iterator[None]:
    """Names who runs the records of this thread."""
    _local.host = host
    try:
        yield
    finally:
        _local.host = None


@contextlib.contextmanager
def aside() -> Iterator[None]:
    """In it the record of this thread is not in flight. Only for waiting: what works belongs among those in flight."""
    host: Host | None = getattr(_local, "host", None)
    if host is None or not host.step_aside():
        yield
        return
    try:
        yield
    finally:
        host.come_back()


def sleep(secs: float) -> None:
    """Sleeps while another record runs."""
    with aside():
        time.sleep(secs)
