"""The rows of the benchmark table: what each one runs, and how its runs are taken in turn."""

from __future__ import annotations

import dataclasses
import shutil
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from array_record.python.array_record_module import ArrayRecordReader

from tests.bench.datagen import Dataset
from tests.bench.measure import CommandFailed, Measurement, run_command

HERE = Path(__file__).resolve().parent
COMPRESSION = {"text": "zstd:3", "blob": "uncompressed"}
OUTPUT_NAMES = ("*.array_record*", "*.arrayrecord*")

BARE = "bare loop"
IN_PROCESS = "gristmill in-process"
ONE_WORKER = "gristmill, one worker"
ALL_CORES = "gristmill, all cores"
AS_IT_COMES = "gristmill as it comes"
SDK = "array_record Beam SDK"
HELP = "gristmill --help"

MakeCommand = Callable[[Dataset, Path], list[str]]


@dataclasses.dataclass
class Case:
    """A command on a data set, and the runs measured so far.

    Attributes:
        section: The part of the benchmark it belongs to, such as `text`.
        row: The name of its row.
        dataset: What it converts.
        command: Makes the command from the data set and an output folder.
        runs: How many runs count.
        warm_up: Whether a run that does not count goes first.
        workers: How many worker processes the memory target allows for.
        run: What runs and measures the command.
        check: Raises CommandFailed if its output is wrong; by default all records must be in the output folder.
        results: The runs that counted.
        problem: Why there are no runs, or none that can be trusted.
        failed: Whether that is because a run failed.
    """

    section: str
    row: str
    dataset: Dataset
    command: MakeCommand
    runs: int
    warm_up: bool = True
    workers: int = 1
    run: Callable[[Sequence[str], Path], Measurement] = run_command
    check: Callable[[Dataset, Path], None] | None = None
    results: list[Measurement] = dataclasses.field(default_factory=list)
    problem: str = ""
    failed: bool = False

    def median(self, what: str) -> float | None:
        """Returns the median of an attribute of the runs, None without runs."""
        return self.pick(what, statistics.median)

    def pick(self, what: str, choose: Callable[[list[float]], float]) -> float | None:
        """Returns one value of an attribute of the runs, such as the least; None without runs."""
        values = self.values(what)
        return choose(values) if values else None

    def values(self, what: str) -> list[float]:
        """Returns an attribute of all runs; no runs of a case that failed."""
        return [] if self.problem else [getattr(result, what) for result in self.results]


def bare_command(python: str) -> MakeCommand:
    """Returns the bare loop."""

    def command(dataset: Dataset, output: Path) -> list[str]:
        options = f"group_size:1,{COMPRESSION[dataset.kind]}"
        return [python, str(HERE / "bare_loop.py"), *_in_out(dataset, output), "--options", options]

    return command


def gristmill_command(gristmill: str, workers: int | str) -> MakeCommand:
    """Returns a conversion by gristmill with that many worker processes, or with as many as it chooses ("auto")."""

    def command(dataset: Dataset, output: Path) -> list[str]:
        compression = f"write.compression={COMPRESSION[dataset.kind]}"
        settings = ["--format", "tfrecord", "--workers", str(workers), "--set", compression]
        return [gristmill, "convert", *_in_out(dataset, output), *settings]

    return command


def help_command(gristmill: str) -> MakeCommand:
    """Returns gristmill's `--help`, which converts nothing."""
    return lambda dataset, output: [gristmill, "--help"]


def sdk_command(python: str, shards: int) -> MakeCommand:
    """Returns a conversion by the ArrayRecord Beam SDK, which has no choice of compression."""

    def command(dataset: Dataset, output: Path) -> list[str]:
        script = str(HERE / "sdk_convert.py")
        return [python, script, *_in_out(dataset, output), "--num-shards", str(shards)]

    return command


def run_interleaved(cases: Sequence[Case], work: Path) -> None:
    """Runs all cases in turn: a warm-up round, then as many rounds as any case asks for."""
    _run_round([case for case in cases if case.warm_up and case.runs], work, "warm-up", False)
    for number in range(max((case.runs for case in cases), default=0)):
        todo = [case for case in cases if number < case.runs]
        _run_round(todo, work, f"run {number + 1}", True)


def count_records(output: Path) -> int:
    """Returns the records in all ArrayRecord files of a folder, by their own footers.

    Raises:
        CommandFailed: If one of the files cannot be read.
    """
    paths = {path for name in OUTPUT_NAMES for path in output.rglob(name)}
    return sum(map(_records_in, sorted(paths)))


def _records_in(path: Path) -> int:
    """Returns the records in one ArrayRecord file."""
    try:
        reader = ArrayRecordReader(str(path), "readahead_buffer_size:0,max_parallelism:0")
        if not reader.ok():
            raise ValueError("its reader is not ok")
        records = reader.num_records()
        reader.close()
    except (RuntimeError, ValueError) as error:
        raise CommandFailed(f"cannot read {path.name}: {error}") from error
    return int(records)


def _run_round(cases: Iterable[Case], work: Path, label: str, counts: bool) -> None:
    """Runs each case once, unless it failed before."""
    for case in cases:
        if case.problem:
            continue
        try:
            result = _run_once(case, work)
        except CommandFailed as error:
            case.problem, case.failed = str(error).splitlines()[0].rstrip(":"), True
            print(f"{case.section}, {case.row}: {error}", file=sys.stderr)
            continue
        if counts:
            case.results.append(result)
        print(
            f"{label}: {case.section}, {case.row}: {result.wall:.2f} s wall, "
            f"{result.cpu:.2f} s CPU, {result.peak_bytes / 1e6:.0f} MB",
            file=sys.stderr,
        )


def _run_once(case: Case, work: Path) -> Measurement:
    """Runs a case into a fresh folder, checks what it wrote and removes that."""
    output = work / "output"
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    try:
        result = case.run(case.command(case.dataset, output), work / "output.log")
        if case.row != HELP:
            (case.check or _check_output)(case.dataset, output)
        return result
    finally:
        shutil.rmtree(output, ignore_errors=True)


def _check_output(dataset: Dataset, output: Path) -> None:
    """Raises CommandFailed unless a folder holds as many records as were to be converted."""
    found = count_records(output)
    if found != dataset.records:
        raise CommandFailed(f"{found} records were written instead of {dataset.records}")


def _in_out(dataset: Dataset, output: Path) -> list[str]:
    """Returns the arguments that name the input and the output."""
    return ["--input", dataset.pattern, "--output", str(output)]
