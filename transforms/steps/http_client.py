"""One attempt at one call of a service, bounded in time and size. No Beam here.

The calls of all threads run in one event loop, because only there a deadline can end whatever a call is doing: httpx
bounds each read by itself, and a server that sends a byte a second would never reach such a bound.
"""

from __future__ import annotations

import dataclasses
import datetime
import email.utils
import http.cookiejar
import logging
import ssl
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import anyio
import httpx
from anyio.from_thread import BlockingPortal, start_blocking_portal

from transforms.dead_letters import BadRecordError
from transforms.steps.http_answer import Expected

MAX_PAUSE_SECS = 600.0
"""A service that wants to be left alone for longer is asked again after this."""

MAX_REDIRECTS = 5
MAX_ERROR_BYTES = 64 << 10
MAX_BODY_CHARS = 300

_TRANSIENT = {408, 425, 429}
_KEEPING_REDIRECTS = {307, 308}
_OF_THE_WIRE = {"content-encoding", "content-length", "transfer-encoding"}


class TransientError(BadRecordError):
    """A call that failed and may pass when it is tried again.

    Args:
        reason: Short snake_case code, for the dead letter if no attempt passes.
        message: What happened.
        pause_secs: How long the service asks not to be called; None when it does not say.
    """

    def __init__(self, reason: str, message: str, *, pause_secs: float | None = None) -> None:
        super().__init__(reason, message)
        self.pause_secs = pause_secs


class RefusedError(BadRecordError):
    """The service answered, and the record gets nothing of it: it was refused, or the answer cannot be used."""


@dataclasses.dataclass(frozen=True)
class CallBounds:
    """What a call may take.

    Attributes:
        timeout_secs: From the beginning of an attempt to the last byte of its answer.
        max_response_bytes: Of the decompressed body.
    """

    timeout_secs: float
    max_response_bytes: int


