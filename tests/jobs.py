"""Runs whole jobs and reads back what they wrote, with readers that are not ours."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

from array_record.python.array_record_module import ArrayRecordReader, ArrayRecordWriter
from google_crc32c import value as crc32c

from pipelines.cli import main
from transforms.elements import JobSpec
from transforms.finish import finish_job
from transforms.generations import open_job_store
from transforms.plan_file import PLAN_NAME, read_tasks
from transforms.publish import decide, give_names, number_parts
from transforms.repeat import repeat_shard, settle
from transforms.steps.job_chain import load_chain

STEP_WITH_BAD_NUMBERS = """
import json, re

def clean(value):
    number = int(re.search(rb"-(\\d{6}) ", value).group(1))
    if number in json.load(open("bad.json")):
        raise ValueError(f"number {number}")
    return value
"""
"""A step that fails on the records whose numbers stand in bad.json."""

GRISTMILL = [sys.executable, "-P", "-m", "pipelines"]


def frame(payload: bytes) -> bytes:
    """Returns a record as TFRecord frames it."""
    length = struct.pack("<Q", len(payload))
    return length + _masked(length) + payload + _masked(payload)


def _masked(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF)


def payload(file: int, number: int) -> bytes:
    """Content that shows loss, order and duplication."""
    return b"record-%02d-%06d " % (file, number) * (1 + number % 7)


def write_tfrecord(path: Path, payloads: list[bytes]) -> Path:
    """Writes a TFRecord file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(map(frame, payloads)))
    return path


def write_damaged(folder: Path, records: int) -> Path:
    """Writes three TFRecord files, one of them damaged in the middle and at its end, and a file that is none."""
    for file in range(3):
        write_tfrecord(folder / f"f{file}.tfrecord", [payload(file, number) for number in range(records)])
    data = bytearray((folder / "f1.tfrecord").read_bytes())
    data[5_000:5_010] = b"\xff" * 10
    (folder / "f1.tfrecord").write_bytes(bytes(data[:-7]))
    (folder / "f3.tfrecord").write_bytes(b"not a record" * 10)
    return folder


def write_array_record(path: Path, payloads: list[bytes]) -> Path:
    """Writes an ArrayRecord, with array_record's own writer."""
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = ArrayRecordWriter(os.fspath(path), "group_size:1")
    for payload in payloads:
        writer.write(payload)
    writer.close()
    return path


def convert(*arguments: str | Path) -> int:
    """Runs `gristmill convert` in this process, without workers, and returns the exit status."""
    return main(["convert", "--workers", "0", *map(str, arguments)])


def replay(*arguments: str | Path) -> int:
    """Runs `gristmill replay` in this process, without workers, and returns the exit status."""
    return main(["replay", "--workers", "0", *map(str, arguments)])


def verify(out: str | Path, *flags: str) -> int:
    """Runs `gristmill verify` and returns the exit status."""
    return main(["verify", str(out), *flags])


def run_plainly(spec: JobSpec, flags: list[str], num_workers: int) -> None:
    """What the pipeline does, one shard after the other and without Beam: stands in for `run_pipeline`."""
    store = open_job_store(spec)
    with store.open(PLAN_NAME) as plan:
        tasks = [task for _, task in read_tasks(plan)]
    with contextlib.closing(load_chain(spec, store)) as chain:
        infos = settle(store, spec, chain, [repeat_shard(store, spec, chain, task) for task in tasks])
    for order in list(number_parts(infos, spec)):
        give_names(store, spec, order)
    finish_job(store, spec, decide(infos, spec)[1])


def spawn(
    arguments: list[str | Path],
    cwd: Path,
    env: dict[str, str] | None = None,
    prefix: list[str] | None = None,
    timeout_secs: float = 600,
) -> subprocess.CompletedProcess[str]:
    """Runs a gristmill command as a process of its own, `prefix` before it on the command line."""
    command = [*(prefix or []), *GRISTMILL, *map(str, arguments)]
    return subprocess.run(
        command, cwd=cwd, env=environment(env), capture_output=True, text=True, timeout=timeout_secs, check=False
    )


def environment(changes: dict[str, str] | None = None) -> dict[str, str]:
    """Returns the environment in which a gristmill process finds this checkout."""
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent), **(changes or {})}


def read_array_record(path: Path) -> list[bytes]:
    """Returns all records of a file, with array_record's own reader."""
    reader = ArrayRecordReader(os.fsencode(path))
    assert reader.ok(), path
    records = list(reader.read(0, reader.num_records())) if reader.num_records() else []
    reader.close()
    return records


def shards(out: Path) -> list[Path]:
    """Returns the final shard files by name."""
    return sorted(out.glob("*.array_record-*"))


def records(out: Path) -> list[bytes]:
    """Returns all records of an output directory, in order of the shard names."""
    return [record for path in shards(out) for record in read_array_record(path)]


def dead_letters(out: Path) -> list[dict[str, Any]]:
    """Returns all dead letters, in order."""
    lines: list[dict[str, Any]] = []
    for path in sorted((out / "_dead_letters").glob("*.jsonl")):
        lines += [json.loads(line) for line in path.read_bytes().splitlines()]
    return lines


def report(out: Path) -> dict[str, Any]:
    """Returns report.json."""
    return dict(json.loads((out / "_gristmill/report.json").read_text()))


def content(out: Path) -> dict[str, str]:
    """Returns a digest by name of all that must be the same in every run: shards, manifest, dead letters."""
    found = {}
    for path in sorted([*out.glob("*.array_record-*"), out / "manifest.json", *(out / "_dead_letters").glob("*")]):
        data = path.read_bytes()
        if path.suffix == ".jsonl":
            data = b"\n".join(_without_traceback(line) for line in data.splitlines())
        found[path.name] = hashlib.sha256(data).hexdigest()
    return found


def _without_traceback(line: bytes) -> bytes:
    fields = json.loads(line)
    del fields["traceback"]
    return json.dumps(fields, sort_keys=True).encode()


def tree(out: Path) -> set[str]:
    """Returns the names of all files below a folder."""
    return {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
