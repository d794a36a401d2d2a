"""`gristmill replay`: what passes now becomes a generation, what fails again stays, and the books stay true."""

from __future__ import annotations

import gzip
import json
import os
import random
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import corpora
import jobs
from pipelines import local_runner
from transforms.job_lock import where_processes_are

LARGE = ["--set", "dead_letters.max_fraction=1"]


class Corpus:
    """Three files of 30 records, of which a step fails on those whose number stands in bad.json."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.out = folder / "out"
        (folder / "steps_of_replay_test.py").write_text(jobs.STEP_WITH_BAD_NUMBERS)
        self.bad()
        for file in range(3):
            self.write(file)

    def path(self, file: int) -> Path:
        return self.folder / f"in/f{file}.tfrecord"

    def write(self, file: int) -> Path:
        return jobs.write_tfrecord(self.path(file), payloads(file))

    def bad(self, *numbers: int) -> None:
        (self.folder / "bad.json").write_text(json.dumps(numbers))

    def convert(self, *arguments: str | Path, shards: int = 3) -> int:
        step = ["--step", "steps_of_replay_test:clean", "--shards", str(shards)]
        return jobs.convert("--input", "in/*", "--output", "out", *step, *LARGE, *arguments)


def payloads(file: int) -> list[bytes]:
    return [jobs.payload(file, number) for number in range(30)]


def everything(*files: int) -> list[bytes]:
    return [record for file in files for record in payloads(file)]


def in_manifest(out: Path) -> list[bytes]:
    """All records in the order of the manifest."""
    manifest = json.loads((out / "manifest.json").read_text())
    records = [record for shard in manifest["shards"] for record in jobs.read_array_record(out / shard["name"])]
    assert len(records) == manifest["num_records"]
    assert sorted(shard["name"] for shard in manifest["shards"]) == [path.name for path in jobs.shards(out)]
    return records


def letters(out: Path) -> list[tuple[str, int, str, int]]:
    """(file, position, reason, attempts) of all dead letters."""
    return [
        (Path(line["source"]).name, line["position"], line["reason"], line["attempts"])
        for line in jobs.dead_letters(out)
    ]


def kept_payloads(out: Path) -> list[bytes]:
    paths = sorted((out / "_dead_letters").glob("*.payloads"))
    return [record for path in paths for record in jobs.read_array_record(path)]


def check(out: Path) -> dict[str, Any]:
    """Verifies the directory, and that the books balance and count all dead letters; returns the report."""
    assert jobs.verify(out) == 0
    report = jobs.report(out)
    came = report["records_read"] + report["records_added"]
    assert came == report["records_written"] + report["records_dropped"] + report["records_dead"]
    assert report["records_dead"] == len(jobs.dead_letters(out)) == sum(report["dead_by_reason"].values())
    assert report["dead_by_reason"] == dict(Counter(line["reason"] for line in jobs.dead_letters(out)))
    assert report["bytes_dead"] == sum(line["length"] for line in jobs.dead_letters(out))
    assert report["files_seen"] == report["files_read"] + report["files_empty"] + report["files_dead"]
    return report


@pytest.fixture
def beam_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Corpus:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))  # Each test has a step module of its own.
    sys.modules.pop("steps_of_replay_test", None)
    return Corpus(tmp_path)


@pytest.fixture
def corpus(beam_corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> Corpus:
    monkeypatch.setattr(local_runner, "run_pipeline", jobs.run_plainly)
    return beam_corpus


def test_mended_step_gives_a_generation_and_the_rest_stays(corpus: Corpus, capsys: pytest.CaptureFixture[str]) -> None:
    corpus.bad(3, 7, 20)
    assert corpus.convert() == 0
    base = json.loads((corpus.out / "manifest.json").read_text())
    good = [record for number, record in enumerate(everything(0, 1, 2)) if number % 30 not in (3, 7, 20)]
    assert in_manifest(corpus.out) == good
    corpus.bad(7)
    assert jobs.replay("out") == 0
    assert "of 9 dead letters came 6 written, 0 dropped and 3 dead" in capsys.readouterr().out
    came = [jobs.payload(file, number) for file in range(3) for number in (3, 20)]
    assert in_manifest(corpus.out) == good + came
    manifest = json.loads((corpus.out / "manifest.json").read_text())
    assert manifest["shards"][: len(base["shards"])] == base["shards"]
    assert manifest["plan_id"] == base["plan_id"]
    assert [path.name for path in jobs.shards(corpus.out)][3:] == [
        f"corpus-train_g001.array_record-{number:05d}-of-00003" for number in range(3)
    ]
    assert [(letter[0], *letter[2:]) for letter in letters(corpus.out)] == [
        (f"f{file}.tfrecord", "exception", 2) for file in range(3)
    ]
    assert kept_payloads(corpus.out) == [jobs.payload(file, 7) for file in range(3)]
    report = check(corpus.out)
    assert (report["records_read"], report["records_written"], report["records_dead"]) == (90, 87, 3)
    assert [source["records_dead"] for source in report["sources"]] == [1, 1, 1]
    moved = sorted((corpus.out / "_gristmill/replayed/g001").glob("*.jsonl"))
    assert sum(len(path.read_text().splitlines()) for path in moved) == 9


def test_second_and_third_replay_count_attempts_until_all_has_passed(corpus: Corpus) -> None:
    corpus.bad(5)
    assert corpus.convert() == 0
    for attempts in (2, 3):
        assert jobs.replay("out") == 0
        assert [letter[3] for letter in letters(corpus.out)] == [attempts] * 3
        assert len(jobs.shards(corpus.out)) == 3
        check(corpus.out)
    corpus.bad()
    assert jobs.replay("out") == 0
    assert sorted(in_manifest(corpus.out)) == sorted(everything(0, 1, 2))
    assert jobs.dead_letters(corpus.out) == []
    assert not (corpus.out / "_dead_letters").exists()
    assert jobs.shards(corpus.out)[3].name == "corpus-train_g003.array_record-00000-of-00003"
    check(corpus.out)
    before = jobs.content(corpus.out)
    assert jobs.replay("out") == 0
    assert corpus.convert() == 0
    assert jobs.content(corpus.out) == before


def test_mended_code_and_other_steps_of_a_config(corpus: Corpus) -> None:
    corpus.bad(1, 2)
    assert corpus.convert() == 0
    corpus.bad(1, 2, 3)
    (corpus.folder / "steps_of_replay_test.py").write_text("def clean(value):\n    return value + b'mended'\n")
    assert jobs.replay("out", "--source", "*f0*") == 0
    (corpus.folder / "other.yaml").write_text("steps:\n  - call: binascii:hexlify\nwrite:\n  name: ignored\n")
    assert jobs.replay("out", "--config", "other.yaml") == 0
    came = [jobs.payload(0, 1) + b"mended", jobs.payload(0, 2) + b"mended"]
    assert in_manifest(corpus.out)[84:] == came + [
        jobs.payload(file, number).hex().encode() for file in (1, 2) for number in (1, 2)
    ]
    check(corpus.out)


def test_selection_takes_what_fits_and_carries_the_rest_byte_for_byte(
    corpus: Corpus, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus.bad(4, 9)
    data = bytearray(corpus.path(1).read_bytes())
    data[12] ^= 1  # The first record's data.
    corpus.path(1).write_bytes(data)
    assert corpus.convert(shards=1) == 0
    before = jobs.dead_letters(corpus.out)
    payloads_before = kept_payloads(corpus.out)
    corpus.bad()
    assert jobs.replay("out", "--reason", "data_checksun") == 0
    assert "did you mean data_checksum?" in capsys.readouterr().out
    assert jobs.replay("out", "--step", "read", "--source", "in/f0.tfrecord") == 0
    assert jobs.dead_letters(corpus.out) == before
    assert jobs.replay("out", "--step", "steps_of_replay_test:clean", "--reason", "exception", "--source", "*f1*") == 0
    after = jobs.dead_letters(corpus.out)
    kept = [number for number, letter in enumerate(before) if "f1" not in letter["source"] or letter["step"] == "read"]
    assert [{**letter, "payload_index": 0} for letter in after] == [{**before[n], "payload_index": 0} for n in kept]
    assert kept_payloads(corpus.out) == [payloads_before[number] for number in kept]
    assert in_manifest(corpus.out)[83:] == [jobs.payload(1, 4), jobs.payload(1, 9)]
    check(corpus.out)
    assert jobs.replay("out", "--reason", "exception", "data_checksum", "--source", "*f0*", "*f1*") == 0
    assert [(letter[0], letter[2:]) for letter in letters(corpus.out)] == [
        ("f1.tfrecord", ("data_checksum", 2)),
        ("f2.tfrecord", ("exception", 1)),
        ("f2.tfrecord", ("exception", 1)),
    ]
    check(corpus.out)


@pytest.mark.parametrize("shards", [1, 4])
def test_repaired_regions_are_read_again(corpus: Corpus, shards: int) -> None:
    whole = corpus.path(1).read_bytes()
    starts = [0]
    for record in payloads(1):
        starts.append(starts[-1] + 16 + len(record))
    data = bytearray(whole)
    data[starts[5] + 14] ^= 1  # Data of one record.
    data[starts[10]] ^= 1  # Length of one,
    data[starts[11]] ^= 1  # and of the next: one region.
    data[starts[20] + 13] ^= 1  # Two records side by side.
    data[starts[21] + 13] ^= 1
    corpus.path(1).write_bytes(data[:-5])  # And a cut end.
    assert corpus.convert(shards=shards) == 0
    assert len(jobs.dead_letters(corpus.out)) == 5
    first = sorted(in_manifest(corpus.out))
    assert jobs.replay("out") == 0  # Nothing is mended yet.
    assert [letter[3] for letter in letters(corpus.out)] == [2] * 5
    assert sorted(in_manifest(corpus.out)) == first
    check(corpus.out)
    half = bytearray(whole)
    half[starts[21] + 13] ^= 1
    corpus.path(1).write_bytes(half)
    corpus.bad(11)
    assert jobs.replay("out") == 0
    assert [letter[1:] for letter in letters(corpus.out)] == [
        (starts[11], "exception", 3),
        (starts[21], "data_checksum", 3),
    ]
    check(corpus.out)
    corpus.path(1).write_bytes(whole)
    corpus.bad()
    assert jobs.replay("out") == 0
    assert sorted(in_manifest(corpus.out)) == sorted(everything(0, 1, 2))
    assert check(corpus.out)["bytes_read"] == sum(corpus.path(file).stat().st_size for file in range(3))


def test_truncated_gzip_is_read_on_from_the_cut(corpus: Corpus) -> None:
    plain = bytearray(corpus.path(1).read_bytes())
    whole = gzip.compress(bytes(plain), mtime=0)
    plain[14] ^= 1
    corpus.path(1).write_bytes(gzip.compress(bytes(plain), mtime=0)[:-60])
    corpus.bad(2)
    assert corpus.convert() == 0
    assert {letter[2] for letter in letters(corpus.out)} == {"data_checksum", "truncated_stream", "exception"}
    corpus.path(1).write_bytes(whole)
    corpus.bad()
    assert jobs.replay("out") == 0
    assert sorted(in_manifest(corpus.out)) == sorted(everything(0, 1, 2))
    check(corpus.out)


@pytest.mark.parametrize("shards", [1, 5])
def test_missing_and_unreadable_files_are_read_whole(corpus: Corpus, shards: int) -> None:
    names = [str(corpus.path(file)) for file in range(3)]
    (corpus.folder / "list.txt").write_text("\n".join(names))
    hidden = corpus.path(2).rename(corpus.folder / "hidden")
    step = ["--step", "steps_of_replay_test:clean", "--shards", str(shards)]
    assert jobs.convert("--input", "@list.txt", "--output", "out", *step, *LARGE) == 0
    report = check(corpus.out)
    assert (report["files_dead"], report["files_read"]) == (1, 2)
    assert jobs.replay("out") == 0
    assert letters(corpus.out) == [("f2.tfrecord", 0, "not_found", 2)]
    assert check(corpus.out)["files_dead"] == 1
    hidden.rename(corpus.path(2))
    corpus.bad(29)
    assert jobs.replay("out") == 0
    report = check(corpus.out)
    assert (report["files_dead"], report["files_read"]) == (0, 3)
    corpus.bad()
    assert jobs.replay("out") == 0
    assert sorted(in_manifest(corpus.out)) == sorted(everything(0, 1, 2))
    assert check(corpus.out)["files_read"] == 3


@pytest.mark.parametrize("wrap", [bytes, gzip.compress])
@pytest.mark.parametrize("shards", [1, 7, 40])
def test_changed_file_in_ranges_is_read_whole_once(
    corpus: Corpus, shards: int, wrap: Callable[[bytes], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every range of the file is a dead letter, and no record begins where most of them do."""
    data = corpus.path(1).read_bytes()
    corpus.path(1).write_bytes(wrap(data))

    def change_and_run(*arguments: Any) -> None:
        corpus.path(1).write_bytes(wrap(data + jobs.frame(b"record-01-000030 new")))
        jobs.run_plainly(*arguments)

    monkeypatch.setattr(local_runner, "run_pipeline", change_and_run)
    assert corpus.convert(shards=shards) == 0
    assert {letter[2] for letter in letters(corpus.out)} >= {"input_changed"}
    assert sorted(in_manifest(corpus.out)) == sorted(everything(0, 2))
    monkeypatch.setattr(local_runner, "run_pipeline", jobs.run_plainly)
    assert jobs.replay("out") == 0
    assert sorted(in_manifest(corpus.out)) == sorted([*everything(0, 1, 2), b"record-01-000030 new"])
    assert jobs.dead_letters(corpus.out) == []
    report = check(corpus.out)
    assert (report["files_read"], report["files_dead"], report["records_read"]) == (3, 0, 91)


