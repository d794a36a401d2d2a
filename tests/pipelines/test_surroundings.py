"""Where a command runs: beside modules named like Python's own, and as a user without name or home."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import jobs
from pipelines.cli import main
from privileges import UNKNOWN_USER

SHADOWS = ("random", "json", "copy", "types", "queue", "ast", "site", "logging", "numpy", "grpc", "apache_beam")
SHADOWS += ("transforms", "pipelines", "tempfile", "sqlite3", "locale", "pickle")
PAYLOADS = [jobs.payload(file, number) for file in range(4) for number in range(50)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A corpus, and a folder of modules that end the process that imports them, with a step that does not."""
    for file in range(4):
        jobs.write_tfrecord(tmp_path / f"in/{file}.tfrecord", [jobs.payload(file, number) for number in range(50)])
    (tmp_path / "shadows").mkdir()
    for name in SHADOWS:
        (tmp_path / f"shadows/{name}.py").write_text("raise SystemExit('shadowed by ' + __file__)\n")
    (tmp_path / "shadows/mine.py").write_text("def keep(record):\n    return record\n")
    return tmp_path


class TestModulesNamedLikeOthers:
    @pytest.mark.parametrize(
        "flags",
        [
            ["--workers", "0", "--step", "mine:keep"],
            ["--workers", "2", "--shards", "4", "--step", "mine:keep"],
            ["--workers", "0", "--step", "mine:keep,isolate=true"],
        ],
    )
    def test_no_process_of_a_job_imports_them(self, folder: Path, flags: list[str]) -> None:
        done = jobs.spawn(["convert", "--input", "../in", "--output", "../out", *flags], folder / "shadows")
        assert done.returncode == 0, done.stderr
        assert jobs.records(folder / "out") == PAYLOADS
        assert "shadowed" not in done.stdout + done.stderr

    @pytest.mark.parametrize("name", ["tokenize", "transforms"])
    def test_a_step_in_one_is_refused_with_the_paths(
        self, folder: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.chdir(folder / "shadows")
        Path(f"{name}.py").write_text("def run(record):\n    return record\n")
        module = __import__(name)
        assert main(["convert", "--input", "../in", "--output", "../out", "--step", f"{name}:run"]) == 2
        said = capsys.readouterr().err
        found = os.path.dirname(module.__file__) if module.__file__.endswith("__init__.py") else module.__file__
        assert f"the module {name!r} that Python finds is {found}, which hides {folder}/shadows/{name}.py" in said
        assert not (folder / "out").exists()

    def test_so_is_one_among_the_modules_that_travel(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.chdir(folder / "shadows")
        command = ["convert", "--input", "../in", "--output", "../out", "--set", "py_modules=[queue]"]
        assert main(command) == 2
        assert f"py_modules: queue: the module 'queue' that Python finds is {__import__('queue').__file__}" in (
            capsys.readouterr().err
        )


class TestUserWithoutNameOrHome:
    @pytest.mark.parametrize(
        ("temporary", "flags"), [(None, ["--step", "mine:keep,isolate=true"]), ("/nowhere", ["--shards", "4"])]
    )
    def test_converts_and_verifies(self, folder: Path, temporary: str | None, flags: list[str]) -> None:
        (folder / "out").mkdir()
        (folder / "out").chmod(0o777)
        settings = {"PATH": os.environ["PATH"], "PYTHONPATH": jobs.environment()["PYTHONPATH"]}
        settings |= {} if temporary is None else {"TMPDIR": temporary}
        prefix = ["env", "-i", *(f"{name}={value}" for name, value in settings.items()), *UNKNOWN_USER]
        command = ["convert", "--input", "../in", "--output", "../out/set", "--workers", "2", *flags]
        for arguments in (command, ["verify", "../out/set"]):
            done = jobs.spawn([*arguments], folder / "shadows", prefix=prefix)
            assert done.returncode == 0, done.stderr
        assert jobs.records(folder / "out/set") == PAYLOADS
        assert (folder / "out/set/manifest.json").stat().st_uid == 54_321
