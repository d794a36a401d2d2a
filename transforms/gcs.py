"""Google Cloud Storage: the one client of a process, how it finds credentials, and what its failures mean.

Every request goes through google-cloud-storage with one policy: what may pass (429, 5xx, timeouts, broken connections)
is tried again with growing, jittered waits; refusals are not. Every request of ours may be repeated, because it
carries a precondition or writes a whole object.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import http.client
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from google.api_core.exceptions import RetryError
from google.api_core.retry import Retry
from google.auth.exceptions import DefaultCredentialsError, RefreshError
from google.cloud.storage import Bucket, Client

from transforms.billing import billing_project
from transforms.sources import MachineFaultError
from transforms.transient import is_transient, status_of

T = TypeVar("T")

SCHEME = "gs://"
TIMEOUT_SECS = (10.0, 120.0)
"""For connecting, and for the next bytes of an answer."""
PATIENCE_SECS = 300.0
"""How long a request is tried again."""

REQUESTS_AT_ONCE = 32
"""Of one process; as many connections are kept open."""

_FIRST_WAIT_SECS = 1.0
_LONGEST_WAIT_SECS = 32.0
_M_MMAP_THRESHOLD = -3
_MAPPED_BYTES = 1 << 20
_METADATA_WAIT_SECS = 1.0
_METADATA_TRIES = 2
_HOW = (
    "log in with `gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS to the key file of a "
    "service account"
)


class CredentialsError(MachineFaultError):
    """There are no credentials for Google Cloud, or they are not valid; the message says what to do."""


class PayerError(MachineFaultError):
    """The bucket wants to know which project pays; the message says how to name it."""


_PAYER_HOW = "name the project that pays: --billing-project PROJECT, or source.billing_project in the config"


class _Process:
    """What a process has once: the client."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.client: Client | None = None


_process = _Process()


def _begin_anew() -> None:
    global _process
    _process = _Process()  # Connections of the parent are of no use to a forked child.


os.register_at_fork(after_in_child=_begin_anew)


def client() -> Client:
    """Returns the client of this process.

    Raises:
        CredentialsError: There are no credentials.
    """
    with _process.lock:
        if _process.client is None:
            _process.client = _new_client()
        return _process.client


def bucket(name: str, payer: str = "") -> Bucket:
    """Returns a bucket, without asking whether it exists.

    Args:
        name: Its name.
        payer: Project that pays for the requests, "" for the one of this process, if it has any.
    """
    return client().bucket(name, user_project=payer or billing_project() or None)


def in_background(call: Callable[..., T], *arguments: Any) -> Future[T]:
    """Runs a call in a thread of its own, which does not hold up the end of the process."""
    future: Future[T] = Future()

    def run() -> None:
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(call(*arguments))
            except BaseException as error:
                future.set_exception(error)

    threading.Thread(target=run, name="gristmill-read-ahead", daemon=True).start()
    return future


def _new_client() -> Client:
    if not has_credentials():
        raise CredentialsError(f"there are no credentials for Google Cloud: {_HOW}")
    # Or the library asks for the bucket in a thread of its own after each object that is not there.
    os.environ.setdefault("DISABLE_GCS_PYTHON_CLIENT_OTEL_BUCKET_METADATA", "true")
    try:
        made = Client(project=None)  # Objects need no project, and looking for one may start gcloud.
    except DefaultCredentialsError as error:
        raise CredentialsError(f"the credentials for Google Cloud cannot be used: {error}; {_HOW}") from error
    _prepare(made._http, made.api_endpoint)
    _give_blocks_back()
    return made


def _prepare(session: Any, endpoint: str) -> None:
    """Has a session keep its connections, and look at proxies and certificates of the environment once.

    By default it closes all beyond ten after each request, and spends a quarter of a request's CPU on the environment.
    """
    for scheme in ("https://", "http://"):
        session.get_adapter(scheme).init_poolmanager(10, REQUESTS_AT_ONCE)
    found = session.merge_environment_settings(endpoint, {}, None, None, None)
    session.proxies, session.verify, session.trust_env = found["proxies"], found["verify"], False


