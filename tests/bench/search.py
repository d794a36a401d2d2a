"""Measures how fast the TFRecord reader looks for the next record in bytes that hold none, and in how much memory."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from transforms.elements import Input, JobSpec
from transforms.formats.tfrecord import read_range
from transforms.sources import open_input

KINDS = {"random": 200, "text": 200, "zeros": 200, "int64": 60}
"""Kinds of bytes, and the MB/s to reach on each."""

MAX_EXTRA_MB = 64
_SMALL_BYTES = 1 << 16
_RUNS = 3
_WORDS = b"the quick brown fox jumps over the lazy dog and runs away from all of it "


def make_bytes(kind: str, num_bytes: int) -> bytes:
    """Returns bytes of a kind that hold no TFRecord header."""
    generator = np.random.default_rng(7)
    if kind == "random":
        return generator.bytes(num_bytes)
    if kind == "zeros":
        return bytes(num_bytes)
    if kind == "int64":
        return generator.integers(0, 50_000, num_bytes // 8).astype("<i8").tobytes()
    return (_WORDS * (num_bytes // len(_WORDS) + 1))[:num_bytes]


def measure_search(num_bytes: int) -> dict[str, tuple[float, float]]:
    """Returns (MB/s, extra MB of memory) by kind of bytes; each is searched by a process of its own.

    Args:
        num_bytes: Bytes to search.
    """
    figures = {}
    with tempfile.TemporaryDirectory(prefix="gristmill-bench-") as folder:
        for kind in KINDS:
            path = Path(folder) / kind
            path.write_bytes(make_bytes(kind, num_bytes))
            small = Path(folder) / "small"
            small.write_bytes(path.read_bytes()[:_SMALL_BYTES])
            command = [sys.executable, "-m", "tests.bench.search", str(small), str(path)]
            root = Path(__file__).resolve().parents[2]
            done = subprocess.run(command, cwd=root, capture_output=True, check=True)
            speed, extra = json.loads(done.stdout)
            figures[kind] = (speed, extra)
            print(f"search, {kind}: {speed:.0f} MB/s, {extra:.0f} MB more memory", file=sys.stderr)
    return figures


def _search(path: str) -> float:
    """Reads a file that holds no record and returns its MB/s, the best of some runs."""
    info = Path(path).stat()
    source = Input(0, path, info.st_size, info.st_mtime_ns)
    spec = JobSpec(root="", plan_id="bench", num_shards=1, format="tfrecord", compression="none")
    best = float("inf")
    for _ in range(_RUNS):
        started = time.perf_counter()
        file = open_input(source)
        chunks = list(read_range(file, source, 0, source.size, spec))
        file.close()
        best = min(best, time.perf_counter() - started)
        assert [letter.length for chunk in chunks for letter in chunk.dead] == [source.size]
    return info.st_size / 1e6 / best


def _peak_mb() -> float:
    """Returns the peak of this process. getrusage would tell that of whoever started it, where that is higher."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024 / 1e6


if __name__ == "__main__":
    _search(sys.argv[1])
    before = _peak_mb()
    print(json.dumps([_search(sys.argv[2]), _peak_mb() - before]))
