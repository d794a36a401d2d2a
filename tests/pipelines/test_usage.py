"""What is wrong with a call is said before any work, in words that help."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

import jobs
from pipelines.cli import main
from pipelines.config import load_config, parse_value
from pipelines.errors import UsageError
from pipelines.progress import JobWatch
from transforms.report import load_spec
from transforms.store import LocalStore, OutputError


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    jobs.write_tfrecord(tmp_path / "in/a", [jobs.payload(0, number) for number in range(9)])
    return tmp_path


class TestConfig:
    @pytest.mark.parametrize(
        "key",
        [
            *("source.max_record_bytes", "write.group_size", "write.shards", "dead_letters.max_fraction"),
            *("dead_letters.max_count", "dead_letters.max_payload_bytes"),
        ],
    )
    def test_true_is_no_number(self, key: str) -> None:
        with pytest.raises(UsageError, match=f"{key}: expected .*got True"):
            load_config(None, [(key, True)])

    def test_true_is_no_number_of_a_steps_options_either(self) -> None:
        with pytest.raises(UsageError, match=r"steps\[0\].timeout_secs: expected no true or false"):
            load_config(None, [("steps", [{"use": "example.check", "timeout_secs": True}])])

    @pytest.mark.parametrize("text", ["1:30", "12:00:00", "-1:30", "1:30.5"])
    def test_numbers_with_colons_are_text(self, text: str, tmp_path: Path) -> None:
        path = tmp_path / "c.yaml"
        path.write_text(
            f"source:\n  patterns: [{text}]\nwrite: {{group_size: 0x10}}\ndead_letters: {{max_fraction: .15}}\n"
        )
        config = load_config(str(path), [])
        assert (config.source.patterns, config.write.group_size) == ([text], 16)
        assert config.dead_letters.max_fraction == 0.15
        assert parse_value(text) == text
        assert parse_value(f"[1, {text}, 1_000, 2.5]") == [1, text, 1_000, 2.5]

    def test_switches_may_be_true(self) -> None:
        config = load_config(None, [("write.check_space", True), ("steps", [{"use": "x", "isolate": True}])])
        assert config.write.check_space
        assert config.steps[0]["isolate"] is True

    @pytest.mark.parametrize("value", [True, False, "auto"])
    def test_whether_answers_are_kept_is_yes_no_or_auto(self, value: object) -> None:
        config = load_config(None, [("steps", [{"use": "x", "journal": value}])])
        assert config.steps == [{"use": "x", "journal": value}]

    @pytest.mark.parametrize("text", ["steps: []\nsteps: []\n", "write:\n  name: a\n  name: b\n"])
    def test_a_key_that_stands_twice_is_refused(self, text: str, tmp_path: Path) -> None:
        (tmp_path / "job.yaml").write_text(text)
        with pytest.raises(UsageError, match=r"the key (steps|name) stands twice"):
            load_config(str(tmp_path / "job.yaml"), [])

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("since: 2024-01-31", "steps[0].since: date is no plain value; quote it"),
            ("mark: !!binary aGk=", "steps[0].mark: bytes is no plain value"),
            ("kinds: !!set {a, b}", "steps[0].kinds: set is no plain value"),
            ("weight: .nan", "steps[0].weight: expected a finite number, got nan"),
            ("inner: {list: [1, .inf]}", "steps[0].inner.list[1]: expected a finite number, got inf"),
            ("inner: {1: a}", "steps[0].inner: the key 1 must be text"),
            ("inner: &a [*a]", "steps[0].inner[0]: contains itself through a YAML anchor"),
            ("max_per_sec: 1.0e-300", "steps[0].max_per_sec: must be greater than or equal to 0.00001"),
            ("journal: maybe", "steps[0].journal: must be true, false or auto, got 'maybe'"),
            ("journal: 1", "steps[0].journal: must be true, false or auto, got 1"),
            ("timeout_secs: 1.0e+300", "steps[0].timeout_secs: must be less than or equal to 1000000"),
            ("max_memory_bytes: 1", "steps[0].max_memory_bytes: must be greater than or equal to 67108864"),
            ("max_memory_bytes: 2000PiB", "steps[0].max_memory_bytes: "),
            ('text: "\\ud800"', "steps[0].text: expected text in UTF-8, got '\\ud800'"),
            ('"\\ud800": 1', "steps[0]: the key '\\ud800' must be text in UTF-8"),
            ("day: 9999-99-99", "a value cannot be read: month must be in 1..12"),
            (f"number: {'9' * 5000}", "a value cannot be read: Exceeds the limit"),
            (f"list: {'[' * 3000}{']' * 3000}", "a value cannot be read: maximum recursion depth exceeded"),
            ("? [a]\n  : b", "found unhashable key"),
        ],
    )
    def test_values_that_would_fail_later_are_refused(self, text: str, message: str, tmp_path: Path) -> None:
        (tmp_path / "job.yaml").write_text(f"steps:\n- call: os:fspath\n  {text}\n")
        with pytest.raises(UsageError) as refused:
            load_config(str(tmp_path / "job.yaml"), [])
        assert message in str(refused.value)

    def test_anchors_that_multiply_are_refused_at_once(self, tmp_path: Path) -> None:
        levels = [f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 9)}]" for level in range(1, 30)]
        lines = ["steps:", "- call: os:fspath", "  a0: &a0 [1]", *(f"  {level}" for level in levels)]
        (tmp_path / "job.yaml").write_text("\n".join(lines))
        with pytest.raises(UsageError, match="more than 1,000,000 values once its YAML anchors are filled in"):
            load_config(str(tmp_path / "job.yaml"), [])

    def test_names_that_are_not_utf8_stay_names(self) -> None:
        config = load_config(None, [("source.patterns", ["in/\udcff*"]), ("write.output", "out\udcfe")])
        assert (config.source.patterns, config.write.output) == (["in/\udcff*"], "out\udcfe")
        with pytest.raises(UsageError, match=r"source.patterns\[0\]: expected text in UTF-8"):
            load_config(None, [("source.patterns", ["in/\ud800"])])

    @pytest.mark.parametrize(
        ("key", "value", "message"),
        [
            ("write.shards", "\u0661", "expected auto, match, a number or a size such as 256MiB, got '\u0661'"),
            ("write.shards", "9" * 5000, "expected auto, match, a number"),
            ("write.shards", "9" * 400 + "B", "expected auto, match, a number"),
            ("write.shards", 0, "write.shards: a number of shards must be at least 1, got 0"),
            ("source.max_record_bytes", "\u0663MB", "expected a size such as 256MiB, got '\u0663MB'"),
            ("write.compression", "zstd:\u0663", "expected auto, uncompressed, snappy, zstd[:LEVEL]"),
            ("source.patterns", [["a"]], "source.patterns.0: must be a valid string, got ['a']"),
            ("steps", {"use": "x"}, "steps: must be a valid list, got {'use': 'x'}"),
            ("steps", [{"use": "x", "max_memory_bytes": "much"}], "expected a size such as 256MiB, got 'much'"),
        ],
    )
    def test_messages_give_the_rule_and_the_value_once(self, key: str, value: object, message: str) -> None:
        with pytest.raises(UsageError) as refused:
            load_config(None, [(key, value)])
        assert message in str(refused.value)
        assert str(refused.value).count(", got ") == 1
        assert len(str(refused.value)) < 6_000

    def test_a_key_below_what_is_no_group_is_refused_with_what_stands_there(self, tmp_path: Path) -> None:
        (tmp_path / "job.yaml").write_text("write: [1]\n")
        with pytest.raises(UsageError, match=r"write: must be a group of keys such as write.output, got \[1\]"):
            load_config(str(tmp_path / "job.yaml"), [("write.output", "out")])

    def test_an_anchor_used_twice_is_no_loop(self, tmp_path: Path) -> None:
        (tmp_path / "job.yaml").write_text("steps:\n- {call: os:fspath, a: &it [1, 2], b: *it}\n")
        assert load_config(str(tmp_path / "job.yaml"), []).steps == [{"call": "os:fspath", "a": [1, 2], "b": [1, 2]}]

    def test_names_that_no_file_system_takes_are_refused(self) -> None:
        with pytest.raises(UsageError, match=r"file names would be about 2.. bytes long"):
            load_config(None, [("write.name", "n" * 200)])


_STEP = """
from pathlib import Path
from typing import Literal

