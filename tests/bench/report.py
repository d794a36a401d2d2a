"""Prints the benchmark table, and below it a line per target."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterable, Sequence

from tests.bench import failures, gcs
from tests.bench.jobs import ALL_CORES, AS_IT_COMES, BARE, HELP, IN_PROCESS, ONE_WORKER, SDK, Case
from tests.bench.search import KINDS, MAX_EXTRA_MB
from tests.bench.services import (
    BEST,
    IDEAL,
    MAX_IN_FLIGHT,
    NOISE,
    OUTAGE,
    OUTAGE_SECS,
    QUEUES,
    REFUSES,
    RETRY_AFTER,
    Figures,
)

START_UP = "start-up"
FEW = "10 records,"
SCALING = "scaling"
MEMORY = "memory"
COLUMNS = (
    "data set",
    "row",
    "runs",
    "wall s",
    "CPU s",
    "start-up CPU s",
    "peak MB",
    "records/s per core",
    "net CPU / bare",
    "wall / bare",
)
GRISTMILL_ROWS = (IN_PROCESS, ONE_WORKER, ALL_CORES)
MANDATED_SECS = 5.0
"""What the waits for retries may add: the last record may wait up to 1 s, and again up to 2 s, then up to 4 s."""
MEMORY_BASE_BYTES = 250e6
MEMORY_WORKER_BYTES = 250e6

Choose = Callable[[list[float]], float]


@dataclasses.dataclass(frozen=True)
class Target:
    """A figure beside what it should be.

    Attributes:
        name: What is compared.
        figure: The measured figure as text, or why there is none.
        wanted: The limit as text.
        met: Whether the figure keeps to the limit; None if it was not measured.
    """

    name: str
    figure: str
    wanted: str
    met: bool | None


class Results:
    """All measured cases, found by section and row.

    Args:
        cases: The cases.
        isolation_us: What isolation adds to a record of 1 KB, in microseconds; None if it was not measured.
        search: (MB/s, extra MB of memory) of looking for a record, by kind of bytes.
        failures: Microseconds that a record costs beyond its step, by what becomes of it.
        services: What was found with services that fail, by row.
    """

    def __init__(
        self,
        cases: Iterable[Case],
        isolation_us: float | None = None,
        search: dict[str, tuple[float, float]] | None = None,
        failures: dict[str, float] | None = None,
        services: dict[str, Figures] | None = None,
    ) -> None:
        self.cases = list(cases)
        self.isolation_us = isolation_us
        self.search = search or {}
        self.failures = failures or {}
        self.services = services or {}
        self._by_name = {(case.section, case.row): case for case in self.cases}

    def sections(self, kind: str) -> list[str]:
        """Returns the sections whose name starts with a word, in order."""
        return list(dict.fromkeys(c.section for c in self.cases if c.section.startswith(kind)))

    def pick(self, section: str, row: str, what: str, choose: Choose) -> float | None:
        """Returns one value of an attribute of a row's runs, if there are any."""
        case = self._by_name.get((section, row))
        return case.pick(what, choose) if case else None

    def median(self, section: str, row: str, what: str) -> float | None:
        """Returns the median of an attribute of a row's runs, if there are any."""
        return self.pick(section, row, what, statistics.median)

    def start_up_cpu(self, section: str, row: str, choose: Choose = statistics.median) -> float | None:
        """Returns the CPU seconds of a row's command on 10 records."""
        return self.pick(f"{START_UP} {section}", row, "cpu", choose)

    def net_cpu(self, section: str, row: str, choose: Choose = statistics.median) -> float | None:
        """Returns the CPU seconds of a row without those of its start-up."""
        cpu = self.pick(section, row, "cpu", choose)
        start_up = self.start_up_cpu(section, row, choose)
        return None if cpu is None or start_up is None else cpu - start_up

    def gigabytes(self, section: str) -> float:
        """Returns the size of a section's data set."""
        return next(case.dataset.gigabytes for case in self.cases if case.section == section)


def format_table(results: Results) -> str:
    """Returns the table of all rows but those of the start-up, which have a column."""
    shown = [case for case in results.cases if not case.section.startswith(START_UP)]
    lines = [COLUMNS] + [_cells(results, case) for case in shown]
    full = [line for line in lines if len(line) == len(COLUMNS)]
    names = [max(len(line[i]) for line in lines) for i in range(2)]
    widths = names + [max(len(line[i]) for line in full) for i in range(2, len(COLUMNS))]
    rule = tuple("-" * width for width in widths)
    return "\n".join(_line(cells, widths) for cells in (lines[0], rule, *lines[1:]))


def format_targets(results: Results) -> str:
    """Returns a line per target: its figure, its limit, and ok or MISSED."""
    words = {True: "ok", False: "MISSED", None: "not measured"}
    targets = list(all_targets(results))
    width = max((len(target.name) for target in targets), default=0)
    return "\n".join(f"{t.name.ljust(width)}  {t.figure} (target {t.wanted})  {words[t.met]}" for t in targets)


