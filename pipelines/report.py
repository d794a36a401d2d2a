"""`gristmill report`: what became of every record, rebuilt from the ledgers."""

from __future__ import annotations

import json
import sys
from typing import Any

from pipelines.errors import DONE
from pipelines.output import open_job
from transforms.budget import ESTIMATE, say_letters
from transforms.finish import write_report
from transforms.state import read_report
from transforms.store import OutputError, Store
from transforms.whole import build_whole


def run(output: str, *, as_json: bool) -> int:
    """Rebuilds, writes and prints the report of an output directory.

    Raises:
        UsageError: There is no job in the directory.
    """
    store, report = load_report(output)
    try:
        write_report(store, report)
    except (OutputError, OSError) as error:
        print(f"gristmill report: it is not written down: {error}", file=sys.stderr)
    if as_json:
        print(json.dumps(report, indent=1))
    else:
        print_report(store, report)
    return DONE


def load_report(output: str) -> tuple[Store, dict[str, Any]]:
    """Returns the directory's store and its report, rebuilt from the ledgers.

    Raises:
        UsageError: There is no job in the directory.
    """
    with open_job(output) as store:
        report = build_whole(store)
    before = read_report(store)
    if before is not None and before["plan_id"] == report["plan_id"]:
        report["seconds"] = before["seconds"]
    return store, report


def print_report(store: Store, report: dict[str, Any], generation: str = "") -> None:
    """Prints the report in a screen's length; with the name of a generation, it is said to be of that alone."""
    alone = f", {generation} alone" if generation else ""
    print(f"\n{report['status']}: {store.root}{alone}" + (f"\n  {report['message']}" if report["message"] else ""))
    if report["status"] == "over_budget":
        print(
            "  next     look at the dead letters; mend what fails, or allow more: --set dead_letters.max_fraction=..."
        )
    print_counts(report)
    for source in report.get("worst_sources", []) if report["status"] == "over_budget" else []:
        print(f"  worst    {source['source']}: {say_letters(source)}; {source['records_read']:,} read")
    if report["shards"]:
        first, last = report["shards"][0]["name"], report["shards"][-1]["name"]
        print(f"  shards   {len(report['shards'])}: {first}" + (f" to {last}" if last != first else ""))
    for one in report.get("generations", []):
        came = f"{one['letters_consumed']:,} dead letters" if one["kind"] == "replay" else "new inputs"
        counts = f"{one['records_written']:,} written in {one['shards']} shards, {one['records_dead']:,} dead"
        print(f"  {one['name']:8} {one['kind']} of {came}: {counts}")
    for note in report.get("notes", []):
        print(f"  note     {note}")
    if report["seconds"]:
        print(f"  seconds  {report['seconds']:,}")


def print_counts(report: dict[str, Any]) -> None:
    """Prints what was counted of records, files and bytes, as far as it was, and the reasons of losses."""
    _line("records", report, ("read", "added", "written", "dropped", "dead"))
    _line("files", report, ("seen", "read", "empty", "dead", "skipped", "duplicate"))
    _line("bytes", report, ("read", "written", "dead"))
    for kind in ("dead", "dropped"):
        reasons = report[f"{kind}_by_reason"]
        if reasons:
            most = sorted(reasons.items(), key=lambda item: -item[1])[:10]
            print(f"  {kind:8} " + ", ".join(f"{reason} {count:,}" for reason, count in most))


def _line(kind: str, report: dict[str, Any], names: tuple[str, ...]) -> None:
    counted = [(name, report[f"{kind}_{name}"]) for name in names if f"{kind}_{name}" in report]
    if not counted:
        return
    texts = [f"{count:,} {name}" for name, count in counted]
    if kind == "records" and report.get(ESTIMATE, 0) > report["records_dead"]:
        texts[-1] = say_letters(report)
    print(f"  {kind:8} " + ", ".join(texts))
