"""One module a format, each with the same names.

| name | what |
|---|---|
| `SPLITTABLE` | whether a shard may begin inside an input |
| `NATIVE` | whether native code parses the file, which may crash on what it was not made for |
| `read_range(file, source, start, end, spec)` | yields `Chunk`s of the records that begin in a range of positions |

A position is a byte of the file as it is listed, so that planning needs sizes only. Formats whose records have no
byte positions (ArrayRecord) map positions to record indices in proportion.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Protocol, cast

from transforms.elements import Chunk, Input, JobSpec
from transforms.sources import RandomAccessFile

FORMATS = ("tfrecord", "array_record", "files")


class Format(Protocol):
    """What a format module offers."""

    SPLITTABLE: bool
    NATIVE: bool

    def read_range(
        self, file: RandomAccessFile, source: Input, start: int, end: int, spec: JobSpec, *, trusted: bool = False
    ) -> Iterator[Chunk]:
        """Yields the records that begin in [start, end), the last chunk with the span covered.

        With `trusted`, everything before `start` was read by others: what stands there is read or named, not searched.
        """


def load_format(name: str) -> Format:
    """Returns the format of that name, one of `FORMATS`."""
    if name not in FORMATS:
        raise ValueError(f"unknown format {name!r}; expected one of {', '.join(FORMATS)}")
    return cast(Format, importlib.import_module(f"transforms.formats.{name}"))


_BY_EXTENSION = {".array_record": "array_record", ".arrayrecord": "array_record", ".tfrecord": "tfrecord"}
_BY_EXTENSION[".payloads"] = "array_record"
_BY_EXTENSION.update({".tfrecords": "tfrecord", ".tfrec": "tfrecord", ".tfr": "tfrecord"})


def guess_format(name: str, head: bytes) -> str | None:
    """Returns the format of a file for `--format auto`, None where neither its bytes nor its name tell.

    Args:
        name: File name; its parts after each dot are looked at, so `x.array_record-00000-of-00002` is known.
        head: Its first bytes.
    """
    from transforms.formats.sniff import tell

    kind = tell(head)
    return kind.format if kind is not None and kind.format is not None else guess_by_name(name)


def guess_by_name(name: str) -> str | None:
    """Returns the format that the name of a file speaks of, None where it speaks of none."""
    base = name.rsplit("/", 1)[-1]
    for part in base.split(".")[1:]:
        known = _BY_EXTENSION.get("." + part.split("-")[0].lower())
        if known:
            return known
    return None
