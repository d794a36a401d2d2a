"""Counted requests are the requests that are made: by the real reader, and by a real job to the emulator."""

from __future__ import annotations

import json
import random
import re
import urllib.parse
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest

import jobs
from gcs_emulator import Answer, Emulator, Request
from pipelines import progress
from simulate.operations import count_operations, describe_job, phase_costs
from simulate.rates import CLASSES, Rates
from simulate.work import blocks_of, count_lookups, read_shards
from transforms import gcs, gcs_reader
from transforms.gcs_reader import ObjectReader, open_object
from transforms.gcs_store import GcsStore
from transforms.job_lock import JobLock
from transforms.plan_file import INPUTS_NAME, PLAN_NAME

KIB, MIB = 1 << 10, 1 << 20
Counted = Callable[[], int]

KINDS = (
    ("plan", r"_gristmill/plan\.jsonl"),
    ("inputs", r"_gristmill/inputs\.jsonl"),
    ("ledger", r"_gristmill/shards/"),
    ("note", r"_gristmill/published/"),
    ("part", r"_gristmill/attempts/"),
    ("mark", r"_gristmill/tries/"),
    ("lock", r"_gristmill/lock\.json"),
    ("state", r"_gristmill/"),
    ("manifest", r"manifest\.json"),
    ("shard", r"corpus-train"),
)


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> Counted:
    """Lets readers read lines of zeros without a service; says how many requests they made."""
    ranges: list[tuple[int, int]] = []

    def fetch(_: ObjectReader, start: int, end: int) -> bytes:
        ranges.append((start, end))
        return (b"0" * 127 + b"\n") * ((end - start) // 128) + b"0" * ((end - start) % 128)

    def at_once(call: Callable[..., bytes], *arguments: int) -> Future[bytes]:
        future: Future[bytes] = Future()
        future.set_result(call(*arguments))
        return future

    monkeypatch.setattr(ObjectReader, "_fetch", fetch)
    monkeypatch.setattr(gcs_reader.gcs, "in_background", at_once)
    return lambda: len(ranges)


SIZES = [0, 1, 256 * KIB, 256 * KIB + 1, 1280 * KIB, 1280 * KIB + 1, 2304 * KIB, 2304 * KIB + 1]
SIZES += [6400 * KIB, 6400 * KIB + 1, 14592 * KIB, 14592 * KIB + 1, 40 * MIB]


@pytest.mark.parametrize("size", SIZES)
def test_reading_a_file_forwards_takes_the_counted_requests(fetched: Counted, size: int) -> None:
    reader = ObjectReader("gs://b/x", size, 1)
    for position in range(0, size, 512 * KIB):
        reader.read_at(position, min(512 * KIB, size - position))
    assert fetched() == blocks_of(size)


@pytest.mark.parametrize("size", [100 * KIB, 600 * KIB, 5 * MIB, 30 * MIB])
@pytest.mark.parametrize("share", [0, 0.02, 0.4, 0.99])
@pytest.mark.parametrize("num_bytes", [150, 300 * KIB, 3 * MIB])
def test_looking_lines_up_takes_the_counted_requests(fetched: Counted, size: int, share: float, num_bytes: int) -> None:
    offset = int(size * share) // 128 * 128
    num_bytes = min(num_bytes, size - offset) // 128 * 128
    with open_object("gs://b/x", size, 1) as file:
        file.seek(offset)
        for _ in range(num_bytes // 128):
            file.readline()
    assert fetched() == count_lookups(offset, num_bytes, size)


def name_kind(name: str) -> str:
    """Returns which kind of object a name is of."""
    if name.startswith("raw/"):
        return "source"
    return next(kind for kind, pattern in KINDS if re.match(f"out/{pattern}", name))


def request_kind(request: Request, status: int) -> tuple[str, str] | None:
    """Returns (action, kind of object) of a request; None for the pieces of an upload session."""
    url = urllib.parse.urlsplit(request.path)
    name = urllib.parse.unquote(url.path.partition("/o/")[2].partition("/rewriteTo/")[0])
    if request.method == "PUT":
        return None
    if "/upload/" in url.path:
        found = re.search(rb'"name": *"([^"]+)"', request.body)
        return "insert", name_kind(found[1].decode() if found else request.query["name"])
    if not name:
        return "list", "source" if request.query["prefix"].startswith("raw") else "output"
    action = {"POST": "copy", "DELETE": "delete", "GET": "look"}[request.method]
    action = "get" if url.path.startswith("/download/") else action
    return "miss" if action in ("get", "look") and status == 404 else action, name_kind(name)


@pytest.fixture
def asked(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[str, str]]:
    """Counts requests by kind; what depends on how long a job takes is left out."""
    counted: Counter[tuple[str, str]] = Counter()
    handle = emulator.handle

    def count(request: Request) -> None:
        reply = request.reply

        def count_and_reply(answer: Answer, *, num_bytes: int | None = None) -> None:
            kind = request_kind(request, answer.status)
            counted.update([kind] if kind else [])
            reply(answer, num_bytes=num_bytes)

        request.reply = count_and_reply  # type: ignore[method-assign]
        handle(request)

    monkeypatch.setattr(emulator, "handle", count)
    monkeypatch.setattr(progress, "_LOOK_SECS", 600.0)
    monkeypatch.setattr(JobLock, "_beat", lambda self: None)
    return counted


def test_a_real_job_makes_the_counted_requests(
    emulator: Emulator, asked: Counter[tuple[str, str]], tmp_path: Path
) -> None:
    url = emulator.new_bucket()
    draw = random.Random(1).randbytes
    files = [[draw(40_000) for _ in range(count)] for count in (1, 8, 80, 250)]  # 40 KB to 10 MB.
    files.insert(2, [])
    contents = [b"".join(map(jobs.frame, records)) for records in files]
    bucket = gcs.bucket(url.removeprefix("gs://"))
    for number, content in enumerate(contents):
        bucket.blob(f"raw/{number}.tfrecord").upload_from_string(content)
    asked.clear()
    assert jobs.convert("--input", f"{url}/raw/", "--output", f"{url}/out", "--shards", "3") == 0
    made = dict(asked)

    for name in (INPUTS_NAME, PLAN_NAME):
        found = GcsStore(f"{url}/out").get(name)
        assert found is not None
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(found[0])
    sizes = np.array(list(map(len, contents)))
    shards = list(read_shards(tmp_path, len(files)))
    assert len(shards) == 3
    assert [shard.num_files for shard in shards] == [5, 1, 1]
    sample_reads = sum(1 + min(3, blocks_of(size)) for size in sizes if size)  # The format, then half a MiB of each.
    job = describe_job(tmp_path, shards, sizes, {"pages": 1, "sample_reads": sample_reads})
    counted: Counter[tuple[str, str]] = Counter()
    for one in count_operations(job):
        counted[one.action, one.what] += one.count
    assert counted["get", "lock"] - 10 <= made.pop(("get", "lock")) <= counted.pop(("get", "lock"))
    assert made == {kind: count for kind, count in counted.items() if count}
    report = json.loads((GcsStore(f"{url}/out").get("_gristmill/report.json") or (b"", None))[0])
    assert report["records_written"] == 339


def test_operations_cost_what_their_classes_cost() -> None:
    rates = Rates(class_a=5, class_b=0.4)
    prices = {action: rates.price(action, 1e6) for action in CLASSES}
    assert prices == {"insert": 5, "copy": 5, "list": 5, "get": 0.4, "look": 0.4, "miss": 0, "delete": 0}


def test_phases_add_up() -> None:
    from simulate.operations import Operations

    some = [Operations("a", "insert", "x", 1_000_000), Operations("b", "get", "x", 2_000_000)]
    some.append(Operations("b", "delete", "x", 7))
    assert phase_costs(some, Rates()) == {
        "a": {"insert": 1_000_000, "$": 5.0},
        "b": {"get": 2_000_000, "delete": 7, "$": 0.8},
        "all": {"insert": 1_000_000, "get": 2_000_000, "delete": 7, "$": 5.8},
    }
