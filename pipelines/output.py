"""What may stand in an output directory before a job begins, and what the job makes of it."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

from pipelines.errors import UsageError
from pipelines.plan_job import PlannedJob
from transforms.ahead import map_ahead
from transforms.billing import billing_project, pay_by
from transforms.budget import ABORT_NAME
from transforms.elements import JobSpec
from transforms.finish import ON_THE_WAY, REPLACED_NAME, delete_all, read_replaced
from transforms.generations import REPLAYED, STATE, generation_names, renew, see_as
from transforms.journal import stray_journals
from transforms.ledger import ATTEMPTS, LEDGERS, PUBLISHED, SizeOf, find_ledger
from transforms.names import list_letter_files, list_shard_files
from transforms.new_inputs import TOUCHED_NAME
from transforms.pieces import PieceEntry, list_entries
from transforms.plan_file import INPUTS_NAME, PLAN_NAME
from transforms.report import VERIFIED_NAME, changed_keys, load_spec
from transforms.shard_progress import PROGRESS
from transforms.state import (
    MANIFEST_NAME,
    REPORT_NAME,
    StateError,
    check_inputs,
    plan_header,
    read_config,
    read_manifest,
    read_report,
)
from transforms.store import OutputError, Store, open_store


def open_output(root: str) -> Store:
    """Opens an output directory and asks it a question, so that it is known to answer.

    Raises:
        UsageError: It cannot be opened or reached.
    """
    try:
        store = open_store(root)
        store.size(PLAN_NAME)
    except (OutputError, ValueError, OSError) as error:
        raise UsageError(f"output: {error}") from error
    return store


@contextlib.contextmanager
def open_job(root: str) -> Iterator[Store]:
    """Gives the output directory of a job to look at; the project that paid for the job goes on to pay.

    Raises:
        UsageError: It cannot be opened, or there is no job in it, or what stands there cannot be read.
    """
    store = open_output(root)
    try:
        if not billing_project():
            pay_by(read_config(store).get("source", {}).get("billing_project", ""))
            store = open_output(root) if billing_project() else store
        yield store
    except FileNotFoundError as error:
        raise UsageError(f"{root} holds no job of gristmill: there is no {PLAN_NAME}") from error
    except (OutputError, ValueError, OSError) as error:
        raise UsageError(str(error)) from error


def check_output(store: Store, job: PlannedJob, *, overwrite: bool) -> None:
    """Refuses a directory that cannot be written, or holds the output of another job that may not be replaced.

    Raises:
        UsageError: The message says what differs and what can be done.
    """
    _check_writable(store)
    check_holds_no_other(store, job, overwrite=overwrite)


def check_holds_no_other(store: Store, job: PlannedJob, *, overwrite: bool) -> None:
    """Refuses a directory that holds the output of another job, unless it may be replaced.

    Raises:
        UsageError: It does; the message says what differs and what can be done.
    """
    if overwrite:
        return
    header = _planned_header(store)
    if header is not None:
        if job.spec.accepts(str(header["plan_id"])):
            return
        changed = changed_keys(header["fingerprint"], job.header["fingerprint"])
        raise UsageError(
            f"{store.root} holds the output of another job ({_in_words(changed)}); "
            f"take another directory, {_choices(changed)}"
        )
    foreign = _foreign_file(store, job.spec)
    if foreign is not None:
        raise UsageError(
            f"{store.root} holds {foreign}, but no {PLAN_NAME} that says which job wrote it; take another directory, "
            "or pass --overwrite to replace it once the new set is whole"
        )


def _check_writable(store: Store) -> None:
    probe = "_gristmill/.writable"
    try:
        store.put(probe, b"")
        store.delete(probe)
    except (OutputError, OSError) as error:
        raise UsageError(f"write.output: {error}") from error


def _planned_header(store: Store) -> dict[str, Any] | None:
    try:
        return plan_header(store)
    except FileNotFoundError:
        return None


def _foreign_file(store: Store, spec: JobSpec) -> str | None:
    if store.size(MANIFEST_NAME) is not None:
        return MANIFEST_NAME
    return next((name for name, _ in list_shard_files(store, spec)), None)


_OF_GENERATION = re.compile(rf"{STATE}g\d+/")
_CUTTING = ("inputs", "write.shards", "limit")
"""What decides how the input is cut: committed shards cannot be kept when it changes."""


def _choices(changed: list[str]) -> str:
    """Returns what else can be done when so much changed."""
    if changed == ["inputs"]:
        return "pass --append to convert only what is new, or --overwrite to replace it once the new set is whole"
    if any(key in _CUTTING or key.startswith("source") for key in changed):
        return "take the old values, or pass --overwrite to replace it once the new set is whole"
    return (
        "pass --overwrite to replace it once the new set is whole, or pass --resume-anyway to keep the shards that are "
        "committed"
    )


def _in_words(changed: list[str]) -> str:
    return f"{', '.join(changed)} changed" if changed else "its plan differs"


def is_published(store: Store, spec: JobSpec) -> bool:
    """Whether this very job is done: its manifest stands and every file it names is there in full."""
    manifest, report = read_manifest(store), read_report(store)
    if manifest is None or report is None or report["status"] != "done" or report["plan_id"] != spec.plan_id:
        return False
    if manifest["plan_id"] != spec.plan_id or any(True for _ in store.list(ATTEMPTS)):
        return False
    listed = dict(list_shard_files(store, spec))
    others = [shard for shard in manifest["shards"] if listed.get(shard["name"]) != shard["bytes"]]  # Generations'.
    sizes = map_ahead(lambda shard: store.size(shard["name"]), others, store.requests_at_once)
    if any(size != shard["bytes"] for size, shard in zip(sizes, others, strict=True)):
        return False
    return all_count(store, spec)


def all_count(store: Store, spec: JobSpec) -> bool:
    """Whether each shard of a job that is published has a ledger that counts: its files are there."""
    return next(missing_shards(store, spec), None) is None


def missing_shards(store: Store, spec: JobSpec) -> Iterator[int]:
    """Yields the shards of a job that is published whose ledger does not count, because files of them are gone.

    Two requests a shard. Sizes come from listings; one that is late makes a job only look as if it were not done.
    """
    sizes = dict(itertools.chain(list_shard_files(store, spec), store.list(f"{spec.dead_letter_path}/")))

    def size_of(name: str) -> int | None:
        if name.startswith(ATTEMPTS):  # Gone since.
            return None
        return sizes[name] if name in sizes else store.size(name)

    count = functools.partial(_counts, store, spec, size_of)
    counting = map_ahead(count, range(spec.num_shards), store.requests_at_once)
    return (shard for shard, counts in enumerate(counting) if not counts)


def _counts(store: Store, spec: JobSpec, size_of: SizeOf, shard: int) -> bool:
    found = find_ledger(store, spec, shard, size_of=size_of)
    return found is not None and found.ledger is not None


def prepare_output(store: Store, job: PlannedJob) -> None:
    """Makes the directory ready for the workers: the plan of this job, and nothing of a run that was killed.

    The caller holds the lock.

    Raises:
        OutputError: It cannot be written, or another run has the lock by now.
    """
    store.clean()
    _put_plan(store, job)
    store.delete(ABORT_NAME)
    _delete_stray_attempts(store, job.spec)
    delete_all(store, [*stray_journals(store, job.spec), *(name for name, _ in store.list(PROGRESS))])


def _put_plan(store: Store, job: PlannedJob) -> None:
    header = _planned_header(store)
    if header is not None and header["plan_id"] in job.spec.earlier_plans:
        store.put_file(job.plan_path, PLAN_NAME)
        _put_state(store, job)
        put_inputs_back(store, job)
    elif header is not None and header["plan_id"] == job.spec.plan_id and renew(store, PLAN_NAME):
        _put_state(store, job)
        put_inputs_back(store, job)
    else:
        if job.spec.generation:
            forget_generation(store)
        else:
            _set_old_state_aside(store)
        _put_state(store, job)
        store.put_file(job.inputs_path, INPUTS_NAME)
        store.put_file(job.plan_path, PLAN_NAME)


def has_its_inputs(store: Store, job: PlannedJob) -> bool:
    """Whether the list of inputs that stands there is the one that the job was planned with."""
    try:
        check_inputs(store, job.header)
    except StateError:
        return False
    return True


def put_inputs_back(store: Store, job: PlannedJob) -> None:
    """Writes the list of inputs anew where it is damaged; the job has just listed the same ones."""
    if not has_its_inputs(store, job):
        store.put_file(job.inputs_path, INPUTS_NAME)


def _put_state(store: Store, job: PlannedJob) -> None:
    for name, path in job.state.items():
        store.put_file(path, name)


def forget_generation(store: Store) -> None:
    """Deletes the state of a generation of which nothing is published; the caller holds the lock."""
    store.delete(PLAN_NAME)
    delete_all(store, _noted_names(store))  # Dead letters of a generation that was over its budget.
    delete_all(store, [name for name, _ in store.list(STATE) if not name.startswith(REPLAYED)])


def _noted_names(store: Store) -> set[str]:
    """Returns the final names that the notes of published shards speak of."""
    notes = [name for name, _ in store.list(PUBLISHED)]
    found = filter(None, map_ahead(store.get, notes, store.requests_at_once))
    return {name for note, _ in found for name in json.loads(note).values()}


def _given_names(store: Store) -> Iterator[str]:
    """Yields the final names that files of a job have, noted or not: it may have been stopped in between."""
    try:
        spec, _ = load_spec(store)
    except (FileNotFoundError, StateError):
        return  # A plan that nobody can read; what was published the notes name.
    yield from (name for name, _ in list_shard_files(store, spec))
    yield from list_letter_files(store, spec)


def _set_old_state_aside(store: Store) -> None:
    """Forgets another job's state. Its files stay, noted for deletion, until the new set is whole."""
    names = set(read_replaced(store))
    with contextlib.suppress(StateError):  # Of what a damaged one named, the notes speak too.
        names.update(shard["name"] for shard in (read_manifest(store) or {"shards": []})["shards"])
    generations = list(generation_names(store))
    for seen in (store, *(see_as(store, generation) for generation in generations)):
        names.update(_noted_names(seen), _given_names(seen))
    names.update(name for name, _ in store.list(REPLAYED))
    if names:
        store.put(REPLACED_NAME, json.dumps(sorted(names)).encode())
    for name in (PLAN_NAME, INPUTS_NAME, REPORT_NAME, VERIFIED_NAME, TOUCHED_NAME):
        store.delete(name)
    for generation in reversed(generations):
        delete_all(store, [name for name, _ in store.list(f"{STATE}{generation}/")])
    delete_all(store, [name for name, _ in store.list(f"{STATE}g") if _OF_GENERATION.match(name)])  # Without a plan.
    for prefix in (LEDGERS, PUBLISHED, *ON_THE_WAY):
        delete_all(store, [name for name, _ in store.list(prefix)])


