"""Whole jobs from and to Google Cloud Storage: what they write is what a local job writes, whatever happens."""

from __future__ import annotations

import gzip
import json
import os
import signal
import time
from pathlib import Path

import pytest

import gcs_emulator
import jobs
from gcs_emulator import Emulator
from gcs_files import download, upload
from gcs_jobs import BUDGET, letters, out_of, shards, slow_job, start
from pipelines.cli import main
from transforms import gcs
from transforms.gcs_store import GcsStore


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Three files with damage in the middle, at the end, and everywhere."""
    folder = jobs.write_damaged(tmp_path / "in", 2_000)
    (folder / "f4.tfrecord").write_bytes(b"")
    return folder


@pytest.fixture
def raw(emulator: Emulator, corpus: Path) -> str:
    url = emulator.new_bucket() + "/raw"
    upload(corpus, url)
    return url


def convert_both(corpus: Path, raw: str, tmp_path: Path, *options: str) -> tuple[Path, Path]:
    """Converts the same corpus here and there, and returns both outputs as folders."""
    out = out_of(raw)
    assert jobs.convert("--input", corpus, "--output", tmp_path / "local", *options) == 0
    assert jobs.convert("--input", f"{raw}/", "--output", out, *options) == 0
    return tmp_path / "local", download(out, tmp_path / "remote")


def test_the_shards_are_those_of_a_local_job(corpus: Path, raw: str, tmp_path: Path) -> None:
    local, remote = convert_both(corpus, raw, tmp_path, "--shards", "5", *BUDGET)
    assert shards(remote) == shards(local)
    assert letters(remote) == letters(local)
    assert jobs.tree(remote) == jobs.tree(local)
    for name in ("records_read", "records_written", "records_dead", "files_dead", "files_empty", "bytes_dead"):
        assert jobs.report(remote)[name] == jobs.report(local)[name]
    assert main(["verify", out_of(raw)]) == 0


def test_the_same_command_again_does_nothing_and_the_report_is_rebuilt(
    emulator: Emulator, corpus: Path, raw: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--input", f"{raw}/*", "--output", out_of(raw), *BUDGET]
    assert jobs.convert(*options) == 0
    emulator.seen.clear()
    assert jobs.convert(*options) == 0
    assert "nothing left to do" in capsys.readouterr().out
    assert emulator.count("rewriteTo|uploadType=resumable") == 0
    assert main(["report", out_of(raw)]) == 0
    assert "5,9" in capsys.readouterr().out


@pytest.mark.parametrize("format_name", ["files", "array_record"])
def test_other_formats(emulator: Emulator, tmp_path: Path, format_name: str) -> None:
    folder, raw = tmp_path / "in", emulator.new_bucket() + "/raw"
    for file in range(3):
        payloads = [jobs.payload(file, i) for i in range(500)]
        if format_name == "files":
            (folder / "deep").mkdir(parents=True, exist_ok=True)
            (folder / f"deep/{file}.bin").write_bytes(b"".join(payloads))
        else:
            jobs.write_array_record(folder / f"{file}.array_record", payloads)
    upload(folder, raw)
    local, remote = convert_both(folder, raw, tmp_path, "--format", format_name, "--shards", "2")
    assert shards(remote) == shards(local) != {}


def test_objects_with_content_encoding_are_read_whole(emulator: Emulator, tmp_path: Path) -> None:
    payloads = [os.urandom(600) for _ in range(3_000)]
    data = gzip.compress(b"".join(map(jobs.frame, payloads)))
    url = emulator.new_bucket()
    blob = gcs.bucket(url.removeprefix("gs://")).blob("raw/x.tfrecord")
    blob.content_encoding = "gzip"
    blob.upload_from_string(data)
    assert jobs.convert("--input", f"{url}/raw/*", "--output", f"{url}/out") == 0
    assert jobs.records(download(f"{url}/out", tmp_path / "remote")) == payloads


def test_failures_that_pass_change_nothing(emulator: Emulator, corpus: Path, raw: str, tmp_path: Path) -> None:
    passing = [gcs_emulator.status(503), gcs_emulator.reset, gcs_emulator.status(429), gcs_emulator.lose_answer]
    emulator.fail("POST /upload", *passing, *passing)
    emulator.fail("GET /download", *passing, gcs_emulator.cut_answer)
    emulator.fail("rewriteTo", *passing)
    emulator.fail("DELETE", *passing[:3])
    emulator.fail("GET .*/o[?]", *passing[:3])
    local, remote = convert_both(corpus, raw, tmp_path, "--shards", "5", *BUDGET)
    assert emulator.left() == 0
    assert shards(remote) == shards(local)
    assert letters(remote) == letters(local)
    assert main(["verify", out_of(raw)]) == 0


def test_an_input_that_changes_or_goes_is_a_dead_letter(
    emulator: Emulator, corpus: Path, raw: str, tmp_path: Path
) -> None:
    bucket, prefix = gcs.split_url(raw)
    blobs = [gcs.bucket(bucket).blob(f"{prefix}/f{file}.tfrecord") for file in range(2)]

    def change() -> None:
        blobs[0].upload_from_string(b"another")
        blobs[1].delete()

    # The first thing that the pipeline does to the output is to look a shard up.
    emulator.fail("GET .*shards%2F00000.json", gcs_emulator.before(change))
    options = ["--shards", "match", "--set", "dead_letters.max_fraction=1"]
    assert jobs.convert("--input", f"{raw}/f[012].*", "--output", out_of(raw), *options) == 0
    found = jobs.dead_letters(download(out_of(raw), tmp_path / "remote"))
    assert sorted(letter["reason"] for letter in found) == ["input_changed", "not_found"]


def test_a_refused_output_is_told_at_once(
    emulator: Emulator, corpus: Path, raw: str, capsys: pytest.CaptureFixture[str]
) -> None:
    emulator.fail("POST /upload", gcs_emulator.status(403))
    started = time.monotonic()
    assert jobs.convert("--input", raw, "--output", out_of(raw)) == 2
    assert time.monotonic() - started < 10
    assert "403" in capsys.readouterr().err
    assert jobs.convert("--input", raw, "--output", "gs://no-such-bucket/out") == 2
    assert "gs://no-such-bucket/out" in capsys.readouterr().err


def test_append_and_replay(emulator: Emulator, tmp_path: Path) -> None:
    raw = emulator.new_bucket() + "/raw"
    out = out_of(raw)
    jobs.write_tfrecord(tmp_path / "in/a", [jobs.payload(0, i) for i in range(300)])
    good = jobs.write_tfrecord(tmp_path / "in/b", [jobs.payload(1, i) for i in range(300)]).read_bytes()
    (tmp_path / "in/b").write_bytes(good[:-20])
    upload(tmp_path / "in", raw)
    assert jobs.convert("--input", f"{raw}/*", "--output", out, "--shards", "2") == 0
    jobs.write_tfrecord(tmp_path / "in/c", [jobs.payload(2, i) for i in range(300)])
    upload(tmp_path / "in", raw)  # The same content, but new generations: their listed checksums tell.
    assert jobs.convert("--input", f"{raw}/*", "--output", out, "--append") == 0
    (tmp_path / "in/b").write_bytes(good)
    upload(tmp_path / "in", raw)
    assert jobs.replay(out) == 0
    assert main(["verify", out]) == 0
    found = download(out, tmp_path / "remote")
    manifest = json.loads((found / "manifest.json").read_text())
    expected = sorted(jobs.payload(file, i) for file in range(3) for i in range(300))
    assert sorted(jobs.records(found)) == expected
    assert manifest["num_records"] == 900
    assert jobs.dead_letters(found) == []


def generations(out: str) -> dict[str, object]:
    store = GcsStore(out)
    return {name: (store.get(name) or (b"", None))[1] for name, _ in store.list("_gristmill/shards/")}


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_killed_at_any_moment_the_same_command_gives_the_same_bytes(
    emulator: Emulator, corpus: Path, raw: str, tmp_path: Path, workers: int
) -> None:
    assert start(tmp_path, slow_job(tmp_path, raw, out_of(raw) + "-reference")).wait(240) == 0
    reference = jobs.content(download(out_of(raw) + "-reference", tmp_path / "reference"))
    moments = [("POST /upload", 25), ("rewriteTo", 3)] if workers else [("POST /upload", 45), ("DELETE", 6)]
    for number, (pattern, count) in enumerate(moments):
        out = f"{out_of(raw)}-{number}"
        emulator.seen.clear()
        process = start(tmp_path, slow_job(tmp_path, raw, out, workers))
        while emulator.count(pattern) < count and process.poll() is None:
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        before = generations(out)
        again = start(tmp_path, slow_job(tmp_path, raw, out, workers))
        text, _ = again.communicate(timeout=240)
        assert again.returncode == 0, text
        found = download(out, tmp_path / f"found-{number}")
        assert jobs.content(found) == reference
        assert before.items() <= generations(out).items()
        assert not [name for name in jobs.tree(found) if "attempts" in name or "lock" in name]


@pytest.mark.slow
def test_two_drivers_at_once_make_one_set(emulator: Emulator, corpus: Path, raw: str, tmp_path: Path) -> None:
    command = slow_job(tmp_path, raw, out_of(raw))
    processes = [start(tmp_path, command) for _ in range(2)]
    texts = [process.communicate(timeout=240)[0] for process in processes]
    statuses = sorted(process.returncode for process in processes)
    assert statuses in ([0, 1], [0, 0]), texts  # Or the second came when all was done.
    if statuses == [0, 1]:
        assert any("is being written by process" in text for text in texts)
    assert main(["verify", out_of(raw)]) == 0
    assert start(tmp_path, command).wait(120) == 0
