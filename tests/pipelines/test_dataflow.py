"""What `convert` submits to Dataflow, that it runs in clean workers, and how the command ends."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import os
import shutil
import signal
import tarfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import apache_beam as beam
import pytest
from apache_beam.portability.api import beam_runner_api_pb2
from apache_beam.runners.portability.fn_api_runner import execution

import jobs
from dataflow import cloud as clouds
from dataflow import execute, graph, submit
from dataflow.cloud import Cloud, Job
from dataflow.execute import STEP
from gcs_emulator import Emulator
from gcs_files import download, read, upload
from pipelines.cli import main
from transforms import gcs
from transforms.gcs_store import GcsStore

COUNTS = (
    *("status", "files_seen", "files_read", "files_dead", "files_empty", "records_read", "records_written"),
    *("records_added", "records_dropped", "records_dead", "bytes_read", "bytes_written", "bytes_dead"),
    *("dropped_by_reason", "dead_by_reason", "shards", "planned_shards", "committed_shards"),
)
LARGEST_GRAPH = 100_000


@dataclasses.dataclass(frozen=True)
class Place:
    """A bucket with a corpus, and a folder with a step to submit from."""

    bucket: str
    folder: Path

    def command(self, out: str, *changes: str, step: str = "my_steps:keep") -> list[str]:
        """Returns the arguments that convert the corpus with the step."""
        command = ["convert", "--input", f"{self.bucket}/raw/", "--output", f"{self.bucket}/{out}", "--shards", "6"]
        return [*command, "--step", step, "--set", "dead_letters.max_fraction=0.5", *changes]

    def submitted(self, *changes: str, out: str = "out", step: str = "my_steps:keep") -> list[str]:
        """Returns the same for Dataflow."""
        return self.command(out, *submit.flags(self.bucket), *changes, step=step)


def make_place(bucket: str, folder: Path) -> Place:
    (folder / "my_steps.py").write_text(STEP)
    upload(jobs.write_damaged(folder / "in", 1_000), f"{bucket}/raw")
    return Place(bucket, folder)


@pytest.fixture
def place(emulator: Emulator, tmp_path: Path) -> Place:
    return make_place(emulator.new_bucket(), tmp_path)


# What is submitted.


@dataclasses.dataclass(frozen=True)
class Submission:
    """A job as it was submitted, with the files that it staged."""

    place: Place
    job: Job
    graph: bytes
    staged: dict[str, bytes]

    @property
    def pipeline(self) -> graph.Pipeline:
        return beam_runner_api_pb2.Pipeline.FromString(self.graph)


def capture(cloud: Cloud, place: Place, command: list[str]) -> Submission:
    """Submits a job and reads what it staged; the command is ended."""
    with submit.submitting(cloud, place.folder, command) as driver:
        job = driver.job()
    job.end("CANCELLED")
    data = read(job.options["pipelineUrl"])
    names = graph.staged_names(beam_runner_api_pb2.Pipeline.FromString(data))
    staged = {name: read(url) for name, (url, _) in names.items()}
    return Submission(place, job, data, staged)


@pytest.fixture(scope="module")
def submission(_emulator: Emulator, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Submission]:
    with pytest.MonkeyPatch.context() as patch, clouds.running() as cloud:
        patch.setenv("STORAGE_EMULATOR_HOST", _emulator.url)
        patch.setattr(gcs, "_process", gcs._Process())
        place = make_place(_emulator.new_bucket(), tmp_path_factory.mktemp("submission"))
        yield capture(cloud, place, place.submitted())


def test_the_request_asks_the_service_for_a_batch_job_of_this_python_and_beam(submission: Submission) -> None:
    [pool] = submission.job.request["environment"]["workerPools"]
    [image] = pool["sdkHarnessContainerImages"]
    assert pool["kind"] == "harness"  # That of the service; "local" would be another path through Beam.
    assert image["containerImage"].endswith(f"sdk:{beam.version.__version__}")
    assert submission.job.request["environment"]["version"]["job_type"] == "FNAPI_BATCH"
    assert submission.job.options["project"] == clouds.PROJECT


def test_what_is_staged_is_what_the_request_names(submission: Submission) -> None:
    assert hashlib.sha256(submission.graph).hexdigest() == submission.job.options["pipelineProtoHash"]
    hashes = {name: hashlib.sha256(data).hexdigest() for name, data in submission.staged.items()}
    assert hashes == {name: sha256 for name, (_, sha256) in graph.staged_names(submission.pipeline).items()}


def test_the_staged_package_has_every_module_of_both_packages(submission: Submission) -> None:
    with tarfile.open(fileobj=io.BytesIO(submission.staged["workflow.tar.gz"])) as archive:
        staged = {name.partition("/")[2] for name in archive.getnames()}
    ours = [path for package in ("pipelines", "transforms") for path in (submit.ROOT / package).rglob("*.py")]
    assert {str(path.relative_to(submit.ROOT)) for path in ours} <= staged
    assert not [name for name in staged if name.startswith("tests")]


def test_the_users_own_step_module_is_staged(submission: Submission) -> None:
    found = []
    for name in submission.staged["extra_packages.txt"].decode().split():
        with tarfile.open(fileobj=io.BytesIO(submission.staged[name])) as archive:
            modules = [archive.extractfile(member) for member in archive if member.name.endswith("/my_steps.py")]
            found += [module.read().decode() for module in modules if module is not None]
    assert found == [STEP]


def test_no_main_session_is_staged_and_nothing_in_the_graph_is_of_the_main_module(submission: Submission) -> None:
    assert "pickled_main_session" not in submission.staged
    pickles = list(graph.pickles(submission.pipeline))
    assert len(pickles) > 10
    assert not [pickled for pickled in pickles if b"__main__" in pickled]


def test_the_graph_is_as_small_for_ten_thousand_inputs_as_for_few(
    emulator: Emulator, cloud: Cloud, submission: Submission
) -> None:
    place = submission.place
    # A listed name that does not exist is an input, too: it becomes a dead letter.
    names = [f"{place.bucket}/raw/f{number}.tfrecord" for number in range(10_000)]
    (place.folder / "names").write_text("\n".join(names))
    command = [f"@{place.folder}/names" if word.endswith("/raw/") else word for word in place.submitted(out="two")]
    many = capture(cloud, place, command)
    assert len(read(f"{place.bucket}/two/_gristmill/inputs.jsonl").splitlines()) == 10_000
    assert len(many.graph) < LARGEST_GRAPH
    assert abs(len(many.graph) - len(submission.graph)) < 500  # Numbers have more digits, and it is compressed.


# What is shuffled.


def test_what_is_grouped_comes_from_where_only_numbers_are(submission: Submission) -> None:
    # Records are between ReadRecords and WriteShards; their batches go from one DoFn to the next, and into no group.
    assert graph.grouped(submission.pipeline) == {
        "ConvertCorpus/ReadPlan/Spread": "ConvertCorpus/ReadPlan/ListShards",
        "ConvertCorpus/CollectShards/CombinePerKey/GroupByKey": "ConvertCorpus/CollectShards/KeyWithVoid",
        "ConvertCorpus/RepeatShards/Spread": "ConvertCorpus/RepeatShards/FindApart",
        "ConvertCorpus/CollectAll/CombinePerKey/GroupByKey": "ConvertCorpus/CollectAll/KeyWithVoid",
        "ConvertCorpus/Publish/Spread": "ConvertCorpus/Publish/Number",
        "ConvertCorpus/Publish/CountNames/CombinePerKey/GroupByKey": "ConvertCorpus/Publish/CountNames/KeyWithVoid",
    }
    inside = "ConvertCorpus/ConvertShards"
    assert graph.consumers(submission.pipeline, f"{inside}/ReadRecords/Read") == [f"{inside}/ApplySteps/Apply"]
    assert graph.consumers(submission.pipeline, f"{inside}/ApplySteps/Apply") == [f"{inside}/WriteShards/Write"]


def leaves(value: object) -> Iterator[str]:
    """Yields the types of all that a value is made of."""
    if dataclasses.is_dataclass(value):
        yield from leaves([getattr(value, field.name) for field in dataclasses.fields(value)])
    elif isinstance(value, dict):
        yield from leaves([*value, *value.values()])
    elif isinstance(value, list | tuple):
        for item in value:
            yield from leaves(item)
    else:
        yield type(value).__name__


def test_what_is_grouped_is_small_and_holds_no_bytes_whatever_the_payload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: Counter[str] = Counter()
    types: set[str] = set()
    coder = beam.coders.FastPrimitivesCoder()
    append = execution.GroupingBuffer.append

    def spy(self: execution.GroupingBuffer, data: bytes) -> None:
        sizes[corpus] += len(data)
        for windowed in self._pre_grouped_coder.get_impl().decode_all(data):
            types.update(leaves([coder.decode(encoded) for encoded in windowed.value]))
        append(self, data)

    monkeypatch.setattr(execution.GroupingBuffer, "append", spy)
    for corpus, factor in (("small", 1), ("large", 100)):
        payloads = [jobs.payload(0, i) * factor for i in range(2_000)]
        jobs.write_tfrecord(tmp_path / corpus / "in/f", payloads)
        command = ["--input", str(tmp_path / corpus / "in/f"), "--output", str(tmp_path / corpus / "out")]
        assert jobs.convert(*command, "--shards", "10") == 0
        assert len(jobs.shards(tmp_path / corpus / "out")) == 10
    assert types == {"int", "str", "bool", "NoneType"}
    assert 0 < sizes["small"] < 10 * 2_000
    assert abs(sizes["large"] - sizes["small"]) < 10 * 50  # Numbers have more digits.


# That it runs.


def convert_here(place: Place, folder: Path) -> Path:
    """Converts the corpus on this machine and returns the output."""
    done = jobs.spawn(place.command("local", "--workers", "0"), place.folder)
    assert done.returncode == 0, done.stderr
    return download(f"{place.bucket}/local", folder / "local")


def check_output(place: Place, folder: Path, local: Path) -> None:
    """Checks that the output is that of a job on this machine, and whole."""
    remote = download(f"{place.bucket}/out", folder / "remote")
    assert jobs.content(remote) == jobs.content(local)
    assert len(jobs.shards(remote)) == 6
    found, expected = jobs.report(remote), jobs.report(local)
    assert {name: found[name] for name in COUNTS} == {name: expected[name] for name in COUNTS}
    assert main(["verify", f"{place.bucket}/out"]) == 0


@pytest.mark.slow
def test_two_clean_workers_write_what_a_local_job_writes(
    emulator: Emulator, cloud: Cloud, base_python: Path, place: Place, tmp_path: Path
) -> None:
    local = convert_here(place, tmp_path)
    env = execute.machine_environment(cloud)
    with (
        execute.machines(tmp_path / "machines", base_python, env) as machines,
        submit.submitting(cloud, place.folder, place.submitted()) as driver,
    ):
        job = driver.job()
        (place.folder / "my_steps.py").unlink()
        execute.execute(job, machines)
        assert driver.wait() == 0, driver.text
    assert execute.foreign_modules(machines) == {0: [], 1: []}
    check_output(place, tmp_path, local)


@pytest.mark.slow
def test_a_detached_job_finishes_by_itself(
    emulator: Emulator,
    cloud: Cloud,
    base_python: Path,
    place: Place,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    local = convert_here(place, tmp_path)
    home = tmp_path / "home"
    home.mkdir()
    shutil.copy(place.folder / "my_steps.py", home)
    with submit.submitting(cloud, home, place.submitted("--detach")) as driver:
        job = driver.job()
        assert driver.wait() == 0, driver.text
    assert job.is_active
    shutil.rmtree(home)
    env = execute.machine_environment(cloud)
    with execute.machines(tmp_path / "machines", base_python, env) as machines:
        execute.execute(job, machines)
        assert job.state == "DONE", job.messages
    capsys.readouterr()
    assert main(["report", f"{place.bucket}/out", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["status"] == "done"
    check_output(place, tmp_path, local)


@pytest.mark.slow
def test_a_worker_that_is_killed_ends_the_job_and_another_runner_finishes_it(
    emulator: Emulator, cloud: Cloud, base_python: Path, place: Place, tmp_path: Path
) -> None:
    slow = "my_steps:keep,secs=0.005"
    env = execute.machine_environment(cloud)
    ledgers = GcsStore(f"{place.bucket}/out")
    with (
        execute.machines(tmp_path / "machines", base_python, env) as machines,
        submit.submitting(cloud, place.folder, place.submitted(step=slow)) as driver,
    ):
        job = driver.job()
        with execute.executing(job, machines) as process:
            while not list(ledgers.list("_gristmill/shards/")):
                assert process.poll() is None, machines.log()
                time.sleep(0.05)
            os.kill(int((machines.containers()[0] / "pid").read_text()), signal.SIGKILL)
            execute.finish(job, machines, process)
        assert job.state == "FAILED"
        assert driver.wait() == 1, driver.text
    committed = {name: ledgers.get(name) for name, _ in ledgers.list("_gristmill/shards/")}
    assert 0 < len(committed) < 6
    again = jobs.spawn(place.command("out", "--workers", "2", step=slow), place.folder)
    assert again.returncode == 0, again.stderr
    assert {name: ledgers.get(name) for name in committed} == committed
    done = jobs.spawn(place.command("local", "--workers", "2", step=slow), place.folder)
    assert done.returncode == 0, done.stderr
    check_output(place, tmp_path, download(f"{place.bucket}/local", tmp_path / "local"))


@pytest.mark.slow
def test_what_cannot_be_installed_ends_the_job_with_what_pip_says(
    emulator: Emulator, cloud: Cloud, base_python: Path, place: Place, tmp_path: Path
) -> None:
    with tarfile.open(tmp_path / "broken-1.tar.gz", "w:gz") as archive:
        (tmp_path / "setup.py").write_text("raise SystemExit('no compiler on this machine')")
        archive.add(tmp_path / "setup.py", "broken-1/setup.py")
    env = execute.machine_environment(cloud)
    package = f"--extra_package={tmp_path / 'broken-1.tar.gz'}"
    with (
        execute.machines(tmp_path / "machines", base_python, env) as machines,
        submit.submitting(cloud, place.folder, place.submitted(package)) as driver,
    ):
        execute.execute(driver.job(), machines)
        assert driver.wait() == 1
        assert "no compiler on this machine" in driver.text


@pytest.mark.slow
def test_a_graph_that_is_not_the_one_that_was_submitted_is_not_run(
    emulator: Emulator, cloud: Cloud, base_python: Path, submission: Submission, tmp_path: Path
) -> None:
    options = {**submission.job.options, "pipelineProtoHash": "0" * 64}
    job = Job({"name": "altered", "environment": {"sdkPipelineOptions": {"options": options}}}, "altered")
    with execute.machines(tmp_path / "machines", base_python, execute.machine_environment(cloud)) as machines:
        execute.execute(job, machines)
        assert machines.containers() == []
    assert job.state == "FAILED"
    assert "and should be 0000" in job.messages[0][1]


# How the command ends.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("state", "error", "said"),
    [
        ("FAILED", "Workflow failed. Causes: the workers' disk is full", "the workers' disk is full"),
        ("CANCELLED", "", "cancelled"),
    ],
    ids=["failed", "cancelled"],
)
def test_a_job_that_does_not_finish_ends_the_command_with_what_the_service_says(
    cloud: Cloud, place: Place, state: str, error: str, said: str
) -> None:
    with submit.submitting(cloud, place.folder, place.submitted()) as driver:
        driver.job().end(state, error)
        assert driver.wait() == 1, driver.text
        assert said in driver.text.lower()
