"""A file that is still being written while it is converted: nothing is lost or doubled once it has been replayed."""

from __future__ import annotations

from pathlib import Path

import pytest

import jobs
from corpora import frame_all, frame_starts
from pipelines import convert
from pipelines.plan_job import PlannedJob, plan_job


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("in").mkdir()
    Path("in/whole").write_bytes(frame_all(payloads(0)))
    return tmp_path


def payloads(file: int) -> list[bytes]:
    return [jobs.payload(file, number) for number in range(100)]


def run() -> int:
    return jobs.convert("--input", "in", "--output", "out", "--shards", "4", "--set", "dead_letters.max_fraction=1")


def check(out: Path) -> None:
    assert sorted(jobs.records(out)) == sorted([*payloads(0), *payloads(1)])
    assert jobs.dead_letters(out) == []
    assert jobs.verify(out) == 0


@pytest.mark.parametrize("cut", [1, 20])
def test_what_was_cut_when_it_was_listed_is_read_to_its_end_by_replay(cut: int, place: Path) -> None:
    data, starts = frame_all(payloads(1)), frame_starts(payloads(1))
    Path("in/live").write_bytes(data[: starts[60] + cut])
    assert run() == 0
    assert [letter["reason"] for letter in jobs.dead_letters(place / "out")] == ["truncated"]
    Path("in/live").write_bytes(data)
    assert jobs.replay("out") == 0
    check(place / "out")


def test_what_grows_between_listing_and_reading_is_left_to_replay(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, starts = frame_all(payloads(1)), frame_starts(payloads(1))
    live = Path("in/live")

    def plan_and_grow(*args: object, **kwargs: object) -> PlannedJob:
        job = plan_job(*args, **kwargs)  # type: ignore[arg-type]
        live.write_bytes(data[: starts[80] + 7])
        return job

    live.write_bytes(data[: starts[60] + 5])
    monkeypatch.setattr(convert, "plan_job", plan_and_grow)
    assert run() == 0
    assert {letter["reason"] for letter in jobs.dead_letters(place / "out")} == {"input_changed"}
    live.write_bytes(data)
    assert jobs.replay("out") == 0
    check(place / "out")


def test_what_is_only_touched_between_listing_and_reading_is_read(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    live = Path("in/live")

    def plan_and_touch(*args: object, **kwargs: object) -> PlannedJob:
        job = plan_job(*args, **kwargs)  # type: ignore[arg-type]
        live.touch()
        return job

    live.write_bytes(frame_all(payloads(1)))
    monkeypatch.setattr(convert, "plan_job", plan_and_touch)
    arguments = ["--input", "in", "--output", "out", "--shards", "match"]
    assert jobs.convert(*arguments) == 0
    monkeypatch.undo()
    monkeypatch.chdir(place)
    check(place / "out")
    assert jobs.convert(*arguments, "--append") == 0
