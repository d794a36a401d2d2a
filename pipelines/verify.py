"""`gristmill verify`: reads every output record and the ledgers back and recounts everything."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import os
from collections.abc import Iterator
from typing import Any

from array_record.python.array_record_module import ArrayRecordReader

from pipelines.errors import DONE, UNBALANCED
from pipelines.report import load_report
from transforms.ahead import map_ahead
from transforms.books import COUNTS, is_balanced
from transforms.child_call import ChildCall
from transforms.elements import JobSpec
from transforms.generations import find_letters
from transforms.ledger import Ledger, StoredFile
from transforms.letters import letters_file
from transforms.names import list_shard_files
from transforms.replaced import final_letters
from transforms.report import MANIFEST_NAME, committed_shards, read_report
from transforms.shard_writer import file_crc32c
from transforms.store import Store
from transforms.whole import Generation, list_generations, load_generation

_PIECE_BYTES = 4 << 20
_WORTH_PROCESSES_BYTES = 128 << 20
_SHOWN = 50
_FILES_AT_ONCE = 8
"""Of a remote store: each may have two blocks of some MiB in memory."""


def run(output: str) -> int:
    """Verifies an output directory and prints every difference.

    Returns:
        0, or 4 when something differs.

    Raises:
        UsageError: There is no job in the directory.
    """
    store, rebuilt = load_report(output)
    differences = list(find_differences(store, rebuilt))
    for difference in differences[:_SHOWN]:
        print(difference)
    if len(differences) > _SHOWN:
        print(f"and {len(differences) - _SHOWN} more")
    records = f"{rebuilt['records_written']:,} records in {len(rebuilt['shards'])} shards"
    if differences:
        print(f"{store.root}: {len(differences)} differences; {records}")
        return UNBALANCED
    print(f"{store.root}: verified, {records}, {rebuilt['records_dead']:,} dead letters")
    return DONE


def find_differences(store: Store, rebuilt: dict[str, Any]) -> Iterator[str]:
    """Yields every difference between ledgers, manifest, report and the files themselves.

    Args:
        store: The output directory.
        rebuilt: The report as the ledgers tell it.
    """
    generations = [load_generation(store, ""), *list_generations(store)]
    finished = [one for one in generations if not one.name or one.is_finished()]
    if rebuilt["status"] == "incomplete":
        yield f"{rebuilt['message']}; run convert again"
    for one in generations[1:]:
        if one.is_decided() and not one.is_finished():
            yield f"{one.kind} {one.name} was stopped while it was published; give its command again"
        return
    if not is_balanced(rebuilt):
        yield f"the books do not balance: { ({name: rebuilt[name] for name in COUNTS}) }"
    yield from _compare_report(store, rebuilt)
    yield from _compare_manifest(store, generations, rebuilt)
    for one in finished:
        yield from _check_ledgers(one.store, one.spec)
    yield from _count_letters(finished, rebuilt)
    yield from _check_shards(store, rebuilt)


def _compare_report(store: Store, rebuilt: dict[str, Any]) -> Iterator[str]:
    report = read_report(store)
    if report is None:
        yield "there is no report.json"
        return
    for name in (
        *COUNTS,
        "bytes_read",
        "bytes_written",
        "bytes_dead",
        "files_seen",
        "files_read",
        "files_empty",
        "files_dead",
    ):
        if report.get(name) != rebuilt[name]:
            yield f"report.json says {name} {report.get(name)}, the ledgers say {rebuilt[name]}"


def _compare_manifest(store: Store, generations: list[Generation], rebuilt: dict[str, Any]) -> Iterator[str]:
    found = store.get(MANIFEST_NAME)
    if found is None:
        if rebuilt["status"] == "done":
            yield "there is no manifest.json; run convert again"
        return
    manifest = json.loads(found[0])
    if manifest["shards"] != rebuilt["shards"]:
        yield "manifest.json and the ledgers name different shards"
    if manifest["num_records"] != rebuilt["records_written"]:
        yield f"manifest.json says {manifest['num_records']} records, the ledgers say {rebuilt['records_written']}"
    named = {shard["name"] for shard in manifest["shards"]}
    for spec in (one.spec for one in generations):
        for name, _ in list_shard_files(store, spec):
            if name not in named:
                yield f"{name} is not in the manifest: whoever opens shards by pattern reads it too"


def _count_letters(generations: list[Generation], rebuilt: dict[str, Any]) -> Iterator[str]:
    """All lines of all dead-letter files together are the dead records of the whole."""
    total = 0
    for one in generations:
        if one.spec.replay is not None:
            continue
        committed = committed_shards(one.store, one.spec)
        shards = (ledger.shard for _, ledger in committed if ledger.dead_lines)
        count = functools.partial(_count_lines, one)
        total += sum(map_ahead(count, shards, min(_FILES_AT_ONCE, one.store.requests_at_once)))
    if total != rebuilt["records_dead"]:
        yield f"the dead-letter files have {total} lines, the books {rebuilt['records_dead']} dead records"


def _count_lines(one: Generation, shard: int) -> int:
    return sum(1 for _ in _read_lines(one.store, final_letters(one.store, one.spec, shard)[0]))


def _read_lines(store: Store, name: str) -> Iterator[bytes]:
    """Yields the lines of a file, none when it is missing."""
    try:
        with store.open(name) as lines:
            yield from lines
    except FileNotFoundError:
        return


def _check_ledgers(store: Store, spec: JobSpec) -> Iterator[str]:
    """Checks the books of each shard, and its dead letters, which take three requests and more."""
    with_letters: list[tuple[Ledger, int]] = []
    for info, ledger in committed_shards(store, spec):
        yield from _check_books(info.task.shard, ledger)
        dead = sum(row.dead * row.count for row in ledger.rows)
        if dead or ledger.dead_lines is not None or spec.replay is not None:
            with_letters.append((dataclasses.replace(ledger, rows=()), dead))

    def check(pair: tuple[Ledger, int]) -> list[str]:
        return list(_check_dead_letters(store, spec, *pair))

    for found in map_ahead(check, with_letters, min(_FILES_AT_ONCE, store.requests_at_once)):
        yield from found


def _check_books(shard: int, ledger: Ledger) -> Iterator[str]:
    books = ledger.books()
    if not is_balanced(books):
        yield f"the books of shard {shard} do not balance: { ({name: books[name] for name in COUNTS}) }"
    for row in ledger.rows:
        if row.read + row.added != row.written + row.dropped + row.dead:
            yield f"the books of input {row.index} in shard {shard} do not balance"
    written = sum(part.records for part in ledger.parts)
    if written != books["records_written"]:
        yield f"shard {shard} has {written} records in its files, {books['records_written']} in its books"


def _check_dead_letters(store: Store, spec: JobSpec, ledger: Ledger, dead: int) -> Iterator[str]:
    names = final_letters(store, spec, ledger.shard)
    lines_name, payloads_name = (find_letters(store, spec.generation, name) for name in names)
    if spec.replay is not None:
        dead += letters_file(store, ledger.shard).kept
    if ledger.dead_lines is None:
        if dead:
            yield f"shard {ledger.shard} has {dead} dead letters but no file of them"
        return
    indices = [json.loads(line)["payload_index"] for line in _read_lines(store, lines_name)]
    if len(indices) != dead:
        yield f"{lines_name} has {len(indices)} lines, the books have {dead} dead letters"
    payloads = [index for index in indices if index is not None]
    expected = ledger.dead_payloads.records if ledger.dead_payloads is not None else 0
    if payloads != list(range(expected)):
        yield f"{lines_name} names {len(payloads)} payloads, the ledger {expected}"
    yield from _check_file(store, lines_name, ledger.dead_lines)
    if ledger.dead_payloads is not None:
        yield from _check_file(store, payloads_name, ledger.dead_payloads)
        if store.size(payloads_name) is not None:
            with store.local_copy(payloads_name) as path:
                yield from check_records(payloads_name, path, expected, ledger.dead_payloads.crc32c)


def _check_file(store: Store, name: str, expected: StoredFile) -> Iterator[str]:
    size = store.size(name)
    if size != expected.size:
        yield f"{name} is missing" if size is None else f"{name} has {size} bytes, the ledger says {expected.size}"


def _check_shards(store: Store, rebuilt: dict[str, Any]) -> Iterator[str]:
    """Reads every record of every shard; if there is much to read, in as many processes as there are cores."""
    present = []
    sizes = map_ahead(lambda shard: store.size(shard["name"]), rebuilt["shards"], store.requests_at_once)
    for shard, size in zip(rebuilt["shards"], sizes, strict=True):
        if size is None:
            yield f"{shard['name']} is missing"
        else:
            present.append(shard)
    if sum(shard["bytes"] for shard in present) < _WORTH_PROCESSES_BYTES:
        yield from check_shards(store, present)
        return
    count = min(len(present), len(os.sched_getaffinity(0)))
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        for found in pool.map(_check_apart, [store] * count, [present[number::count] for number in range(count)]):
            yield from found


def _check_apart(store: Store, shards: list[dict[str, Any]]) -> list[str]:
    """Reads shards in a process of their own: not a fork, which the library's threads would not survive."""
    child = ChildCall("pipelines.verify:check_shards", store=store, shards=shards)
    found = list(child.items())
    if child.death is not None:
        found.append(f"the process that read {', '.join(shard['name'] for shard in shards)} died: {child.death}")
    return found


