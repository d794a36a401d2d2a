"""The standard streams of the command: open from the first moment, and no traceback when their reader goes away.

And the encoding of all that is no stream: names of files are bytes, whatever the locale says of them.
"""

from __future__ import annotations

import contextlib
import locale
import logging
import os
import sys
from typing import TextIO

from pipelines.errors import DONE, FAILED


def begin_in_utf8() -> None:
    """Starts the command anew in Python's UTF-8 mode, where the locale would have names of files be in other signs.

    In a Latin-1 locale a name in UTF-8 would be other text in this process than in what it writes, and one that a
    config spells could not be opened at all. Processes that this one starts inherit the mode. It costs one more start
    of the interpreter, some 50 ms, and only there: most locales are UTF-8, and for C and POSIX Python does the same.
    """
    is_asked_for = os.environ.get("PYTHONUTF8") == "1"  # By us, and in vain if we come here again.
    if sys.getfilesystemencoding() == "utf-8" or is_asked_for or not sys.executable:
        return
    os.environ["PYTHONUTF8"] = "1"
    with contextlib.suppress(OSError):
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])


def open_streams() -> None:
    """Opens those of the three that were closed when the command started, as if they were /dev/null.

    The next file that is opened would take their number, and whatever prints would write into it.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            # Takes the lowest free number, which is this one. Programs that steps start must have it too.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    sys.stdin = sys.stdin or os.fdopen(0, encoding="utf-8", closefd=False)
    sys.stdout = sys.stdout or os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", encoding="utf-8", closefd=False)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):  # Not a stream of Python's own.
            # Names may hold any bytes.
            stream.reconfigure(encoding=_terminal_encoding(stream), errors="backslashreplace")  # type: ignore[union-attr]


def _terminal_encoding(stream: TextIO) -> str | None:
    """Returns the encoding of a terminal that does not show UTF-8, None to leave a stream as it is.

    Files and pipes get UTF-8, as JSON has to be.
    """
    if not sys._xoptions.get("utf8") or "PYTHONIOENCODING" in os.environ or not stream.isatty():
        return None
    return locale.getencoding()


def mend_files() -> None:
    """Opens anew what a step of this process has closed: the standard streams as /dev/null, and logs."""
    open_streams()
    for handler in logging.root.handlers:
        if not isinstance(handler, logging.FileHandler):
            continue
        stream = handler.stream
        if stream is not None and not _is_open(stream.fileno(), handler.baseFilename):
            file = os.open(handler.baseFilename, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            if file != stream.fileno():
                os.dup2(file, stream.fileno(), inheritable=False)
                os.close(file)


def _is_open(number: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(number), os.stat(path))
    except OSError:
        return False


def flush_streams(status: int, *, only_prints: bool) -> int:
    """Sends what was printed on its way, and returns the exit status of the command.

    Args:
        status: What the command came to.
        only_prints: Whether it has done nothing else, so that it has failed if what it says cannot be written.
    """
    try:
        sys.stdout.flush()
    except BrokenPipeError:  # As with `| head`.
        close_output()
    except OSError as error:
        close_output()
        print(f"gristmill: standard output cannot be written: {error}", file=sys.stderr)
        return FAILED if only_prints and status == DONE else status
    return status


def close_output() -> None:
    """Lets what is still to be printed go nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
