"""The HTTP server on this machine behind which the tests put what they play."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def handle_error(self, *_: Any) -> None:
        """The client went away, as it may."""


@contextlib.contextmanager
def listening(handle: Callable[[BaseHTTPRequestHandler], None], buffer_bytes: int = 0) -> Iterator[str]:
    """Answers requests of any method on 127.0.0.1, each connection in a thread of its own; yields the server's URL.

    Args:
        handle: Answers a request.
        buffer_bytes: What is kept back of an answer until it is flushed, or done.
    """

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True
        wbufsize = buffer_bytes

        def do_GET(self) -> None:
            handle(self)

        do_POST = do_PUT = do_PATCH = do_DELETE = do_GET

        def log_message(self, *_: Any) -> None:
            """Says nothing."""

    with _Server(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
