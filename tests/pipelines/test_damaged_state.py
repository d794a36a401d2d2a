"""A state file that is damaged or gone ends a command with a sentence that names it, never with a traceback."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import jobs
from grown_set import GrownSet
from pipelines.cli import main

STATE = [
    *("_gristmill/plan.jsonl", "_gristmill/inputs.jsonl", "_gristmill/config.json", "_gristmill/report.json"),
    *("manifest.json", "_gristmill/g001/plan.jsonl", "_gristmill/g001/inputs.jsonl", "_gristmill/g001/config.json"),
    *("_gristmill/g002/plan.jsonl", "_gristmill/g002/letters.jsonl", "_gristmill/g001/finished.json"),
    "_gristmill/g002/inputs.jsonl",
]


def remove(path: Path) -> None:
    path.unlink()


def empty(path: Path) -> None:
    path.write_bytes(b"")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def cut_end(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def set_to(text: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(text)


def make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES = {
    "gone": remove,
    "empty": empty,
    "cut": cut,
    "cut_end": cut_end,
    "empty_object": set_to(b"{}"),
    "list": set_to(b"[1, 2]"),
    "binary": set_to(b"\xff\x00" * 50),
    "folder": make_folder,
}
COMMANDS: dict[str, Callable[[GrownSet], int]] = {
    "convert": GrownSet.convert,
    "append": GrownSet.append,
    "replay": GrownSet.replay,
    "report": GrownSet.report,
    "verify": lambda grown: jobs.verify(grown.out),
    "status": lambda grown: main(["status", str(grown.out)]),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", STATE)
def test_no_command_ends_in_a_traceback(
    name: str, damage: str, grown: GrownSet, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command, run in COMMANDS.items():
        again = GrownSet(tmp_path / command)
        shutil.copytree(grown.out, again.out)
        published = shards(again.out)
        DAMAGES[damage](again.out / name)
        capsys.readouterr()
        status = run(again)  # Raises what would be a traceback.
        printed = capsys.readouterr()
        assert status in (0, 1, 2, 3, 4), command
        if status == 2:
            assert os.path.basename(name) in printed.err or "run convert again" in printed.err, command
        if status in (0, 2):
            assert shards(again.out) == published, command  # Nothing of the set is lost or doubled.


def shards(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in jobs.shards(out)}