def all_targets(results: Results) -> Iterable[Target]:
    """Yields every target that the sections of a run have figures for."""
    for section in results.sections("text"):
        yield from _cpu_ratio(results, section)
    for section in results.sections("blob"):
        yield from _cpu_difference(results, section)
        yield _ratio(
            f"{section}: wall, all cores to one worker",
            results.median(section, ALL_CORES, "wall"),
            results.median(section, ONE_WORKER, "wall"),
            most=1.0,
        )
    for section in results.sections(SCALING):
        yield _ratio(
            f"{section}: wall, two workers to one",
            results.median(section, workers_row(2), "wall"),
            results.median(section, ONE_WORKER, "wall"),
            most=0.62,
        )
    for section, wall, memory in (("text", 3, 8), ("blob", 3, 10)):
        if results.sections(section):
            yield from _against_sdk(results, section, wall, memory)
    yield from _memory_limits(results)
    yield from _memory_growth(results, MEMORY)
    yield from _against_local(results)
    yield from _memory_growth(results, gcs.SECTION)
    yield from _start_up(results)
    if results.isolation_us is not None:
        figure = f"{results.isolation_us:.1f} us a record"
        yield Target("isolation: beyond a plain step, 1 KB records", figure, "<= 30 us", results.isolation_us <= 30)
    for kind, spent in results.failures.items():
        most = failures.MOST_US[kind]
        yield Target(f"records, {kind}: beyond the step", f"{spent:.1f} us a record", f"<= {most} us", spent <= most)
    for kind, (speed, extra) in results.search.items():
        wanted = f">= {KINDS[kind]} MB/s, <= {MAX_EXTRA_MB} MB"
        met = speed >= KINDS[kind] and extra <= MAX_EXTRA_MB
        yield Target(f"search for a record, {kind} bytes", f"{speed:.0f} MB/s, {extra:.0f} MB more memory", wanted, met)
    yield from _services(results)


def workers_row(workers: int) -> str:
    """Returns the name of a row with that many workers."""
    return ONE_WORKER if workers == 1 else f"gristmill, {workers} workers"


def _cells(results: Results, case: Case) -> tuple[str, ...]:
    """Returns the cells of a row; fewer than there are columns if it has no figures."""
    wall, cpu = case.median("wall"), case.median("cpu")
    if wall is None or cpu is None:
        return case.section, case.row, "-", f"not measured: {case.problem or 'no runs'}"
    bare_wall = results.median(case.section, BARE, "wall")
    bare_cpu = results.net_cpu(case.section, BARE)
    return (
        case.section,
        case.row,
        str(len(case.results)),
        _spread(case.values("wall")),
        _spread(case.values("cpu")),
        _number(results.start_up_cpu(case.section, case.row)),
        _spread([peak / 1e6 for peak in case.values("peak_bytes")], digits=0),
        "-" if case.row == HELP else f"{case.dataset.records / cpu:,.0f}",
        _number(_divide(results.net_cpu(case.section, case.row), bare_cpu)),
        _number(_divide(wall, bare_wall)),
    )


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    """Returns a line of the table, words to the left and figures to the right."""
    left = [cell.ljust(width) for cell, width in zip(cells[:2], widths, strict=False)]
    if len(cells) < len(widths):
        return "  ".join([*left, cells[2].rjust(widths[2]), cells[3]])
    right = [cell.rjust(width) for cell, width in zip(cells[2:], widths[2:], strict=True)]
    return "  ".join(left + right)


def _cpu_ratio(results: Results, section: str) -> Iterable[Target]:
    """Yields the text target: net CPU against the bare loop's."""
    for row in (IN_PROCESS, ONE_WORKER):
        own, bare = results.net_cpu(section, row), results.net_cpu(section, BARE)
        target = _ratio(f"{section}: net CPU, {row} to {BARE}", own, bare, most=1.15)
        own, bare = (results.net_cpu(section, name, min) for name in (row, BARE))
        best = f"{target.figure}, {_number(_divide(own, bare))} by the fastest runs"
        yield dataclasses.replace(target, figure=best)


def _cpu_difference(results: Results, section: str) -> Iterable[Target]:
    """Yields the blob target: CPU seconds per GB beyond the bare loop's."""
    for row in (IN_PROCESS, ONE_WORKER):
        name, wanted = f"{section}: net CPU, {row} beyond {BARE}", "<= 2 s per GB"
        own, bare = results.net_cpu(section, row), results.net_cpu(section, BARE)
        if own is None or bare is None:
            yield Target(name, "-", wanted, None)
        else:
            extra = (own - bare) / results.gigabytes(section)
            yield Target(name, f"{extra:+.2f} s per GB", wanted, extra <= 2)


def _against_sdk(results: Results, section: str, wall: float, memory: float) -> Iterable[Target]:
    """Yields the targets for wall time and memory against the SDK."""
    yield _ratio(
        f"{section}: wall, {SDK} to {ALL_CORES}",
        results.median(section, SDK, "wall"),
        results.median(section, ALL_CORES, "wall"),
        least=wall,
    )
    yield _ratio(
        f"{section}: peak memory, {SDK} to {ALL_CORES}",
        results.median(section, SDK, "peak_bytes"),
        results.median(section, ALL_CORES, "peak_bytes"),
        least=memory,
    )