def _give_blocks_back() -> None:
    """Has blocks of some MiB given back to the system when they are freed.

    By default the C library raises its threshold for that with each one, and then keeps them in pieces, per thread.
    """
    with contextlib.suppress(OSError, AttributeError):  # Another C library.
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)


def has_credentials() -> bool:
    """Whether credentials are likely to be found, told within about two seconds.

    The library asks for a metadata server five times before it gives up, which takes half a minute.
    """
    if os.environ.get("STORAGE_EMULATOR_HOST") or os.environ.get("GOOGLE_APPLICATION_CREDENTIALS"):
        return True
    if _gcloud_file().exists():
        return True
    return os.environ.get("NO_GCE_CHECK", "").lower() != "true" and _has_metadata_server()


def _gcloud_file() -> Path:
    folder = os.environ.get("CLOUDSDK_CONFIG") or Path.home() / ".config" / "gcloud"
    return Path(folder) / "application_default_credentials.json"


def _has_metadata_server() -> bool:
    host = os.environ.get("GCE_METADATA_IP") or "169.254.169.254"
    for _ in range(_METADATA_TRIES):
        connection = http.client.HTTPConnection(host, timeout=_METADATA_WAIT_SECS)
        try:
            connection.request("GET", "/", headers={"Metadata-Flavor": "Google"})
            return connection.getresponse().getheader("Metadata-Flavor") == "Google"
        except TimeoutError:
            continue
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()
    return False


def retry_policy(on_error: Callable[[Exception], Any] | None = None) -> Retry:
    """Returns the policy of all requests.

    It goes around downloads once more: the library reads why one is refused outside of its own policy, and that answer
    may break off as well.

    Args:
        on_error: Told of every failure that is tried again.
    """
    return Retry(
        predicate=lambda error: not isinstance(error, RetryError) and is_transient(error),
        initial=_FIRST_WAIT_SECS,
        maximum=_LONGEST_WAIT_SECS,
        timeout=PATIENCE_SECS,
        on_error=on_error,
    )


def split_url(url: str) -> tuple[str, str]:
    """Splits `gs://bucket/name` into bucket and name, which may be empty.

    Raises:
        ValueError: There is no bucket in it.
    """
    name, _, rest = url.removeprefix(SCHEME).partition("/")
    if not name:
        raise ValueError(f"{url!r}: expected gs://BUCKET/NAME")
    return name, rest


def describe_error(error: BaseException) -> str:
    """Returns a failure in words, without the layers around its cause."""
    if isinstance(error, RefreshError):
        return f"the credentials for Google Cloud are no longer valid: {_HOW}"
    cause = error.cause if isinstance(error, RetryError) and error.cause is not None else error
    status = status_of(cause)
    text = str(getattr(cause, "message", None) or cause or type(cause).__name__)[:500]
    text = f"HTTP {status}: {text}" if status is not None and str(status) not in text else text
    if needs_payer(cause):
        text = f"{text}; {_PAYER_HOW}"
    return f"{text} (tried again for {PATIENCE_SECS:.0f} s)" if cause is not error else text


def needs_payer(error: BaseException) -> bool:
    """Whether a request was refused since it names no project that pays."""
    if status_of(error) != http.client.BAD_REQUEST:
        return False
    text = str(error).lower()
    return "requester pays" in text or "userprojectmissing" in text


def reading_error(error: Exception, url: str) -> OSError:
    """Returns a failure to read an object as what it would be for a file."""
    if isinstance(error, RefreshError | DefaultCredentialsError | CredentialsError):
        return CredentialsError(f"{url}: {describe_error(error)}")
    status = status_of(error)
    text = f"{url}: {describe_error(error)}"
    if needs_payer(error):
        return PayerError(text)
    if status == http.client.NOT_FOUND:
        return FileNotFoundError(errno.ENOENT, text)
    if status in (http.client.FORBIDDEN, http.client.UNAUTHORIZED):
        return PermissionError(errno.EACCES, text)
    return OSError(errno.EIO, text)
