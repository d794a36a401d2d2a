"""Tells the format of the inputs for `--format auto`, and refuses a mixture that one format cannot read.

A file tells by its content, not by its name. Two formats that are both read refuse each other; so does data of a kind
that is not read, unless the files of the one format are more than the others. Files that lie beside data (a read-me, a
description in JSON, a web page in place of a file) may be as many as they. What cannot be told, such as a file whose
beginning is damaged, does not count. Whatever is left over becomes dead letters that name it.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator

from pipelines.errors import UsageError
from transforms.ahead import map_ahead
from transforms.elements import Input, display_name, printable
from transforms.formats import FORMATS, guess_by_name
from transforms.formats.sniff import HEAD_BYTES, Kind, tell
from transforms.inputs import sample_inputs
from transforms.sources import open_input

TOLD_INPUTS = 64
"""Inputs that are looked at, evenly spaced: a kind that is a twentieth of all is missed once in 27 times."""

_NAMED = 3  # Inputs that a message names.
_NAMED_KINDS = 6
_THREADS = 16


@dataclasses.dataclass
class _Kinds:
    """What was told, by noun: how many, and the first name."""

    counts: Counter[str] = dataclasses.field(default_factory=Counter)
    examples: dict[str, str] = dataclasses.field(default_factory=dict)
    kinds: dict[str, Kind] = dataclasses.field(default_factory=dict)

    def add(self, source: Input, kind: Kind) -> None:
        self.counts[kind.noun] += 1
        self.examples.setdefault(kind.noun, printable(display_name(source.name)))
        self.kinds[kind.noun] = kind

    def formats(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for noun, count in self.counts.items():
            name = self.kinds[noun].format
            if name is not None:
                found[name] += count
        return found

    def others(self, *, companions: bool) -> int:
        kinds = self.kinds
        return sum(
            count
            for noun, count in self.counts.items()
            if kinds[noun].format is None and kinds[noun].is_companion == companions
        )

    def say(self) -> str:
        shown = [f"{count} x {noun} ({self.examples[noun]})" for noun, count in self.counts.most_common(_NAMED_KINDS)]
        more = len(self.counts) - len(shown)
        return "; ".join(shown) + (f"; {more} more kinds" if more > 0 else "")


def tell_format(inputs_path: str, few: list[Input]) -> tuple[str, list[str]]:
    """Returns (format, notes for the plan) of listed inputs.

    Args:
        inputs_path: Their inputs.jsonl.
        few: Some inputs, for a message when none can be read.

    Raises:
        UsageError: It cannot be told, or the inputs are of different kinds; the message names them and the way out.
    """
    told = sample_inputs(inputs_path, TOLD_INPUTS)
    kinds, by_name = _look(told)
    formats = kinds.formats()
    if not formats and 2 * len(by_name) >= len(told) > 0:  # All are damaged; what they should be they still say.
        return by_name[0], []
    if not formats:
        raise UsageError(_cannot_be_told(told or few, kinds))
    [(name, count), *others] = formats.most_common()
    if others or kinds.others(companions=False) >= count or kinds.others(companions=True) > count:
        raise UsageError(
            f"the inputs are of different kinds: of {len(told)} that were looked at, {kinds.say()}. Narrow the --input "
            f"pattern to one kind, or pass --format {name} to read all as that: what is none becomes dead letters"
        )
    foreign = len(kinds.counts) > 1 and any(kind.format is None for kind in kinds.kinds.values())
    return name, [f"of {len(told)} inputs that were looked at: {kinds.say()}"] if foreign else []


def _look(told: list[Input]) -> tuple[_Kinds, list[str]]:
    """Returns what the contents say, and which formats the names of the others do."""
    kinds, by_name = _Kinds(), []
    for source, head in map_ahead(_read_head, told, _THREADS):
        if head is None:
            continue
        kind, name = tell(head), guess_by_name(source.name)
        if kind is not None:
            kinds.add(source, kind)
        if name is not None and (kind is None or kind.format is None):
            by_name.append(name)
    return kinds, by_name


def _read_head(source: Input) -> tuple[Input, bytes | None]:
    try:
        file = open_input(source)
        try:
            return source, file.read_at(0, HEAD_BYTES)
        finally:
            file.close()
    except OSError:
        return source, None


def _cannot_be_told(inputs: list[Input], kinds: _Kinds) -> str:
    if kinds.counts:
        return (
            f"the inputs are of no kind that is read record by record: of {len(inputs)} that were looked at, "
            f"{kinds.say()}. Pass --format files to take each file as one record, another --format, one of "
            f"{', '.join(FORMATS)}, or another --input pattern"
        )
    errors = list(_errors(inputs))
    if len(errors) == len(inputs):
        return f"no input can be read: {'; '.join(errors[:_NAMED])}"
    names = ", ".join(printable(display_name(source.name)) for source in inputs[:_NAMED])
    return f"the format of {names or 'the inputs'} cannot be told; pass --format, one of {', '.join(FORMATS)}"


def _errors(inputs: list[Input]) -> Iterator[str]:
    for one in inputs:
        if one.error is not None:
            yield f"{printable(display_name(one.name))}: {one.error[1]}"
