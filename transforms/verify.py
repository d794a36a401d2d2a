"""What `verify` compares of the whole: manifest, report and books with the ledgers; and its result. No Beam here.

This much the command does itself. The files are checked shard by shard, see `transforms.check_shard`, by the command or
by the workers of a pipeline, see `transforms.verify_shards`.
"""

from __future__ import annotations

import dataclasses
import json
import time
import uuid
from collections.abc import Iterator
from typing import Any

from transforms.billing import billing_project
from transforms.books import BYTES, COUNTS, FILES, is_balanced
from transforms.check_shard import MAX_TEXTS, Differences, Found
from transforms.elements import to_json
from transforms.generations import base_of
from transforms.names import list_shard_files
from transforms.report import VERIFIED_NAME
from transforms.state import StateError, check_inputs, read_manifest, read_report
from transforms.store import OutputError, Store
from transforms.whole import Generation, list_generations, load_generation

_AGAIN = "the same convert command again"


@dataclasses.dataclass(frozen=True)
class VerifyOrder:
    """What is to be checked, and what the command has found already: small, whatever the corpus.

    Attributes:
        root: Output directory.
        verify_id: Tells this run from all others.
        plan_id: The job's.
        started_at: Unix time.
        generations: Names of what is to be read, "" for the base; none while a generation is being published.
        num_shards: Planned shards of all of them.
        records_dead: Dead records of the whole, by its books.
        num_differences: Differences found already.
        differences: The first of them.
        billing_project: Project that pays for requests to gs://, "" for the owner of the bucket.
    """

    root: str
    verify_id: str
    plan_id: str
    started_at: float
    generations: tuple[str, ...]
    num_shards: int
    records_dead: int
    num_differences: int
    differences: tuple[str, ...]
    billing_project: str = ""


def order_verify(store: Store, rebuilt: dict[str, Any]) -> VerifyOrder:
    """Compares the whole, and returns what is left to do.

    Args:
        store: The output directory.
        rebuilt: The report as the ledgers tell it.
    """
    generations = [load_generation(store, ""), *list_generations(store)]
    differences = Differences(MAX_TEXTS)
    for text in find_differences(store, rebuilt, generations):
        differences.add(text)
    published = [one for one in generations if not one.name or one.is_finished()]
    checked = published if _being_published(generations) is None else []
    return VerifyOrder(
        root=store.root,
        verify_id=uuid.uuid4().hex,
        plan_id=rebuilt["plan_id"],
        started_at=time.time(),
        generations=tuple(one.name for one in checked),
        num_shards=sum(one.spec.num_shards for one in checked),
        records_dead=rebuilt["records_dead"],
        num_differences=differences.count,
        differences=tuple(differences.texts),
        billing_project=billing_project(),
    )


def list_tasks(store: Store, order: VerifyOrder) -> Iterator[tuple[str, int]]:
    """Yields (generation, planned shard) of all that is to be checked."""
    for name in order.generations:
        for shard in range(load_generation(store, name).spec.num_shards):
            yield name, shard


def conclude(order: VerifyOrder, found: Found) -> dict[str, Any]:
    """Returns the result, as it stands in `_gristmill/verify.json`.

    Raises:
        OutputError: Shards are missing from what was found.
    """
    if found.shards != order.num_shards:
        raise OutputError(f"{found.shards} of {order.num_shards} planned shards were checked")
    texts = [*order.differences, *(text for _, _, text in found.differences)]
    count = order.num_differences + found.num_differences
    if not count and found.letters != order.records_dead:
        count = 1
        texts.append(f"the dead-letter files have {found.letters} lines, the books {order.records_dead} dead records")
    return {
        "status": "different" if count else "verified",
        "verify_id": order.verify_id,
        "plan_id": order.plan_id,
        "started_at": order.started_at,
        "planned_shards": found.shards,
        "files": found.files,
        "records": found.records,
        "bytes": found.num_bytes,
        "dead_letters": found.letters,
        "num_differences": count,
        "differences": texts[:MAX_TEXTS],
    }


def write_result(store: Store, result: dict[str, Any]) -> None:
    """Puts the result in its place; whoever does so again puts the same there."""
    base_of(store).put(VERIFIED_NAME, to_json(result, indent=1))


def read_result(store: Store, order: VerifyOrder) -> dict[str, Any]:
    """Returns the result of a run.

    Raises:
        OutputError: What stands there is not of this run.
    """
    found = base_of(store).get(VERIFIED_NAME)
    result: dict[str, Any] = {} if found is None else json.loads(found[0])
    if result.get("verify_id") != order.verify_id:
        raise OutputError(f"{VERIFIED_NAME} is not the result of this run: somebody else verified at the same time")
    return result