class HttpClient:
    """A pool of connections, used by many threads. Proxies and certificates are those of the environment.

    Args:
        bounds: What a call may take.
        hide: Takes secrets out of a text that is to be shown.
        expected: What an answer has to be.
    """

    def __init__(self, bounds: CallBounds, hide: Callable[[str], str], expected: Expected) -> None:
        self._bounds = bounds
        self._hide = hide
        self._expected = expected
        self._lock = threading.Lock()
        self._running: AbstractContextManager[BlockingPortal] | None = None
        self._portal: BlockingPortal | None = None
        # One connection each: the time that httpx takes to find a free one grows with their number, and at 32 in one
        # pool it is more than all the rest. The last one used comes first, so no more are open than calls in flight.
        self._clients: list[httpx.AsyncClient] = []
        self._free: list[httpx.AsyncClient] = []
        self._tls: ssl.SSLContext | None = None
        self._closed = False
        # It logs each call with its whole URL, secrets in the query included.
        logging.getLogger("httpx").setLevel(logging.WARNING)

    def send(self, request: dict[str, Any]) -> httpx.Response:
        """Makes one attempt.

        Args:
            request: Arguments of `httpx.Request`.

        Returns:
            A successful answer, its body read.

        Raises:
            TransientError: The service cannot be reached, is overloaded, or failed.
            RefusedError: The service refused the call, or answered something that cannot be used.
            BadRecordError: The call is none that can be made.
        """
        return self._start().call(self._attempt, request)

    def close(self) -> None:
        """Ends the calls that are running and closes all connections."""
        with self._lock:
            self._closed = True
            running, portal, self._running, self._portal = self._running, self._portal, None, None
        if running is not None and portal is not None:
            portal.call(self._shut)
            ended = RuntimeError("the client is closed")
            running.__exit__(RuntimeError, ended, None)  # With an exception, it cancels what still runs.

    def _start(self) -> BlockingPortal:
        """Starts the event loop with the first call, so that the object can be made anywhere and costs nothing."""
        with self._lock:
            if self._closed:
                raise RuntimeError("the client is closed")
            if self._portal is None:
                self._running = start_blocking_portal(name="gristmill-http")
                self._portal = self._running.__enter__()
            return self._portal

    def _open(self) -> httpx.AsyncClient:
        if self._tls is None:
            self._tls = httpx.create_ssl_context()  # It reads all certificates, so it is made once.
        limits = httpx.Limits(max_connections=1, max_keepalive_connections=1)
        # No call depends on the one before, and none is pinned to one of many servers: cookies are not kept.
        cookies = http.cookiejar.CookieJar(http.cookiejar.DefaultCookiePolicy(allowed_domains=[]))
        client = httpx.AsyncClient(timeout=None, limits=limits, cookies=cookies, verify=self._tls)
        self._clients.append(client)
        return client

    async def _shut(self) -> None:
        with anyio.move_on_after(1):
            for client in self._clients:
                await client.aclose()

    async def _attempt(self, arguments: dict[str, Any]) -> httpx.Response:
        client = self._free.pop() if self._free else self._open()
        try:
            return await self._attempt_with(client, arguments)
        finally:
            self._free.append(client)

    async def _attempt_with(self, client: httpx.AsyncClient, arguments: dict[str, Any]) -> httpx.Response:
        try:
            request = client.build_request(**arguments)
        except Exception as error:  # Its text may hold what must not be shown: a URL, a header.
            raise BadRecordError("http_request", f"this is no request: {type(error).__name__}") from None
        where = self._hide(f"{request.method} {request.url.host}{request.url.path}")
        secs = self._bounds.timeout_secs
        try:
            with anyio.fail_after(secs):
                return await self._follow(client, request, where)
        except (TimeoutError, httpx.TimeoutException):
            raise TransientError("http_timeout", f"{where}: no answer in {secs:g} s") from None
        except (httpx.LocalProtocolError, httpx.UnsupportedProtocol) as error:
            raise BadRecordError("http_request", f"{where}: this is no request: {type(error).__name__}") from None
        except httpx.TransportError as error:
            text = self._hide(f"{where}: {type(error).__name__}: {error}")
            raise TransientError("http_connection", text) from None
        except httpx.DecodingError as error:
            raise RefusedError("http_undecodable", self._hide(f"{where}: {error}")) from None

    async def _follow(self, client: httpx.AsyncClient, request: httpx.Request, where: str) -> httpx.Response:
        """Sends the request, and again where a redirect of the same server says so."""
        for _ in range(MAX_REDIRECTS + 1):
            response = await self._send(client, request, where)
            if response.is_success:
                self._check(response, where)
                return response
            following = response.next_request
            if response.status_code not in _KEEPING_REDIRECTS or following is None:
                break
            if _origin(following.url) != _origin(request.url):
                break
            request = following
        raise self._to_error(response, where)

    async def _send(self, client: httpx.AsyncClient, request: httpx.Request, where: str) -> httpx.Response:
        response = await client.send(request, stream=True)
        try:
            body = await self._read(response, where)
        finally:
            await response.aclose()
        headers = [(name, value) for name, value in response.headers.multi_items() if name not in _OF_THE_WIRE]
        whole = httpx.Response(response.status_code, headers=headers, content=body, request=request)
        whole.next_request = response.next_request
        return whole

    async def _read(self, response: httpx.Response, where: str) -> bytes:
        limit = self._bounds.max_response_bytes if response.is_success else MAX_ERROR_BYTES
        body = bytearray()
        try:
            async for piece in response.aiter_bytes():
                body += piece
                if len(body) > limit:
                    break
        except (httpx.TransportError, httpx.DecodingError):
            if response.is_success:
                raise  # The body of an error is only read to be shown: its status says what is to be done.
        if len(body) > limit and response.is_success:
            raise RefusedError("http_response_too_large", f"{where}: the answer has more than {limit} bytes")
        return bytes(body)

    def _check(self, response: httpx.Response, where: str) -> None:
        refusal = self._expected.refuse(response)
        if refusal is not None:
            reason, what = refusal
            shown = f": {self._beginning(response.content)}" if response.content else ""
            raise RefusedError(reason, f"{where}: {response.status_code} with {what}{shown}")

    def _to_error(self, response: httpx.Response, where: str) -> BadRecordError:
        status = response.status_code
        reason, text = f"http_{status}", f"{where}: {status} {response.reason_phrase}"
        if response.next_request is not None:
            url = response.next_request.url
            text += self._hide(f" to {url.scheme}://{url.host}{url.path}, which is not followed")
        elif response.content:
            text += f": {self._beginning(response.content)}"
        if status in _TRANSIENT or status >= 500:
            return TransientError(reason, text, pause_secs=retry_after(response.headers))
        return RefusedError(reason, text)

    def _beginning(self, body: bytes) -> str:
        """The first characters of a body; a service may send back the secrets that it was sent."""
        text = body[: 10 * MAX_BODY_CHARS].decode("utf-8", "replace")
        return self._hide(text)[:MAX_BODY_CHARS]


def _origin(url: httpx.URL) -> tuple[str, str, int | None]:
    return url.scheme, url.host, url.port


def retry_after(headers: httpx.Headers) -> float | None:
    """Returns how many seconds the service asks to wait, at most ten minutes; None when it does not say.

    A date is compared with the service's own clock, when its answer carries that.
    """
    value = headers.get("retry-after", "").strip()
    if value.isascii() and value.isdigit():
        return min(float(value), MAX_PAUSE_SECS)
    until = _parse_date(value)
    if until is None:
        return None
    now = _parse_date(headers.get("date", "")) or datetime.datetime.now(datetime.UTC)
    return min(max(0.0, (until - now).total_seconds()), MAX_PAUSE_SECS)


def _parse_date(value: str) -> datetime.datetime | None:
    try:
        date = email.utils.parsedate_to_datetime(value)
    except (ValueError, TypeError, OverflowError):
        return None
    return date if date.tzinfo is not None else date.replace(tzinfo=datetime.UTC)
