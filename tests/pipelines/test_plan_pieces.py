"""Planning by time: how long a job takes, with how many workers and in which pieces; and what is planned as ever."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import jobs
import services
from pipelines.cli import main
from pipelines.config import JobConfig, load_config
from pipelines.plan_job import PlannedJob, plan_job
from pipelines.plan_pieces import choose_workers, plan_pieces, recall_pieces
from transforms.elements import ShardTask
from transforms.pieces import PIECES_NAME
from transforms.plan_file import read_tasks
from transforms.store import LocalStore

STEPS = """
import time


def compute(value, secs):
    end = time.process_time() + secs
    while time.process_time() < end:
        pass
    return value


def sleep(value, secs):
    time.sleep(secs)
    return value


class Calls:
    max_in_flight = 8

    def __call__(self, value):
        open("called", "a").close()
        time.sleep(0.05)
        return value
"""


@pytest.fixture(autouse=True)
def two_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "planned_steps", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    (tmp_path / "planned_steps.py").write_text(STEPS)
    jobs.write_tfrecord(tmp_path / "in/a", [jobs.payload(0, at) for at in range(2_000)])


def config_of(*steps: dict[str, object], **write: object) -> JobConfig:
    overrides: list[tuple[str, object]] = [("source.patterns", ["in/*"]), ("write.output", "out")]
    return load_config(None, [*overrides, ("steps", list(steps)), *((f"write.{key}", write[key]) for key in write)])


def planned(config: JobConfig, scratch: Path) -> PlannedJob:
    scratch.mkdir(exist_ok=True)
    return plan_pieces(plan_job(config, limit=0, scratch=str(scratch)), config, str(scratch))


def pieces_of(job: PlannedJob) -> list[ShardTask]:
    with open(job.state[PIECES_NAME], "rb") as lines:
        return [task for _, task in read_tasks(lines)]


def dry_run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[float, float, str]:
    """Returns the CPU seconds, the seconds and the words of a prediction, and checks that nothing was written."""
    capsys.readouterr()
    assert main(["convert", "--input", "in/*", "--output", "out", "--dry-run", "--limit", "1", *arguments]) == 0
    printed = capsys.readouterr().out
    found = re.search(r"^time +about ([\d,]+) CPU seconds, ([\d,]+) s here (in .*);", printed, re.MULTILINE)
    assert found is not None, printed
    assert not Path("out").exists()
    return float(found[1].replace(",", "")), float(found[2].replace(",", "")), found[3] + printed


class TestPredictions:
    """The truth is known without running the job: so many records, each of so many seconds."""

    def test_a_chain_that_computes_uses_all_cores(self, capsys: pytest.CaptureFixture[str]) -> None:
        cpu_secs, secs, words = dry_run(capsys, "--step", "planned_steps:compute,secs=0.03")
        assert 60 <= cpu_secs < 90
        assert 30 <= secs < 60
        assert "in 2 worker processes" in words
        assert re.search(r"1 of 1 shards are worked on in 1[2-9] pieces of about 5 s", words)
        assert "mostly wait" not in words

    def test_a_chain_that_sleeps_starts_no_worker_for_it(self, capsys: pytest.CaptureFixture[str]) -> None:
        cpu_secs, secs, words = dry_run(capsys, "--step", "planned_steps:sleep,secs=0.05")
        assert cpu_secs <= 10
        assert 100 <= secs < 150
        assert "in one process" in words or cpu_secs > 5  # A busy machine makes sleeping cost something.
        assert "the steps mostly wait, 1 at a time in each worker" in words

    def test_a_service_is_called_by_several_at_a_time(
        self, capsys: pytest.CaptureFixture[str], service: services.Service
    ) -> None:
        def slowly(call: services.Call) -> None:
            service.ended.wait(0.1)
            call.reply(200, call.body)

        service.answer = slowly
        _, secs, words = dry_run(capsys, "--step", f"http.post,url={service.url},max_in_flight=4")
        workers = 2 if "in 2 worker processes" in words else 1  # A busy machine makes calls cost something.
        assert 2_000 * 0.1 / 4 / workers <= secs < 2 * 2_000 * 0.1 / 4 / workers
        assert "the steps mostly wait, 4 at a time in each worker" in words
        assert len(service.seen) == 3 + 1  # The trial's, and the record that is shown.
        assert "becomes 17 bytes" in words

    def test_the_word_of_the_user_goes_before_a_trial(self, capsys: pytest.CaptureFixture[str]) -> None:
        cpu_secs, secs, words = dry_run(
            capsys, "--step", "planned_steps:sleep,secs=0", "--set", "write.secs_per_record=0.5"
        )
        assert 1_000 <= cpu_secs <= 1_001
        assert 500 <= secs < 510
        assert "steps take 500 ms a record" in words

    def test_a_rate_bounds_what_any_number_of_workers_can_do(self, capsys: pytest.CaptureFixture[str]) -> None:
        step = "planned_steps:sleep,secs=0,max_per_sec=10"
        _, secs, _ = dry_run(capsys, "--step", step, "--set", "write.secs_per_record=0.01")
        assert 200 <= secs < 210


@pytest.fixture
def service() -> Iterator[services.Service]:
    with services.serving() as found:
        yield found


class TestPlans:
    def test_the_plan_is_the_same_however_long_a_record_takes(self, tmp_path: Path) -> None:
        step = {"call": "planned_steps:sleep", "secs": 0}
        found = [planned(config_of(step, secs_per_record=secs), tmp_path / f"{secs}") for secs in (0, 1, 7.5)]
        assert len({job.spec.plan_id for job in found}) == 1
        assert len({Path(job.plan_path).read_bytes() for job in found}) == 1
        assert [job.spec.num_pieces for job in found] == [0, 22, 125 + 42]

    def test_pieces_lie_within_the_shards_and_cover_them(self, tmp_path: Path) -> None:
        step = {"call": "planned_steps:sleep", "secs": 0}
        job = planned(config_of(step, secs_per_record=1, shards=3), tmp_path / "scratch")
        with open(job.plan_path, "rb") as plan:
            shards = [task for _, task in read_tasks(plan)]
        for shard in shards:
            own = [piece for piece in pieces_of(job) if piece.shard == shard.shard]
            assert [piece.piece for piece in own] == list(range(7))
            assert (own[0].start, own[-1].end) == (shard.start, shard.end)
            assert [piece.end for piece in own[:-1]] == [piece.start for piece in own[1:]]

    @pytest.mark.parametrize(
        "steps",
        [
            [],
            [{"use": "example.check"}],
            [{"use": "example.check"}, {"use": "example.check"}],
        ],
    )
    def test_cheap_chains_are_planned_as_ever(self, tmp_path: Path, steps: list[dict[str, object]]) -> None:
        config = config_of(*steps)
        before = plan_job(config, limit=0, scratch=str(tmp_path))
        notes = list(before.header["notes"])
        after = plan_pieces(before, config, str(tmp_path))
        assert after is before
        assert after.header["notes"] == notes

    def test_a_small_job_is_not_tried_at_all(self, tmp_path: Path) -> None:
        jobs.write_tfrecord(tmp_path / "in/a", [jobs.payload(0, at) for at in range(10)])
        job = planned(config_of({"call": "planned_steps:Calls"}), tmp_path / "scratch")
        assert (job.timing, job.spec.num_pieces) == (None, 0)
        assert not (tmp_path / "called").exists()

    def test_zero_switches_it_off(self, tmp_path: Path) -> None:
        job = planned(config_of({"call": "planned_steps:Calls"}, secs_per_record=0), tmp_path / "scratch")
        assert (job.timing, job.spec.num_pieces) == (None, 0)
        assert not (tmp_path / "called").exists()

    def test_a_trial_run_is_one_shard_as_ever(self, tmp_path: Path) -> None:
        config = config_of({"call": "planned_steps:Calls"}, secs_per_record=9)
        job = plan_pieces(plan_job(config, limit=100, scratch=str(tmp_path)), config, str(tmp_path))
        assert (job.timing, job.spec.num_pieces) == (None, 0)

    def test_a_chain_that_computes_has_as_many_workers_as_there_is_work_and_cores(self, tmp_path: Path) -> None:
        step = {"call": "planned_steps:sleep", "secs": 0}
        slow = planned(config_of(step, secs_per_record=0.05, shards=1), tmp_path / "slow")
        quick = planned(config_of(step, secs_per_record=0.001, shards=1), tmp_path / "quick")
        waiting = planned(config_of({"call": "planned_steps:Calls"}, secs_per_record=9), tmp_path / "waiting")
        assert [choose_workers(job) for job in (slow, quick, waiting)] == [2, 0, 0]


class TestRecall:
    def test_a_job_takes_the_pieces_that_it_finds(self, tmp_path: Path) -> None:
        step = {"call": "planned_steps:sleep", "secs": 0}
        first = planned(config_of(step, secs_per_record=1), tmp_path / "first")
        store = LocalStore(str(tmp_path / "out"))
        assert recall_pieces(store, first) is None
        store.put_file(first.state[PIECES_NAME], PIECES_NAME)
        again = plan_job(config_of(step, secs_per_record=99), limit=0, scratch=str(tmp_path))
        found = recall_pieces(store, again)
        assert found is not None
        assert (found.spec, found.timing) == (first.spec, first.timing)

    def test_those_of_another_plan_are_not_its_own(self, tmp_path: Path) -> None:
        step = {"call": "planned_steps:sleep", "secs": 0}
        first = planned(config_of(step, secs_per_record=1), tmp_path / "first")
        store = LocalStore(str(tmp_path / "out"))
        store.put_file(first.state[PIECES_NAME], PIECES_NAME)
        other = plan_job(config_of({**step, "secs": 1}), limit=0, scratch=str(tmp_path))
        assert recall_pieces(store, other) is None

    @pytest.mark.parametrize("harm", [lambda data: data[:-30], lambda data: data + b"{}\n", lambda data: data[:600]])
    def test_a_list_of_which_a_part_is_damaged_is_made_anew(
        self, tmp_path: Path, harm: Callable[[bytes], bytes]
    ) -> None:
        first = planned(config_of({"call": "planned_steps:sleep", "secs": 0}, secs_per_record=1), tmp_path / "first")
        store = LocalStore(str(tmp_path / "out"))
        store.put(PIECES_NAME, harm(Path(first.state[PIECES_NAME]).read_bytes()))
        assert recall_pieces(store, first) is None

    @pytest.mark.parametrize("data", [b"", b"{}\n", b"\xff\n", json.dumps({"gristmill_plan": 9}).encode()])
    def test_a_damaged_list_is_none(self, tmp_path: Path, data: bytes) -> None:
        store = LocalStore(str(tmp_path / "out"))
        store.put(PIECES_NAME, data)
        job = plan_job(config_of(), limit=0, scratch=str(tmp_path))
        assert recall_pieces(store, job) is None