def test_file_that_became_shorter_or_longer_in_its_middle_doubles_nothing(corpus: Corpus) -> None:
    data = bytearray(corpus.path(1).read_bytes())
    data[0] ^= 1
    data[-3] ^= 1
    corpus.path(1).write_bytes(data)
    assert corpus.convert() == 0
    before = sorted(in_manifest(corpus.out))
    jobs.write_tfrecord(corpus.path(1), [b"record-00-000000 other", *payloads(1)])
    assert jobs.replay("out") == 0
    assert set(Counter(in_manifest(corpus.out)).values()) == {1}
    assert set(before) <= set(in_manifest(corpus.out))
    check(corpus.out)


def damaged(rng: random.Random, data: bytes, starts: list[int]) -> bytes:
    """One to three damages. Swapped blocks and cuts between records are none that a reader could see."""
    for _ in range(rng.randint(1, 3)):
        while True:
            kind, changed = corpora.damage_near(rng, data, [min(start, len(data) - 1) for start in starts])
            if kind != "swap" and not (kind == "cut" and len(changed) in starts):
                break
        data = changed
    return data


@pytest.mark.parametrize("seed", range(12))
def test_whatever_was_damaged_and_is_mended_is_never_doubled_and_never_lost(seed: int, corpus: Corpus) -> None:
    rng = random.Random(seed)
    wrap = gzip.compress if seed % 4 == 3 else bytes
    good = corpora.frame_all(payloads(1))
    corpus.path(1).write_bytes(wrap(damaged(rng, good, corpora.frame_starts(payloads(1)))))
    assert corpus.convert(shards=rng.choice([1, 3, 7])) == 0
    before = letters(corpus.out)
    assert jobs.replay("out") == 0  # Nothing is mended yet.
    assert letters(corpus.out) == [(*letter[:3], 2) for letter in before]
    corpus.path(1).write_bytes(wrap(good))
    assert jobs.replay("out") == 0
    check(corpus.out)
    came = Counter(in_manifest(corpus.out))
    assert set(came.values()) == {1}
    assert set(came) <= set(everything(0, 1, 2))
    assert jobs.dead_letters(corpus.out) or len(came) == 90


