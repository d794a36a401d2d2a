"""Puts the figures of a simulation into tables, and the arithmetic of the costs into lines that can be followed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from simulate.bottlenecks import Bottleneck, Gathering
from simulate.corpus import Corpus
from simulate.events import Outcome
from simulate.rates import Rates
from simulate.work import Shard

_TB = 1e12
_ACTIONS = ("insert", "copy", "list", "get", "look", "miss", "delete")


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns rows in columns: the first to the left, the others to the right."""
    lines = [list(header), *map(list, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def amount(num_bytes: float) -> str:
    """Returns bytes in the unit that suits them."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:,.1f} {unit}"
    return f"{num_bytes:,.0f} B"


def span(secs: float) -> str:
    """Returns seconds in the unit that suits them."""
    if secs >= 5400:
        return f"{secs / 3600:,.1f} h"
    return f"{secs / 60:,.1f} min" if secs >= 120 else f"{secs:,.1f} s"


def describe_corpus(corpus: Corpus, sizes: np.ndarray) -> str:
    """Returns how many files there are, and how large."""
    giants = int((sizes >= 100e9).sum())
    median, mean, largest = (amount(float(one)) for one in (np.median(sizes), sizes.mean(), sizes.max()))
    return (
        f"{corpus.files:,} files, {amount(float(sizes.sum()))} (seed {corpus.seed}): "
        f"median {median}, mean {mean}, largest {largest}, {giants} of 100 GB or more"
    )


def planning(all_facts: list[dict[str, Any]]) -> str:
    """Returns a row for each number of files that was planned."""
    header = (
        "files",
        "list CPU s",
        "cut CPU s",
        "wall s",
        "peak MB",
        "at start MB",
        "inputs.jsonl",
        "plan.jsonl",
        "graph bytes",
        "shards",
    )
    return table(header, (
        (
            f"{facts['files']:,}", f"{facts['list_secs']:.1f}", f"{facts['cut_secs']:.1f}", f"{facts['wall_secs']:.0f}",
            f"{facts['peak_bytes'] / 1e6:.0f}", f"{facts['start_bytes'] / 1e6:.0f}",
            amount(facts["inputs_bytes"]), amount(facts["plan_bytes"]),
            f"{facts['graph_bytes']:,}", f"{facts['shards']:,}",
        )
        for facts in all_facts
    ))  # fmt: skip


def shards_line(facts: dict[str, Any], shards: list[Shard]) -> str:
    """Returns how even the shards are."""
    mean = facts["bytes"] / facts["shards"]
    files = [shard.num_files for shard in shards]
    return (
        f"{facts['shards']:,} shards of {amount(facts['smallest'])} to {amount(facts['largest'])}; the largest is "
        f"{facts['largest'] / mean:.3f} of the mean. A shard reads {min(files):,} to {max(files):,} files."
    )


def balance(outcomes: dict[str, Outcome]) -> str:
    """Returns a row for each fleet."""
    header = ("fleet", "makespan", "/ ideal", "utilisation", "99% done at", "tail", "lost work", "done again")
    return table(header, (
        (
            name, span(one.makespan), f"{one.makespan / one.ideal_secs:.3f}", f"{one.utilisation:.1%}",
            span(one.done_at(0.99)), span(one.tail_secs), span(one.lost_secs), f"{one.num_repeated:,}",
        )
        for name, one in outcomes.items()
    ))  # fmt: skip


def operations(costs: dict[str, dict[str, float]], rates: Rates) -> str:
    """Returns a row for each phase, its requests by kind and their price."""
    header = ("phase", "insert A", "copy A", "list A", "get B", "look B", "nothing there", "delete", "$")
    rows = (
        (phase, *(f"{row.get(action, 0):,.0f}" for action in _ACTIONS), f"{row['$']:,.2f}")
        for phase, row in costs.items()
    )
    note = f"A: ${rates.class_a:.2f} a million, B: ${rates.class_b:.2f}; what finds nothing, and deletions, are free"
    return f"{table(header, rows)}\n{note}"


def bottlenecks(found: list[Bottleneck]) -> str:
    """Returns a row for each, with what it grows with."""
    header = ("what", "takes", "who", "bound by", "grows with")
    rows = [(one.name, span(one.secs), one.where, one.bound, one.grows) for one in found]
    waiting = sum(one.secs for one in found if not one.meanwhile)
    return table(header, [*rows, ("before and after the fleet", span(waiting), "", "", "")])


def gathering_lines(gathering: Gathering, num_shards: int) -> str:
    """Returns what grows, and how far."""
    return (
        f"The list of all shards, gathered in one worker: {amount(gathering.coded_bytes)} coded, "
        f"{amount(gathering.memory_bytes)} in memory. It grows with the shards.\n"
        f"Ledgers hold a row of books a file: {amount(gathering.ledger_bytes)} in all, "
        f"{amount(gathering.ledger_bytes / num_shards)} each; the largest has {gathering.largest_rows:,} rows, "
        "which its worker holds in memory."
    )


def cost_per_tb(rates: Rates, files: float, shards: float, operations_cost: float) -> str:
    """Returns the arithmetic of a TB.

    Args:
        rates: The assumptions, with compression.
        files: Files a TB.
        shards: Shards a TB.
        operations_cost: $ of operations a TB.
    """
    both = (rates, rates.plainly())
    rows = [_steps(one, files, shards, operations_cost) for one in both]
    names = [name for name, _ in rows[0]]
    values = ([text for _, text in row] for row in rows)
    return table(("of 1 TB read", "zstd:3", "uncompressed"), zip(names, *values, strict=True))


def _steps(rates: Rates, files: float, shards: float, operations_cost: float) -> list[tuple[str, str]]:
    rate = min(rates.compress_rate, rates.download_rate)
    convert, upload = _TB / rate, _TB * (1 - rates.saving) / rates.upload_rate
    opening, waiting = files * rates.open_secs, shards * rates.shard_requests * rates.request_secs
    hours = (convert + upload + opening + waiting) / 3600
    return [
        ("read, check, write: 1 TB / rate", f"/ {rate / 1e6:.0f} MB/s = {convert:,.0f} s"),
        (
            "upload: what is written / rate",
            f"{1 - rates.saving:.2f} TB / {rates.upload_rate / 1e6:.0f} MB/s = {upload:,.0f} s",
        ),
        ("open files", f"{files:,.0f} x {rates.open_secs} s = {opening:,.0f} s"),
        (
            "small requests of shards",
            f"{shards:,.0f} x {rates.shard_requests:.0f} x {rates.request_secs} s = {waiting:,.0f} s",
        ),
        ("vCPU hours", f"{hours:.2f}"),
        (f"  x vCPU ${rates.vcpu_hour}", f"${hours * rates.vcpu_hour:.3f}"),
        (f"  x {rates.memory} GB x ${rates.memory_hour}", f"${hours * rates.memory * rates.memory_hour:.3f}"),
        (
            f"  x {rates.disk:.0f} GB disk x ${rates.disk_hour:.6f}".rstrip("0"),
            f"${hours * rates.disk * rates.disk_hour:.3f}",
        ),
        ("operations", f"${operations_cost:.3f}"),
        ("together", f"${hours * rates.worker_hour + operations_cost:.2f}"),
    ]