def _delete_stray_attempts(store: Store, spec: JobSpec) -> None:
    """Deletes files of attempts that never committed, which would keep a full disk full."""
    sizes = dict(store.list(ATTEMPTS))
    kept = _piece_files(store, spec)
    names: dict[int, list[str]] = {}
    for name in sizes:
        names.setdefault(int(name.removeprefix(ATTEMPTS).split("-", 1)[0]), []).append(name)

    def size_of(name: str) -> int | None:
        return sizes[name] if name in sizes else store.size(name)  # A listing may be late.

    def find_strays(shard: int) -> Iterable[str]:
        found = find_ledger(store, spec, shard, size_of=size_of)
        ledger = found.ledger if found is not None else None
        if ledger is None:
            return set(names[shard]).difference(kept)
        return set(names[shard]).difference(file.name for file in ledger.files())

    strays = map_ahead(find_strays, names, store.requests_at_once)
    delete_all(store, itertools.chain.from_iterable(strays))


def _piece_files(store: Store, spec: JobSpec) -> set[str]:
    """Returns the files that entries of pieces name, for shards that are still to be made of them."""
    found = set()
    for entry in map_ahead(store.get, list_entries(store), store.requests_at_once):
        with contextlib.suppress(ValueError):  # Half an entry; it will be made again.
            piece = PieceEntry.from_json(entry[0]) if entry is not None else None
            if piece is not None and piece.plan_id == spec.plan_id:
                found.add(piece.file.name)
    return found
