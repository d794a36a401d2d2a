"""Measures the converter against a bare loop and the ArrayRecord Beam SDK; prints one table.

Run it from the repository's root: `python -m tests.bench.run`, or `python tests/bench/run.py`.
All rows are measured in one go on the same generated data, their runs taken in turn. The exit
status is 1 only if a command failed; a missed target is a figure like any other.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.bench import jobs, report
from tests.bench.datagen import Dataset, make_dataset
from tests.bench.failures import measure_failures
from tests.bench.gcs import measure_gcs
from tests.bench.isolation import measure_isolation
from tests.bench.jobs import Case
from tests.bench.measure import become_subreaper
from tests.bench.search import measure_search
from tests.bench.services import measure_services

UNITS = {"": 1, "B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
SDK_INSTALL = "python3.11 -m venv SDK && SDK/bin/pip install array-record-beam-sdk"
SCALING_HELP = "size of the text that one and two workers are compared on, 0 for none"
MEMORY_HELP = "sizes of text between which memory must not grow, with commas; '' for none"
GCS_HELP = "sizes of text to convert from and to an emulated gs://, with commas; '' for none"
WORK_HELP = "folder that caches generated data; without it, a temporary one that is removed"
SERVICE_HELP = "calls of a service that fails at random, is too small or goes down, a row, 0 for none"
SEARCH_HELP = "bytes without a record that the reader searches, 0 for none"
START_UP_RECORDS = 10


def parse_size(text: str) -> int:
    """Returns the bytes that a size such as 500MB or 1.5GiB stands for."""
    number = text.strip().rstrip("BbIiKkMmGg")
    unit = text.strip()[len(number) :].upper()
    try:
        return int(float(number) * UNITS[unit])
    except (KeyError, ValueError):
        raise argparse.ArgumentTypeError(f"not a size: {text!r}") from None


def parse_sizes(text: str) -> list[int]:
    """Returns the sizes in a list with commas; none in an empty one."""
    return [parse_size(part) for part in text.split(",") if part.strip()]


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Returns the flags."""
    parser = argparse.ArgumentParser(
        prog="tests.bench.run",
        description=(__doc__ or "").split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    beside = str(Path(sys.executable).parent / "gristmill")
    add = parser.add_argument
    add("--text-bytes", type=parse_size, default="1GB", help="size of the text data, 0 for none")
    add("--blob-bytes", type=parse_size, default="1GB", help="size of the blob data, 0 for none")
    add("--files", type=int, default=8, help="files per data set")
    add("--runs", type=int, default=3, help="counted runs of each row, after a warm-up")
    add("--scaling-bytes", type=parse_size, default="2GB", help=SCALING_HELP)
    add("--scaling-runs", type=int, default=3, help="counted runs of each of those rows")
    add("--memory-bytes", type=parse_sizes, default="0.5GB,4GB", help=MEMORY_HELP)
    add("--memory-workers", type=int, default=os.cpu_count() or 1, help="workers of those rows")
    add("--gcs-bytes", type=parse_sizes, default="0.25GB,1GB", help=GCS_HELP)
    add("--gcs-runs", type=int, default=1, help="counted runs of each of those rows")
    add("--isolation-batches", type=int, default=200, help="batches to measure isolated steps on, 0 for none")
    add("--failing-records", type=int, default=20_000, help="records that a step fails on or drops, 0 for none")
    add("--gristmill", default=beside, help="the command to measure")
    add("--sdk-python", default=None, help=f"Python that has the Beam SDK, made by: {SDK_INSTALL}")
    add("--sdk-runs", type=int, default=1, help="counted runs of the SDK's rows, 0 for no rows")
    add("--sdk-shards", type=int, default=50, help="files that the SDK is told to write")
    add("--search-bytes", type=parse_size, default="100MB", help=SEARCH_HELP)
    add("--service-calls", type=int, default=2000, help=SERVICE_HELP)
    add("--work", type=Path, default=None, help=WORK_HELP)
    add("--keep", action="store_true", help="keep the generated data in a temporary folder too")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Measures and prints everything; returns the exit status."""
    args = parse_args(argv)
    become_subreaper()
    cases: list[Case] = []
    with work_folder(args.work, args.keep) as work:
        for make_cases in (main_cases, scaling_cases, memory_cases):
            made = make_cases(args, work / "data")
            jobs.run_interleaved(made, work)
            cases += made
            if not (args.work or args.keep):
                shutil.rmtree(work / "data", ignore_errors=True)
        texts = [generate(work / "data", "text", size, args.files) for size in args.gcs_bytes]
        cases += measure_gcs(texts, args.gristmill, args.memory_workers, args.gcs_runs, work)
    isolation_us = measure_isolation(args.isolation_batches) if args.isolation_batches else None
    search = measure_search(args.search_bytes) if args.search_bytes else {}
    failures = measure_failures(args.failing_records) if args.failing_records else {}
    services = measure_services(args.service_calls) if args.service_calls else {}
    results = report.Results(cases, isolation_us, search, failures, services)
    print(describe(), report.format_table(results), "", report.format_targets(results), sep="\n")
    return int(any(case.failed for case in cases))


@contextlib.contextmanager
def work_folder(given: Path | None, keep: bool) -> Iterator[Path]:
    """Yields the folder for data and outputs; removes it at the end if it is a temporary one."""
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        yield given.resolve()
        return
    folder = Path(tempfile.mkdtemp(prefix="gristmill-bench-"))
    try:
        yield folder
    finally:
        if keep:
            print(f"kept {folder}", file=sys.stderr)
        else:
            shutil.rmtree(folder, ignore_errors=True)


def main_cases(args: argparse.Namespace, data: Path) -> list[Case]:
    """Returns the rows of both data sets, and the start-up of each."""
    cases: list[Case] = []
    for kind, size in (("text", args.text_bytes), ("blob", args.blob_bytes)):
        if size:
            small = generate(data, kind, size, 1, START_UP_RECORDS)
            cases += section_cases(args, f"{report.START_UP} {kind}", small, sdk_warm_up=True)
            chosen = jobs.gristmill_command(args.gristmill, "auto")
            cases.append(Case(f"{report.FEW} {kind}", jobs.AS_IT_COMES, small, chosen, args.runs))
            whole = generate(data, kind, size, args.files)
            cases += section_cases(args, kind, whole, sdk_warm_up=False)
    if cases:
        command = jobs.help_command(args.gristmill)
        cases.append(Case(jobs.HELP, jobs.HELP, cases[0].dataset, command, args.runs))
    return cases


def section_cases(args: argparse.Namespace, section: str, dataset: Dataset, sdk_warm_up: bool) -> list[Case]:
    """Returns a case of every row on one data set."""
    bare = jobs.bare_command(sys.executable)
    cases = [Case(section, jobs.BARE, dataset, bare, args.runs)]
    cores = os.cpu_count() or 1
    for row, workers in ((jobs.IN_PROCESS, 0), (jobs.ONE_WORKER, 1), (jobs.ALL_CORES, cores)):
        command = jobs.gristmill_command(args.gristmill, workers)
        cases.append(Case(section, row, dataset, command, args.runs, workers=workers))
    if args.sdk_runs:
        sdk = jobs.sdk_command(args.sdk_python or "", args.sdk_shards)
        case = Case(section, jobs.SDK, dataset, sdk, args.sdk_runs, warm_up=sdk_warm_up)
        case.problem = "" if args.sdk_python else f"{SDK_INSTALL}; then --sdk-python"
        cases.append(case)
    return cases


def scaling_cases(args: argparse.Namespace, data: Path) -> list[Case]:
    """Returns one and two workers on text in several files and in one."""
    cases = []
    for files in (args.files, 1) if args.scaling_bytes else ():
        dataset = generate(data, "text", args.scaling_bytes, files)
        section = f"{report.SCALING} {dataset.gigabytes:.3g} GB, {files} file{'s'[: files - 1]}"
        cases += [workers_case(args, section, dataset, workers, args.scaling_runs) for workers in (1, 2)]
    return cases


def memory_cases(args: argparse.Namespace, data: Path) -> list[Case]:
    """Returns the same row on text of several sizes, one run of each."""
    cases = []
    for size in args.memory_bytes:
        dataset = generate(data, "text", size, args.files)
        section = f"{report.MEMORY} {dataset.gigabytes:.3g} GB"
        cases.append(workers_case(args, section, dataset, args.memory_workers, 1))
    return cases


def workers_case(args: argparse.Namespace, section: str, dataset: Dataset, workers: int, runs: int) -> Case:
    """Returns a gristmill row without a warm-up, named by its number of workers."""
    command = jobs.gristmill_command(args.gristmill, workers)
    row = report.workers_row(workers)
    return Case(section, row, dataset, command, runs, warm_up=False, workers=workers)


def generate(data: Path, kind: str, size: int, files: int, records: int | None = None) -> Dataset:
    """Returns a data set, and says on standard error that it is being made."""
    amount = f"{records} records" if records else f"{size / 1e9:.3g} GB"
    print(f"data: {kind}, {amount} in {files} file(s)", file=sys.stderr)
    return make_dataset(data, kind, size, files, records)


def describe() -> str:
    """Returns what the table was measured on and how."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("array-record", "apache-beam"))
    return (
        f"{os.cpu_count()} cores, Python {platform.python_version()}, {versions}\n"
        "Times and memory: median (smallest-largest) of the runs. Net CPU: less the start-up, "
        f"which is the same command on {START_UP_RECORDS} records.\n"
    )


if __name__ == "__main__":
    sys.exit(main())
