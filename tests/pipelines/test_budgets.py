"""Exit status 3 by each budget, early and at the end, and how the job goes on from there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import jobs
from corpora import frame_all
from pipelines.cli import main

STEP = """
from transforms.dead_letters import BadRecordError
def pick(value):
    if b"bad" in value:
        raise BadRecordError("bad" if b"worse" not in value else "worse")
    return value
"""


def payloads(file: int, count: int, bad: int, text: bytes = b"bad", size: int = 1) -> list[bytes]:
    """Records of which the first `bad` are dead-lettered by the step."""
    return [(text if i < bad else b"good") * size + jobs.payload(file, i) for i in range(count)]


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    (tmp_path / "picking.py").write_text(STEP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return ["--input", "in/*", "--output", "out", "--step", "picking:pick", "--shards", "match"]


def run(command: list[str], *changes: str) -> int:
    return jobs.convert(*command, *(part for change in changes for part in ("--set", f"dead_letters.{change}")))


def good_records(tmp_path: Path) -> list[bytes]:
    return [record for record in jobs.records(tmp_path / "out") if record.startswith(b"good")]


def write(tmp_path: Path, *files: list[bytes]) -> None:
    for number, records in enumerate(files):
        jobs.write_tfrecord(tmp_path / f"in/f{number:02d}", records)


class TestAtTheEnd:
    """Jobs in which nothing is certain or seen enough before the last shard."""

    def test_records(self, job: list[str], tmp_path: Path) -> None:
        write(tmp_path, payloads(0, 50, 6), payloads(1, 50, 6))
        assert run(job) == 3
        assert jobs.report(tmp_path / "out")["message"] == (
            "12.00% of records are dead; dead_letters.max_fraction allows 10.00%"
        )
        assert jobs.report(tmp_path / "out")["records_read"] == 100
        assert jobs.shards(tmp_path / "out") == []
        assert len(jobs.dead_letters(tmp_path / "out")) == 12
        assert run(job, "max_fraction=0.12") == 0
        assert len(good_records(tmp_path)) == 88

    def test_bytes(self, job: list[str], tmp_path: Path) -> None:
        write(tmp_path, payloads(0, 400, 0), [*payloads(1, 100, 0), b"bad" * 4000])
        assert run(job) == 3
        assert "of bytes are dead" in jobs.report(tmp_path / "out")["message"]
        assert run(job, "max_fraction=0.9") == 0
        assert len(good_records(tmp_path)) == 500

    def test_files(self, job: list[str], tmp_path: Path) -> None:
        write(tmp_path, *(payloads(file, 200, 0) for file in range(4)), payloads(4, 1, 1))
        assert run(job) == 3
        assert jobs.report(tmp_path / "out")["message"] == (
            "20.00% of files are dead; dead_letters.max_fraction allows 10.00%"
        )
        assert run(job, "max_fraction=0.2") == 0
        assert len(good_records(tmp_path)) == 800


class TestEarly:
    """Jobs whose first shards tell enough: the others are not read."""

    def check(self, job: list[str], tmp_path: Path, key: str, num_good: int) -> None:
        assert run(job) == 3
        report = jobs.report(tmp_path / "out")
        assert report["status"] == "over_budget"
        assert f"of the {key} that were read are dead; dead_letters.max_fraction allows 10.00%" in report["message"]
        assert report["committed_shards"] < report["planned_shards"]
        assert jobs.shards(tmp_path / "out") == []
        assert not (tmp_path / "out/manifest.json").exists()
        assert len(jobs.dead_letters(tmp_path / "out")) == report["records_dead"] > 0
        ledgers = self.ledgers(tmp_path)
        assert run(job, "max_fraction=1") == 0
        assert ledgers.items() <= self.ledgers(tmp_path).items()
        assert len(good_records(tmp_path)) == num_good
        assert jobs.report(tmp_path / "out")["committed_shards"] == report["planned_shards"]

    def ledgers(self, tmp_path: Path) -> dict[str, int]:
        return {path.name: path.stat().st_ino for path in (tmp_path / "out/_gristmill/shards").glob("*")}

    def test_records(self, job: list[str], tmp_path: Path) -> None:
        small = [b"bad", *payloads(0, 1, 0)] * 1000
        write(
            tmp_path, [*small, *payloads(0, 1000, 0, size=30)], *(payloads(file, 500, 0, size=6) for file in range(12))
        )
        self.check(job, tmp_path, "records", 1000 + 1000 + 12 * 500)

    def test_bytes(self, job: list[str], tmp_path: Path) -> None:
        write(tmp_path, payloads(0, 40, 8, size=4000), *(payloads(file, 300, 0) for file in range(1, 9)))
        self.check(job, tmp_path, "bytes", 32 + 8 * 300)

    def test_files(self, job: list[str], tmp_path: Path) -> None:
        dead = [payloads(file, 3, 3) for file in range(12)]
        write(tmp_path, *dead, *(payloads(file, 20, 0) for file in range(12, 100)))
        self.check(job, tmp_path, "files", 88 * 20)


def test_a_count_ends_the_job_with_the_shard_that_exceeds_it(job: list[str], tmp_path: Path) -> None:
    write(tmp_path, *(payloads(file, 100, 2) for file in range(8)))
    assert run(job, "max_count=3") == 3
    report = jobs.report(tmp_path / "out")
    assert report["message"] == "4 dead letters; dead_letters.max_count allows 3"
    assert report["committed_shards"] == 2
    assert run(job, "max_count=16") == 0
    assert len(good_records(tmp_path)) == 8 * 98


def test_each_reason_has_a_count_of_its_own(job: list[str], tmp_path: Path) -> None:
    write(tmp_path, *(payloads(file, 100, 2) for file in range(4)), payloads(4, 100, 1, b"bad worse"))
    assert run(job, "max_count_by_reason={worse: 0, bad: 100}") == 3
    assert jobs.report(tmp_path / "out")["message"] == (
        "1 dead letters for worse; dead_letters.max_count_by_reason allows 0"
    )
    assert run(job, "max_count_by_reason={bad: 8}") == 0


def test_a_smaller_budget_is_held_against_what_is_there_before_anything_is_read(job: list[str], tmp_path: Path) -> None:
    write(tmp_path, *(payloads(file, 100, 2) for file in range(8)))
    assert run(job, "max_count=3") == 3
    assert run(job, "max_count=1") == 3
    assert jobs.report(tmp_path / "out")["committed_shards"] == 2


@pytest.mark.parametrize("flags", [["--workers", "2"], ["--workers", "0", "--runner=BundleBasedDirectRunner"]])
def test_a_job_that_is_called_off_ends_normally_on_every_runner(
    flags: list[str], job: list[str], tmp_path: Path
) -> None:
    write(tmp_path, *(payloads(file, 100, 50) for file in range(30)))
    done = jobs.spawn(["convert", *job, *flags], cwd=tmp_path)
    assert done.returncode == 3, done.stderr
    report = jobs.report(tmp_path / "out")
    # The other runner reads everything before it writes anything.
    assert report["committed_shards"] < 30 or "--runner=BundleBasedDirectRunner" in flags
    assert report["records_read"] == report["records_written"] + report["records_dead"]
    assert not list((tmp_path / "out/_gristmill").glob("tries/*"))
    done = jobs.spawn(["convert", *job, *flags, "--set", "dead_letters.max_fraction=0.5"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(good_records(tmp_path)) == 30 * 50
    assert json.loads((tmp_path / "out/manifest.json").read_text())["num_records"] == 30 * 50


class TestRegions:
    """Damaged regions, of which each is one dead letter and held many records."""

    def write(self, folder: Path) -> None:
        """Four files of 100 records of 116 bytes; regions of 30, 20 and 10 records in three of them are zero."""
        for file, lost in enumerate((30, 20, 10, 0)):
            data = bytearray(frame_all([b"%100d" % number for number in range(100)]))
            data[10 * 116 : (10 + lost) * 116] = bytes(lost * 116)
            (folder / f"f{file}").write_bytes(data)

    def test_report_and_message_say_about_how_many_records_they_held(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "in").mkdir()
        self.write(tmp_path / "in")
        assert run(["--input", "in/*", "--output", "out", "--shards", "1"], "max_count=2") == 3
        report = jobs.report(tmp_path / "out")
        assert report["message"] == "3 dead letters, about 60 records; dead_letters.max_count allows 2"
        assert (report["records_dead"], report["records_dead_estimate"]) == (3, 60)
        printed = capsys.readouterr().out.splitlines()
        assert [line for line in printed if line.startswith("  worst")] == [
            f"  worst    {tmp_path}/in/f0: 1 dead letter, about 30 records; 71 read",
            f"  worst    {tmp_path}/in/f1: 1 dead letter, about 20 records; 81 read",
            f"  worst    {tmp_path}/in/f2: 1 dead letter, about 10 records; 91 read",
        ]
        assert "  records  343 read, 0 added, 340 written, 0 dropped, 3 dead letters, about 60 records" in printed

    def test_the_estimate_is_the_same_for_every_cut(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "in").mkdir()
        self.write(tmp_path / "in")
        for shards in ("1", "9"):
            assert run(["--input", "in/*", "--output", f"out{shards}", "--shards", shards], "max_fraction=1") == 0
        letters, others = (jobs.dead_letters(tmp_path / out) for out in ("out1", "out9"))
        assert letters == others
        assert [letter["records_estimate"] for letter in letters] == [30, 20, 10]

    def test_status_says_both_and_a_replay_takes_back_what_it_recovers(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "in").mkdir()
        self.write(tmp_path / "in")
        assert run(["--input", "in/*", "--output", "out"], "max_fraction=0.2") == 0
        assert main(["status", "out"]) == 0
        assert "3 dead letters, about 60 records" in capsys.readouterr().out
        (tmp_path / "in/f0").write_bytes(frame_all([b"%100d" % number for number in range(100)]))
        assert jobs.replay("out") == 0
        report = jobs.report(tmp_path / "out")
        assert (report["records_dead"], report["records_dead_estimate"], report["records_written"]) == (2, 30, 370)
        assert [entry["records_dead_estimate"] for entry in report["sources"]] == [20, 10]
        assert jobs.verify("out") == 0
