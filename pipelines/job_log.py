"""The log of a job: on the terminal, and in `_gristmill/job.log` beside the output."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from pipelines.errors import CAUSES
from transforms.scratch import scratch_folder
from transforms.store import LocalStore, OutputError, Store

_LOG_NAME = "_gristmill/job.log"
_FORMAT = "%(asctime)s %(levelname)s %(message)s"
_MAX_MESSAGES = 1_000
"""Of one place in the code: more than anybody reads."""
_MAX_PLACES = 1_000
_MAX_CHARS = 10_000
_SERVICE = "apache_beam.runners.dataflow"
_WORKERS_PLACE = re.compile(r'^log_location: "([^"\n]{1,300})"$', re.MULTILINE)
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


class Bounded(logging.Filter):
    """Leaves out what one place in the code says after its first messages, and cuts those that are too long.

    A step may say something about each of a billion records. What we say ourselves, and a service of its job, is
    bounded already. One filter serves all handlers: it decides about each message once.
    """

    def __init__(self) -> None:
        super().__init__()
        self._counts: Counter[str] = Counter()

    def filter(self, record: logging.LogRecord) -> bool:
        """Decides about a message."""
        if record.name.partition(".")[0] == "gristmill" or record.name.startswith(_SERVICE):
            return True
        if "is_kept" not in record.__dict__:
            record.__dict__["is_kept"] = self._decide(record)
        return bool(record.__dict__["is_kept"])

    def _decide(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        place = self._place(record, message)
        self._counts[place] += 1
        count = self._counts[place]
        if count < _MAX_MESSAGES and len(message) <= _MAX_CHARS:
            return True
        message = message if len(message) <= _MAX_CHARS else f"{message[:_MAX_CHARS]} ..."
        more = f" (what {place} says from here on is left out)" if count == _MAX_MESSAGES else ""
        record.msg, record.args = message + more, ()
        return count <= _MAX_MESSAGES

    def _place(self, record: logging.LogRecord, message: str) -> str:
        """Returns where a message comes from; what workers say comes through one place of Beam's, and tells its own."""
        found = _WORKERS_PLACE.search(message[-_MAX_CHARS:])
        place = found[1] if found is not None else f"{record.pathname}:{record.lineno}"
        return place if place in self._counts or len(self._counts) < _MAX_PLACES else "other code"


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
    bounded = Bounded()
    ours.setLevel(logging.INFO)
    for handler in handlers:
        handler.setFormatter(logging.Formatter(_FORMAT))
        handler.addFilter(_WithoutNoise())
        handler.addFilter(bounded)
        root.addHandler(handler)
    try:
        yield
    finally:
        ours.setLevel(before)
        for handler in handlers:
            root.removeHandler(handler)
            handler.close()