def test_cut_payloads_come_from_the_source(corpus: Corpus) -> None:
    corpus.bad(6)
    cap = ["--set", "dead_letters.max_payload_bytes=5"]
    assert corpus.convert(*cap) == 0
    assert all(line["payload_truncated"] for line in jobs.dead_letters(corpus.out))
    hidden = corpus.path(0).rename(corpus.folder / "hidden")
    corpus.bad()
    before = jobs.dead_letters(corpus.out)
    assert jobs.replay("out", "--source", "*f0*") == 0
    [letter, *_] = after = jobs.dead_letters(corpus.out)
    assert (letter["attempts"], letter["payload_truncated"], letter["payload_bytes"]) == (2, True, 119)
    assert after == [{**before[0], "attempts": 2}, *before[1:]]
    assert kept_payloads(corpus.out) == [jobs.payload(file, 6)[:5] for file in range(3)]
    hidden.rename(corpus.path(0))
    assert jobs.replay("out") == 0
    assert sorted(in_manifest(corpus.out)) == sorted(everything(0, 1, 2))
    check(corpus.out)


def test_damaged_records_of_array_record_are_read_by_number(corpus: Corpus) -> None:
    assert (
        jobs.convert("--input", "in/*", "--output", "first", "--shards", "2", "--set", "write.compression=uncompressed")
        == 0
    )
    paths = jobs.shards(corpus.folder / "first")
    whole = paths[1].read_bytes()
    at = whole.index(jobs.payload(2, 4))
    paths[1].write_bytes(whole[:at] + b"X" + whole[at + 1 :])
    corpus.bad(8)
    step = ["--step", "steps_of_replay_test:clean", "--shards", "3"]
    assert jobs.convert("--input", "first/*.array_record*", "--output", "out", *step, *LARGE) == 0
    assert Counter(letter[2] for letter in letters(corpus.out)) == {"exception": 3, "damaged_record": 1}
    assert jobs.replay("out") == 0
    assert {letter[3] for letter in letters(corpus.out)} == {2}
    check(corpus.out)
    paths[1].write_bytes(whole)
    corpus.bad()
    assert jobs.replay("out") == 0
    assert sorted(in_manifest(corpus.out)) == sorted(everything(0, 1, 2))
    check(corpus.out)