def find_differences(store: Store, rebuilt: dict[str, Any], generations: list[Generation]) -> Iterator[str]:
    """Yields every difference between ledgers, manifest, report and the names of the files.

    Args:
        store: The output directory.
        rebuilt: The report as the ledgers tell it.
        generations: The base and all generations that are planned.
    """
    stopped = _being_published(generations)
    if stopped is not None:
        command = "replay" if stopped.spec.replay is not None else "convert --append"
        yield f"{stopped.kind} {stopped.name} was stopped while it was published; the next `{command}` completes it"
        return
    manifest, damage = _look_at_manifest(store)
    yield from damage
    if rebuilt["committed_shards"] < rebuilt["planned_shards"]:
        # Report and manifest cannot agree with ledgers that are not there.
        if damage or _was_published(store, manifest, rebuilt["plan_id"]):
            yield _describe_missing(rebuilt)
    else:
        yield from _compare_books(store, rebuilt)
        if not damage:
            yield from _compare_manifest(manifest, rebuilt)
    if manifest is not None:
        yield from _find_strays(store, generations, manifest, rebuilt)
    yield from _compare_inputs(generations)


def _look_at_manifest(store: Store) -> tuple[dict[str, Any] | None, list[str]]:
    """Returns the manifest, if there is one that can be read, and what is wrong with it if there is one that cannot."""
    try:
        return read_manifest(store), []
    except StateError as error:
        return None, [str(error)]


def _compare_inputs(generations: list[Generation]) -> Iterator[str]:
    for one in generations:
        try:
            check_inputs(one.store, one.header)
        except StateError as error:
            yield str(error)


def _being_published(generations: list[Generation]) -> Generation | None:
    return next((one for one in generations if one.name and one.is_decided() and not one.is_finished()), None)


def _was_published(store: Store, manifest: dict[str, Any] | None, plan_id: str) -> bool:
    """Whether the job was whole once: one that was stopped on its way has lost nothing."""
    report = read_report(store)
    is_reported = report is not None and report["status"] == "done" and report["plan_id"] == plan_id
    return is_reported or (manifest is not None and manifest["plan_id"] == plan_id)


def _describe_missing(rebuilt: dict[str, Any]) -> str:
    counts = f"{rebuilt['committed_shards']} of {rebuilt['planned_shards']} planned shards are committed"
    if rebuilt["status"] == "incomplete":
        return f"{counts}; {_AGAIN} goes on from there"
    return f"{counts}; the next `convert --append` or `replay` makes the others anew"


def _compare_books(store: Store, rebuilt: dict[str, Any]) -> Iterator[str]:
    if not is_balanced(rebuilt):
        yield f"the books do not balance: { ({name: rebuilt[name] for name in COUNTS}) }"
        return  # Which ledger is at fault, its shard tells.
    if rebuilt["status"] == "unbalanced":
        yield f"{rebuilt['message']}; `convert --overwrite` makes all of it anew"
    report = read_report(store)
    cure = f"`gristmill report {store.root}` writes it anew"
    if report is None:
        yield f"there is no report.json that can be read; {cure}"
        return
    for name in (*COUNTS, *BYTES, "files_seen", *FILES):
        if report.get(name) != rebuilt[name]:
            yield f"report.json says {name} {report.get(name)}, the ledgers say {rebuilt[name]}; {cure}"


def _compare_manifest(manifest: dict[str, Any] | None, rebuilt: dict[str, Any]) -> Iterator[str]:
    cure = f"delete manifest.json, and {_AGAIN} writes it anew"
    if manifest is None:
        if rebuilt["status"] == "done":
            yield f"there is no manifest.json; {_AGAIN} writes it"
        return
    named = [shard["name"] for shard in manifest["shards"]]
    known = {shard["name"] for shard in rebuilt["shards"]}
    unknown = [name for name in named if name not in known]
    if unknown:
        yield (
            f"manifest.json names {unknown[0]} and {len(unknown) - 1} more that no ledger knows; make anew what "
            "is missing of them, or put back what was deleted below _gristmill/"
        )
    elif manifest["shards"] != rebuilt["shards"]:
        yield f"manifest.json has {len(named)} shards, the ledgers have {len(known)}, and they differ; {cure}"
    elif manifest["num_records"] != rebuilt["records_written"]:
        counts = f"{manifest['num_records']} records, the ledgers say {rebuilt['records_written']}"
        yield f"manifest.json says {counts}; {cure}"


def _find_strays(
    store: Store, generations: list[Generation], manifest: dict[str, Any], rebuilt: dict[str, Any]
) -> Iterator[str]:
    """Yields files with names of shards that belong to no shard, once the set is published."""
    named = {shard["name"] for shard in (*manifest["shards"], *rebuilt["shards"])}
    there = {name for one in generations for name, _ in list_shard_files(store, one.spec)}
    for name in sorted(there - named):
        yield f"{name} is not in the manifest: whoever opens shards by pattern reads it too; delete it"
