"""A set with all that `verify` looks at (dead letters, an append, a replay), and what can happen to it."""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import jobs
from pipelines import local_runner
from pipelines.cli import main
from transforms.store import LocalStore, Store

STEP = """
import re

def clean(value, bad=""):
    number = int(re.search(rb"-(\\d{6}) ", value).group(1))
    if number in map(int, str(bad).split("+")):
        raise ValueError(f"number {number}")
    return value
"""
CONVERT = ["convert", "--workers", "0", "--shards", "match", "--step", "steps_of_grown_set:clean,bad=3+7"]
BASE = "the same convert command again makes it anew, given the same inputs and steps"
LATER = "the next `convert --append` or `replay` makes it anew, given the same inputs and steps"
_SHOWN_BY_OTHERS = ("the books do not balance: ", "manifest.json names ")


@dataclasses.dataclass
class GrownSet:
    """Three shards of the base (f0 to f2), one of an append (f3), one of a replay of f0's dead letters.

    Attributes:
        out: Output directory.
    """

    out: Path

    @classmethod
    def copy_of(cls, folder: Path, out: Path) -> GrownSet:
        """Copies the set that `make_grown_set` made."""
        shutil.copytree(folder / "out", out)
        return cls(out)

    @property
    def store(self) -> LocalStore:
        return LocalStore(str(self.out))

    def convert(self) -> int:
        """Runs the command that made the base."""
        return main([*CONVERT, "--input", "in/f[012].tfrecord", "--output", str(self.out)])

    def append(self) -> int:
        """Runs the command that made the append."""
        return main([*CONVERT, "--input", "in/*", "--output", str(self.out), "--append"])

    def replay(self) -> int:
        """Runs the command that made the replay."""
        steps = "steps=[{call: 'steps_of_grown_set:clean', bad: 7}]"
        return jobs.replay(self.out, "--source", "*f0.tfrecord", "--set", steps)

    def report(self) -> int:
        """Rebuilds the report."""
        return main(["report", str(self.out)])

    def make_stopped(self) -> None:
        """Makes of it a job that was stopped when the second of its three shards was committed."""
        for folder in ("g001", "g002"):
            self.store.delete(f"_gristmill/{folder}/plan.jsonl")
        notes = json.loads((self.out / "_gristmill/published/00001.json").read_text())
        for attempt, final in notes.items():
            self.store.copy(final, attempt)
        for path in (self.out / "_gristmill/published").iterdir():
            path.unlink()
        for name in (
            "manifest.json",
            *(f"_gristmill/{rest}.json" for rest in ("report", "shards/00000", "shards/00002")),
        ):
            assert self.store.delete(name)

    def do_as_told(self, difference: str) -> None:
        """Does what a difference says to do; one that shows in others is mended with them."""
        if difference.startswith(_SHOWN_BY_OTHERS):
            return
        deleted = re.search(r"delete (\S+), and", difference) or re.search(r"^(\S+) .*; delete it", difference)
        if deleted:
            name = deleted[1] if deleted[1] != "it" else difference.split(" ", 1)[0]
            assert self.store.delete(name), difference
        if "the same convert command again" in difference:
            assert self.convert() == 0, difference
        elif "the next `convert --append` or `replay`" in difference:
            assert self.append() == 0, difference
        elif "`gristmill report " in difference:
            assert self.report() == 0, difference
        else:
            assert deleted, f"nothing to do is named: {difference}"


