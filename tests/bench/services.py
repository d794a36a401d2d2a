"""Measures how fast records pass a service on this machine that fails at random, is too small, or goes down.

The service is a process of its own; its faults are drawn from a fixed seed. What is measured is the chain of a worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transforms.elements import Input, RecordBatch, ShardTask
from transforms.steps.http import Post
from transforms.steps.in_flight import ConcurrentChain
from transforms.steps.load import Step

ANSWER_SECS = 0.05
MAX_IN_FLIGHT = 32
CAPACITY = 8
OUTAGE_SECS = 10.0

IDEAL = "ideal"
NOISE = "5 % 503, 1 % reset"
RETRY_AFTER = "and 2 % 429 for 1 s"
BEST = "8 at a time"
REFUSES = "503 beyond 8"
QUEUES = "latency beyond 8"
OUTAGE = "down for 10 s"

_BATCH_RECORDS = 100


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a service behaves.

    Attributes:
        faults: (share of the calls, 503, 429 or "reset").
        capacity: Calls that it works on at a time; None for no bound.
        queues: Whether further ones wait instead of being refused.
        down: From when until when, in seconds from the first call, it refuses all.
    """

    faults: list[tuple[float, str]] = dataclasses.field(default_factory=list)
    capacity: int | None = None
    queues: bool = False
    down: tuple[float, float] = (0.0, 0.0)


_NOISE = [(0.05, "503"), (0.01, "reset")]
PLANS = {
    IDEAL: Plan(),
    NOISE: Plan(_NOISE),
    RETRY_AFTER: Plan([*_NOISE, (0.02, "429")]),
    BEST: Plan(capacity=CAPACITY),
    REFUSES: Plan(capacity=CAPACITY),
    QUEUES: Plan(capacity=CAPACITY, queues=True),
    OUTAGE: Plan(down=(2.0, 2.0 + OUTAGE_SECS)),
}


@dataclasses.dataclass(frozen=True)
class Figures:
    """What a row found.

    Attributes:
        records: How many there were.
        secs: How long they took together.
        refused: Calls that the service refused because it was full or down.
    """

    records: int
    secs: float
    refused: int

    @property
    def rate(self) -> float:
        """Records a second."""
        return self.records / self.secs


def measure_services(calls: int) -> dict[str, Figures]:
    """Returns the figures by row.

    Args:
        calls: Records of a row; enough to notice it where the service goes down, half as many where it is too small.
    """
    figures = {}
    for name, plan in PLANS.items():
        count = max(calls, 2000) if plan.down[1] else calls // 2 if plan.capacity else calls
        # What the service can do on this machine is found with just so many calls as it takes.
        figures[name] = found = _measure(plan, count, CAPACITY if name == BEST else MAX_IN_FLIGHT)
        text = f"{found.records} records in {found.secs:.1f} s, {found.refused} refused"
        print(f"service, {name}: {text}", file=sys.stderr)
    return figures


def _measure(plan: Plan, count: int, max_in_flight: int) -> Figures:
    records = [b"%d" % number for number in range(count)]
    with _serving(plan) as (url, process):
        step = Post(url, max_in_flight=max_in_flight, retries=20)
        chain = ConcurrentChain([Step("http.post", step)], 1 << 20, max_in_flight)
        started = time.perf_counter()
        found = [record for batch in _batches(records) for out in chain.apply(batch) for record in out.records]
        secs = time.perf_counter() - started
        chain.close()
        assert found == records
        process.terminate()
        assert process.stdout is not None
        return Figures(count, secs, int(process.stdout.readline()))


def _batches(records: list[bytes]) -> Iterator[RecordBatch]:
    task, source = ShardTask(0, 0, 0, 0, 0, 0, 0), Input(0, "bench", 0, 0)
    starts = range(0, len(records), _BATCH_RECORDS)
    for number, start in enumerate(starts):
        part = records[start : start + _BATCH_RECORDS]
        yield RecordBatch(task, number, source=source, records=part, positions=list(range(len(part))))
    yield RecordBatch(task, len(starts), last=True)


@contextlib.contextmanager
def _serving(plan: Plan) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    command = [sys.executable, "-m", "tests.bench.services", json.dumps(dataclasses.asdict(plan))]
    root = Path(__file__).resolve().parents[2]
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield f"http://127.0.0.1:{int(process.stdout.readline())}/", process
        finally:
            process.kill()


class _Service:
    """The service's side."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._random = random.Random(7)
        self._places = asyncio.Semaphore(plan.capacity or sys.maxsize)
        self._started: float | None = None
        self.refused = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers the calls of a connection."""
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                length = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0])
                await self._answer(await reader.readexactly(length), writer)

    async def _answer(self, body: bytes, writer: asyncio.StreamWriter) -> None:
        fault = self._fault()
        if fault == "reset":
            writer.transport.abort()
        elif fault is not None:
            wait = "Retry-After: 1\r\n" if fault == "429" else ""
            writer.write(f"HTTP/1.1 {fault} Busy\r\n{wait}Content-Length: 0\r\n\r\n".encode())
        else:
            async with self._places:
                await asyncio.sleep(ANSWER_SECS)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)

    def _fault(self) -> str | None:
        now = time.monotonic()
        self._started = self._started or now
        is_down = self._plan.down[0] <= now - self._started < self._plan.down[1]
        if is_down or (self._places.locked() and not self._plan.queues):
            self.refused += 1
            return "503"
        drawn = self._random.random()
        for share, fault in self._plan.faults:
            if drawn < share:
                return fault
            drawn -= share
        return None


async def _main(plan: dict[str, Any]) -> None:
    service = _Service(Plan(**plan))
    server = await asyncio.start_server(service.serve, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(15, ended.set)
    await ended.wait()
    print(service.refused, flush=True)


if __name__ == "__main__":
    asyncio.run(_main(json.loads(sys.argv[1])))
