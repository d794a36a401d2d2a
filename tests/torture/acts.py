"""Steps that do what their records say, in the processes of a tortured job."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterator

from transforms import BadRecordError, Drop

SECS = "GRISTMILL_TORTURE_SECS"
"""Environment variable: how long `slow` takes."""


class UnprintableError(Exception):
    """An exception of which nothing can be had."""

    def __str__(self) -> str:
        raise RuntimeError("no text")

    def __reduce__(self) -> str:
        raise TypeError("cannot be pickled")


def slow(record: bytes) -> bytes:
    """Takes a while without taking CPU."""
    time.sleep(float(os.environ.get(SECS, "0")))
    return record


def act(record: bytes) -> object:
    """Does what the second word of the record says."""
    return _ACTIONS[record.split(b" ")[1].decode()](record)


def _raise(error: Exception) -> object:
    raise error


def _items(record: bytes) -> Iterator[object]:
    yield record + b" first"
    yield Drop("unwanted_item")
    yield record + b" last"


def _failing_items(record: bytes) -> Iterator[object]:
    yield record
    raise ValueError("the second item fails")


_ACTIONS: dict[str, Callable[[bytes], object]] = {
    "keep": lambda record: record,
    "drop": lambda _: Drop("unwanted"),
    "none": lambda _: None,
    "items": _items,
    "nothing": lambda _: iter(()),
    "fail": lambda _: _raise(ValueError("half \ud83d")),
    "bad": lambda _: _raise(BadRecordError("my_reason", "my text")),
    "unprintable": lambda _: _raise(UnprintableError()),
    "failing_items": _failing_items,
    "segfault": lambda _: ctypes.string_at(0),
    "abort": lambda _: os.abort(),
    "exit": lambda _: os._exit(0),
    "kill": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "hang": lambda _: time.sleep(10_000),
    "memory": lambda _: bytearray(1 << 40),
}