class Unknown: ...

def clean(value, count: int = 1, share: float = 0, path: Path = ".", kind: Literal["a", "b"] = "a", text: str = "",
          words: list[str] = (), other: Unknown = None, free=None):
    return value

class Clean:
    def __init__(self, count: "int | None" = None): ...
    def __call__(self, value): return value
"""


class TestStepParameters:
    @pytest.fixture(autouse=True)
    def _step(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (place / "steps_of_usage_test.py").write_text(_STEP)
        monkeypatch.setattr(sys, "path", list(sys.path))
        sys.modules.pop("steps_of_usage_test", None)

    @pytest.mark.parametrize(
        ("parameters", "message"),
        [
            ("clean,count=many", "steps[0].count: steps_of_usage_test:clean expects int: should be a valid integer"),
            ("clean,count=1.5", "got 1.5"),
            ("clean,share=[1]", "expects float"),
            ("clean,kind=c", "expects Literal['a', 'b']"),
            ("clean,text=3", "expects str"),
            ("clean,words=[a,3]", "expects list[str]"),
            ("Clean,count=many", "expects int | None"),
        ],
    )
    def test_of_another_type_than_declared_are_refused(
        self, parameters: str, message: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert jobs.convert("--input", "in", "--output", "out", "--step", f"steps_of_usage_test:{parameters}") == 2
        assert message in capsys.readouterr().err
        assert not Path("out").exists()

    @pytest.mark.parametrize(
        "parameters",
        [
            "clean,count=3,share=1,path=a/b,kind=b,text=x",
            "clean,words=[a,b],other=7,free=[1]",
            "Clean,count=2",
            "Clean",
        ],
    )
    def test_of_the_declared_type_or_of_none_are_taken(self, parameters: str) -> None:
        assert jobs.convert("--input", "in", "--output", "out", "--step", f"steps_of_usage_test:{parameters}") == 0
        assert len(jobs.records(Path("out"))) == 9


class TestOutput:
    def test_that_cannot_exist_is_refused(self, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert jobs.convert("--input", "in", "--output", "x" * 300) == 2
        assert "output: [Errno 36] File name too long" in capsys.readouterr().err

    @pytest.mark.parametrize("command", ["convert", "status", "report", "verify", "cancel", "replay"])
    def test_of_a_file_system_whose_module_is_missing_is_refused(
        self, command: str, place: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        arguments = ["--input", "in", "--output", "hdfs://b/x"] if command == "convert" else ["hdfs://b/x"]
        assert main([command, *arguments]) == 2
        assert "output: hdfs://b/x cannot be opened" in capsys.readouterr().err

    def test_with_other_shards_is_not_said_to_be_resumable(
        self, place: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert jobs.convert("--input", "in", "--output", "out", "--shards", "2") == 0
        capsys.readouterr()
        assert jobs.convert("--input", "in", "--output", "out", "--shards", "3") == 2
        message = capsys.readouterr().err
        assert "write.shards changed" in message
        assert "resume-anyway" not in message


def test_inputs_that_cannot_be_read_are_named(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.symlink("loop", place / "in/loop")
    os.mkfifo(place / "in/fifo")
    (place / "list").write_text("gone\n")
    for given, said in (
        ("in/loop", f"no input can be read: {place}/in/loop: Too many levels of symbolic links"),
        ("in/fifo", f"no input can be read: {place}/in/fifo: neither a regular file nor a link to one"),
        ("@list", f"no input can be read: {place}/gone: No such file or directory"),
    ):
        assert jobs.convert("--input", given, "--output", "out") == 2
        assert said in capsys.readouterr().err


def test_no_more_workers_are_started_than_there_are_shards(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", "--input", "in", "--output", "out", "--shards", "1", "--workers", "900"]) == 0
    assert "--direct_num_workers=1" in capfd.readouterr().err


def test_a_list_of_inputs_that_is_damaged_is_written_anew_by_the_same_command(place: Path) -> None:
    assert jobs.convert("--input", "in", "--output", "out") == 0
    listed = place / "out/_gristmill/inputs.jsonl"
    before = listed.read_bytes()
    for published in (True, False):
        listed.write_bytes(b"{}\n")
        if not published:
            (place / "out/manifest.json").unlink()
        assert jobs.convert("--input", "in", "--output", "out") == 0
        assert listed.read_bytes() == before
        assert jobs.verify("out") == 0


def test_cancel_of_a_folder_without_a_job_is_wrong_usage(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cancel", "nothing"]) == 2
    assert "nothing holds no job of gristmill" in capsys.readouterr().err


def test_a_report_that_cannot_be_written_is_printed(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert jobs.convert("--input", "in", "--output", "out") == 0

    def refuse(*_: object) -> None:
        raise OutputError("cannot write report.html: Read-only file system")

    monkeypatch.setattr(LocalStore, "put", refuse)
    capsys.readouterr()
    assert main(["report", "out", "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["records_written"] == 9
    assert "it is not written down: cannot write report.html" in printed.err


def test_what_is_over_its_budget_is_not_verified_and_says_what_to_do(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (place / "in/a").open("ab") as file:
        file.write(b"x" * 10_000)
    assert jobs.convert("--input", "in", "--output", "out") == 3
    assert "--set dead_letters.max_fraction=..." in capsys.readouterr().out
    assert main(["verify", "out"]) == 3
    assert "nothing is published" in capsys.readouterr().out


def test_the_speed_counts_from_when_the_run_began(place: Path) -> None:
    assert jobs.convert("--input", "in", "--output", "out", "--shards", "3") == 0
    store = LocalStore("out")
    for name, moment in (("00000", 100.0), ("00001", 1_010.0), ("00002", 1_010.5)):
        path = f"_gristmill/shards/{name}.json"
        found = store.get(path)
        assert found is not None
        store.put(path, json.dumps({**json.loads(found[0]), "committed_at": moment}).encode())
    watch = JobWatch(store, load_spec(store)[0], may_call_off=False)
    watch.look()
    speed = watch.speed(since=1_000.5)
    assert speed is not None
    assert speed["shards"] == 2 / 10  # The first was committed by an earlier run.
    alone = watch.speed()
    assert alone is not None
    assert alone["shards"] == 1 / 0.5  # When the second was begun, nobody knows.
