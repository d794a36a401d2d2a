"""One damaged corpus: made, damaged, converted, and held against the oracle."""

from __future__ import annotations

import collections
import itertools
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import corpora
import jobs
from pipelines.cli import main
from pipelines.inspect import inspect_file
from torture import oracle
from torture.damage import IN_PLACE, KINDS, damage
from torture.make_files import MAKERS, TortureFile, read_payloads
from torture.oracle import Letter, require
from torture.tally import Case, Tally

COUNTS = ("records_read", "records_added", "records_written", "records_dropped", "records_dead")


def run_case(case: Case, folder: Path) -> Tally:
    """Runs one case in an empty folder.

    Raises:
        DiscrepancyError: A law does not hold.
    """
    rng = random.Random(f"{case.seed}/{case}")
    format_name = rng.choices(["tfrecord", "array_record", "files"], [80, 12, 8])[0]
    shards = rng.choice(["1", "2", "5", "9", "match", "20KiB"])
    files = make_corpus(rng, folder, format_name, shards)
    arguments = ["--input", folder / "in/*"]
    if rng.random() < 0.5 or format_name == "files" or not any(file.file.data for file in files):
        arguments += ["--format", format_name]
    out = folder / "out"
    status = convert(arguments, out, shards)
    tally = Tally()
    check_output(files, format_name, out, status, tally)
    if rng.random() < 0.3:
        other = rng.choice(["1", "3", "12", "match"])
        compare(out, folder / "again", status, convert(arguments, folder / "again", other))
        tally.counts["converted twice"] += 1
    if rng.random() < 0.3 and format_name != "files":
        check_inspect(rng.choice(files), out)
    for file in files:
        tally.damages.update(file.file.kinds)
    return tally


def make_corpus(rng: random.Random, folder: Path, format_name: str, shards: str) -> list[TortureFile]:
    """Makes some files, damages at least one of them, and writes them."""
    (folder / "in").mkdir(parents=True)
    files = [MAKERS[format_name](rng, folder / "in", number) for number in range(rng.choice([1, 1, 2, 3, 5]))]
    victims = rng.sample(files, rng.randint(1, len(files)))
    for file in victims:
        kinds = IN_PLACE if format_name == "array_record" and rng.random() < 0.6 else KINDS
        for _ in range(rng.choice([1, 1, 2, 3, 6])):
            damage(file.file, rng, targets(file, shards), kinds)
    for file in files:
        file.path.write_bytes(file.file.data)
    return files


