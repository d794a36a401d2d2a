"""The last acts of a job: manifest, report, and the end of what is no longer needed. No Beam here."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from transforms.ahead import call_ahead, map_ahead
from transforms.books import Verdict
from transforms.elements import JobSpec, to_json
from transforms.generations import FINISHED_NAME, base_of
from transforms.journal import JOURNALS
from transforms.ledger import ATTEMPTS, read_published
from transforms.names import list_shard_files
from transforms.pieces import ALL_OF_PIECES
from transforms.report import build_report, committed_shards, load_spec
from transforms.shard_progress import PROGRESS
from transforms.state import MANIFEST_NAME, REPORT_NAME
from transforms.store import Store
from transforms.tries import TRIES
from transforms.whole import add_generations, build_whole, whole_spec

REPORT_HTML_NAME = "_gristmill/report.html"
REPLACED_NAME = "_gristmill/replaced.json"
"""Names of an older set that `--overwrite` replaces: they go once the new set is whole."""
ON_THE_WAY = (ATTEMPTS, TRIES, JOURNALS, PROGRESS, ALL_OF_PIECES)
"""What there is of shards that are not committed yet."""

_MANIFEST_VERSION = 1


def finish_job(store: Store, spec: JobSpec, verdict: Verdict) -> dict[str, Any]:
    """Writes manifest and report and tidies up; may be repeated.

    Args:
        store: The output directory.
        spec: The job.
        verdict: What the books said when the shards were published or not.

    Returns:
        The report.

    Raises:
        OutputError: It cannot be written, or another run has the lock of the output by now.
    """
    if spec.generation:
        return _finish_generation(store, spec, verdict)
    _, header = load_spec(store)
    report = build_report(store, spec, header)
    report["status"], report["message"] = verdict.status, verdict.message
    if verdict.status == "done":
        _delete_others(store, spec, {shard["name"] for shard in report["shards"]})
        report = add_generations(store, report)
        store.put(MANIFEST_NAME, to_json(make_manifest(spec, report), indent=1))
    else:
        report["shards"] = []
    write_report(store, report)
    if verdict.status == "done":
        delete_leftovers(store)
    return report


def _finish_generation(store: Store, spec: JobSpec, verdict: Verdict) -> dict[str, Any]:
    """Adds a generation to manifest and report; returns the report of the generation alone."""
    _, header = load_spec(store)
    report = build_report(store, spec, header)
    report["status"], report["message"] = verdict.status, verdict.message
    if verdict.status != "done":
        report["shards"] = []
        write_report(store, report)
        return report
    base = base_of(store)
    whole = build_whole(base, also=spec.generation)
    whole["seconds"] = report["seconds"]
    base.put(MANIFEST_NAME, to_json(make_manifest(whole_spec(base), whole), indent=1))
    write_report(base, whole)
    write_report(store, report)
    committed = (ledger for _, ledger in committed_shards(store, spec))  # Not from a listing alone, which may be late.
    delete_all(store, (file.name for ledger in committed for file in ledger.files()))
    delete_all(store, [name for prefix in ON_THE_WAY for name, _ in store.list(prefix)])
    store.put(FINISHED_NAME, to_json({"plan_id": spec.plan_id}))
    return report


def delete_leftovers(store: Store) -> None:
    """Deletes what a job needs only while it runs."""
    delete_all(store, [name for prefix in ON_THE_WAY for name, _ in store.list(prefix)])
    store.delete(REPLACED_NAME)


def make_manifest(spec: JobSpec, report: dict[str, Any]) -> dict[str, Any]:
    """Returns the manifest: what a loader should open, in order. The same job gives the same bytes."""
    return {
        "gristmill_manifest": _MANIFEST_VERSION,
        "plan_id": spec.plan_id,
        "name": spec.name,
        "split": spec.split,
        "num_records": report["records_written"],
        "num_bytes": report["bytes_written"],
        "shards": report["shards"],
    }


def write_report(store: Store, report: dict[str, Any]) -> None:
    """Writes report.json, and report.html for people."""
    from transforms.report_html import render_html  # The templates take time to load and nothing else needs them.

    store.put(REPORT_HTML_NAME, render_html(report).encode())
    store.put(REPORT_NAME, to_json(report, indent=1))


def _delete_others(store: Store, spec: JobSpec, shards: set[str]) -> None:
    """Deletes shard files that are not of this set, and what an older set left behind.

    Shards of an older count beside the new ones would double the data of everyone who opens them by pattern.
    """
    old = [name for name, _ in list_shard_files(store, spec)]
    replaced = read_replaced(store)
    keep = shards | (_published_names(store, spec) if replaced else set())
    old += replaced
    delete_all(store, [name for name in old if name not in keep])


def read_replaced(store: Store) -> list[str]:
    """Returns the final names of the set that is being replaced."""
    found = store.get(REPLACED_NAME)
    return [] if found is None else list(json.loads(found[0]))


def _published_names(store: Store, spec: JobSpec) -> set[str]:
    def read(shard: int) -> Iterable[str]:
        return read_published(store, spec, shard).values()

    shards = range(spec.num_shards)  # Not from a listing, which may be late.
    return {name for names in map_ahead(read, shards, store.requests_at_once) for name in names}


def delete_all(store: Store, names: Iterable[str]) -> None:
    """Deletes names that may be gone already, in no certain order."""
    call_ahead(store.delete, names, store.requests_at_once)