@contextlib.contextmanager
def at_home(folder: Path) -> Iterator[None]:
    """Runs jobs in the folder of the inputs and steps, one shard after the other and without Beam."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "path", list(sys.path))
        patch.setattr(local_runner, "run_pipeline", jobs.run_plainly)
        yield


def make_grown_set(folder: Path) -> Path:
    """Makes the set in `folder`, with its inputs and steps, and returns the folder."""
    (folder / "steps_of_grown_set.py").write_text(STEP)
    for file in range(4):
        jobs.write_tfrecord(folder / f"in/f{file}.tfrecord", [jobs.payload(file, number) for number in range(30)])
    grown = GrownSet(folder / "out")
    with at_home(folder):
        assert (grown.convert(), grown.append(), grown.replay()) == (0, 0, 0)
    return folder


SHARD = "corpus-train.array_record-00001-of-00003"
APPENDED = "corpus-train_g001.array_record-00000-of-00001"
REPLAYED = "corpus-train_g002.array_record-00000-of-00001"
LINES = "_dead_letters/corpus-train-00001.jsonl"
PAYLOADS = "_dead_letters/corpus-train-00001.payloads"
NEW_LINES = "_dead_letters/corpus-train-00000.jsonl"
CONSUMED_LINES = "_gristmill/replayed/g002/corpus-train-00000.jsonl"
CONSUMED = "_gristmill/replayed/g002/corpus-train-00000.payloads"
STRAY = "corpus-train.array_record-00000-of-00002"
LEDGER = "_gristmill/shards/00001.json"
LATER_LEDGER = "_gristmill/g001/shards/00000.json"


def content(store: Store, name: str) -> bytes:
    """Returns the content of a name that exists."""
    found = store.get(name)
    assert found is not None, name
    return found[0]


def delete(*names: str) -> Callable[[Store], None]:
    """The names are gone."""

    def act(store: Store) -> None:
        assert [store.delete(name) for name in names] == [True] * len(names)

    return act


def flip(name: str) -> Callable[[Store], None]:
    """One bit in the middle is another."""

    def act(store: Store) -> None:
        data = bytearray(content(store, name))
        data[len(data) // 2] ^= 1
        store.put(name, bytes(data))

    return act


def cut(name: str) -> Callable[[Store], None]:
    """The last bytes are gone."""
    return lambda store: store.put(name, content(store, name)[:-3])


def put(name: str, data: bytes) -> Callable[[Store], None]:
    """Something else stands there."""
    return lambda store: store.put(name, data)


def edit(name: str, change: Callable[[Any], Any]) -> Callable[[Store], None]:
    """The file says something else."""

    def act(store: Store) -> None:
        fields = json.loads(content(store, name))
        change(fields)
        store.put(name, json.dumps(fields).encode())

    return act


def _read_one_more(ledger: Any) -> None:
    ledger["sources"][0][4] += 1


def _claim_one_more(ledger: Any) -> None:
    ledger["parts"][0]["records"] += 1


@dataclasses.dataclass(frozen=True)
class Damage:
    """What happened to a set.

    Attributes:
        act: Does it.
        differences: What is said of it; `*` stands for anything.
        can_be_mended: Whether that says what to do.
    """

    act: Callable[[Store], None]
    differences: tuple[str, ...]
    can_be_mended: bool = True


def check_differences(found: list[str], expected: tuple[str, ...]) -> None:
    """Checks that these differences were found, no others, and in this order."""
    assert len(found) == len(expected), found
    for difference, pattern in zip(found, expected, strict=True):
        assert fnmatch.fnmatchcase(difference, pattern), difference


_CRC = "is not the file that was written: its crc32c differs from the ledger's; delete it, and"
_CONSUMED = "nothing of the set is lost, but g002 can no longer be made anew"
_NO_MANIFEST = "delete manifest.json, and the same convert command again writes it anew"
_NO_REPORT = "`gristmill report * writes it anew"
_INCOMPLETE = "4 of 5 planned shards are committed; the same convert command again goes on from there"
_LATER_INCOMPLETE = "4 of 5 planned shards are committed; the next `convert --append` or `replay` makes the others anew"

DAMAGES = {
    "shard_missing": Damage(delete(SHARD), (f"{SHARD} is missing; {BASE}",)),
    "shard_short": Damage(cut(SHARD), (f"{SHARD} has * bytes, the ledger says *; {BASE}",)),
    "shard_flipped": Damage(flip(SHARD), (f"{SHARD} {_CRC} {BASE}",)),
    "appended_missing": Damage(delete(APPENDED), (f"{APPENDED} is missing; {LATER}",)),
    "appended_flipped": Damage(flip(APPENDED), (f"{APPENDED} {_CRC} {LATER}",)),
    "replayed_short": Damage(cut(REPLAYED), (f"{REPLAYED} has * bytes, the ledger says *; {LATER}",)),
    "lines_missing": Damage(delete(LINES), (f"{LINES} is missing; {BASE}",)),
    "lines_flipped": Damage(flip(LINES), (f"{LINES} {_CRC} {BASE}",)),
    "payloads_missing": Damage(delete(PAYLOADS), (f"{PAYLOADS} is missing; {BASE}",)),
    "payloads_flipped": Damage(flip(PAYLOADS), (f"{PAYLOADS} {_CRC} {BASE}",)),
    "new_lines_missing": Damage(delete(NEW_LINES), (f"{NEW_LINES} is missing; {LATER}",)),
    "consumed_flipped": Damage(
        flip(CONSUMED),
        (f"{CONSUMED} is not the file that was written: its crc32c differs from the ledger's; {_CONSUMED}",),
        can_be_mended=False,
    ),
    "consumed_missing": Damage(
        delete(CONSUMED, CONSUMED_LINES),
        (f"{CONSUMED_LINES} is missing; {_CONSUMED}", f"{CONSUMED} is missing; {_CONSUMED}"),
        can_be_mended=False,
    ),
    "ledger_missing": Damage(delete(LEDGER), (_INCOMPLETE, f"{LEDGER} is missing; {BASE}")),
    "ledger_cut": Damage(cut(LEDGER), (_INCOMPLETE, f"{LEDGER} is no ledger of this plan; {BASE}")),
    "later_ledger_cut": Damage(
        cut(LATER_LEDGER), (_LATER_INCOMPLETE, f"{LATER_LEDGER} is no ledger of this plan; {LATER}")
    ),
    "ledger_unbalanced": Damage(
        edit(LEDGER, _read_one_more),
        (
            "the books do not balance: *",
            f"the books of shard 1 do not balance: *; delete {LEDGER}, and {BASE}",
            f"the books of input 1 in shard 1 do not balance; delete {LEDGER}, and {BASE}",
        ),
    ),
    "ledger_miscounts": Damage(
        edit(LATER_LEDGER, _claim_one_more),
        (
            "manifest.json has 5 shards, the ledgers have 5, and they differ; " + _NO_MANIFEST,
            f"shard 0 of g001 has 29 records in its files, 28 in its books; delete {LATER_LEDGER}, and {LATER}",
            f"{APPENDED} has 28 records, the ledger says 29; delete {LATER_LEDGER}, and {LATER}",
        ),
    ),
    "note_missing": Damage(
        delete("_gristmill/published/00001.json"),
        (
            f"manifest.json names {SHARD} and 0 more that no ledger knows; *",
            *(f"_gristmill/attempts/00001-* is missing; {BASE}",) * 3,
        ),
    ),
    "manifest_missing": Damage(
        delete("manifest.json"), ("there is no manifest.json; the same convert command again writes it",)
    ),
    "manifest_cut": Damage(cut("manifest.json"), (f"manifest.json of * cannot be read; {_NO_MANIFEST}",)),
    "manifest_lacks_one": Damage(
        edit("manifest.json", lambda manifest: manifest["shards"].pop()),
        (f"manifest.json has 4 shards, the ledgers have 5, and they differ; {_NO_MANIFEST}",),
    ),
    "manifest_miscounts": Damage(
        edit("manifest.json", lambda manifest: manifest.update(num_records=7)),
        (f"manifest.json says 7 records, the ledgers say 113; {_NO_MANIFEST}",),
    ),
    "report_missing": Damage(
        delete("_gristmill/report.json"), (f"there is no report.json that can be read; {_NO_REPORT}",)
    ),
    "report_cut": Damage(cut("_gristmill/report.json"), (f"there is no report.json that can be read; {_NO_REPORT}",)),
    "report_miscounts": Damage(
        edit("_gristmill/report.json", lambda report: report.update(records_dead=6)),
        (f"report.json says records_dead 6, the ledgers say 7; {_NO_REPORT}",),
    ),
    "stray": Damage(
        put(STRAY, b"stale"),
        (f"{STRAY} is not in the manifest: whoever opens shards by pattern reads it too; delete it",),
    ),
}


def damage_all(store: Store) -> tuple[str, ...]:
    """Damages much at once, and returns the differences in order; `*` stands for anything."""
    names = ("stray", "shard_flipped", "lines_missing", "appended_missing", "replayed_short")
    chosen = [DAMAGES[name] for name in names]
    for damage in chosen:
        damage.act(store)
    return tuple(difference for damage in chosen for difference in damage.differences)
