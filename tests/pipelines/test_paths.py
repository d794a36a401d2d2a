"""Home folders and environment variables in paths: they mean what they mean to a shell, or are refused with words."""

from __future__ import annotations

import json
import os
import pwd
from pathlib import Path
from typing import Any

import pytest

import jobs
from pipelines.cli import main
from pipelines.errors import UsageError
from pipelines.paths import expand_config, expand_flag, expand_home

PAYLOADS = [jobs.payload(0, number) for number in range(20)]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder with a corpus in raw/, and another folder to work in."""
    jobs.write_tfrecord(tmp_path / "home/raw/a.tfrecord", PAYLOADS)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def write_config(path: Path, **fields: Any) -> Path:
    path.write_text(json.dumps(fields))  # JSON is YAML.
    return path


class TestHomeFolders:
    def test_every_path_of_every_command_may_begin_with_one(
        self, home: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert jobs.convert("--input", "~/raw/*.tfrecord", "--output=~/out") == 0
        assert jobs.records(home / "out") == PAYLOADS
        for command in (["verify", "~/out"], ["status", "~/out"], ["report", "~/out"], ["replay", "~/out"]):
            assert main(command) == 0
        assert main(["inspect", "~/raw/a.tfrecord"]) == 0
        assert "20 records" in capsys.readouterr().out
        assert list(Path().iterdir()) == []  # No folder that is called `~`.

    def test_a_config_may_be_in_one_and_name_them(self, home: Path) -> None:
        (home / "list").write_text(f"{home}/raw/a.tfrecord\n")
        write_config(home / "job.yaml", source={"patterns": "@~/list"}, write={"output": "~/out"})
        assert jobs.convert("--config=~/job.yaml") == 0
        assert jobs.records(home / "out") == PAYLOADS
        assert json.loads((home / "out/_gristmill/config.json").read_bytes())["write"]["output"] == str(home / "out")
        assert jobs.convert("--input=@~/list", "--set", "write.output=~/other") == 0
        assert jobs.records(home / "other") == PAYLOADS
        assert list(Path().iterdir()) == []

    def test_the_job_is_the_same_as_if_it_had_been_written_out(
        self, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("CORPUS", f"{home}/raw")
        write_config(home / "job.yaml", source={"patterns": ["${CORPUS}/*"]}, write={"output": "~/out"})
        assert jobs.convert("--config", home / "job.yaml") == 0
        capsys.readouterr()
        for arguments in (("--input", f"{home}/raw/*", "--output", home / "out"), ("--config", "~/job.yaml")):
            assert jobs.convert(*arguments) == 0
            assert "nothing left to do" in capsys.readouterr().out

    def test_a_name_that_begins_with_a_tilde_is_reached_with_a_dot(self, home: Path) -> None:
        jobs.write_tfrecord(Path("~/a.tfrecord"), PAYLOADS[:3])
        assert jobs.convert("--input", "./~/*", "--output", "./~x") == 0
        assert jobs.records(Path("~x")) == PAYLOADS[:3]

    def test_a_list_whose_name_begins_with_a_tilde_is_a_file(self, home: Path) -> None:
        jobs.write_tfrecord(Path("@~a.tfrecord"), PAYLOADS[:3])
        assert jobs.convert("--input", "@~a.tfrecord", "--output", "out") == 0
        assert jobs.records(Path("out")) == PAYLOADS[:3]

    def test_that_of_another_user(self, home: Path) -> None:
        user = pwd.getpwuid(os.getuid())
        assert expand_home(f"~{user.pw_name}/raw", "--input") == f"{user.pw_dir}/raw"

    @pytest.mark.parametrize("value", ["gs://bucket/~/x", "a~", "x/~/y", "@list", "@./~", "", "/~"])
    def test_only_a_leading_tilde_means_one(self, home: Path, value: str) -> None:
        assert expand_home(value, "--input") == value

    def test_of_flags_that_are_beams(self, home: Path) -> None:
        assert expand_flag("--temp_location=~/x") == f"--temp_location={home}/x"
        assert expand_flag("~/x") == f"{home}/x"
        for word in ("--x=~y", "--x=a=~/y", "--x", "~y", "=~/"):
            assert expand_flag(word) == word
        assert expand_config({"beam": {"temp_location": "~/x", "y": "~z", "n": 3}}) == {
            "beam": {"temp_location": f"{home}/x", "y": "~z", "n": 3}
        }

    @pytest.mark.parametrize(
        ("path", "value", "why"),
        [
            ("~nobody-of-this-name/x", "/root", "there is no user 'nobody-of-this-name'"),
            ("~$report.tfrecord", "/root", "there is no user"),
            ("~/x", "", "HOME is ''"),
            ("~", "home", "HOME is 'home', which is no absolute path"),
        ],
    )
    def test_one_that_is_not_known_is_refused_with_the_way_out(
        self, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], path: str, value: str,
        why: str,
    ) -> None:  # fmt: skip
        monkeypatch.setenv("HOME", value)
        assert jobs.convert("--input", path, "--output", "out") == 2
        said = capsys.readouterr().err
        assert why in said
        assert f"--input {path}: " in said
        assert f"./{path}" in said

    def test_a_user_without_any_is_refused(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("HOME")
        monkeypatch.setattr(os, "getuid", lambda: 54_321)
        with pytest.raises(UsageError, match="output ~: HOME is not set, and user 54321 has no home folder"):
            expand_home("~", "output")


class TestVariables:
    def test_a_literal_one_is_written_with_two_dollars(self, home: Path) -> None:
        jobs.write_tfrecord(Path("${RAW}.tfrecord"), PAYLOADS[:3])
        write_config(home / "job.yaml", source={"patterns": ["$${RAW}*"]}, write={"output": "a$b"})
        assert jobs.convert("--config", home / "job.yaml") == 0
        assert jobs.records(Path("a$b")) == PAYLOADS[:3]
        assert jobs.replay("a$b") == 0

    def test_flags_leave_them_to_the_shell(self, home: Path) -> None:
        jobs.write_tfrecord(Path("${RAW}.tfrecord"), PAYLOADS[:3])
        assert jobs.convert("--input", "${RAW}*", "--output", "out") == 0
        assert jobs.records(Path("out")) == PAYLOADS[:3]

    def test_the_home_folder_of_a_value_is_expanded_too(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RAW", "~/raw")
        assert expand_config({"source": {"patterns": "${RAW}/*"}}) == {"source": {"patterns": f"{home}/raw/*"}}

    def test_other_values_are_left_alone(self, home: Path) -> None:
        fields = {"steps": [{"use": "http.post", "url": "~/${X}"}], "source": {"format": "${X}"}, "write": None, "~": 1}
        assert expand_config(fields) == fields
        assert expand_config(["~/x", 3], "source.patterns") == [f"{home}/x", 3]

    @pytest.mark.parametrize(
        ("path", "why"),
        [
            ("${NOT_SET_AT_ALL}/x", "the environment variable NOT_SET_AT_ALL is not set"),
            ("gs://${EMPTY}/x", "the environment variable EMPTY is empty"),
            ("${}/x", "expected ${NAME}"),
            ("${A-b}/x", "expected ${NAME}"),
            ("${A", "expected ${NAME}"),
        ],
    )
    @pytest.mark.parametrize("in_file", [True, False])
    def test_one_that_has_no_value_is_refused_with_its_key(
        self, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], path: str, why: str,
        in_file: bool,
    ) -> None:  # fmt: skip
        monkeypatch.setenv("EMPTY", "")
        config = write_config(home / "job.yaml", write={"output": path if in_file else "out"})
        change = [] if in_file else ["--set", f"write.output={path}"]
        assert jobs.convert("--config", config, "--input", "~/raw/*", *change) == 2
        said = capsys.readouterr().err
        assert f"write.output: {path}: " in said
        assert why in said
        assert (f"{config}: " in said) == in_file
        assert list(Path().iterdir()) == []

    def test_a_secret_that_one_holds_is_refused(
        self, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("WORD", "hunter2")
        config = write_config(home / "job.yaml", write={"output": "s3://me:${WORD}@host/x"})
        assert jobs.convert("--config", config, "--input", "~/raw/*") == 2
        assert "hunter2" not in capsys.readouterr().err