def targets(file: TortureFile, shards: str) -> list[int]:
    """Where damage is worst: at frames, and where the file is probably cut into ranges."""
    if file.path.suffix == ".array_record":
        return [file.stream.find(payload) for payload in file.payloads]
    if file.compression != "none":
        return [0, len(file.file.original) - 8]
    cuts = int(shards) if shards.isdigit() else 4
    size = len(file.stream)
    return [*corpora.frame_starts(file.payloads), *(size * cut // cuts for cut in range(cuts))]


def convert(arguments: list[Any], out: Path, shards: str) -> int:
    """Converts whatever the losses."""
    changes = ["--set", "dead_letters.max_fraction=1", "--set", "write.check_space=false"]
    return jobs.convert(*arguments, "--output", out, "--shards", shards, *changes)


def check_output(files: list[TortureFile], format_name: str, out: Path, status: int, tally: Tally) -> None:
    """Checks records, dead letters and books of a job."""
    written = _written(out)
    records = iter(written)
    letters = jobs.dead_letters(out)
    payloads = {id(letter): payload for letter, payload in zip(letters, read_payloads(out, letters), strict=True)}
    by_source: dict[str, list[Letter]] = collections.defaultdict(list)
    for letter in letters:
        by_source[letter["source"]].append(letter)
    rows = []
    for file in files:
        mine = by_source.pop(str(file.path), [])
        found = _CHECKS[format_name](file, mine, records)
        if format_name == "tfrecord":
            oracle.check_payloads(
                _stream(file, mine)[0], mine, lambda letter: payloads[id(letter)] or b"", file.path.name
            )
        rows.append((found, len(mine)))
    require(not by_source, f"dead letters for {list(by_source)}")
    require(next(records, None) is None, "more records than the files account for")
    check_books(files, format_name, out, rows, letters)
    require(status == (0 if written else 3), f"the job ended with {status} and wrote {len(written)} records")
    require(main(["verify", str(out)]) == status, "verify found a difference")
    tally.counts["corpora"] += 1
    tally.counts["files"] += len(files)
    tally.counts["records"] += sum(len(file.payloads) for file in files)
    tally.counts["records recovered"] += len(written)
    tally.counts["dead letters"] += len(letters)
    tally.counts["bytes named"] += sum(letter["length"] for letter in letters)


def _written(out: Path) -> list[bytes]:
    """All records, by the manifest."""
    manifest = out / "manifest.json"
    names = [shard["name"] for shard in json.loads(manifest.read_text())["shards"]] if manifest.exists() else []
    return [record for name in names for record in jobs.read_array_record(out / name)]


def _stream(file: TortureFile, letters: list[Letter]) -> tuple[bytes, bool, int]:
    """Returns the bytes that the positions count, whether they were decompressed, and how many could not be.

    A file that does not inflate to a record any more may be read as plain bytes: of what does not compress, whole
    records stand in it.
    """
    data = file.file.data
    if file.compression == "none":
        return data, False, 0
    stream, problem, unread = oracle.inflate(data, file.compression)
    is_clear = stream[:12] == file.stream[:12] or problem is None
    is_told = any(letter["reason"] in oracle.STREAM_REASONS for letter in letters)
    return (stream, True, unread) if is_clear or is_told else (data, False, 0)


def check_tfrecord(file: TortureFile, letters: list[Letter], records: Iterator[bytes]) -> int:
    """Returns how many records of the file were written."""
    name = file.path.name
    stream, is_inflated, _ = _stream(file, letters)
    if not file.file.data:
        require(not letters, f"{name} is empty, but {letters}")
        return 0
    found = oracle.tile(stream, letters, records, name)
    if is_inflated:
        oracle.check_end(*oracle.inflate(file.file.data, file.compression), letters, name)
    spliced = set() if is_inflated else _spliced(file, found)
    for payload, place in _untouched(file, stream, is_inflated):
        recovered = found.get(place) == payload or place in spliced
        require(recovered, f"{name}: the record now at {place} is outside the damage but was not written")
    return len(found)


def _untouched(file: TortureFile, stream: bytes, is_inflated: bool) -> Iterator[tuple[bytes, int]]:
    """Yields each record that the damage left alone, and where it stands now."""
    starts = corpora.frame_starts(file.payloads)
    if file.compression == "none":
        places = file.file.places(starts)
    else:
        whole = oracle.common_prefix(stream, file.stream) if is_inflated else 0
        places = [start if end <= whole else None for start, end in itertools.pairwise(starts)]
    for payload, place in zip(file.payloads, places, strict=True):
        if place is not None:
            yield payload, place


def _spliced(file: TortureFile, found: dict[int, bytes]) -> set[int]:
    """Places inside of records that the damage itself made.

    The header of an 8-byte record put before another such record is a whole record of the number 8.
    """
    places: set[int] = set()
    for at, payload in found.items():
        origin = file.file.origin[at : at + len(payload) + corpora.FRAME_BYTES]
        if origin[0] < 0 or len(origin) != origin[-1] - origin[0] + 1:
            places.update(range(at + 1, at + len(origin)))
    return places


def check_array_record(file: TortureFile, letters: list[Letter], records: Iterator[bytes]) -> int:
    """Every row is written or named; and damage to one record's place costs that record alone."""
    name, size = file.path.name, len(file.file.data)
    if not size:
        require(not letters, f"{name} is empty, but {letters}")
        return 0
    safe = _safe_rows(file)
    if [letter["reason"] for letter in letters] == ["not_array_record"]:
        require((letters[0]["position"], letters[0]["length"]) == (0, size), f"{name}: {letters}")
        require(not safe, f"{name}: only records are damaged, but {letters}")
        return 0
    dead = [letter["row"] for letter in letters]
    require(len(set(dead)) == len(dead), f"{name}: rows are named twice: {dead}")
    require(not safe & set(dead), f"{name}: rows {sorted(safe & set(dead))} are not damaged, but dead")
    alive = [payload for row, payload in enumerate(file.payloads) if row not in dead]
    for payload in alive:
        require(next(records, None) == payload, f"{name}: record {payload[:6]!r} is neither written nor named")
    return len(alive)


def _safe_rows(file: TortureFile) -> set[int]:
    """Rows that bytes changed elsewhere cannot touch; none when framing around all records may be damaged."""
    original, changed = file.stream, file.file.changed()
    places = [original.find(payload) for payload in file.payloads]
    if len(file.file.data) != len(original) or -1 in places:
        return set()
    ends = [place + len(payload) for place, payload in zip(places, file.payloads, strict=True)]
    if any(not places[0] <= at < ends[-1] for at in changed):
        return set()
    befores, afters = [0, *ends], [*places[1:], len(original)]
    areas = list(zip(befores, afters, strict=False))
    return {row for row, (low, high) in enumerate(areas) if not any(low <= at < high for at in changed)}


def check_raw(file: TortureFile, letters: list[Letter], records: Iterator[bytes]) -> int:
    """A file is one record as it stands; an empty one is a dead letter."""
    data = file.file.data
    if not data:
        require([letter["reason"] for letter in letters] == ["empty_file"], f"{file.path.name}: {letters}")
        return 0
    require(not letters and next(records, None) == data, f"{file.path.name} is not the record that was written")
    return 1


_CHECKS = {"tfrecord": check_tfrecord, "array_record": check_array_record, "files": check_raw}


def check_books(
    files: list[TortureFile], format_name: str, out: Path, rows: list[tuple[int, int]], letters: list[Letter]
) -> None:
    """The books of the job, of every shard and of every file say what was found."""
    report = jobs.report(out)
    require(_balances(report), f"the job's books do not balance: {report}")
    read = [written + dead for written, dead in rows]
    expected = {
        "records_written": sum(written for written, _ in rows),
        "records_dead": len(letters),
        "records_read": sum(read),
        "bytes_dead": sum(letter["length"] for letter in letters),
        "files_seen": len(files),
        "files_empty": read.count(0),
        "files_dead": sum(dead > 0 and not written for written, dead in rows),
        "files_read": sum(written > 0 for written, _ in rows),
    }
    if format_name == "tfrecord":
        by_source = {str(file.path): [one for one in letters if one["source"] == str(file.path)] for file in files}
        streams = [_stream(file, by_source[str(file.path)]) for file in files]
        expected["bytes_read"] = sum(len(stream) + unread for stream, _, unread in streams)
    for key, value in expected.items():
        require(report[key] == value, f"report.json says {key} {report[key]}, the oracle {value}")
    require(
        _rows_by_file(out, len(files)) == rows, f"the books by file differ: {_rows_by_file(out, len(files))} {rows}"
    )


def _balances(books: dict[str, Any]) -> bool:
    read, added, written, dropped, dead = (books[name] for name in COUNTS)
    return bool(read + added == written + dropped + dead)


def _rows_by_file(out: Path, num_files: int) -> list[tuple[int, int]]:
    """Returns (written, dead) of every file, as the ledgers of all shards have it together."""
    written, dead = [0] * num_files, [0] * num_files
    for path in sorted((out / "_gristmill/shards").glob("*.json")):
        ledger = json.loads(path.read_bytes())
        require(_balances(ledger["books"]), f"the books of {path.name} do not balance")
        for index, count, _, _, *numbers in ledger["sources"]:
            names = ("records_read", *COUNTS[2:3], "records_added", *COUNTS[3:])
            row = dict(zip(names, numbers[: len(names)], strict=True))  # Bytes and checksums follow.
            require(_balances(row), f"the books of file {index} in {path.name} do not balance")
            for file in range(index, index + count):
                written[file] += row["records_written"]
                dead[file] += row["records_dead"]
    return list(zip(written, dead, strict=True))


def compare(out: Path, again: Path, status: int, status_again: int) -> None:
    """Other shards hold the same records in the same order, and lose the same for the same reasons."""
    require(status == status_again, f"the job ended with {status}, with other shards with {status_again}")
    require(_written(out) == _written(again), "with other shards the records differ")
    require(_named(out) == _named(again), f"with other shards the dead letters differ: {_named(out)} {_named(again)}")
    shutil.rmtree(again)


def _named(out: Path) -> list[tuple[Any, ...]]:
    keys = ("source", "position", "length", "step", "reason", "error", "payload_bytes")
    return [tuple(letter[key] for key in keys) for letter in jobs.dead_letters(out)]


def check_inspect(file: TortureFile, out: Path) -> None:
    """`inspect` finds in a file what `convert` found."""
    if not file.file.data:
        return
    found = inspect_file(str(file.path), 0)["damage"]
    keys = ("position", "length", "reason", "error")
    letters = [
        {key: letter[key] for key in keys} for letter in jobs.dead_letters(out) if letter["source"] == str(file.path)
    ]
    require(found == letters, f"inspect finds {found}, convert {letters}")
