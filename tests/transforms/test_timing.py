"""What the steps of a job take is found out on a few records, whatever the steps do."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import services
from corpora import write_file
from jobs import frame
from transforms.elements import Input, JobSpec
from transforms.timing import Timing, given_timing, is_cheap, time_steps

STEPS = """
import os, signal, time


def compute(value, secs):
    end = time.process_time() + secs
    while time.process_time() < end:
        pass
    return note(value)


def sleep(value, secs):
    time.sleep(secs)
    return note(value)


def warm_up(value):
    if not os.path.exists("called"):
        time.sleep(1)
    time.sleep(0.1)
    return note(value)


def note(value):
    with open("called", "ab") as calls:
        calls.write(value + b"\\n")
    return value


def die(value):
    os.kill(os.getpid(), signal.SIGKILL)


def fail(value):
    raise ValueError("never")


class Few:
    plan_records = 2

    def __call__(self, value):
        return sleep(value, 0.01)


"""
RECORDS = [b"record-%02d" % number for number in range(20)]
MANY = 1_000_000
"""Records of a job that takes long whatever a record takes."""


@pytest.fixture
def inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Input]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "timed_steps", raising=False)
    (tmp_path / "timed_steps.py").write_text(STEPS)
    return [write_file(tmp_path / f"in{number}", b"".join(map(frame, RECORDS))) for number in range(2)]


def spec_of(step: str, **parameters: object) -> JobSpec:
    steps = ({"call": f"timed_steps:{step}", **parameters},)
    return JobSpec("out", "timing", 1, "tfrecord", steps=steps, import_paths=(str(Path.cwd()),))


def called() -> list[bytes]:
    """Returns the records that the step was called for."""
    path = Path("called")
    return path.read_bytes().splitlines() if path.exists() else []


def test_a_step_that_computes_takes_cpu_seconds(inputs: list[Input]) -> None:
    found = time_steps(spec_of("compute", secs=0.02), inputs, [], MANY)
    assert found is not None
    assert 0.02 <= found.cpu_secs < 0.03
    assert found.cpu_secs <= found.secs
    assert (found.records, found.in_flight, found.at_least) == (8, 1, False)


def test_a_step_that_sleeps_waits(inputs: list[Input]) -> None:
    found = time_steps(spec_of("sleep", secs=0.05), inputs, [], MANY)
    assert found is not None
    assert found.secs >= 0.05
    assert found.cpu_secs < 0.01
    assert found.waits()


def test_records_are_taken_from_all_inputs_each_once(inputs: list[Input]) -> None:
    time_steps(spec_of("sleep", secs=0.01), inputs, [], MANY)
    assert called() == [RECORDS[number] for number in (0, 5, 10, 15)] * 2


def test_payloads_that_are_at_hand_are_taken_instead(inputs: list[Input]) -> None:
    time_steps(spec_of("sleep", secs=0.01), inputs, [b"at hand"], MANY)
    assert called() == [b"at hand"]


def test_what_the_first_record_has_to_wait_for_does_not_count(inputs: list[Input]) -> None:
    found = time_steps(spec_of("warm_up"), inputs, [], MANY)
    assert found is not None
    assert 0.1 <= found.secs < 0.3


def test_a_job_that_one_record_shows_to_be_short_is_tried_no_further(inputs: list[Input]) -> None:
    found = time_steps(spec_of("sleep", secs=0.01), inputs, [], num_records=100)
    assert found is not None
    assert found.records == 1
    assert called() == [RECORDS[0]]


def test_a_step_may_want_fewer_records(inputs: list[Input]) -> None:
    found = time_steps(spec_of("Few"), inputs, [], MANY)
    assert found is not None
    assert found.records == len(called()) == 2


def test_a_service_is_asked_three_times_and_its_calls_in_flight_are_known(inputs: list[Input]) -> None:
    with services.serving() as service:
        steps = ({"use": "http.post", "url": service.url, "max_in_flight": 7},)
        spec = JobSpec("out", "timing", 1, "tfrecord", steps=steps)
        found = time_steps(spec, inputs, [], 100_000_000)
        assert found is not None
        assert (found.records, found.in_flight) == (3, 7)
        assert len(service.seen) == 3


def test_a_step_that_never_ends_is_ended_and_takes_at_least_so_long(inputs: list[Input]) -> None:
    found = time_steps(spec_of("sleep", secs=600), inputs, [], MANY, tried_secs=0.5)
    assert found == Timing(0.5, 0.0, at_least=True)
    assert called() == []


@pytest.mark.parametrize("step", ["die", "fail", "missing"])
def test_of_a_step_that_never_passes_a_record_nothing_is_known(inputs: list[Input], step: str) -> None:
    assert time_steps(spec_of(step), inputs, [], MANY) is None


def test_of_inputs_that_cannot_be_read_nothing_is_known(inputs: list[Input], tmp_path: Path) -> None:
    for source in inputs:
        Path(source.name).unlink()
    assert time_steps(spec_of("sleep", secs=0.01), inputs, [], MANY) is None


def test_isolated_steps_are_tried_as_well(inputs: list[Input]) -> None:
    found = time_steps(spec_of("sleep", secs=0.02, isolate=True, timeout_secs=5), inputs, [], MANY)
    assert found is not None
    assert 0.02 <= found.secs < 0.1


def test_what_the_user_says_is_cpu_time_or_waiting_as_the_steps_have_calls_in_flight(inputs: list[Input]) -> None:
    assert given_timing(spec_of("compute", secs=1), 0.5) == Timing(0.5, 0.5)
    steps = ({"use": "http.post", "url": "http://localhost:1", "max_in_flight": 4, "max_per_sec": 2.0},)
    spec = JobSpec("out", "timing", 1, "tfrecord", steps=steps)
    assert given_timing(spec, 0.5) == Timing(0.5, 0.0, 4, max_per_sec=2.0)


def test_calls_in_flight_share_the_waiting_and_workers_the_work() -> None:
    found = Timing(secs=1.0, cpu_secs=0.2, in_flight=8)
    assert found.worker_secs(100) == pytest.approx(100 * (0.2 + 0.8 / 8))
    assert found.total_secs(100, 2) == pytest.approx(15)
    assert Timing(1.0, 0.2, 8, max_per_sec=1.0).total_secs(100, 2) == 100


def test_only_chains_of_our_own_quick_steps_are_cheap() -> None:
    check, own = {"use": "example.check"}, {"call": "timed_steps:fail"}
    post = {"use": "http.post", "url": "http://localhost:1"}
    spec = JobSpec("out", "timing", 1, "tfrecord")
    for steps, cheap in (((), True), ((check,), True), ((check, own), False), ((post,), False)):
        assert is_cheap(JobSpec(spec.root, spec.plan_id, 1, "tfrecord", steps=steps)) is cheap
