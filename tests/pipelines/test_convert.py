"""Whole jobs: what comes out, exit statuses, messages, resuming, replacing."""

from __future__ import annotations

import gzip
import json
import os
import random
import re
import stat
from pathlib import Path

import pytest

import jobs


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Three files of 100 records."""
    for file in range(3):
        jobs.write_tfrecord(tmp_path / "in" / f"f{file}.tfrecord", [jobs.payload(file, i) for i in range(100)])
    return tmp_path / "in"


def all_payloads() -> list[bytes]:
    return [jobs.payload(file, i) for file in range(3) for i in range(100)]


def test_records_come_out_unchanged_and_in_order(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert (
        jobs.convert("--input", corpus / "*", "--output", out, "--shards", "4", "--name", "c4", "--split", "test") == 0
    )
    assert jobs.records(out) == all_payloads()
    assert [path.name for path in jobs.shards(out)] == [f"c4-test.array_record-{i:05d}-of-00004" for i in range(4)]
    report = jobs.report(out)
    assert (report["records_read"], report["records_written"], report["records_dead"]) == (300, 300, 0)
    assert (report["files_seen"], report["files_read"], report["status"]) == (3, 3, "done")
    manifest = json.loads((out / "manifest.json").read_text())
    assert [shard["name"] for shard in manifest["shards"]] == [path.name for path in jobs.shards(out)]
    assert manifest["num_records"] == 300
    assert not [name for name in jobs.tree(out) if "attempts" in name or "lock" in name]


def test_shards_are_balanced_to_within_a_record(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    jobs.convert("--input", corpus, "--output", out, "--shards", "7")
    sizes = [sum(len(record) + 16 for record in jobs.read_array_record(path)) for path in jobs.shards(out)]
    assert len(sizes) == 7
    assert max(sizes) - min(sizes) <= 2 * (17 * 7 + 16)


def test_match_keeps_one_shard_a_file(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    jobs.write_tfrecord(corpus / "empty.tfrecord", [])
    (corpus / "f1.tfrecord").write_bytes(gzip.compress((corpus / "f1.tfrecord").read_bytes()))
    assert jobs.convert("--input", corpus, "--output", out, "--shards", "match") == 0
    expected = [[jobs.payload(file, i) for i in range(100)] for file in range(3)]
    assert [jobs.read_array_record(path) for path in jobs.shards(out)] == expected
    assert jobs.report(out)["files_empty"] == 1


def test_compressed_input_rolls_over_at_the_size(tmp_path: Path) -> None:
    payloads = [jobs.payload(0, i) for i in range(2000)]
    path = jobs.write_tfrecord(tmp_path / "in/one.tfrecord.gz", payloads)
    path.write_bytes(gzip.compress(path.read_bytes()))
    out = tmp_path / "out"
    assert jobs.convert("--input", path, "--output", out, "--shards", "20kB") == 0
    parts = [jobs.read_array_record(shard) for shard in jobs.shards(out)]
    assert [record for part in parts for record in part] == payloads
    assert len(parts) > 3
    assert all(sum(map(len, part)) <= 20_000 for part in parts)


def test_fewer_records_than_shards_leaves_no_empty_file(tmp_path: Path) -> None:
    jobs.write_tfrecord(tmp_path / "in/three", [b"a", b"b", b"c"])
    out = tmp_path / "out"
    assert jobs.convert("--input", tmp_path / "in", "--output", out, "--format", "tfrecord", "--shards", "8") == 0
    parts = [jobs.read_array_record(path) for path in jobs.shards(out)]
    assert [record for part in parts for record in part] == [b"a", b"b", b"c"]
    assert all(parts)
    assert jobs.shards(out)[-1].name.endswith(f"-of-{len(parts):05d}")


def test_damage_costs_only_itself_and_is_named(corpus: Path, tmp_path: Path) -> None:
    data = bytearray((corpus / "f1.tfrecord").read_bytes())
    starts = [0]
    for i in range(99):
        starts.append(starts[-1] + 16 + len(jobs.payload(1, i)))
    data[starts[20] + 14] ^= 1
    data[starts[60]] ^= 1
    (corpus / "f1.tfrecord").write_bytes(data)
    out = tmp_path / "out"
    assert jobs.convert("--input", corpus, "--output", out, "--shards", "5") == 0
    lost = {jobs.payload(1, 20), jobs.payload(1, 60)}
    assert jobs.records(out) == [record for record in all_payloads() if record not in lost]
    letters = jobs.dead_letters(out)
    assert [(letter["position"], letter["reason"]) for letter in letters] == [
        (starts[20], "data_checksum"),
        (starts[60], "length_checksum"),
    ]
    assert all(letter["source"] == str(corpus / "f1.tfrecord") and letter["step"] == "read" for letter in letters)
    [payloads] = (out / "_dead_letters").glob("*.payloads")
    damaged = bytes(data[starts[20] + 12 : starts[20] + 12 + len(jobs.payload(1, 20))])
    assert jobs.read_array_record(payloads) == [damaged]
    [source] = jobs.report(out)["sources"]
    assert (source["records_read"], source["records_written"], source["records_dead"]) == (100, 98, 2)


STEPS = """
import re
from transforms import Drop

