"""`convert --append`: only what is new becomes a generation; names and order of what was published stay."""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import pytest

import jobs
from pipelines import local_runner


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    sys.modules.pop("steps_of_append_test", None)
    monkeypatch.setattr(local_runner, "run_pipeline", jobs.run_plainly)
    (tmp_path / "steps_of_append_test.py").write_text(jobs.STEP_WITH_BAD_NUMBERS)
    (tmp_path / "bad.json").write_text("[]")
    for file in range(3):
        write(file)
    return tmp_path


def write(file: int) -> None:
    jobs.write_tfrecord(Path(f"in/f{file}.tfrecord"), payloads(file))


def payloads(file: int) -> list[bytes]:
    return [jobs.payload(file, number) for number in range(20)]


def everything(*files: int) -> list[bytes]:
    return [record for file in files for record in payloads(file)]


def convert(*arguments: str) -> int:
    step = ["--step", "steps_of_append_test:clean", "--set", "dead_letters.max_fraction=0.9"]
    return jobs.convert("--input", "in/*", "--output", "out", "--shards", "2", *step, *arguments)


def manifest() -> dict[str, Any]:
    return dict(json.loads(Path("out/manifest.json").read_text()))


def in_manifest() -> list[bytes]:
    shards = manifest()["shards"]
    assert sorted(shard["name"] for shard in shards) == [path.name for path in jobs.shards(Path("out"))]
    return [record for shard in shards for record in jobs.read_array_record(Path("out") / shard["name"])]


def check() -> dict[str, Any]:
    assert jobs.verify(Path("out")) == 0
    report = jobs.report(Path("out"))
    assert report["records_read"] == report["records_written"] + report["records_dead"]
    assert report["records_dead"] == len(jobs.dead_letters(Path("out")))
    assert report["records_written"] == manifest()["num_records"] == len(in_manifest())
    return report


