"""Which failures of a storage service may pass, and trying again until they do."""

from __future__ import annotations

import errno
import http.client
import re
from collections.abc import Callable
from typing import Any, TypeVar

import requests
import tenacity
import urllib3

T = TypeVar("T")

MAX_TRIES = 8
_FIRST_WAIT_SECS = 0.5
_LONGEST_WAIT_SECS = 32.0
_TRANSIENT_STATUSES = {408, 425, 429, 500, 502, 503, 504}
_TRANSIENT_ERRNOS = {errno.ECONNRESET, errno.ETIMEDOUT, errno.ECONNABORTED, errno.ECONNREFUSED, errno.EPIPE}
_BROKEN_CONNECTIONS = (
    ConnectionError,
    TimeoutError,
    http.client.IncompleteRead,
    http.client.BadStatusLine,
    http.client.ResponseNotReady,
    requests.ConnectionError,
    requests.Timeout,
    requests.exceptions.ChunkedEncodingError,
    urllib3.exceptions.ProtocolError,
    urllib3.exceptions.PoolError,
    urllib3.exceptions.TimeoutError,
)
_STATUS = re.compile(r"\b([45]\d\d)\b")


def is_transient(error: BaseException) -> bool:
    """Whether an error of a storage service may pass: overload, timeouts and broken connections, not refusals.

    The service's HTTP status decides where the error has one, as an attribute or, in errors that wrap others as text,
    in its message.
    """
    if isinstance(error, _BROKEN_CONNECTIONS):  # Their texts hold ports, which look like a status.
        return True
    cause = error.args[0] if error.args else None
    if isinstance(cause, Exception):  # An error of google-auth around one of the connection's.
        return is_transient(cause)
    status = status_of(error)
    if status is not None:
        return status in _TRANSIENT_STATUSES
    if getattr(error, "retryable", False):  # google-auth says so of its own errors.
        return True
    return isinstance(error, OSError) and error.errno in _TRANSIENT_ERRNOS


def status_of(error: BaseException) -> int | None:
    """Returns the HTTP status that an error tells of, None when it tells of none."""
    for holder in (error, getattr(error, "response", None)):
        for name in ("code", "status_code", "status"):
            value = getattr(holder, name, None)
            value = getattr(value, "value", value)
            if isinstance(value, int) and 400 <= value < 600:
                return value
    found = _STATUS.search(str(error)[:2_000])
    return int(found[1]) if found and not isinstance(error, FileNotFoundError) else None


def try_again(call: Callable[..., T], *arguments: Any, **named: Any) -> T:
    """Calls, and again after failures that may pass: up to 8 times, 0.5 s apart, then ever longer, with jitter."""
    retrying = tenacity.Retrying(
        stop=tenacity.stop_after_attempt(MAX_TRIES),
        wait=tenacity.wait_random_exponential(multiplier=_FIRST_WAIT_SECS, max=_LONGEST_WAIT_SECS),
        retry=tenacity.retry_if_exception(is_transient),
        reraise=True,
    )
    return retrying(call, *arguments, **named)
