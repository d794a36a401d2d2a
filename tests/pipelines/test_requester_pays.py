"""Buckets whose owner lets the reader pay: every request names the project, and without one nothing is begun."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import jobs
from gcs_emulator import Emulator
from gcs_files import download, upload
from pipelines.cli import main
from transforms import gcs
from transforms.billing import pay_by
from transforms.elements import Input, JobSpec
from transforms.isolated_reader import read_isolated
from transforms.remote_inputs import find_object
from transforms.shard_reader import read_input

PAID = ("--billing-project", "payer-1")
HOW = "--billing-project PROJECT, or source.billing_project"


@pytest.fixture
def raw(emulator: Emulator, tmp_path: Path) -> Iterator[str]:
    """Four files of ten records in a bucket whose owner does not pay."""
    for number in range(4):
        jobs.write_tfrecord(tmp_path / "in" / f"c4-{number}.tfrecord", [b"record %d" % one for one in range(10)])
    url = emulator.new_bucket()
    upload(tmp_path / "in", f"{url}/c4")
    emulator.requester_pays.add(gcs.split_url(url)[0])
    emulator.seen.clear()
    yield f"{url}/c4"
    pay_by("")


def convert(raw: str, out: str, *options: str, workers: int = 0) -> int:
    return main(["convert", "--input", f"{raw}/*", "--output", out, "--workers", str(workers), *options])


def projects(emulator: Emulator) -> set[str]:
    """What the requests name that were seen."""
    return {line.partition("userProject=")[2].partition("&")[0].partition(" ")[0] for line in emulator.seen}


class TestWithoutAProject:
    @pytest.mark.parametrize("is_list", [False, True])
    def test_nothing_is_begun_and_the_option_is_named(
        self, raw: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], is_list: bool
    ) -> None:
        (tmp_path / "list.txt").write_text(f"{raw}/c4-0.tfrecord\n{raw}/c4-1.tfrecord\n")
        inputs = f"@{tmp_path}/list.txt" if is_list else f"{raw}/*"
        out = tmp_path / "out"
        assert main(["convert", "--input", inputs, "--output", str(out), "--workers", "0"]) == 2
        said = capsys.readouterr().err
        assert "requester pays" in said
        assert HOW in said
        assert not out.exists() or not any(path.is_file() for path in out.rglob("*"))

    def test_so_it_is_with_the_output(self, raw: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        corpus = jobs.write_tfrecord(tmp_path / "a.tfrecord", [b"record"])
        assert main(["convert", "--input", str(corpus), "--output", f"{raw}/out", "--workers", "0"]) == 2
        assert HOW in capsys.readouterr().err
        for command in ("verify", "status", "report", "cancel", "replay"):
            assert main([command, f"{raw}/out"]) == 2
            assert HOW in capsys.readouterr().err

    def test_inspect_names_the_option(self, raw: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["inspect", f"{raw}/c4-0.tfrecord"]) == 2
        assert HOW in capsys.readouterr().err

    def test_a_bucket_that_stops_paying_ends_the_job_and_not_its_records(self, raw: str, emulator: Emulator) -> None:
        pay_by("payer-1")
        found = find_object(f"{raw}/c4-0.tfrecord")
        assert found is not None
        source = Input(0, found.url, found.size, found.version)
        pay_by("")
        with pytest.raises(OSError, match="requester pays"):
            list(read_input(JobSpec("", "", 1, "tfrecord"), source, 0, source.size))

    @pytest.mark.parametrize("project", ["My Project", "-x", "a/b"])
    def test_what_is_no_project_is_refused(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], project: str
    ) -> None:
        assert main(["status", str(tmp_path), f"--billing-project={project}"]) == 2
        assert f"expected the id of a Google Cloud project, such as my-project-123, got {project!r}" in (
            capsys.readouterr().err
        )


class TestWithAProject:
    @pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
    def test_every_request_names_it(self, raw: str, emulator: Emulator, tmp_path: Path, workers: int) -> None:
        assert convert(raw, str(tmp_path / "out"), *PAID, workers=workers) == 0
        assert jobs.report(tmp_path / "out")["records_written"] == 40
        assert (emulator.unpaid, projects(emulator)) == ([], {"payer-1"})

    def test_the_key_of_the_config_does_the_same(self, raw: str, emulator: Emulator, tmp_path: Path) -> None:
        assert convert(raw, str(tmp_path / "out"), "--set", "source.billing_project=payer-1", "--dry-run") == 0
        assert (emulator.unpaid, projects(emulator)) == ([], {"payer-1"})

    def test_a_reader_in_a_process_of_its_own_names_it(self, raw: str, emulator: Emulator) -> None:
        pay_by("payer-1")
        found = find_object(f"{raw}/c4-0.tfrecord")
        assert found is not None
        source = Input(0, found.url, found.size, found.version)
        spec = JobSpec("", "", 1, "tfrecord", billing_project="payer-1")
        chunks = list(read_isolated(spec, source, 0, source.size))
        assert sum(len(chunk.records) for chunk in chunks) == 10
        assert emulator.unpaid == []

    def test_inspect_names_it(self, raw: str, emulator: Emulator, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["inspect", "--json", f"{raw}/c4-0.tfrecord", *PAID]) == 0
        assert json.loads(capsys.readouterr().out)["records"] == 10
        assert emulator.unpaid == []

    def test_a_whole_life_of_a_set_in_such_a_bucket(
        self, raw: str, emulator: Emulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "picky.py").write_text("def pick(record):\n    return record[:int(record[-1:] != b'3') or 1 / 0]\n")
        out = f"{raw.removesuffix('/c4')}/out"
        options = ("--step", "picky:pick", "--set", "dead_letters.max_fraction=1", *PAID)
        assert convert(raw, out, *options) == 0
        more = jobs.write_tfrecord(tmp_path / "more" / "c4-9.tfrecord", [b"more"])
        pay_by("payer-1")
        upload(more.parent, raw)
        pay_by("")
        assert convert(raw, out, "--append", *options) == 0
        (tmp_path / "picky.py").write_text("def pick(record):\n    return record\n")
        assert main(["replay", out, "--workers", "0", *PAID]) == 0
        for command in (["verify", out], ["status", out], ["report", out]):
            assert main([*command, *PAID]) == 0
        assert (emulator.unpaid, projects(emulator)) == ([], {"payer-1"})
        pay_by("payer-1")
        assert jobs.report(download(out, tmp_path / "copy"))["records_written"] == 41

    @pytest.mark.slow
    def test_verify_on_a_runner_names_it(self, raw: str, emulator: Emulator) -> None:
        out = f"{raw.removesuffix('/c4')}/out"
        assert convert(raw, out, *PAID) == 0
        assert main(["verify", out, "--direct_num_workers=2", *PAID]) == 0
        assert emulator.unpaid == []


class TestWhoPaysIsNoPartOfTheJob:
    def test_a_job_goes_on_under_another_project(
        self, raw: str, emulator: Emulator, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        out = tmp_path / "out"
        budget = ("--step", "json:loads", "--set", "dead_letters.max_fraction=0")
        assert convert(raw, str(out), *budget, *PAID) == 3
        ledgers = {path: path.read_bytes() for path in (out / "_gristmill/shards").iterdir()}
        emulator.seen.clear()
        assert convert(raw, str(out), *budget, "--billing-project=payer-2") == 3
        assert {path: path.read_bytes() for path in (out / "_gristmill/shards").iterdir()} == ledgers
        assert projects(emulator) == {"payer-2"}

    def test_it_stands_in_no_plan(self, raw: str, tmp_path: Path) -> None:
        headers: list[dict[str, Any]] = []
        for out, options in (("paid", PAID), ("other", ("--billing-project=payer-2",))):
            assert convert(raw, str(tmp_path / out), *options) == 0
            headers.append(json.loads((tmp_path / out / "_gristmill/plan.jsonl").read_text().splitlines()[0]))
        assert headers[0]["plan_id"] == headers[1]["plan_id"]
        assert "billing_project" not in json.dumps(headers)