def check_shards(store: Store, shards: list[dict[str, Any]]) -> Iterator[str]:
    """Reads every record of some shards and yields what differs.

    Args:
        store: The output directory.
        shards: Their entries in the report.
    """
    for shard in shards:
        with store.local_copy(shard["name"]) as path:
            yield from check_records(shard["name"], path, shard["records"], shard["crc32c"])


def check_records(name: str, path: str, records: int, crc32c: str) -> Iterator[str]:
    """Reads every record of an ArrayRecord file and yields what differs.

    Args:
        name: What to call the file.
        path: Where it can be read.
        records: Records it must have.
        crc32c: Checksum it must have.
    """
    if file_crc32c(path) != crc32c:
        yield f"{name} is not the file that was written: its crc32c differs from the ledger's"
    reader = ArrayRecordReader(os.fsencode(path))
    try:
        if not reader.ok():
            yield f"{name} cannot be opened as ArrayRecord"
            return
        count = reader.num_records()
        if count != records:
            yield f"{name} has {count} records, the ledger says {records}"
        step = max(1, _PIECE_BYTES // max(1, os.path.getsize(path) // max(1, count)) // 8)
        for first in range(0, count, step):
            reader.read(first, min(count, first + step))
    except Exception as error:
        yield f"{name} cannot be read to its end: {str(error)[:300]}"
    finally:
        with contextlib.suppress(Exception):
            reader.close()