def test_files_that_were_empty_or_too_large(corpus: Corpus) -> None:
    (corpus.folder / "pictures").mkdir()
    for number in range(5):
        (corpus.folder / f"pictures/{number}.png").write_bytes(
            b"picture %d" % number * (100 if number == 3 else number)
        )
    arguments = ["--format", "files", "--set", "source.max_record_bytes=100", *LARGE]
    assert jobs.convert("--input", "pictures", "--output", "out", *arguments) == 0
    assert [letter[2] for letter in letters(corpus.out)] == ["empty_file", "record_too_large"]
    (corpus.folder / "pictures/0.png").write_bytes(b"picture 0")
    assert check(corpus.out)["files_dead"] == 2
    assert jobs.replay("out") == 0
    assert letters(corpus.out) == [("3.png", 0, "record_too_large", 2)]
    assert check(corpus.out)["files_dead"] == 1
    assert jobs.replay("out", "--set", "source.max_record_bytes=1MiB") == 0
    assert in_manifest(corpus.out)[3:] == [b"picture 0", b"picture 3" * 100]
    assert check(corpus.out)["files_dead"] == 0


def test_refusals_say_what_to_do(corpus: Corpus, capsys: pytest.CaptureFixture[str]) -> None:
    assert jobs.replay("nowhere") == 2
    assert "holds no job" in capsys.readouterr().err
    corpus.bad(*range(20))
    assert corpus.convert("--set", "dead_letters.max_fraction=0.1") == 3
    assert jobs.replay("out") == 2
    assert "dead_letters.max_fraction" in capsys.readouterr().err
    assert corpus.convert() == 0
    assert jobs.replay("out", "--set", "writ.name=x") == 2
    lock = {**where_processes_are(), "pid": os.getpid(), "pid_started": None, "token": "x", "heartbeat": 0}
    lock["pid_started"] = Path(f"/proc/{os.getpid()}/stat").read_text().rpartition(")")[2].split()[19]
    (corpus.out / "_gristmill/lock.json").write_text(json.dumps(lock))
    assert jobs.replay("out") == 1
    assert "gristmill replay: " in capsys.readouterr().err
    (corpus.out / "_gristmill/lock.json").unlink()
    corpus.bad()
    assert jobs.replay("out") == 0
    assert sorted(in_manifest(corpus.out)) == sorted(everything(0, 1, 2))


