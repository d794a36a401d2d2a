"""The dead letters that a replay takes: which ones, and in which files. No Beam here.

A replay is planned over the sources of its dead letters, laid end to end like the inputs of any job; a position in a
source is a number of letters. Each dead-letter file is one planned shard, and letters.jsonl says which.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import json
import os
from collections.abc import Iterator
from typing import Any, BinaryIO

from array_record.python.array_record_module import ArrayRecordReader

from transforms.dead_letters import from_fields
from transforms.elements import DeadLetter, JobSpec
from transforms.generations import LETTERS_NAME, base_of, moved_name
from transforms.store import OutputError, Store


@dataclasses.dataclass(frozen=True)
class Selection:
    """Which dead letters a replay takes: all that fit in every respect that is given.

    Attributes:
        reasons: Reason codes.
        steps: Names of the steps that failed; "read" for the reader.
        sources: Names of inputs, or patterns in which `*` stands for anything.
    """

    reasons: tuple[str, ...] = ()
    steps: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()

    @classmethod
    def of(cls, spec: JobSpec) -> Selection:
        """Returns the selection of a replay."""
        return cls(**{name: tuple(values) for name, values in (spec.replay or {}).items()})

    def to_fields(self) -> dict[str, list[str]]:
        """Returns it as it stands in a `JobSpec`."""
        return {name: list(values) for name, values in dataclasses.asdict(self).items()}

    def takes(self, letter: DeadLetter) -> bool:
        """Whether the letter is among them."""
        if self.reasons and letter.reason not in self.reasons:
            return False
        if self.steps and letter.step not in self.steps:
            return False
        return not self.sources or any(_fits(letter.source, source) for source in self.sources)


def _fits(name: str, pattern: str) -> bool:
    return name in (pattern, os.path.abspath(pattern)) or fnmatch.fnmatchcase(name, pattern)


@dataclasses.dataclass(frozen=True)
class LettersFile:
    """A dead-letter file that a replay consumes.

    Attributes:
        lines: Final name of its lines.
        lines_size: Bytes of them.
        payloads: Final name of the payloads.
        payloads_size: Bytes of them, None when there are none.
        kept: Letters in it that are not taken.
        joins: Whether its first letter goes on where the last one of the file before ends inside an unreadable range,
            so that no record need begin there.
    """

    lines: str
    lines_size: int
    payloads: str
    payloads_size: int | None
    kept: int
    joins: bool


def write_letters_files(path: str, files: list[LettersFile]) -> None:
    """Writes letters.jsonl, its lines padded to one length so that a shard finds its own by its number."""
    lines = [json.dumps(dataclasses.asdict(file)).encode() for file in files]
    width = max(map(len, lines), default=0)
    with open(path, "wb") as out:
        out.writelines(line.ljust(width) + b"\n" for line in lines)


def letters_file(store: Store, shard: int) -> LettersFile:
    """Returns the dead-letter file that is a replay's planned shard."""
    with store.open(LETTERS_NAME) as lines:
        first = lines.readline()
        lines.seek(len(first) * shard)
        return LettersFile(**json.loads(lines.readline()))


def consumed_lines(store: Store) -> set[str]:
    """Returns the final names of the dead-letter lines that a replay consumes."""
    with store.open(LETTERS_NAME) as lines:
        return {json.loads(line)["lines"] for line in lines}


def old_names(store: Store, spec: JobSpec, file: LettersFile) -> tuple[str, str]:
    """Returns where the pair of files that a replay consumes is now: moved already, or under its final names."""
    base = base_of(store)
    moved = moved_name(spec.generation, file.lines), moved_name(spec.generation, file.payloads)
    lines = moved[0] if base.size(moved[0]) == file.lines_size else file.lines
    payloads = moved[1] if base.size(moved[1]) == file.payloads_size else file.payloads
    return lines, payloads


def read_old_letters(store: Store, spec: JobSpec, shard: int) -> Iterator[DeadLetter]:
    """Yields the letters of a replay's planned shard as they were before it, with their payloads.

    Raises:
        OutputError: The files are not the ones that were planned, or cannot be read.
    """
    file = letters_file(store, shard)
    lines_name, payloads_name = old_names(store, spec, file)
    if store.size(lines_name) != file.lines_size:
        raise OutputError(f"{lines_name} has changed since the replay was planned; run the same command again")
    try:
        with store.open(lines_name) as lines:
            if file.payloads_size is None:
                yield from read_lines(lines, None)
                return
            with store.local_copy(payloads_name) as path:
                yield from read_lines(lines, path)
    except FileNotFoundError as error:
        raise OutputError(f"dead letters are gone: {lines_name} or {payloads_name}") from error


def read_lines(lines: BinaryIO, payloads_path: str | None) -> Iterator[DeadLetter]:
    """Yields the letters of a file, one at a time.

    Args:
        lines: The open file of lines.
        payloads_path: The payloads beside it, None to leave them aside.

    Raises:
        OutputError: A payload cannot be read.
    """
    reader = None if payloads_path is None else ArrayRecordReader(os.fsencode(payloads_path))
    try:
        for line in lines:
            fields: dict[str, Any] = json.loads(line)
            payload = None
            if reader is not None and fields["payload_index"] is not None:
                payload = reader.read()  # Payloads are in the order of their lines.
            yield from_fields(fields, payload)
    except RuntimeError as error:
        raise OutputError(f"the dead-letter payloads in {payloads_path} cannot be read: {str(error)[:300]}") from error
    finally:
        if reader is not None:
            reader.close()
