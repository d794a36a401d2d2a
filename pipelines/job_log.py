"""The log of a job: on the terminal, and in `_gristmill/job.log` beside the output."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator

from transforms.store import LocalStore, Store

_FORMAT = "%(asctime)s %(levelname)s %(message)s"
_NOISE = (
    "No semi_persistent_directory found",
    "Discarding unparseable args",
    "No iterator is returned",
    "If direct_num_workers is not equal to 1",
    "Failed to read inputs in the data plane",
)


class _WithoutNoise(logging.Filter):
    """Leaves out warnings of Beam's own start-up that no user can act on."""

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        return not any(noise in message for noise in _NOISE)


@contextlib.contextmanager
def log_to_job(store: Store) -> Iterator[None]:
    """Logs our INFO and everybody's warnings to the terminal and, for local output, to the job's log."""
    handlers: list[logging.Handler] = [logging.StreamHandler()]
    if isinstance(store, LocalStore):
        folder = os.path.join(store.root, "_gristmill")
        os.makedirs(folder, exist_ok=True)
        handlers.append(
            logging.FileHandler(os.path.join(folder, "job.log"), encoding="utf-8", errors="backslashreplace")
        )
    root = logging.getLogger()
    ours = logging.getLogger("gristmill")
    before = ours.level
    ours.setLevel(logging.INFO)
    for handler in handlers:
        handler.setFormatter(logging.Formatter(_FORMAT))
        handler.addFilter(_WithoutNoise())
        root.addHandler(handler)
    try:
        yield
    finally:
        ours.setLevel(before)
        for handler in handlers:
            root.removeHandler(handler)
            handler.close()