def _memory_limits(results: Results) -> Iterable[Target]:
    """Yields a target per gristmill row: the most memory that it took on any data set."""
    own = [case for case in results.cases if case.row.startswith("gristmill") and case.row != HELP]
    for row in dict.fromkeys(case.row for case in own):
        cases = [case for case in own if case.row == row]
        limit = MEMORY_BASE_BYTES + MEMORY_WORKER_BYTES * max(1, cases[0].workers)
        peaks = [peak for case in cases for peak in case.values("peak_bytes")]
        name, wanted = f"peak memory, {row}, any data set", f"<= {limit / 1e6:.0f} MB"
        if peaks:
            yield Target(name, f"{max(peaks) / 1e6:.0f} MB", wanted, max(peaks) <= limit)
        else:
            yield Target(name, "-", wanted, None)


def _against_local(results: Results) -> Iterable[Target]:
    """Yields the target for the CPU of a conversion on gs://, the service's own left out."""
    for section in results.sections(gcs.SECTION):
        own, local = (results.median(section, row, "cpu") for row in (gcs.REMOTE, gcs.LOCAL))
        yield _ratio(f"{section}: CPU, {gcs.REMOTE} to {gcs.LOCAL}", own, local, most=1.3)


def _memory_growth(results: Results, kind: str) -> Iterable[Target]:
    """Yields the target that memory does not grow from the first to the last section of a kind."""
    sections = results.sections(kind)
    if len(sections) < 2:
        return
    row = [case.row for case in results.cases if case.section == sections[0]][-1]
    peaks = [results.median(section, row, "peak_bytes") for section in sections]
    growth = _divide(peaks[-1], peaks[0])
    yield Target(
        f"peak memory, {row}, {sections[-1].removeprefix(kind + ' ')} against {sections[0].removeprefix(kind + ' ')}",
        "-" if growth is None else f"{100 * (growth - 1):+.1f} %",
        "within 10 %",
        None if growth is None else abs(growth - 1) <= 0.1,
    )


def _services(results: Results) -> Iterable[Target]:
    """Yields the targets for services that fail."""
    rows = results.services
    if not rows:
        return
    ideal = rows[IDEAL].secs
    for name in (NOISE, RETRY_AFTER):
        limit = 2 * ideal + MANDATED_SECS + (name == RETRY_AFTER)
        yield _seconds(f"service, {name}: {rows[name].records} records, ideal {ideal:.1f} s", rows[name].secs, limit)
    best = rows[BEST].rate
    for name in (REFUSES, QUEUES):
        yield _ratio(f"service, {name}: records a second to {BEST}, {best:.0f}", rows[name].rate, best, least=0.8)
    yield _ratio(
        f"service, {REFUSES}: refused calls to records", rows[REFUSES].refused, rows[REFUSES].records, most=0.1
    )
    calls, most = rows[OUTAGE].refused, 2.5 * MAX_IN_FLIGHT
    yield Target(f"service, {OUTAGE}: calls meanwhile", str(calls), f"<= {most:.0f}", calls <= most)
    limit = 2 * rows[OUTAGE].records / rows[IDEAL].rate + 2.5 * OUTAGE_SECS
    yield _seconds(f"service, {OUTAGE}: {rows[OUTAGE].records} records", rows[OUTAGE].secs, limit)


def _start_up(results: Results) -> Iterable[Target]:
    """Yields the targets for the wall time of `--help` and of a job on 10 records."""
    yield _seconds("gristmill --help: wall", results.median(HELP, HELP, "wall"), 0.3)
    for section in results.sections(FEW):
        yield _seconds(f"{section} {AS_IT_COMES}: wall", results.median(section, AS_IT_COMES, "wall"), 3.0)


def _seconds(name: str, figure: float | None, limit: float) -> Target:
    """Returns a target for a time."""
    wanted = f"< {limit:g} s"
    if figure is None:
        return Target(name, "-", wanted, None)
    return Target(name, f"{figure:.2f} s", wanted, figure < limit)


def _ratio(name: str, top: float | None, bottom: float | None, most: float = 0, least: float = 0) -> Target:
    """Returns a target for a ratio, which has either a largest or a smallest value."""
    ratio = _divide(top, bottom)
    wanted = f"<= {most:g}" if most else f">= {least:g}"
    if ratio is None:
        return Target(name, "-", wanted, None)
    return Target(name, f"{ratio:.2f}", wanted, ratio <= most if most else ratio >= least)


def _divide(top: float | None, bottom: float | None) -> float | None:
    """Returns a quotient, None if either part is missing or the divisor is not positive."""
    return None if top is None or bottom is None or bottom <= 0 else top / bottom


def _number(value: float | None) -> str:
    """Returns a figure with two decimals, or a dash."""
    return "-" if value is None else f"{value:.2f}"


def _spread(values: Sequence[float], digits: int = 2) -> str:
    """Returns the median of some values, and their range if there are several."""
    median = f"{statistics.median(values):.{digits}f}"
    if len(values) == 1:
        return median
    return f"{median} ({min(values):.{digits}f}-{max(values):.{digits}f})"
