"""Jobs whose steps are slow: worked on in pieces, and what they publish is what they would publish without."""

from __future__ import annotations

import concurrent.futures
import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import corpora
import jobs
from gcs_emulator import Emulator
from gcs_files import download
from pipelines.cli import main

STEPS = """
import hashlib, os, time

from transforms import BadRecordError, Drop


def mixed(value):
    number = hashlib.blake2b(value, digest_size=1).digest()[0]
    if number % 11 == 0:
        return Drop("eleven")
    if number % 13 == 0:
        raise BadRecordError("thirteen", "no luck")
    return iter([value, value + b"!"]) if number % 7 == 0 else value


def noted(value):
    with open(os.environ["CALLS"], "ab") as calls:
        calls.write(value[:17] + b"\\n")
    time.sleep(0.004)
    return value


def mended(value):
    if b"-0001" in value and not os.path.exists("mended"):
        raise ValueError("not yet")
    return value
"""
WHOLE = ["--set", "write.secs_per_record=0"]
PIECES = ["--set", "write.secs_per_record=1.0"]
"""A step that is said to be slow: 400 records and more are cut into 16 pieces."""
MIXED = ["--step", "steps_of_tests:mixed", "--set", "dead_letters.max_fraction=0.9"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))  # Not what the test before has imported.
    monkeypatch.delitem(sys.modules, "steps_of_tests", raising=False)
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    (tmp_path / "steps_of_tests.py").write_text(STEPS)
    return tmp_path


def damaged(folder: Path) -> None:
    jobs.write_damaged(folder, 300)