def test_replay_that_makes_the_whole_worse_than_the_budget_waits_for_a_larger_one(corpus: Corpus) -> None:
    hidden = corpus.path(2).rename(corpus.folder / "hidden")
    (corpus.folder / "list.txt").write_text("\n".join(str(corpus.path(file)) for file in range(3)))
    step = ["--step", "steps_of_replay_test:clean"]
    assert jobs.convert("--input", "@list.txt", "--output", "out", *step, *LARGE) == 0
    hidden.rename(corpus.path(2))
    corpus.bad(*range(20))
    before = jobs.content(corpus.out)
    assert jobs.replay("out", "--set", "dead_letters.max_fraction=0.1") == 3
    assert jobs.content(corpus.out) == before
    check(corpus.out)
    assert jobs.replay("out") == 0
    assert len(letters(corpus.out)) == 20
    assert in_manifest(corpus.out) == everything(0, 1) + payloads(2)[20:]
    check(corpus.out)


def test_lost_shard_of_a_generation_and_of_the_base_are_made_again(corpus: Corpus) -> None:
    corpus.bad(3, 7)
    assert corpus.convert() == 0
    corpus.bad(7)
    assert jobs.replay("out") == 0
    before = jobs.content(corpus.out)
    jobs.shards(corpus.out)[1].unlink()
    corpus.bad(3, 7)
    assert corpus.convert() == 0
    assert jobs.content(corpus.out) == before
    check(corpus.out)
    corpus.bad(7)
    jobs.shards(corpus.out)[4].unlink()
    assert jobs.replay("out", "--reason", "none") == 0
    assert jobs.content(corpus.out) == before
    check(corpus.out)


