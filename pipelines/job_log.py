"""The log of a job: on the terminal, and in `_gristmill/job.log` beside the output."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from pipelines.errors import CAUSES
from transforms.scratch import scratch_folder
from transforms.store import LocalStore, OutputError, Store

_LOG_NAME = "_gristmill/job.log"
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


FILE_ONLY = {"file_only": True}
"""`extra` of a message for the job's log alone."""


class _ForTerminal(logging.Filter):
    """Leaves out what is for the file, and Beam's tracebacks of errors of ours: the command ends with their message."""

    def filter(self, record: logging.LogRecord) -> bool:
        if not record.name.startswith("apache_beam"):
            return not hasattr(record, "file_only")
        failure = record.exc_info[0] if record.exc_info else None
        text = record.getMessage() if failure is None else f"{failure.__name__}: "
        return not any(f"{name}: " in text for name in (*CAUSES, "JobInterrupted"))


@contextlib.contextmanager
def log_to_job(store: Store) -> Iterator[None]:
    """Logs our INFO and everybody's warnings to the terminal and to the job's log."""
    with _log_file(store) as path, _logging_to(path):
        yield


def log_to_terminal() -> contextlib.AbstractContextManager[None]:
    """Logs the same to the terminal alone, for a command that is no job."""
    return _logging_to(None)


@contextlib.contextmanager
def _log_file(store: Store) -> Iterator[str]:
    """Gives the path of the log; a store gets what was logged when the job ends, behind what it has."""
    if isinstance(store, LocalStore):
        path = os.path.join(store.root, _LOG_NAME)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        yield path
        return
    with scratch_folder() as folder:
        path = os.path.join(folder, "job.log")
        try:
            yield path
        finally:
            with contextlib.suppress(OutputError, OSError):  # A job is not at fault for its log.
                before, version = store.get(_LOG_NAME) or (b"", None)
                store.put_if_version(_LOG_NAME, before + Path(path).read_bytes(), version)


@contextlib.contextmanager
def _logging_to(path: str | None) -> Iterator[None]:
    terminal = logging.StreamHandler()
    terminal.addFilter(_ForTerminal())
    handlers: list[logging.Handler] = [terminal]
    if path is not None:
        handlers.append(logging.FileHandler(path, encoding="utf-8", errors="backslashreplace"))
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
