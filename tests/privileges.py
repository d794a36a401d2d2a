"""Takes from the superuser what others do not have."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator

_VERSION = 0x20080522
_READ_ANYTHING = 1 << 1 | 1 << 2
"""CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH."""


@contextlib.contextmanager
def as_anybody() -> Iterator[None]:
    """Has this thread, and those that it starts meanwhile, read only what the modes of files allow."""
    before = _exchange(lambda effective: effective & ~_READ_ANYTHING)
    try:
        yield
    finally:
        _exchange(lambda _: before)


def _exchange(change: Callable[[int], int]) -> int:
    """Changes the effective capabilities of this thread and returns what they were. See capset(2)."""
    libc = ctypes.CDLL(None, use_errno=True)
    header, data = (ctypes.c_uint32 * 2)(_VERSION, 0), (ctypes.c_uint32 * 6)()
    assert libc.capget(header, data) == 0, ctypes.get_errno()
    before = data[0]
    data[0] = change(before)
    assert libc.capset(header, data) == 0, ctypes.get_errno()
    return int(before)


UNKNOWN_USER = [
    *("setpriv", "--reuid=54321", "--regid=54321", "--clear-groups"),
    *("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"),  # To reach Python, wherever it lies.
]
"""In front of a command: it runs as a user that no file of passwords knows, who may read all and write nothing."""
