"""`gristmill inspect`: what is in a file, read whole, damage included."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections import Counter
from typing import Any

from array_record.python.array_record_module import ArrayRecordReader

from pipelines.errors import DONE, UsageError
from transforms.dead_letters import BadRecordError
from transforms.elements import DeadLetter, Input, JobSpec, display_name, printable
from transforms.formats import guess_format
from transforms.formats.tfrecord import detect_compression
from transforms.shard_reader import read_input
from transforms.sources import RandomAccessFile, local_path, look_up, open_input
from transforms.steps.example import parse_example

_SHOWN_BYTES = 60
_EXAMPLES = 1_000  # Records that are parsed for their features.


@dataclasses.dataclass
class _Sizes:
    count: int = 0
    total: int = 0
    smallest: int = 0
    largest: int = 0

    def add(self, size: int) -> None:
        self.smallest = size if not self.count else min(self.smallest, size)
        self.largest = max(self.largest, size)
        self.count += 1
        self.total += size


def run(files: list[str], num_records: int, *, as_json: bool) -> int:
    """Prints what is in each file.

    Raises:
        UsageError: Files cannot be opened, or are of no format that can be inspected; the others were printed.
    """
    problems: list[str] = []
    for name in files:
        try:
            found = inspect_file(name, num_records)
        except UsageError as error:
            problems.append(str(error))
            continue
        print(json.dumps(found)) if as_json else _print(found)
    if problems:
        raise UsageError("\n".join(problems))
    return DONE


def inspect_file(name: str, num_records: int) -> dict[str, Any]:
    """Reads a file to its end and returns what is in it.

    Args:
        name: The file.
        num_records: Records to show.

    Raises:
        UsageError: It cannot be opened, or is of no known format.
    """
    try:
        source = look_up(name if "://" in name else os.path.abspath(name))
        file = open_input(source)
    except OSError as error:
        raise UsageError(f"{printable(display_name(name))} cannot be opened: {error.strerror or error}") from error
    format_name = guess_format(name, file.read_at(0, 64))
    compression = detect_compression(file)
    options = _writer_options(file, source) if format_name == "array_record" else None
    file.close()
    if format_name is None and compression != "none":
        format_name = "tfrecord"
    if format_name is None:
        raise UsageError(f"{printable(display_name(name))} is neither TFRecord nor ArrayRecord by its bytes or name")
    found: dict[str, Any] = {"file": display_name(name), "format": format_name, "bytes": source.size}
    if format_name == "tfrecord":
        found["compression"] = compression
    else:
        found["writer_options"] = options
    found.update(_read(source, format_name, num_records))
    return found


def _writer_options(file: RandomAccessFile, source: Input) -> str | None:
    with local_path(file, source) as path:
        reader = ArrayRecordReader(os.fsencode(path))
        try:
            return reader.writer_options_string() if reader.ok() else None
        finally:
            with contextlib.suppress(Exception):
                reader.close()


def _read(source: Input, format_name: str, num_records: int) -> dict[str, Any]:
    sizes = _Sizes()
    features = _Features()
    shown: list[str] = []
    damage: list[dict[str, Any]] = []
    spec = JobSpec(root="", plan_id="", num_shards=1, format=format_name)
    for chunk in read_input(spec, source, 0, source.size):
        for record in chunk.records:
            sizes.add(len(record))
            if len(shown) < num_records:
                shown.append(repr(record[:_SHOWN_BYTES]))
            features.add(record)
        damage += [_describe_damage(letter) for letter in chunk.dead]
    mean = round(sizes.total / sizes.count, 1) if sizes.count else 0
    record_bytes = {"total": sizes.total, "smallest": sizes.smallest, "mean": mean, "largest": sizes.largest}
    return {
        "records": sizes.count,
        "record_bytes": record_bytes,
        "damage": damage,
        "features": features.describe(),
        "first_records": shown,
    }


def _describe_damage(letter: DeadLetter) -> dict[str, Any]:
    return {"position": letter.position, "length": letter.length, "reason": letter.reason, "error": letter.error}


class _Features:
    """The features of the first records, if they are tf.train.Examples."""

    def __init__(self) -> None:
        self._seen = self._examples = 0
        self._kinds: Counter[tuple[str, str]] = Counter()

    def add(self, record: bytes) -> None:
        if self._seen == _EXAMPLES:
            return
        self._seen += 1
        try:
            example = parse_example(record)
        except BadRecordError:
            return
        self._examples += 1
        for key, feature in example.features.feature.items():
            self._kinds[key, feature.WhichOneof("kind") or "empty"] += 1

    def describe(self) -> list[dict[str, Any]] | None:
        """Returns name, kind and share of every feature; None when the records are not Examples."""
        if not self._seen or self._examples < self._seen:
            return None
        return [
            {"name": name, "kind": kind, "share": round(count / self._examples, 3)}
            for (name, kind), count in sorted(self._kinds.items())
        ]


def _print(found: dict[str, Any]) -> None:
    options = found.get("writer_options") or found.get("compression") or "not readable"
    print(f"{printable(found['file'])}: {found['format']} ({options}), {found['bytes']:,} bytes")
    sizes = found["record_bytes"]
    each = f"{sizes['smallest']:,} to {sizes['largest']:,}, mean {sizes['mean']:,}"
    print(f"  records   {found['records']:,}; bytes each {each}")
    for entry in found["damage"][:20]:
        print(f"  damage    at {entry['position']:,}, {entry['length']:,} bytes: {entry['reason']}: {entry['error']}")
    if len(found["damage"]) > 20:
        print(f"  damage    and {len(found['damage']) - 20:,} more")
    for feature in found["features"] or []:
        print(f"  feature   {printable(feature['name'])}: {feature['kind']}, in {feature['share']:.0%} of records")
    for record in found["first_records"]:
        print(f"  record    {record}")