def compressed(folder: Path) -> None:
    damaged(folder)
    for name in ("f0", "f2"):
        path = folder / f"{name}.tfrecord"
        (folder / f"{name}.tfrecord.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    (folder / "f4.tfrecord").write_bytes(gzip.compress((folder / "f1.tfrecord").read_bytes()))  # Under a plain name.


def array_records(folder: Path) -> None:
    for number in range(3):
        path = folder / f"{number}.array_record"
        jobs.write_array_record(path, [jobs.payload(number, at) for at in range(300)])
    data = bytearray(path.read_bytes())
    data[-400:-390] = b"\xff" * 10
    path.write_bytes(bytes(data))


def files(folder: Path) -> None:
    folder.mkdir()
    for number in range(400):
        (folder / f"{number:04d}.bin").write_bytes(b"" if number % 50 == 7 else jobs.payload(0, number) * (number % 9))


def nested(folder: Path) -> None:
    """Payloads that look like records to whoever begins to read inside them."""
    inner = corpora.frame_all([b"inside-%d" % index for index in range(400)])
    jobs.write_tfrecord(folder / "a", [b"first", inner, b"second", inner, *(jobs.payload(0, at) for at in range(400))])


def ledgers(out: Path) -> list[dict[str, Any]]:
    """Returns what the ledgers say, but for the attempt and the time."""
    found = [json.loads(path.read_text()) for path in sorted((out / "_gristmill/shards").glob("*.json"))]
    for ledger in found:
        del ledger["committed_at"]
        for file in (*ledger["parts"], ledger["dead_lines"], ledger["dead_payloads"]):
            if file is not None:
                file["name"] = file["name"].rpartition("/")[2]
        if ledger["dead_lines"] is not None:  # After a kill the tracebacks are those of an isolated step.
            del ledger["dead_lines"]["size"], ledger["dead_lines"]["crc32c"]
    return found


def check_same(one: Path, other: Path) -> None:
    assert jobs.content(one) == jobs.content(other)
    assert ledgers(one) == ledgers(other)
    assert jobs.tree(one) == jobs.tree(other)
    for name in ("plan.jsonl", "inputs.jsonl"):
        assert (one / "_gristmill" / name).read_bytes() == (other / "_gristmill" / name).read_bytes()
    assert jobs.verify(one) == 0


@pytest.mark.parametrize(
    ("make", "flags"),
    [
        *((damaged, ["--shards", shards]) for shards in ("1", "3", "match", "match,8KiB", "9KiB", "auto")),
        *((compressed, ["--shards", shards]) for shards in ("2", "match,8KiB", "auto")),
        *((array_records, ["--shards", shards]) for shards in ("2", "match", "200KiB")),
        *((files, ["--shards", shards, "--format", "files"]) for shards in ("3", "12KiB")),
        *((nested, ["--shards", shards, "--format", "tfrecord"]) for shards in ("1", "3")),
    ],
)
def test_what_is_published_is_what_it_is_without_pieces(
    make: Callable[[Path], None], flags: list[str], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make(folder / "in")
    command = ["--input", "in/*", *flags, *MIXED]
    assert jobs.convert(*command, *WHOLE, "--output", "whole") == 0
    assert "pieces" not in caplog.text
    assert jobs.convert(*command, *PIECES, "--output", "pieces") == 0
    assert "are worked on in" in caplog.text
    check_same(folder / "pieces", folder / "whole")


def test_a_file_that_is_gone_when_it_is_read_is_one_dead_letter_for_each_shard(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it is without pieces, though each piece of it found the file missing."""
    from pipelines import run_job

    damaged(folder / "in")
    choose = run_job._choose_engine

    def lose_a_file(*arguments: Any) -> Any:
        os.rename("in/f1.tfrecord", "lost")
        return choose(*arguments)

    monkeypatch.setattr(run_job, "_choose_engine", lose_a_file)
    for out, how in (("whole", WHOLE), ("pieces", PIECES)):
        assert jobs.convert("--input", "in/*", "--output", out, "--shards", "2", *MIXED, *how) == 0
        os.rename("lost", "in/f1.tfrecord")
    reasons = [letter["reason"] for letter in jobs.dead_letters(folder / "pieces")]
    assert 1 <= reasons.count("not_found") <= 2
    check_same(folder / "pieces", folder / "whole")


def write_input(path: Path, number: int) -> None:
    """Writes a file that is listed like the one of the same content before it."""
    jobs.write_tfrecord(path, [jobs.payload(number, at) for at in range(400)])
    os.utime(path, (1_700_000_000, 1_700_000_000))


def test_append_replay_and_mending_work_on_a_set_of_pieces(folder: Path) -> None:
    """Each of them is done to both sets, and the sets stay the same."""
    for out, how in (("whole", WHOLE), ("pieces", PIECES)):
        shutil.rmtree("in", ignore_errors=True)
        (folder / "mended").unlink(missing_ok=True)
        write_input(folder / "in/a", 0)
        step = ["--step", "steps_of_tests:mended", "--set", "dead_letters.max_fraction=0.9"]
        command = ["--input", "in/*", "--output", out, "--shards", "2", *step, *how]
        assert jobs.convert(*command) == 0
        assert len(jobs.dead_letters(folder / out)) == 100
        write_input(folder / "in/b", 1)
        assert jobs.convert(*command, "--append") == 0
        jobs.shards(folder / out)[1].unlink()  # Of the set itself.
        jobs.shards(folder / out)[-1].unlink()  # Of what was appended.
        assert jobs.convert(*command, "--append") == 0
        (folder / "mended").touch()
        assert jobs.replay(out) == 0
    assert len(jobs.records(folder / "pieces")) == 800
    assert jobs.content(folder / "pieces") == jobs.content(folder / "whole")
    assert jobs.tree(folder / "pieces") == jobs.tree(folder / "whole")
    assert jobs.verify(folder / "pieces") == 0


def test_a_set_over_its_budget_is_published_with_a_larger_one_without_a_call(folder: Path) -> None:
    damaged(folder / "in")
    command = ["--input", "in/*", "--output", "out", "--shards", "2", "--step", "steps_of_tests:noted", *PIECES]
    assert jobs.convert(*command, "--set", "dead_letters.max_count=2") == 3
    (folder / "calls").unlink()
    assert jobs.convert(*command, "--set", "dead_letters.max_fraction=0.9") == 0
    assert not (folder / "calls").exists()
    assert len(jobs.records(folder / "out")) == 898


def test_a_job_whose_first_pieces_break_the_budget_does_no_other(folder: Path) -> None:
    damaged(folder / "in")
    command = ["--input", "in/*", "--shards", "2", "--step", "steps_of_tests:mixed"]
    largest = ["--set", "dead_letters.max_fraction=0.9"]
    assert jobs.convert(*command, *PIECES, "--output", "out", "--set", "dead_letters.max_count=1") == 3
    assert 1 <= pieces_done() <= 3
    assert jobs.convert(*command, *PIECES, "--output", "out", *largest) == 0
    assert jobs.convert(*command, *WHOLE, "--output", "whole", *largest) == 0
    check_same(folder / "out", folder / "whole")


def start(*arguments: str, stop: str = "") -> subprocess.Popen[bytes]:
    env = jobs.environment({"GRISTMILL_TEST_STOP": stop} if stop else None)
    env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1] / "hooks"), env["PYTHONPATH"]])
    with open("log", "ab") as log:
        return subprocess.Popen(
            [*jobs.GRISTMILL, *arguments], env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )


def kill_when(ready: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 120
    while not ready():
        assert process.poll() is None, Path("log").read_text()
        assert time.monotonic() < deadline, "the moment never came"
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def pieces_done(out: str = "out") -> int:
    return len(list(Path(out).glob("_gristmill/pieces/*.json")))


def calls_made() -> list[str]:
    """Returns the records that the step was called for, and forgets them."""
    path = Path("calls")
    found = path.read_text().splitlines() if path.exists() else []
    path.unlink(missing_ok=True)
    return found


def test_a_killed_job_makes_no_piece_again_though_its_steps_are_said_to_take_another_time(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs.write_tfrecord(folder / "in/a", [jobs.payload(0, at) for at in range(400)])
    command = ["convert", "--input", "in/a", "--shards", "1", "--workers", "0", "--step", "steps_of_tests:noted"]
    command += ["--output", "out", "--set"]
    kill_when(lambda: pieces_done() >= 4, start(*command, "write.secs_per_record=1.0"))
    done, called = pieces_done(), len(calls_made())
    capsys.readouterr()
    assert main(["status", "out", "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert (status["status"], status["committed_shards"], status["planned_shards"]) == ("stopped", 0, 1)
    assert (status["planned_pieces"], status["committed_pieces"]) == (16, done)
    assert status["records_read"] == status["records_written"] == pytest.approx(400 * done / 16, abs=16)
    assert main([*command, "write.secs_per_record=7.0"]) == 0
    again = len(calls_made())
    assert 400 <= called + again <= 400 + 2 * 400 / 16
    assert jobs.records(folder / "out") == [jobs.payload(0, at) for at in range(400)]
    whole = [*command[1:], "write.secs_per_record=0", "--output", "whole"]
    assert main(["convert", *whole]) == 0
    check_same(folder / "out", folder / "whole")


MOMENTS = {
    "before_a_piece_is_committed": "before-put_if_absent _gristmill/pieces/00000-00003 {marker}",
    "after_a_piece_was_committed": "after-put_if_absent _gristmill/pieces/00001-00002 {marker}",
    "before_a_shard_is_committed": "before-put_if_absent _gristmill/shards/00001 {marker}",
    "after_a_shard_was_committed": "after-put_if_absent _gristmill/shards/00000 {marker}",
    "before_a_piece_is_deleted": "before-delete batches.array_record {marker}",
    "after_a_piece_was_deleted": "after-delete batches.array_record {marker}",
    "before_a_name_is_given": "before-copy array_record-00001-of {marker}",
    "before_the_manifest": "before-put manifest.json {marker}",
    "after_the_manifest": "after-put manifest.json {marker}",
    "before_the_entries_go": "before-delete _gristmill/pieces/00000-00004 {marker}",
}


@pytest.mark.slow
def test_killed_at_any_moment_the_same_command_gives_the_same_bytes(folder: Path) -> None:
    damaged(folder / "in")
    command = ["convert", "--input", "in/*", "--shards", "2", "--workers", "0", *MIXED]
    assert main([*command, *WHOLE, "--output", "whole"]) == 0
    command += [*PIECES, "--output"]

    def at_moment(moment: str) -> None:
        marker = folder / f"{moment}.marker"
        kill_when(marker.exists, start(*command, moment, stop=MOMENTS[moment].format(marker=marker)))
        assert start(*command, moment).wait(timeout=120) == 0, Path("log").read_text()

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for result in [pool.submit(at_moment, moment) for moment in MOMENTS]:
            result.result()
    for moment in MOMENTS:
        check_same(folder / moment, folder / "whole")


@pytest.mark.slow
def test_all_workers_share_the_work_of_one_shard(folder: Path) -> None:
    jobs.write_tfrecord(folder / "in/a", [jobs.payload(0, at) for at in range(400)])
    (folder / "who.py").write_text(
        "import os\n\ndef who(value):\n    open(f'pid-{os.getpid()}', 'a').close()\n    return value\n"
    )
    command = ["--input", "in/a", "--output", "out", "--shards", "1", "--step", "who:who", *PIECES]
    assert main(["convert", "--workers", "2", *command]) == 0
    assert len(list(folder.glob("pid-*"))) == 2
    assert jobs.records(folder / "out") == [jobs.payload(0, at) for at in range(400)]


@pytest.mark.slow
def test_bundles_that_a_runner_runs_twice_change_nothing(folder: Path) -> None:
    damaged(folder / "in")
    command = ["--input", "in/*", "--shards", "2", *MIXED]
    assert jobs.convert(*command, *WHOLE, "--output", "whole") == 0
    twice = ["--runner=BundleBasedDirectRunner", "--direct_runner_bundle_repeat=1"]
    assert main(["convert", *map(str, command), *PIECES, "--output", "twice", *twice]) == 0
    check_same(folder / "twice", folder / "whole")


def test_in_a_bucket_it_is_the_same(folder: Path, emulator: Emulator) -> None:
    damaged(folder / "in")
    url = emulator.new_bucket() + "/out"
    command = ["--input", "in/*", "--shards", "2", *MIXED]
    assert jobs.convert(*command, *WHOLE, "--output", "whole") == 0
    assert jobs.convert(*command, *PIECES, "--output", url) == 0
    assert any("_gristmill%2Fpieces%2F00000-00003.json" in str(request) for request in emulator.seen)
    assert jobs.verify(url) == 0
    check_same(download(url, folder / "remote"), folder / "whole")
