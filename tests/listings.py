"""Lists toy files and says what a listing found, in names relative to the working directory."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from transforms.elements import Input
from transforms.inputs import Listing, list_inputs, read_inputs

LITERAL_NAMES = [
    "a[1].rec",
    "a1.rec",
    "star*.rec",
    "what?.rec",
    "two words.rec",
    " leading.rec",
    "trailing.rec ",
    "line\nend.rec",
    "tab\t.rec",
    "-dash.rec",
    "@at.rec",
    "ünï-山.rec",
    "quote'\".rec",
    "back\\slash.rec",
    os.fsdecode(b"bytes-\xff\xfe.rec"),
]


def enter_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes an empty folder whose path is no link the working directory."""
    folder = Path(os.path.realpath(tmp_path)) / "corpus"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def write(folder: Path, *names: str | bytes) -> None:
    """Makes files whose size is their number, from 1."""
    for number, name in enumerate(names, 1):
        path = os.path.join(os.fsencode(folder), os.fsencode(name))
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(bytes(number))


def listed(*arguments: str, excluded: str = "/nowhere/out") -> tuple[Listing, list[Input]]:
    """The listing, and the lines of inputs.jsonl."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "inputs.jsonl")
        listing = list_inputs(list(arguments), path, excluded)
        with open(path, "rb") as lines:
            inputs = [source for _, source in read_inputs(lines)]
    assert [source.index for source in inputs] == list(range(listing.num_inputs))
    assert listing.total_bytes == sum(source.size for source in inputs)
    return listing, inputs


def names_of(*arguments: str, **options: Any) -> list[str]:
    """Listed names, relative to the working directory."""
    return [os.path.relpath(source.name) for source in listed(*arguments, **options)[1]]


def errors_of(*arguments: str) -> dict[str, str | None]:
    """Reason of each listed name, None for the good ones."""
    return {os.path.relpath(source.name): source.error and source.error[0] for source in listed(*arguments)[1]}
