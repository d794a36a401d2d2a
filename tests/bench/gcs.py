"""Measures conversions from and to gs:// against the same ones on local files.

The service is the emulator of the tests, on the same machine and without the proxy in front of it. What it takes is
nobody's account: the commands are measured by a process of their own, of which the emulator is no child.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.bench import jobs
from tests.bench.datagen import Dataset
from tests.bench.jobs import Case
from tests.bench.measure import CommandFailed, Measurement, become_subreaper, run_command

SECTION = "gs://"
LOCAL = "gristmill, local files"
REMOTE = "gristmill, gs:// to gs://"


def measure_gcs(datasets: Sequence[Dataset], gristmill: str, workers: int, runs: int, work: Path) -> list[Case]:
    """Runs both rows on each data set, in turn, and returns them.

    Args:
        datasets: Text data sets, the smallest first.
        gristmill: The command to measure.
        workers: Its worker processes.
        runs: Counted runs of each row.
        work: Folder for outputs.
    """
    cases: list[Case] = []
    for dataset in datasets:
        with _storing(dataset) as bucket:
            section = f"{SECTION} {dataset.gigabytes:.3g} GB"
            local, remote = jobs.gristmill_command(gristmill, workers), _remote_command(gristmill, workers, bucket)
            made = [Case(section, LOCAL, dataset, local, runs, warm_up=False, workers=workers)]
            made += [Case(section, REMOTE, dataset, remote, runs, warm_up=False, workers=workers)]
            for case in made:
                case.run = run_apart
            made[1].check = lambda dataset, _, bucket=bucket: _check_bucket(dataset, bucket)
            jobs.run_interleaved(made, work)
            cases += made
    return cases


def run_apart(command: Sequence[str], log: Path) -> Measurement:
    """Measures a command as `run_command` does, from a process that has no other children.

    Raises:
        CommandFailed: It cannot be started or does not exit with 0.
    """
    measuring = [sys.executable, str(Path(__file__).resolve()), str(log), *command]
    ended = subprocess.run(measuring, stdout=subprocess.PIPE, text=True, check=False)
    fields = json.loads(ended.stdout or "{}")
    if "wall" not in fields:
        raise CommandFailed(fields.get("problem", f"the measuring process ended with {ended.returncode}"))
    return Measurement(**fields)


def _remote_command(gristmill: str, workers: int, bucket: str) -> jobs.MakeCommand:
    """Returns the conversion of a bucket's `raw/` to its `out/`."""
    local = jobs.gristmill_command(gristmill, workers)

    def command(dataset: Dataset, output: Path) -> list[str]:
        places = {dataset.pattern: f"{bucket}/raw/part-*.tfrecord", str(output): f"{bucket}/out"}
        return [places.get(word, word) for word in local(dataset, output)]

    return command


@contextlib.contextmanager
def _storing(dataset: Dataset) -> Iterator[str]:
    """Runs an emulator that holds a data set; yields the URL of its bucket. Commands find it by the environment."""
    sys.path.append(str(Path(__file__).resolve().parents[1]))  # Where the tests find one another.
    from gcs_emulator import emulating
    from transforms import gcs

    with emulating() as emulator:
        os.environ["STORAGE_EMULATOR_HOST"] = emulator.direct_url
        try:
            bucket = emulator.new_bucket()
            for path in sorted(dataset.folder.glob("part-*.tfrecord")):
                gcs.bucket(bucket.removeprefix("gs://")).blob(f"raw/{path.name}").upload_from_filename(path)
            yield bucket
        finally:
            del os.environ["STORAGE_EMULATOR_HOST"]
            gcs._begin_anew()


def _check_bucket(dataset: Dataset, bucket: str) -> None:
    """Raises CommandFailed unless the manifest has all records; deletes the output."""
    from transforms.finish import delete_all
    from transforms.gcs_store import GcsStore

    store = GcsStore(f"{bucket}/out")
    found = store.get("manifest.json")
    records = 0 if found is None else json.loads(found[0])["num_records"]
    delete_all(store, [name for name, _ in store.list("")])
    if records != dataset.records:
        raise CommandFailed(f"{records} records were written instead of {dataset.records}")


def main(log: str, *command: str) -> None:
    """Measures one command and prints the figures as JSON."""
    become_subreaper()
    try:
        print(json.dumps(dataclasses.asdict(run_command(command, Path(log)))))
    except CommandFailed as error:
        print(json.dumps({"problem": str(error)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