def test_new_files_become_generations_behind_what_is_there(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert convert("--append") == 0  # Without a job it is a plain convert.
    base = manifest()
    assert in_manifest() == everything(0, 1, 2)
    capsys.readouterr()
    assert convert("--append") == 0
    assert "nothing to append" in capsys.readouterr().out
    for file in (4, 3):
        write(file)
        assert convert("--append") == 0
    assert in_manifest() == everything(0, 1, 2, 4, 3)
    assert manifest()["shards"][:2] == base["shards"]
    assert [shard["name"] for shard in manifest()["shards"]] == [
        f"corpus-train{suffix}.array_record-{number:05d}-of-00002"
        for suffix in ("", "_g001", "_g002")
        for number in (0, 1)
    ]
    report = check()
    assert (report["files_seen"], report["files_read"], report["records_read"]) == (5, 5, 100)
    assert [one["kind"] for one in report["generations"]] == ["append", "append"]
    capsys.readouterr()
    assert convert() == 2
    message = capsys.readouterr().err
    assert "inputs changed" in message
    assert "--append" in message
    for file in (3, 4):
        os.unlink(f"in/f{file}.tfrecord")
    assert convert() == 0
    assert "nothing left to do" in capsys.readouterr().out


def test_a_file_that_is_missing_anywhere_in_the_set_is_made_anew(place: Path) -> None:
    assert convert() == 0
    write(3)
    assert convert("--append") == 0
    before = {path.name: path.read_bytes() for path in jobs.shards(Path("out"))}
    write(4)
    for name in ("corpus-train.array_record-00001-of-00002", "corpus-train_g001.array_record-00000-of-00002"):
        Path("out", name).unlink()
    assert convert("--append") == 0
    after = {path.name: path.read_bytes() for path in jobs.shards(Path("out"))}
    assert {name: after[name] for name in before} == before
    assert in_manifest() == everything(0, 1, 2, 3, 4)
    check()


@pytest.mark.parametrize("also_gone", [(), (1, 2)])
def test_missing_files_are_not_made_of_inputs_that_are_no_longer_what_they_were(
    also_gone: tuple[int, ...], place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert convert() == 0
    for file in also_gone:
        os.unlink(f"in/f{file}.tfrecord")
    os.unlink("in/f0.tfrecord")
    write(3)
    missing = Path("out/corpus-train.array_record-00000-of-00002")
    copy = missing.read_bytes()
    missing.unlink()
    before = jobs.tree(place / "out")
    capsys.readouterr()
    assert convert("--append") == 1
    message = capsys.readouterr().err
    assert "f0.tfrecord" in message
    assert "--overwrite" in message
    assert [name for name in jobs.tree(place / "out") if name not in before] in ([], ["_gristmill/job.log"])
    missing.write_bytes(copy)
    assert convert("--append") == 0
    assert in_manifest() == everything(0, 1, 2, 3)
    check()


@pytest.mark.parametrize("name", ["g001/finished.json", "g001/plan.jsonl", "g002/plan.jsonl"])
def test_lost_state_of_a_generation_never_costs_another_one_its_place(
    name: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert convert() == 0
    for file in (3, 4):
        write(file)
        assert convert("--append") == 0
    lost = Path("out/_gristmill") / name
    copy = lost.read_bytes()
    lost.unlink()
    write(5)
    capsys.readouterr()
    assert convert("--append") == 2
    assert name in capsys.readouterr().err
    assert jobs.replay("out") == 2
    lost.write_bytes(copy)
    assert in_manifest() == everything(0, 1, 2, 3, 4)
    assert convert("--append") == 0
    assert in_manifest() == everything(0, 1, 2, 3, 4, 5)
    check()


def test_a_list_of_inputs_that_lost_lines_is_not_taken_for_a_shorter_one(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert convert() == 0
    known = Path("out/_gristmill/inputs.jsonl")
    known.write_bytes(b"".join(known.read_bytes().splitlines(keepends=True)[:-1]))
    capsys.readouterr()
    assert convert("--append") == 2
    assert "inputs.jsonl of" in capsys.readouterr().err
    assert in_manifest() == everything(0, 1, 2)


def test_shards_may_differ_in_size_and_compression_but_not_in_what_is_done(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert convert() == 0
    write(3)
    assert convert("--append", "--step", "example.check") == 2
    assert "steps" in capsys.readouterr().err
    assert convert("--append", "--name", "other") == 2
    assert "write.name" in capsys.readouterr().err
    assert convert("--append", "--limit", "5") == 2
    assert convert("--append", "--overwrite") == 2
    assert not Path("out/_gristmill/g001").exists()
    assert convert("--append", "--shards", "5", "--set", "write.compression=brotli:2") == 0
    assert in_manifest() == everything(0, 1, 2, 3)
    assert len(jobs.shards(place / "out")) == 7
    check()


def test_dry_run_shows_what_is_new_and_writes_nothing(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert convert() == 0
    write(3)
    before = jobs.tree(place / "out")
    capsys.readouterr()
    assert convert("--append", "--dry-run") == 0
    printed = capsys.readouterr().out
    assert "1 " in printed
    assert "f3.tfrecord" in printed or "2 planned" in printed
    assert jobs.tree(place / "out") == before


def test_files_that_are_gone_are_no_concern_and_changed_ones_are_named(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert convert() == 0
    os.unlink("in/f0.tfrecord")
    write(3)
    jobs.write_tfrecord(Path("in/f1.tfrecord"), everything(1)[:19])
    assert convert("--append") == 2
    message = capsys.readouterr().err
    assert "in/f1.tfrecord" in message
    assert "f0.tfrecord" not in message
    assert "--overwrite" in message
    os.unlink("in/f1.tfrecord")
    assert convert("--append") == 0
    assert in_manifest() == everything(0, 1, 2, 3)
    for file in (2, 3):
        os.unlink(f"in/f{file}.tfrecord")
    assert convert("--append") == 0
    check()


def test_mended_file_with_dead_letters_is_for_replay(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = Path("in/f1.tfrecord").read_bytes()
    Path("in/f1.tfrecord").write_bytes(whole[:-3])
    assert convert() == 0
    Path("in/f1.tfrecord").write_bytes(whole)
    write(3)
    assert convert("--append") == 0
    assert jobs.replay("out") == 0
    write(4)
    assert convert("--append") == 0
    assert in_manifest() == everything(0, 1)[:-1] + everything(2, 3) + payloads(1)[-1:] + everything(4)
    check()


def test_template_without_a_split_keeps_names_apart(place: Path) -> None:
    template = ["--set", "write.template=data/{DATASET}-{SHARD_X_OF_Y}.arrayrecord"]
    assert convert(*template) == 0
    write(3)
    assert convert(*template, "--append") == 0
    names = [shard["name"] for shard in manifest()["shards"]]
    assert names[2:] == [f"data/corpus-g001-{number:05d}-of-00002.arrayrecord" for number in (0, 1)]
    records = [record for name in names for record in jobs.read_array_record(place / "out" / name)]
    assert records == everything(0, 1, 2, 3)
    assert jobs.verify(place / "out") == 0


class Stopped(KeyboardInterrupt):
    """Somebody stops the command."""


def stop_after(shards: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes jobs stop when so many shards are committed."""

    def run(spec: Any, *_: Any) -> None:
        store, chain = jobs.open_job_store(spec), jobs.load_chain(spec)
        with store.open(jobs.PLAN_NAME) as plan:
            for _offset, task in list(jobs.read_tasks(plan))[:shards]:
                jobs.repeat_shard(store, spec, chain, task)
        raise Stopped

    monkeypatch.setattr(local_runner, "run_pipeline", run)


def test_stopped_append_is_finished_by_its_plan_and_later_files_wait(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert convert() == 0
    before = jobs.content(place / "out")
    write(3)
    stop_after(1, monkeypatch)
    assert convert("--append") == 1
    assert before.items() <= jobs.content(place / "out").items()
    check()
    assert jobs.replay("out") == 2
    assert "convert --append" in capsys.readouterr().err
    ledger = Path("out/_gristmill/g001/shards/00000.json").stat().st_ino
    monkeypatch.setattr(local_runner, "run_pipeline", jobs.run_plainly)
    write(4)
    assert convert("--append") == 0
    assert Path("out/_gristmill/g001/shards/00000.json").stat().st_ino == ledger
    assert in_manifest() == everything(0, 1, 2, 3)
    assert convert("--append") == 0
    assert in_manifest() == everything(0, 1, 2, 3, 4)
    check()


def test_stopped_append_with_other_steps_is_planned_anew(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert convert() == 0
    write(3)
    stop_after(1, monkeypatch)
    assert convert("--append") == 1
    monkeypatch.setattr(local_runner, "run_pipeline", jobs.run_plainly)
    assert convert("--append", "--shards", "3") == 0
    assert in_manifest() == everything(0, 1, 2, 3)
    assert len(jobs.shards(place / "out")) == 5
    check()


def test_append_over_its_budget_is_not_published_and_goes_on_with_mended_files(place: Path) -> None:
    assert convert() == 0
    Path("bad.json").write_text(json.dumps(list(range(19))))
    write(3)
    assert convert("--append") == 3
    assert in_manifest() == everything(0, 1, 2)
    Path("bad.json").write_text("[]")
    jobs.write_tfrecord(Path("in/f4.tfrecord"), payloads(4))
    assert convert("--append") == 0
    assert in_manifest() == everything(0, 1, 2, 3, 4)
    check()


def test_stopped_base_is_finished_first(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stop_after(1, monkeypatch)
    assert convert("--append") == 1
    monkeypatch.setattr(local_runner, "run_pipeline", jobs.run_plainly)
    write(3)
    assert convert("--append") == 0
    assert in_manifest() == everything(0, 1, 2)
    assert convert("--append") == 0
    assert in_manifest() == everything(0, 1, 2, 3)
    check()


@pytest.mark.parametrize("seed", range(3))
def test_any_order_of_appends_and_replays_keeps_every_record_once(
    seed: int, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    bad = set(rng.sample(range(20), 6))
    Path("bad.json").write_text(json.dumps(sorted(bad)))
    assert convert() == 0
    files = 3
    published = [record for record in everything(0, 1, 2) if int(record[10:16]) not in bad]
    dead = {record: 1 for record in everything(0, 1, 2) if record not in published}
    for _ in range(6):
        before = manifest()["shards"]
        kind = rng.choice(["append", "replay", "replay", "stopped"])
        if kind == "append":
            write(files)
            assert convert("--append") == 0
            new = payloads(files)
            files += 1
            published += [record for record in new if int(record[10:16]) not in bad]
            dead.update((record, 1) for record in new if int(record[10:16]) in bad)
        else:
            bad -= set(rng.sample(sorted(bad), min(len(bad), rng.randint(0, 2))))
            Path("bad.json").write_text(json.dumps(sorted(bad)))
            source = rng.randrange(files)
            select = rng.choice([[], ["--source", f"*f{source}.tfrecord"]])
            if kind == "stopped":
                stop_after(1, monkeypatch)
                assert jobs.replay("out", *select) in (0, 1)
                monkeypatch.setattr(local_runner, "run_pipeline", jobs.run_plainly)
            assert jobs.replay("out", *select) == 0
            taken = [record for record in dead if not select or int(record[7:9]) == source]
            published += [record for record in taken if int(record[10:16]) not in bad]
            dead = {record: dead[record] + (record in taken) for record in dead if record not in published}
        assert sorted(in_manifest()) == sorted(published)
        assert manifest()["shards"][: len(before)] == before
        letters = {}
        for path in sorted(Path("out/_dead_letters").glob("*.jsonl")):
            kept = jobs.read_array_record(path.with_suffix(".payloads"))
            for line in map(json.loads, path.read_text().splitlines()):
                letters[kept[line["payload_index"]]] = line["attempts"]
        assert letters == dead
        report = check()
        assert (report["records_read"], report["files_read"]) == (20 * files, files)
