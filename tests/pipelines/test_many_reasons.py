"""Steps that give each record a reason of its own: tables stay small, the books balance, budgets count rightly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import jobs
from pipelines.cli import main
from transforms.dead_letters import MAX_REASONS, OTHER_REASONS

STEP = """
from transforms import BadRecordError, Drop

def drop(record):
    return Drop(record.decode())

def fail(record):
    raise BadRecordError("late" if record.endswith(b"7") and len(record) > 3 else record.decode())

def same(record):
    return record
"""
RECORDS = 1_500


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with two files, each with more reasons than a shard counts, and the steps that give them."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "odd.py").write_text(STEP)
    for name in "ab":
        jobs.write_tfrecord(tmp_path / f"in/{name}.tfrecord", [f"{name}{number}".encode() for number in range(RECORDS)])
    return tmp_path


def convert(place: Path, step: str, *options: str) -> int:
    arguments = ["convert", "--input", "in/*", "--output", "out", "--shards", "2", "--workers", "0", "--step", step]
    return main([*arguments, "--set", "dead_letters.max_fraction=1", *options])


def ledgers(place: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_bytes()) for path in sorted((place / "out/_gristmill/shards").iterdir())]


def first(name: str) -> list[str]:
    return [f"{name}{number}" for number in range(MAX_REASONS)]


@pytest.mark.parametrize("options", [(), ("--set", "source.max_record_bytes=1MiB")])
def test_tables_of_drops_hold_the_first_reasons_in_the_order_of_the_plan(place: Path, options: tuple[str, ...]) -> None:
    assert convert(place, "odd:drop", *options) == 3  # Nothing is written.
    for name, ledger in zip("ab", ledgers(place), strict=True):
        assert list(ledger["dropped_by_reason"]) == [*first(name), OTHER_REASONS]
        assert sum(ledger["dropped_by_reason"].values()) == RECORDS
    report = jobs.report(place / "out")
    assert set(report["dropped_by_reason"]) == {*first("a"), OTHER_REASONS}
    assert sum(report["dropped_by_reason"].values()) == report["records_dropped"] == 2 * RECORDS
    assert (place / "out/_gristmill/report.html").stat().st_size < 300_000


def test_an_isolated_step_gives_the_same_tables(place: Path) -> None:
    assert convert(place, "odd:drop") == 3
    alone = [ledger["dropped_by_reason"] for ledger in ledgers(place)]
    assert convert(place, "odd:drop,isolate=true", "--overwrite") == 3
    assert [list(ledger["dropped_by_reason"].items()) for ledger in ledgers(place)] == [
        list(table.items()) for table in alone
    ]


def test_dead_letters_keep_their_reasons_and_the_tables_are_bounded(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert convert(place, "odd:fail") == 3
    report = jobs.report(place / "out")
    assert len(report["dead_by_reason"]) == MAX_REASONS + 1
    assert not any(reason.startswith("b") for reason in report["dead_by_reason"])
    assert sum(report["dead_by_reason"].values()) == report["records_dead"] == 2 * RECORDS
    letters = jobs.dead_letters(place / "out")
    assert len({letter["reason"] for letter in letters}) > 2_000
    capsys.readouterr()
    assert main(["status", "out", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["dead_by_reason"] == report["dead_by_reason"]


@pytest.mark.parametrize("named_first", [True, False])
def test_a_budget_of_a_reason_counts_all_of_its_letters(
    place: Path, capsys: pytest.CaptureFixture[str], named_first: bool
) -> None:
    num_late = sum(1 for number in range(RECORDS) for name in "ab" if number > 99 and f"{name}{number}".endswith("7"))
    named = f'dead_letters.max_count_by_reason={{"b1499": 0, "late": {num_late - 1}}}'
    if not named_first:
        assert convert(place, "odd:fail", "--set", "dead_letters.max_count=5") == 3
    capsys.readouterr()
    assert convert(place, "odd:fail", "--set", named) == 3
    assert "1 dead letters for b1499; dead_letters.max_count_by_reason allows 0" in capsys.readouterr().out
    assert convert(place, "odd:fail", "--set", f"dead_letters.max_count_by_reason.late={num_late - 1}") == 3
    assert f"{num_late} dead letters for late" in capsys.readouterr().out
    report = jobs.report(place / "out")
    assert report["dead_by_reason"]["late"] == num_late
    assert sum(report["dead_by_reason"].values()) == 2 * RECORDS


def test_a_set_with_many_reasons_grows_and_is_mended(place: Path) -> None:
    (place / "mended.py").write_text(
        STEP.replace("    raise BadRec", "    if len(record) < 3: return record\n    raise BadRec")
    )
    assert convert(place, "mended:fail") == 0
    jobs.write_tfrecord(place / "in/d.tfrecord", [f"d{number}".encode() for number in range(RECORDS)])
    assert convert(place, "mended:fail", "--append") == 0
    whole = jobs.report(place / "out")
    assert sum(whole["dead_by_reason"].values()) == whole["records_dead"] == 3 * (RECORDS - 10)
    assert len(whole["dead_by_reason"]) <= MAX_REASONS + 2
    (place / "mended.py").write_text(
        STEP.replace("    raise BadRec", "    if record[:1] < b'b': return record\n    raise BadRec")
    )
    assert main(["replay", "out", "--workers", "0"]) == 0
    whole = jobs.report(place / "out")
    assert whole["records_dead"] == len(jobs.dead_letters(place / "out")) == 2 * (RECORDS - 10)
    assert sum(whole["dead_by_reason"].values()) == whole["records_dead"]
    assert len(whole["dead_by_reason"]) <= MAX_REASONS + 2
    assert main(["verify", "out"]) == 0
    assert main(["replay", "out", "--reason", "no_such", "--workers", "0"]) == 0
