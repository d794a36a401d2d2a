"""What README, configs and Makefile say is what the code does: commands parse and run, keys and defaults are right."""

from __future__ import annotations

import base64
import contextlib
import inspect
import io
import json
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import jobs
from corpora import frame_all
from pipelines.beam_options import check_flags
from pipelines.cli import main, make_parser
from pipelines.config import JobConfig, load_config
from pipelines.convert import config_of
from services import Call, serving
from transforms.plan import parse_size
from transforms.steps.example import example_class
from transforms.steps.http import HttpStep, Post
from transforms.steps.load import load_steps

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
CONFIG_TARGETS = {f"dataflow-{path.stem}" for path in CONFIGS if path.stem != "reference"}
EXAMPLES = {"source.patterns", "steps", "write.output"}  # Keys that reference.yaml shows by example.


# What the documents hold.


def code_blocks(language: str) -> list[str]:
    """The README's code blocks of a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def gristmill_commands(text: str) -> list[list[str]]:
    """The arguments of every `gristmill` command line, without nohup, redirections and comments."""
    found = []
    for line in text.splitlines():
        match = re.match(r"^[#\s]*(?:nohup )?gristmill (.*)$", line)
        if match:
            found.append(shlex.split(re.split(r" [>&]", match[1])[0], comments=True))
    return found


def readme_commands() -> list[list[str]]:
    return [command for block in code_blocks("sh") for command in gristmill_commands(block)]


def config_commands() -> list[list[str]]:
    return [command for path in CONFIGS for command in gristmill_commands(path.read_text(encoding="utf-8"))]


def flatten(fields: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values by key path; an empty group is a value."""
    flat: dict[str, Any] = {}
    for key, value in fields.items():
        flat.update(flatten(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {prefix + key: value})
    return flat


DEFAULTS = flatten(JobConfig().model_dump())


# A folder in which the commands can run.


def make_example(number: int) -> bytes:
    """Most have a text; every tenth a short one, every twentieth none."""
    example = example_class()()
    example.features.feature["label"].int64_list.value.append(number)
    if number % 20:
        text = b"short" if number % 10 == 0 else b"the text of record %04d" % number
        example.features.feature["text"].bytes_list.value.append(text)
    return bytes(example.SerializeToString(deterministic=True))


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The files that the README's commands name, as the current folder."""
    (tmp_path / "raw").mkdir()
    for number in range(3):
        examples = [make_example(40 * number + record) for record in range(40)]
        (tmp_path / f"raw/part-{number:05d}.tfrecord").write_bytes(frame_all(examples))
    (tmp_path / "files.txt").write_text("raw/part-00002.tfrecord\nraw/part-00000.tfrecord\n")
    (tmp_path / "pictures").mkdir()
    for number in range(5):
        (tmp_path / f"pictures/{number}.png").write_bytes(b"picture %d" % number)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    [steps] = [block for block in code_blocks("python") if "def keep_long_texts" in block]
    (tmp_path / "my_steps.py").write_text(steps)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    yield tmp_path
    for name in ("my_steps", "my_captions"):
        sys.modules.pop(name, None)


# Configs.


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_config_loads_and_its_steps_exist(path: Path) -> None:
    config = load_config(str(path), [])
    load_steps(config.steps, ())
    assert config.source.patterns
    assert config.write.output


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_config_says_on_top_how_to_run_it(path: Path) -> None:
    commands = gristmill_commands(path.read_text(encoding="utf-8"))
    assert [command for command in commands if f"configs/{path.name}" in command]


def test_reference_names_every_key() -> None:
    named = yaml.safe_load((ROOT / "configs/reference.yaml").read_text(encoding="utf-8"))
    assert sorted(flatten(named)) == sorted(DEFAULTS)


def test_reference_shows_the_defaults() -> None:
    shown = flatten(load_config(str(ROOT / "configs/reference.yaml"), []).model_dump())
    assert {key: shown[key] for key in shown if key not in EXAMPLES} == {
        key: DEFAULTS[key] for key in DEFAULTS if key not in EXAMPLES
    }


def test_readme_table_shows_every_key_with_its_default() -> None:
    section = README.split("\n## Configuration\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `([a-z_.]+)` \| (.*?) \| ", section, re.MULTILINE)
    assert sorted(key for key, _ in rows) == sorted(DEFAULTS)
    for key, shown in rows:
        assert as_value(shown) == (DEFAULTS[key] or None), key


def as_value(shown: str) -> Any:
    """The default as the README's table shows it."""
    text = shown.strip("`")
    if text == "none":
        return None
    if text.endswith("iB"):
        return parse_size(text)
    return yaml.safe_load(text) if text[:1] != "{" else text


def test_readme_config_is_valid(workplace: Path) -> None:
    [example] = [block for block in code_blocks("yaml") if "source:" in block]
    (workplace / "example.yaml").write_text(example)
    config = load_config("example.yaml", [])
    load_steps(config.steps, (str(workplace),))
    assert set(yaml.safe_load(example)) == set(JobConfig.model_fields)


# Commands.


@pytest.mark.parametrize("command", [*readme_commands(), *config_commands()], ids=" ".join)
def test_command_parses(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    args, unknown = make_parser().parse_known_args(command)
    assert args.command is not None
    check_flags(unknown)
    if args.command == "convert":
        config_of(args)


def test_first_commands_of_readme_run(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = gristmill_commands(code_blocks("sh")[1])
    assert [command[0] for command in first] == ["convert", "verify", "report", "inspect"]
    for command in first:
        assert main(command) == 0, command
    printed = capsys.readouterr().out
    assert "done:" in printed
    assert "verified, 120 records in 1 shards, 0 dead letters" in printed


def test_readme_reads_it_with_grain(workplace: Path) -> None:
    assert main(["convert", "--input", "raw/*.tfrecord", "--output", "demo-output/corpus"]) == 0
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code_blocks("python")[0], "README.md", "exec"), {})
    assert "'next_index': 1" in printed.getvalue()


def test_readme_names_every_field_of_report_and_dead_letter(workplace: Path) -> None:
    arguments = ["--step", "my_steps:keep_long_texts", "--output", "out"]
    assert main(["convert", "--input", "raw/*.tfrecord", *arguments]) == 0
    report = json.loads(Path("out/_gristmill/report.json").read_text())
    [letters] = Path("out/_dead_letters").glob("*.jsonl")
    fields = [*report, *json.loads(letters.read_text().splitlines()[0])]
    assert [field for field in fields if f"`{field}`" not in README] == []


@pytest.mark.slow
def test_all_commands_of_readme_run(workplace: Path) -> None:
    for command in readme_commands():
        assert main(command) == 0, command


def test_readme_calls_a_service(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [code] = [block for block in code_blocks("python") if "class Caption" in block]
    [config] = [block for block in code_blocks("yaml") if "my_captions" in block]
    (workplace / "my_captions.py").write_text(code)
    monkeypatch.setenv("CAPTION_KEY", "the-key")
    example = example_class()()
    example.features.feature["image/encoded"].bytes_list.value.append(b"\x89PNG")
    (workplace / "raw/part-00000.tfrecord").write_bytes(frame_all([example.SerializeToString(), b"not an example"]))

    def caption(call: Call) -> None:
        asked = json.loads(call.body)
        text = f"{call.headers['authorization']}: {base64.b64decode(asked['image'])!r}"
        call.reply(200, json.dumps({"caption": text}).encode())

    with serving() as service:
        service.answer = caption
        (workplace / "captions.yaml").write_text(config.replace("http://localhost:8000/caption", service.url))
        inputs = ["--input", "raw/part-00000.tfrecord", "--output", "out", "--set", "dead_letters.max_fraction=0.9"]
        assert main(["convert", "--config", "captions.yaml", *inputs]) == 0
    [record] = jobs.records(workplace / "out")
    features = example_class().FromString(record).features.feature
    assert list(features["caption"].bytes_list.value) == [b"Bearer the-key: b'\\x89PNG'"]
    assert [letter["reason"] for letter in jobs.dead_letters(workplace / "out")] == ["not_example"]
    kept = [path for path in (workplace / "out").rglob("*") if path.is_file() and b"the-key" in path.read_bytes()]
    assert [path.name for path in kept] == ["corpus-train.array_record-00000-of-00001"]  # In the caption alone.


def test_reference_shows_the_defaults_of_http_post() -> None:
    text = (ROOT / "configs/reference.yaml").read_text(encoding="utf-8")
    [shown] = re.findall(r"^  # - use: http.post\n((?:  #   .*\n)+)", text, re.MULTILINE)
    step = yaml.safe_load(re.sub(r"^  #   ", "", shown, flags=re.MULTILINE))
    defaults = {
        name: parameter.default
        for kind in (HttpStep, Post)
        for name, parameter in inspect.signature(kind).parameters.items()
        if parameter.kind is not parameter.VAR_KEYWORD
    }
    assert sorted(step) == sorted(defaults)
    examples = {"url", "headers"}
    assert {name: step[name] for name in step if name not in examples} == {
        name: defaults[name] for name in defaults if name not in examples
    }


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_config_runs_as_it_stands(path: Path, workplace: Path) -> None:
    (workplace / "demo-output").mkdir()
    for folder in ("raw", "pictures"):
        (workplace / folder).rename(workplace / "demo-output" / folder)
    if path.stem == "reshard":
        assert main(["convert", "--input", "demo-output/raw", "--output", "demo-output/corpus"]) == 0
    assert main(["convert", "--config", f"configs/{path.name}"]) == 0


# Make.


def run_make(*arguments: str, **settings: Any) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}
    command = ["make", "--no-print-directory", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, **settings)


def make_targets() -> set[str]:
    """The targets with a text, as the Makefile has them, with one for each config that is ready to run."""
    return set(re.findall(r"^([a-z-]+):.*## ", MAKEFILE, re.MULTILINE)) | CONFIG_TARGETS


def test_make_prints_every_target() -> None:
    printed = run_make()
    assert printed.returncode == 0
    assert set(re.findall(r"^  ([a-z-]+) ", printed.stdout, re.MULTILINE)) == make_targets()
    assert printed.stdout in README


def test_every_target_has_a_text_and_is_phony() -> None:
    phony = re.search(r"^\.PHONY: (.*)$", MAKEFILE.replace("\\\n", " "), re.MULTILINE)
    assert phony is not None
    targets = phony[1].replace("$(CONFIG_TARGETS)", " ".join(CONFIG_TARGETS)).split()
    assert set(targets) == make_targets()


def test_make_targets_named_in_readme_exist() -> None:
    named = re.findall(r"`make ([a-z -]+)`", README) + re.findall(r"^make ([a-z-]+)", README, re.MULTILINE)
    assert {target for words in named for target in words.split()} <= make_targets()


@pytest.mark.parametrize(
    ("arguments", "missing"),
    [
        (["convert-local"], "INPUT"),
        (["convert-local", "INPUT=raw/*"], "OUTPUT"),
        (["dry-run", "OUTPUT=out"], "INPUT"),
        (["verify-local"], "OUTPUT"),
    ],
)
def test_make_names_the_missing_variable_before_it_installs(arguments: list[str], missing: str, tmp_path: Path) -> None:
    result = run_make(*arguments, f"VENV={tmp_path}/venv")
    assert result.returncode == 2
    assert f"{missing} is missing; for example: make {arguments[0]} " in result.stderr
    assert not (tmp_path / "venv").exists()


def test_make_refuses_an_old_python(tmp_path: Path) -> None:
    old = tmp_path / "python"
    old.write_text('#!/bin/sh\ntest "$1" = -V && echo Python 3.9.2\ntest "$1" = -V\n')
    old.chmod(0o755)
    result = run_make("venv", f"PYTHON={old}", f"VENV={tmp_path}/venv")
    assert result.returncode == 2
    assert "Gristmill needs Python 3.11 or newer" in result.stderr
    assert "Python 3.9.2" in result.stderr
    assert not (tmp_path / "venv").exists()


def test_ci_runs_the_checks_the_tests_and_the_demo() -> None:
    path = ROOT / ".ci/run"
    assert path.stat().st_mode & stat.S_IXUSR
    targets = re.findall(r"^ *run make (.*)$", path.read_text(), re.MULTILINE)
    assert targets == ["venv", "check", "test", "test-slow", "test-sdk", "demo"]


# Layout.


def test_readme_layout_names_every_module() -> None:
    layout = README.split("\n## Layout\n")[1]
    for package in ("pipelines", "transforms"):
        modules = {path.name for path in (ROOT / package).glob("*.py") if not path.name.startswith("__")}
        assert sorted(module for module in modules if module not in layout) == []


def test_modules_named_in_readme_exist() -> None:
    places = [ROOT, *(ROOT / name for name in ("pipelines", "transforms", "transforms/steps", "transforms/formats"))]
    named = {name for name in re.findall(r"[\w/]+\.py\b", README) if not name.startswith("my_") and "NAME" not in name}
    assert sorted(name for name in named if not any((place / name).exists() for place in places)) == []


def test_sdist_holds_both_packages_readme_and_configs(tmp_path: Path) -> None:
    ignored = shutil.ignore_patterns(".git", ".venv*", "*.egg-info", "__pycache__", "build", "dist", "demo-output")
    shutil.copytree(ROOT, tmp_path / "source", ignore=ignored)
    command = [sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", str(tmp_path)]
    subprocess.run(command, cwd=tmp_path / "source", check=True, capture_output=True)
    [archive] = tmp_path.glob("gristmill-*.tar.gz")
    with tarfile.open(archive) as files:
        names = {name.partition("/")[2] for name in files.getnames()}
    sources = {
        str(path.relative_to(ROOT))
        for package in ("pipelines", "transforms")
        for path in (ROOT / package).rglob("*.py")
    }
    documents = {"README.md", "LICENSE", "setup.py", "pyproject.toml", *(f"configs/{path.name}" for path in CONFIGS)}
    of_image = {"Makefile", "Dockerfile", ".dockerignore", "cloudbuild.yaml", "pipelines/flex_template.json"}
    assert sources | documents | of_image <= names
    assert [name for name in names if name.startswith("tests")] == []
