"""File names of the output: shards in TFDS's naming form, dead letters by planned shard."""

from __future__ import annotations

import re
import string
from collections.abc import Iterator

from transforms.elements import JobSpec
from transforms.store import Store

DEFAULT_TEMPLATE = "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}"
_SEPARATORS = re.compile(r"[*?,;\\]")
_VARIABLES = ("DATASET", "SPLIT", "FILEFORMAT", "SHARD_X_OF_Y", "SHARD_INDEX", "NUM_SHARDS")


def check_template(template: str) -> None:
    """Checks a file name template.

    Args:
        template: In the variables of TFDS, for example "data/{SPLIT}-{SHARD_X_OF_Y}.arrayrecord".

    Raises:
        ValueError: A variable is unknown, or shards would get the same name, or it leaves the directory, or
            readers would not find the files.
    """
    try:
        fields = [part for part in string.Formatter().parse(template) if part[1] is not None]
        used = {field for _, field, _, _ in fields if field is not None}
    except ValueError as error:
        raise ValueError(f"template {template!r} is malformed: {error}") from error
    unknown = used.difference(_VARIABLES)
    if unknown:
        known = ", ".join("{" + name + "}" for name in _VARIABLES)
        raise ValueError(f"template {template!r} has unknown {{{sorted(unknown)[0]}}}; known are {known}")
    if any(spec or conversion for _, _, spec, conversion in fields):
        raise ValueError(
            f"template {template!r} must not format its variables further; write {{SHARD_X_OF_Y}} as it is"
        )
    if not used & {"SHARD_X_OF_Y", "SHARD_INDEX"}:
        raise ValueError(f"template {template!r} gives every shard the same name; add {{SHARD_X_OF_Y}}")
    if any(part[:1] in ("", "_", ".") for part in template.split("/")):
        raise ValueError(f"template {template!r} must name files below the output folder, not hidden or `_` ones")
    if not template.isprintable() or _SEPARATORS.search(template):
        raise ValueError(
            f"template {template!r} has a sign that readers take for a separator or pattern (* ? , ; \\), or one that "
            "cannot be printed"
        )


def shard_file_name(spec: JobSpec, number: int, total: int) -> str:
    """Returns the final name of part `number` of `total`; numbers have five digits, more when they need them."""
    width = max(5, len(str(total - 1)))
    index, count = f"{number:0{width}d}", f"{total:0{width}d}"
    return spec.template.format(
        DATASET=spec.name,
        SPLIT=spec.split,
        FILEFORMAT="array_record",
        SHARD_X_OF_Y=f"{index}-of-{count}",
        SHARD_INDEX=index,
        NUM_SHARDS=count,
    )


def shard_file_pattern(spec: JobSpec) -> re.Pattern[str]:
    """Returns a pattern that every shard name of this name, split and template matches, whatever the count."""
    fields = {
        "DATASET": re.escape(spec.name),
        "SPLIT": re.escape(spec.split),
        "FILEFORMAT": "array_record",
        "SHARD_X_OF_Y": r"\d{5,}-of-\d{5,}",
        "SHARD_INDEX": r"\d{5,}",
        "NUM_SHARDS": r"\d{5,}",
    }
    pattern = ""
    for text, field, _, _ in string.Formatter().parse(spec.template):
        pattern += re.escape(text) + (fields[field] if field else "")
    return re.compile(pattern)


def list_shard_files(store: Store, spec: JobSpec) -> Iterator[tuple[str, int]]:
    """Yields (name, bytes) of every file that has the name of a shard of this job, of whatever count."""
    pattern = shard_file_pattern(spec)
    return (found for found in store.list(_fixed_start(spec)) if pattern.fullmatch(found[0]))


def _fixed_start(spec: JobSpec) -> str:
    """Returns what the names of all shards begin with, so that a listing need not go through all else."""
    fixed = {"DATASET": spec.name, "SPLIT": spec.split, "FILEFORMAT": "array_record"}
    start = ""
    for text, field, _, _ in string.Formatter().parse(spec.template):
        start += text
        if field not in fixed:
            break
        start += fixed[field]
    return start


def dead_letter_names(spec: JobSpec, shard: int) -> tuple[str, str]:
    """Returns the final names of a planned shard's dead-letter lines and payloads."""
    base = f"{spec.dead_letter_path}/{spec.name}-{spec.split}-{spec.shard_key(shard)}"
    return f"{base}.jsonl", f"{base}.payloads"


def list_letter_files(store: Store, spec: JobSpec) -> Iterator[str]:
    """Yields the name of every file that has the final name of a dead-letter file of this job, of whatever shard."""
    start = f"{spec.dead_letter_path}/{spec.name}-{spec.split}-"
    pattern = re.compile(re.escape(start) + r"\d{5,}\.(jsonl|payloads)")
    return (name for name, _ in store.list(start) if pattern.fullmatch(name))
