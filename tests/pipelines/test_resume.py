"""The same command again, and commands that differ: what is refused, what is kept, and what the report says of it."""

from __future__ import annotations

from pathlib import Path

import pytest

import jobs


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for file in range(4):
        jobs.write_tfrecord(tmp_path / f"in/f{file}", [jobs.payload(file, i) for i in range(50)])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def command(*more: str) -> list[str]:
    return ["convert", "--input", "in/*", "--output", "out", "--shards", "4", "--step", "marking:mark", *more]


def write_step(folder: Path, mark: str, stop_after: int | None = None) -> None:
    """Writes a step that marks records, and ends the whole job at the first record of a file when it is told to."""
    stop = "" if stop_after is None else f"    if b'record-{stop_after:02d}' in value: os.killpg(0, signal.SIGKILL)\n"
    (folder / "marking.py").write_text(
        f"import os, signal\ndef mark(value):\n{stop}    return {mark.encode()!r} + value\n"
    )


def half_done(folder: Path) -> None:
    """Leaves a job behind that was killed after two of four shards."""
    write_step(folder, "old ", stop_after=2)
    killed = jobs.spawn(command("--workers", "0"), cwd=folder, prefix=["setsid", "--wait"])
    assert killed.returncode != 0
    assert len(list((folder / "out/_gristmill/shards").glob("*"))) == 2


def test_changed_code_of_a_step_is_refused_with_the_choices(folder: Path) -> None:
    half_done(folder)
    write_step(folder, "new ")
    refused = jobs.spawn(command(), cwd=folder)
    assert refused.returncode == 2
    assert "code of steps changed" in refused.stderr
    for choice in ("another directory", "--overwrite", "--resume-anyway"):
        assert choice in refused.stderr


def test_resume_anyway_keeps_what_is_committed_and_says_which_shards_that_is(folder: Path) -> None:
    half_done(folder)
    write_step(folder, "new ")
    done = jobs.spawn(command("--resume-anyway"), cwd=folder)
    assert done.returncode == 0, done.stderr
    expected = [b"old " + jobs.payload(file, i) for file in (0, 1) for i in range(50)]
    expected += [b"new " + jobs.payload(file, i) for file in (2, 3) for i in range(50)]
    assert jobs.records(folder / "out") == expected
    report = jobs.report(folder / "out")
    assert sorted(report["shards_by_plan"].values()) == [2, 2]
    [note] = [note for note in report["notes"] if "before" in note]
    assert note.startswith("2 shards were committed by plan ")
    assert note.endswith("before code of steps changed")
    for again in (command(), command("--resume-anyway")):
        complete = jobs.spawn(again, cwd=folder)
        assert complete.returncode == 0, complete.stderr
        assert "nothing left to do" in complete.stdout
    assert jobs.spawn(["verify", "out"], cwd=folder).returncode == 0


def test_resume_anyway_takes_other_write_keys(folder: Path) -> None:
    half_done(folder)
    write_step(folder, "old ")
    done = jobs.spawn(command("--resume-anyway", "--set", "write.compression=uncompressed"), cwd=folder)
    assert done.returncode == 0, done.stderr
    assert jobs.records(folder / "out") == [b"old " + jobs.payload(file, i) for file in range(4) for i in range(50)]
    [note] = [note for note in jobs.report(folder / "out")["notes"] if "before" in note]
    assert note.endswith("before code of steps, write.compression changed")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--shards", "3"], "cuts the input into other shards"),
        (["--input", "in/f0"], "here the inputs changed; pass --append"),
    ],
)
def test_resume_anyway_is_refused_where_shards_would_not_fit_together(
    change: list[str], message: str, folder: Path
) -> None:
    half_done(folder)
    asked = {"--input": "in/*", "--shards": "4", **dict([change])}
    flags = [word for flag in asked.items() for word in flag]
    refused = jobs.spawn(
        ["convert", *flags, "--output", "out", "--step", "marking:mark", "--resume-anyway"],
        cwd=folder,
        prefix=["setsid", "--wait"],
    )
    assert refused.returncode == 2
    assert message in refused.stderr


def test_budgets_workers_and_beam_options_may_change_freely(folder: Path) -> None:
    write_step(folder, "old ")
    assert jobs.spawn(command("--set", "dead_letters.max_count=0"), cwd=folder).returncode == 0
    inodes = {path.name: path.stat().st_ino for path in jobs.shards(folder / "out")}
    freely = [
        "--set",
        "dead_letters.max_fraction=0.5",
        "--workers",
        "2",
        "--job_name=other",
        "--set",
        "write.check_space=false",
    ]
    done = jobs.spawn(command(*freely), cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "nothing left to do" in done.stdout
    assert {path.name: path.stat().st_ino for path in jobs.shards(folder / "out")} == inodes
