"""Sets signal handlers for a while."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def handled(
    numbers: tuple[signal.Signals, ...], handler: Callable[..., Any] | signal.Handlers, *, only_default: bool = False
) -> Iterator[None]:
    """Handles signals while the context lives; does nothing in other threads than the main one, which alone may.

    Args:
        numbers: The signals.
        handler: As for `signal.signal`.
        only_default: Whether to leave those alone that whoever started us has chosen for, as nohup does.
    """
    before: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        chosen = [one for one in numbers if not only_default or signal.getsignal(one) == signal.SIG_DFL]
        before = {one: signal.signal(one, handler) for one in chosen}
    try:
        yield
    finally:
        for one, old in before.items():
            signal.signal(one, old)