def clean(value):
    n = int(re.search(rb"-(\\d{6}) ", value).group(1))
    if n % 10 == 1:
        return None
    if n % 10 == 2:
        return Drop("too_even")
    if n % 10 == 3:
        raise KeyError(n)
    if n % 10 == 4:
        return iter([value + b"a", value + b"b"])
    if n % 10 == 5:
        return (value if i < 2 else 1 / 0 for i in range(3))
    return value.upper()
"""


def test_steps_clean_drop_fail_and_fan_out(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "steps_of_convert_test.py").write_text(STEPS)
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "out"
    changes = ["--set", "dead_letters.max_fraction=0.5"]
    assert jobs.convert("--input", corpus, "--output", out, "--step", "steps_of_convert_test:clean", *changes) == 0
    expected: list[bytes] = []
    for record in all_payloads():
        kind = int(record[10:16]) % 10
        if kind == 4:
            expected += [record + b"a", record + b"b"]
        elif kind not in (1, 2, 3, 5):
            expected.append(record.upper())
    assert jobs.records(out) == expected
    report = jobs.report(out)
    assert report["dropped_by_reason"] == {"returned_none": 30, "too_even": 30}
    assert report["dead_by_reason"] == {"exception": 60}
    assert report["records_added"] == 30
    letters = jobs.dead_letters(out)
    assert {letter["error_type"] for letter in letters} == {"KeyError", "ZeroDivisionError"}
    kept = [r for path in sorted((out / "_dead_letters").glob("*.payloads")) for r in jobs.read_array_record(path)]
    assert kept == [record for record in all_payloads() if int(record[10:16]) % 10 in (3, 5)]


def test_reshard_and_files_pass_bytes_through(corpus: Path, tmp_path: Path) -> None:
    first, second, raw = tmp_path / "first", tmp_path / "second", tmp_path / "raw"
    assert jobs.convert("--input", corpus, "--output", first, "--shards", "6") == 0
    assert jobs.convert("--input", first / "*.array_record*", "--output", second, "--shards", "2") == 0
    assert jobs.records(second) == all_payloads()
    assert jobs.convert("--input", corpus, "--output", raw, "--format", "files", "--shards", "2") == 0
    assert jobs.records(raw) == [(corpus / f"f{i}.tfrecord").read_bytes() for i in range(3)]


def test_same_command_again_has_nothing_to_do(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    command = ["--input", corpus, "--output", out, "--shards", "3"]
    assert jobs.convert(*command) == 0
    before = {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in jobs.shards(out)}
    capsys.readouterr()
    assert jobs.convert(*command) == 0
    assert "nothing left to do" in capsys.readouterr().out
    assert {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in jobs.shards(out)} == before


def test_a_lost_shard_is_made_again(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = ["--input", corpus, "--output", out, "--shards", "3"]
    assert jobs.convert(*command) == 0
    before = jobs.content(out)
    jobs.shards(out)[1].unlink()
    assert jobs.convert(*command) == 0
    assert jobs.content(out) == before


def test_another_job_is_refused_and_replaced_only_when_whole(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert jobs.convert("--input", corpus, "--output", out, "--shards", "3") == 0
    old = jobs.content(out)
    other = ["--input", corpus / "f[01].tfrecord", "--output", out, "--shards", "2"]
    assert jobs.convert(*other) == 2
    message = capsys.readouterr().err
    assert "inputs, write.shards changed" in message
    assert "--overwrite" in message
    assert jobs.content(out) == old
    assert jobs.convert(*other, "--overwrite", "--step", "example.check") == 3  # Nothing is written: the old set stays.
    assert {name for name in jobs.content(out) if name.startswith("corpus-train.")} == {
        name for name in old if name.startswith("corpus-train.")
    }
    assert (out / "manifest.json").exists()
    assert jobs.convert(*other, "--overwrite") == 0
    assert [path.name for path in jobs.shards(out)] == [f"corpus-train.array_record-{i:05d}-of-00002" for i in range(2)]
    assert jobs.records(out) == all_payloads()[:200]
    assert not (out / "_gristmill/replaced.json").exists()
    assert jobs.dead_letters(out) == []


def test_overwrite_takes_old_shards_of_another_name_away(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert jobs.convert("--input", corpus, "--output", out, "--name", "old") == 0
    assert jobs.convert("--input", corpus, "--output", out, "--name", "new", "--overwrite") == 0
    assert {path.name for path in jobs.shards(out)} == {"new-train.array_record-00000-of-00001"}


def test_foreign_shards_are_refused(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "corpus-train.array_record-00000-of-00009").write_bytes(b"someone else's")
    assert jobs.convert("--input", corpus, "--output", out) == 2
    assert "corpus-train.array_record-00000-of-00009" in capsys.readouterr().err
    assert jobs.convert("--input", corpus, "--output", out, "--overwrite") == 0
    assert jobs.records(out) == all_payloads()


def test_over_budget_publishes_nothing_and_goes_on_with_a_larger_budget(corpus: Path, tmp_path: Path) -> None:
    data = bytearray((corpus / "f0.tfrecord").read_bytes())
    for i in range(0, len(data) // 2, 40):
        data[i] ^= 0xFF
    (corpus / "f0.tfrecord").write_bytes(data)
    out = tmp_path / "out"
    command = ["--input", corpus, "--output", out, "--shards", "3"]
    assert jobs.convert(*command, "--set", "dead_letters.max_fraction=0.001") == 3
    assert jobs.shards(out) == []
    assert not (out / "manifest.json").exists()
    assert jobs.report(out)["status"] == "over_budget"
    assert jobs.dead_letters(out)
    attempts = {path.stat().st_mtime_ns for path in (out / "_gristmill/attempts").rglob("part-*")}
    assert jobs.convert(*command, "--set", "dead_letters.max_fraction=1") == 0
    assert attempts <= {path.stat().st_mtime_ns for path in jobs.shards(out)}
    assert len(jobs.records(out)) == jobs.report(out)["records_written"]


def test_max_count_is_a_budget_too(corpus: Path, tmp_path: Path) -> None:
    with (corpus / "f0.tfrecord").open("ab") as file:
        file.write(b"tail")
    out = tmp_path / "out"
    assert jobs.convert("--input", corpus, "--output", out, "--set", "dead_letters.max_count=0") == 3
    assert "max_count" in jobs.report(out)["message"]


def test_nothing_usable_exits_3_without_a_data_set(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.tfrecord").write_bytes(b"<!DOCTYPE html><html>Virus scan warning</html>")
    (tmp_path / "in/b.tfrecord").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n")
    out = tmp_path / "out"
    changes = ["--set", "dead_letters.max_fraction=1"]
    assert jobs.convert("--input", tmp_path / "in", "--output", out, *changes) == 3
    assert jobs.shards(out) == []
    letters = jobs.dead_letters(out)
    assert [letter["reason"] for letter in letters] == ["not_tfrecord", "not_tfrecord"]
    assert "HTML" in letters[0]["error"]
    assert "LFS" in letters[1]["error"]
    assert jobs.report(out)["files_dead"] == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--output", "out"], "no input"),
        (["--input", "in"], "no output"),
        (["--input", "in/nothing*", "--output", "out"], "in/nothing*"),
        (
            ["--input", "in", "--output", "out", "--set", "write.shard=3"],
            "write.shard: unknown key; did you mean shards?",
        ),
        (["--input", "in", "--output", "out", "--set", "writ.shards=3"], "writ: unknown key; did you mean write?"),
        (["--input", "in", "--output", "out", "--set", "write.group_size=0"], "write.group_size"),
        (["--input", "in", "--output", "out", "--set", "write.group_size=2147483648"], "equal to 2147483647"),
        (["--input", "in", "--output", "out", "--set", "beam.direct_num_workers=x"], "invalid int value: 'x'"),
        (["--input", "in", "--output", "out", "--direct_num_workers", "-2"], "or 0 for all cores, got -2"),
        (["--input", "in", "--output", "out", "--set", "beam.runner=Nope"], "Unexpected pipeline runner: Nope"),
        (["--input", "in", "--output", "out", "--direct_running_mode", "fast"], "invalid choice: 'fast'"),
        (["--input", "in", "--output", "out", "--set", "py_modules=[no_such_module]"], "no module 'no_such_module'"),
        (["--input", "in", "--output", "out", "--set", "write.compression=zip"], "'zip'"),
        (["--input", "in", "--output", "out", "--set", "write.compression=zstd:99"], "from -131072 to 22"),
        (["--input", "in", "--output", "out", "--set", "write.template={SPLIT}"], "same name"),
        (["--input", "in", "--output", "out", "--set", "write.name=a,b"], "write.name"),
        (["--input", "in", "--output", "out", "--set", "nonsense"], "key.path=value"),
        (["--input", "in", "--output", "out", "--shards", "many"], "'many'"),
        (["--input", "in", "--output", "out", "--shards", "0"], "at least 1"),
        (["--input", "in", "--output", "out", "--shards", "268435456"], "for bytes say 268435456B"),
        (["--input", "", "--output", "out"], "a name is empty"),
        (["--input", "in", "--output", "out", "--format", "tfrecrod"], "source.format"),
        (["--input", "in", "--output", "out", "--step", "example.chek"], "did you mean example.check?"),
        (["--input", "in", "--output", "out", "--step", "no_such_module:f"], "no_such_module"),
        (["--input", "in", "--output", "out", "--step", "os:no_such_function"], "no_such_function"),
        (["--input", "in", "--output", "out", "--step", "example.check,level=3"], "parameters"),
        (["--input", "in", "--output", "out", "--step", "../steps:f"], "not a path to it"),
        (["--input", "in", "--output", "out", "--step", "steps.py:f"], "a module is named without .py"),
        (["--input", "in", "--output", "out", "--step", "nope"], "http.post. Functions of your own"),
        (["--input", "in", "--output", "out", "--set", ".=3"], "key.path=value"),
        (["--input", "in", "--output", "out", "--workers", "99999"], "at most 1,000, got '99999'"),
        (["--input", "in", "--output", "out", "--outptu", "x"], "did you mean --output?"),
        (["--input", "in", "--output", "out", "--config", "none.yaml"], "none.yaml"),
        (["--input", "in", "--output", "out", "--limit", "0"], "--limit"),
        (["--input", "in", "--output", "/dev/null/out"], "/dev/null/out"),
        (["--input", "in", "--output", "strange://bucket/out"], "strange://"),
        (["--input", "strange://bucket/in", "--output", "out"], "strange://bucket/in"),
    ],
)
def test_wrong_usage_exits_2_with_rule_value_and_way_out(
    arguments: list[str],
    message: str,
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert jobs.convert(*arguments) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_dry_run_prints_the_plan_and_writes_nothing(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    command = [
        "--input",
        corpus,
        "--output",
        out,
        "--shards",
        "3",
        "--step",
        "example.check",
        "--dry-run",
        "--limit",
        "2",
    ]
    assert jobs.convert(*command) == 0
    printed = capsys.readouterr().out
    assert "3 planned" in printed
    assert "one random read" in printed
    assert printed.count("not_example") == 2
    assert not out.exists()


def test_limit_converts_the_first_records_only(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert jobs.convert("--input", corpus, "--output", out, "--limit", "130") == 0
    assert jobs.records(out) == all_payloads()[:130]
    report = jobs.report(out)
    assert (report["records_read"], report["records_written"]) == (130, 130)


def test_group_size_above_one_is_written_and_warned_of(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert jobs.convert("--input", corpus, "--output", out, "--set", "write.group_size=16") == 0
    assert jobs.records(out) == all_payloads()
    assert any("Grain expects 1" in note for note in jobs.report(out)["notes"])


@pytest.mark.parametrize("compression", ["zstd:9", "brotli:3", "snappy", "uncompressed", "auto"])
def test_every_compression_round_trips(compression: str, corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert jobs.convert("--input", corpus, "--output", out, "--set", f"write.compression={compression}") == 0
    assert jobs.records(out) == all_payloads()


def test_auto_writes_what_does_not_compress_uncompressed(tmp_path: Path) -> None:
    rng = random.Random(0)
    jobs.write_tfrecord(tmp_path / "in/a.tfrecord", [rng.randbytes(20_000) for _ in range(50)])
    out = tmp_path / "out"
    assert jobs.convert("--input", tmp_path / "in", "--output", out) == 0
    assert any("compression uncompressed" in note for note in jobs.report(out)["notes"])


@pytest.mark.parametrize("workers", ["0", "2"])
def test_names_on_the_command_line_may_hold_any_bytes(workers: str, tmp_path: Path) -> None:
    name = os.fsdecode(b"in/\xff a\n.tfrecord")
    jobs.write_tfrecord(tmp_path / name, [b"%d" % i for i in range(10)])
    command = ["--input", tmp_path / name, "--output", tmp_path / os.fsdecode(b"out\xfe"), "--workers", workers]
    assert jobs.convert(*command) == 0
    out = tmp_path / os.fsdecode(b"out\xfe")
    assert jobs.records(out) == [b"%d" % i for i in range(10)]
    assert jobs.report(out)["config"]["source"]["patterns"] == [f"{tmp_path}/in/\\xff a\n.tfrecord"]
    assert jobs.convert(*command) == 0
    assert jobs.main(["report", str(out)]) == 0
    assert jobs.main(["verify", str(out)]) == 0


def test_hidden_files_and_duplicates_are_counted(corpus: Path, tmp_path: Path) -> None:
    (corpus / "_SUCCESS").write_bytes(b"")
    (corpus / ".part.crc").write_bytes(b"crc")
    os.symlink(corpus / "f0.tfrecord", corpus / "link.tfrecord")
    out = tmp_path / "out"
    assert jobs.convert("--input", corpus / "*", corpus / "f1*", "--output", out, "--format", "tfrecord") == 0
    report = jobs.report(out)
    assert (report["files_seen"], report["files_skipped"], report["files_duplicate"]) == (3, 2, 2)
    assert jobs.records(out) == all_payloads()


def test_file_whose_disk_gives_errors_is_not_taken_for_an_empty_one(corpus: Path, tmp_path: Path) -> None:
    os.symlink("/proc/self/mem", corpus / "bad-disk.tfrecord")  # 0 bytes by its listing; reading gives EIO.
    out = tmp_path / "out"
    assert jobs.convert("--input", corpus, "--output", out, "--set", "dead_letters.max_fraction=1") == 0
    assert jobs.records(out) == all_payloads()
    [letter] = jobs.dead_letters(out)
    assert (letter["reason"], Path(letter["source"]).name) == ("io_error", "bad-disk.tfrecord")
    assert jobs.report(out)["files_dead"] == 1


def test_output_below_the_input_folder_is_not_read_again(corpus: Path) -> None:
    command = ["--input", corpus, "--output", corpus / "out", "--shards", "2"]
    assert jobs.convert(*command) == 0
    assert jobs.convert(*command) == 0
    assert jobs.records(corpus / "out") == all_payloads()


def test_report_is_rebuilt_from_the_ledgers(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert jobs.convert("--input", corpus, "--output", out, "--shards", "3") == 0
    before = jobs.report(out)
    (out / "_gristmill/report.json").unlink()
    assert jobs.main(["report", str(out)]) == 0
    after = jobs.report(out)
    del before["seconds"], after["seconds"]
    assert after == before
    assert "300 written" in capsys.readouterr().out
    assert jobs.main(["report", str(tmp_path)]) == 2


def test_inspect_tells_counts_options_features_and_damage(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    with (corpus / "f0.tfrecord").open("ab") as file:
        file.write(b"tail")
    jobs.convert("--input", corpus, "--output", out)
    capsys.readouterr()
    assert jobs.main(["inspect", str(corpus / "f0.tfrecord"), str(jobs.shards(out)[0])]) == 0
    printed = capsys.readouterr().out
    for words in ("100;", "truncated", "group_size:1", "300;", "record-00-000000"):
        assert words in printed


def test_inspect_goes_on_after_a_file_that_it_cannot_tell(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "line\nand \x1b[31mred").write_text("text")
    good = jobs.write_array_record(tmp_path / "of no known name", [jobs.payload(0, number) for number in range(5)])
    assert jobs.main(["inspect", str(tmp_path / "line\nand \x1b[31mred"), str(tmp_path / "gone"), str(good)]) == 2
    printed = capsys.readouterr()
    assert f"{good}: array_record (" in printed.out
    assert printed.err.splitlines() == [
        f"gristmill inspect: {tmp_path}/line\\nand \\x1b[31mred is neither TFRecord nor ArrayRecord "
        "by its bytes or name",
        f"{tmp_path}/gone cannot be opened: No such file or directory",
    ]


def test_more_shards_than_records_are_said_ahead(
    corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert jobs.convert("--input", corpus, "--output", tmp_path / "out", "--shards", "5000") == 0
    assert re.search(r"5,000 shards for about \d\d\d records: empty ones are left out", capfd.readouterr().err)
    assert len(jobs.records(tmp_path / "out")) == 300


def test_output_without_permission_exits_2(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    out.mkdir()
    out.chmod(stat.S_IRUSR | stat.S_IXUSR)
    if os.access(out, os.W_OK):  # The superuser may write anywhere but here.
        out = Path("/proc/self/out")
    assert jobs.convert("--input", corpus, "--output", out) == 2
    assert str(out) in capsys.readouterr().err
