"""A real HTTP server on this machine that misbehaves on purpose, and counts what it is asked."""

from __future__ import annotations

import collections
import contextlib
import email.utils
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler

from http_server import listening


class Call:
    """One request, and the ways to answer it.

    Attributes:
        body: What was sent.
        headers: Its headers, names in lower case.
        path: Its path with the query.
        number: How often this body was sent, this time included.
    """

    def __init__(self, handler: BaseHTTPRequestHandler, service: Service) -> None:
        self._handler = handler
        self.service = service
        self.path = handler.path
        self.headers = {name.lower(): value for name, value in handler.headers.items()}
        self.body = handler.rfile.read(int(self.headers.get("content-length", 0)))
        self.number = service.enter(self)
        self._left = False

    def leave(self) -> None:
        """The call is over: said before the answer is sent, since the next call may come right after it."""
        if not self._left:
            self._left = True
            self.service.leave()

    def reply(self, status: int, body: bytes = b"", **headers: str) -> None:
        """Sends a proper answer."""
        self.leave()
        self._handler.send_response(status)
        for name, value in headers.items():
            self._handler.send_header(name.replace("_", "-"), value)
        if "Content_Length" not in headers:
            self._handler.send_header("Content-Length", str(len(body)))
        self._handler.end_headers()
        self._handler.wfile.write(body)

    def send(self, data: bytes) -> None:
        """Sends bytes as they are."""
        self._handler.wfile.write(data)

    def reset(self) -> None:
        """Ends the connection with a reset."""
        self.leave()
        self._handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._handler.connection.close()
        self._handler.close_connection = True

    def hang_up(self) -> None:
        """Ends the connection properly, whatever was sent so far."""
        self.leave()
        self._handler.close_connection = True


Fault = Callable[[Call], None]


class Service:
    """Answers a body with its capitals, after the faults that are planned for it.

    Attributes:
        faults: For each body, what happens to its first, second, ... call.
        answer: What happens to all other calls.
        calls: Calls by body.
        seen: All calls, in order of their arrival, with the time of it.
        in_flight: Calls that wait for an answer.
        peak: The most that ever did.
        ended: Set when the server stops; what hangs goes on then.
    """

    def __init__(self) -> None:
        self.faults: dict[bytes, list[Fault]] = {}
        self.answer: Fault = lambda call: call.reply(200, call.body.upper())
        self.calls: collections.Counter[bytes] = collections.Counter()
        self.seen: list[tuple[float, Call]] = []
        self.in_flight = self.peak = 0
        self.ended = threading.Event()
        self._lock = threading.Lock()
        self.url = ""

    def enter(self, call: Call) -> int:
        with self._lock:
            self.in_flight += 1
            self.peak = max(self.peak, self.in_flight)
            self.calls[call.body] += 1
            self.seen.append((time.monotonic(), call))
            return self.calls[call.body]

    def leave(self) -> None:
        with self._lock:
            self.in_flight -= 1

    def handle(self, call: Call) -> None:
        faults = self.faults.get(call.body, [])
        try:
            (faults[call.number - 1] if call.number <= len(faults) else self.answer)(call)
        finally:
            call.leave()


@contextlib.contextmanager
def serving() -> Iterator[Service]:
    """Runs a service."""
    service = Service()
    with listening(lambda handler: service.handle(Call(handler, service))) as url:
        service.url = f"{url}/caption"
        try:
            yield service
        finally:
            service.ended.set()


# Faults.


def status(code: int, body: bytes = b"", **headers: str) -> Fault:
    """An answer with this status."""
    return lambda call: call.reply(code, body, **headers)


def wait_until(code: int, secs: int) -> Fault:
    """A Retry-After that is a date, on the service's own clock, which is years off."""

    def fault(call: Call) -> None:
        now = 1_000_000_000
        dates = [email.utils.formatdate(date, usegmt=True) for date in (now, now + secs)]
        call.leave()
        head = f"HTTP/1.1 {code} Busy\r\nDate: {dates[0]}\r\nRetry-After: {dates[1]}\r\nContent-Length: 0\r\n\r\n"
        call.send(head.encode())

    return fault


def reset(call: Call) -> None:
    """No answer but a reset."""
    call.reset()


def hang_up(call: Call) -> None:
    """No answer, and the connection ends."""
    call.hang_up()


def end_in_body(call: Call) -> None:
    """Half of what Content-Length says."""
    call.reply(200, call.body, Content_Length=str(2 * len(call.body)))
    call.hang_up()


def send_too_much(call: Call) -> None:
    """More than Content-Length says."""
    call.reply(200, call.body.upper() + b"left over", Content_Length=str(len(call.body)))


def send_garbage(call: Call) -> None:
    """Not HTTP."""
    call.send(b"SSH-2.0-OpenSSH_9.6\r\n")
    call.hang_up()


def never(call: Call) -> None:
    """No answer."""
    call.service.ended.wait()


def drip(call: Call) -> None:
    """A body that never ends, a byte at a time."""
    call.send(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
    while not call.service.ended.wait(0.02):
        call.send(b"x")


def drip_headers(call: Call) -> None:
    """Headers that never end, a byte at a time."""
    call.send(b"HTTP/1.1 200 OK\r\nServer: ")
    while not call.service.ended.wait(0.02):
        call.send(b"x")


def endless(call: Call) -> None:
    """A body without an end, as fast as it goes."""
    call.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\n")
    while not call.service.ended.is_set():
        call.send(b"x" * 65536)