def test_overwrite_takes_generations_away(corpus: Corpus) -> None:
    corpus.bad(3, 7)
    assert corpus.convert() == 0
    corpus.bad(7)
    assert jobs.replay("out") == 0
    corpus.bad()
    assert corpus.convert("--overwrite", shards=2) == 0
    assert in_manifest(corpus.out) == everything(0, 1, 2)
    names = jobs.tree(corpus.out)
    assert not [name for name in names if "g001" in name or "replayed" in name or "_dead_letters" in name]
    check(corpus.out)


@pytest.mark.parametrize("workers", ["0", "2"])
def test_real_pipeline_does_the_same(workers: str, beam_corpus: Corpus) -> None:
    corpus = beam_corpus
    corpus.bad(3, 7)
    assert corpus.convert() == 0
    corpus.bad(7)
    assert jobs.main(["replay", "out", "--workers", workers]) == 0
    assert in_manifest(corpus.out)[84:] == [jobs.payload(file, 3) for file in range(3)]
    check(corpus.out)


def test_a_set_grows_though_somebody_deleted_the_letters_that_a_replay_has_consumed(tmp_path: Path) -> None:
    whole = jobs.write_damaged(tmp_path / "in", 300)
    arguments = ["--input", tmp_path / "in", "--output", tmp_path / "out", "--set", "dead_letters.max_fraction=0.9"]
    assert jobs.convert(*arguments, "--shards", "4") == 0
    jobs.write_tfrecord(whole / "f1.tfrecord", [jobs.payload(1, number) for number in range(300)])
    assert jobs.replay(tmp_path / "out") == 0
    for path in (tmp_path / "out/_gristmill/replayed/g001").iterdir():
        path.unlink()
    jobs.write_tfrecord(whole / "new.tfrecord", [b"new"])
    assert jobs.convert(*arguments, "--append") == 0
    expected = [jobs.payload(file, number) for file in range(3) for number in range(300)]
    assert sorted(jobs.records(tmp_path / "out")) == sorted([*expected, b"new"])
    assert len(jobs.dead_letters(tmp_path / "out")) == 1  # Not given once more by a shard that is made anew.
    assert jobs.verify(tmp_path / "out") == 4  # What is missing is still told.
