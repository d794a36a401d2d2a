"""What is asked of Dataflow: the defaults, what the user's own flags change, and what is refused before any work."""

from __future__ import annotations

from pathlib import Path

import pytest

import jobs
from pipelines import dataflow
from pipelines.cli import main
from pipelines.dataflow import Load, complete_flags, count_cpus, make_job_name, rate_share
from pipelines.errors import UsageError

NEEDED = ["--runner=DataflowRunner", "--project=p", "--region=r", "--temp_location=gs://b/t"]
LOAD = Load(num_tasks=1_000, cpu_secs=36_000, largest_bytes=2 * 10**9)


def added(flags: list[str], load: Load = LOAD) -> dict[str, str]:
    """Returns what is added to the flags of the user."""
    completed = complete_flags(flags, "a-job", load)
    assert completed[: len(flags)] == flags
    return dict(flag.removeprefix("--").partition("=")[::2] for flag in completed[len(flags) :])


class TestDefaults:
    def test_suit_a_job_that_compresses_on_every_core(self) -> None:
        assert added(NEEDED) == {
            "job_name": "a-job",
            "worker_machine_type": "n2-standard-4",
            "disk_size_gb": "42",  # 30 for the system, and four shards of 2 GB with half as much to spare.
            "number_of_worker_harness_threads": "1",
            "max_num_workers": "100",
            "num_workers": "5",  # 36,000 seconds of CPU on four cores in half an hour.
            "no_save_main_session": "",
        }

    def test_a_small_job_takes_no_more_workers_than_it_has_shards_for(self) -> None:
        found = added(NEEDED, Load(num_tasks=6, cpu_secs=1e9, largest_bytes=1))
        assert (found["max_num_workers"], found["num_workers"]) == ("2", "2")

    def test_a_step_that_waits_for_a_service_gets_a_second_thread_and_its_disk(self) -> None:
        found = added(NEEDED, Load(num_tasks=1_000, cpu_secs=1, largest_bytes=10**9, waits=True))
        assert (found["number_of_worker_harness_threads"], found["disk_size_gb"]) == ("2", "42")

    @pytest.mark.parametrize(
        ("flag", "name"),
        [
            ("--worker_machine_type=c3-highcpu-8", "worker_machine_type"),
            ("--machine_type=c3-highcpu-8", "worker_machine_type"),
            ("--disk_size_gb=500", "disk_size_gb"),
            ("--worker_disk_size_gb=500", "disk_size_gb"),
            ("--max_num_workers=3", "max_num_workers"),
            ("--num_workers=2", "num_workers"),
            ("--job_name=mine", "job_name"),
            ("--number_of_worker_harness_threads=7", "number_of_worker_harness_threads"),
        ],
    )
    def test_give_way_to_the_users_flags(self, flag: str, name: str) -> None:
        assert name not in added([*NEEDED, flag])

    def test_a_machine_with_more_cores_needs_a_larger_disk_and_fewer_workers(self) -> None:
        found = added([*NEEDED, "--worker_machine_type=n2-standard-64"])
        assert (found["disk_size_gb"], found["max_num_workers"], found["num_workers"]) == ("222", "16", "1")


@pytest.mark.parametrize(
    ("machine", "cpus"),
    [
        ("n1-standard-1", 1),
        ("n2-highmem-80", 80),
        ("custom-6-8192", 6),
        ("n2-custom-8-16384", 8),
        ("c3-standard-44-lssd", 44),
        ("e2-medium", 1),
    ],
)
def test_the_cores_of_a_machine_stand_in_its_name(machine: str, cpus: int) -> None:
    assert count_cpus(machine) == cpus


class TestRates:
    def test_need_a_bound_of_the_workers(self) -> None:
        with pytest.raises(UsageError, match="--max_num_workers=8"):
            complete_flags(NEEDED, "a-job", Load(1, 1, 1, max_per_sec=True))

    def test_are_divided_among_all_processes_there_may_be(self) -> None:
        flags = complete_flags([*NEEDED, "--max_num_workers=5"], "a-job", Load(1_000, 1, 1, max_per_sec=True))
        assert rate_share(flags) == 1 / 20


def test_job_names_are_as_the_service_wants_them_and_tell_plans_apart() -> None:
    assert make_job_name("convert", "My_Corpus.v2-train", "0123456789abcdef") == (
        "gristmill-convert-my-corpus-v2-train-01234567"
    )
    assert len(make_job_name("g001", "x" * 300, "f" * 32)) <= 63


@pytest.mark.parametrize("missing", ["project", "region", "temp_location"])
def test_what_is_missing_is_named_with_an_example(missing: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [flag for flag in NEEDED if f"--{missing}=" not in flag]
    assert main(["convert", "--input", "gs://b/in/*", "--output", "gs://b/out", *flags]) == 2
    assert f"Dataflow needs --{missing}; for example --{missing}=" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--input", "gs://b/in/*", "--output", "out"], "output: workers on Dataflow cannot reach out"),
        (["--input", "in/*", "--output", "gs://b/out"], "input in/*: workers on Dataflow cannot reach it"),
        (["--input", "gs://b/in/*", "--output", "gs://b/out", "--temp_location=/tmp"], "must be a folder in a bucket"),
    ],
)
def test_places_that_workers_cannot_reach_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = NEEDED[:-1] if any("temp_location" in argument for argument in arguments) else NEEDED
    assert main(["convert", *arguments, *flags]) == 2
    assert message in capsys.readouterr().err


def test_a_local_job_is_not_detached(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    jobs.write_tfrecord(tmp_path / "in/a", [b"one"])
    assert jobs.convert("--input", tmp_path / "in/a", "--output", tmp_path / "out", "--detach") == 2
    assert "--detach is for runners elsewhere" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_runner_is_known_by_its_full_name_too() -> None:
    assert dataflow.is_dataflow(["--runner", "apache_beam.runners.dataflow.dataflow_runner.DataflowRunner"])
    assert dataflow.is_dataflow(["--runner=dataflowrunner"])
    assert not dataflow.is_dataflow([])
