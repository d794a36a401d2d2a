"""The letters that a replay takes: lines go through unchanged, files are found by number, selections fit."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path

import pytest

from fakes import WorstStore, make_letter
from transforms.dead_letters import from_fields, to_line
from transforms.elements import DeadLetter
from transforms.letters import LETTERS_NAME, LettersFile, Selection, letters_file, read_lines, write_letters_files

STRANGE = DeadLetter(
    "/in/\udcff name",
    12,
    34,
    "st:ep",
    "exception",
    "Err\u00f6r",
    "te\u0301xt \ud800",
    "frames",
    b"payload",
    False,
    {"row": 5},
    3,
)


@pytest.mark.parametrize("letter", [make_letter(7), make_letter(7, None), STRANGE])
@pytest.mark.parametrize("limit", [3, 1000])
def test_line_of_a_letter_that_is_carried_differs_in_attempts_and_payload_index_only(
    letter: DeadLetter, limit: int
) -> None:
    line = to_line(letter, 4, limit)
    fields = json.loads(line)
    carried = from_fields(fields, None if letter.payload is None else letter.payload[:limit])
    assert carried.source == letter.source
    assert carried.extra == letter.extra
    assert to_line(carried, 4, 1) == line
    again = json.loads(to_line(dataclasses.replace(carried, attempts=9), 0, 1))
    assert again == {**fields, "attempts": 9, "payload_index": 0}


@pytest.mark.parametrize(
    ("selection", "takes"),
    [
        (Selection(), True),
        (Selection(reasons=("exception", "other")), True),
        (Selection(reasons=("excep*",)), False),
        (Selection(steps=("read",)), False),
        (Selection(steps=("st:ep",), reasons=("exception",)), True),
        (Selection(steps=("st:ep",), reasons=("other",)), False),
        (Selection(sources=("*.tfrecord",)), True),
        (Selection(sources=("in/a[1].tfrecord",)), True),
        (Selection(sources=("/elsewhere/*",)), False),
        (Selection(sources=("*b*", "*a?1*"), steps=("st:ep",)), True),
    ],
)
def test_selection(selection: Selection, takes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    letter = DeadLetter(str(tmp_path / "in/a[1].tfrecord"), 0, 1, "st:ep", "exception")
    assert selection.takes(letter) is takes


def test_files_are_found_by_their_number_whatever_the_lengths_of_their_names(tmp_path: Path) -> None:
    files = [
        LettersFile(f"_dead_letters/{'n' * number}.jsonl", number, f"_dead_letters/{number}.payloads", None, 0, False)
        for number in range(20)
    ]
    write_letters_files(str(tmp_path / "letters"), files)
    store = WorstStore()
    store.put_file(str(tmp_path / "letters"), LETTERS_NAME)
    assert [letters_file(store, number) for number in range(20)] == files


def test_lines_are_read_one_at_a_time() -> None:
    lines = b"".join(to_line(make_letter(number, None), None, 10) for number in range(3))
    assert [letter.position for letter in read_lines(io.BytesIO(lines), None)] == [0, 1, 2]
