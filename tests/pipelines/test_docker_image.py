"""The image of workers and launcher, as far as it can be told without Docker: files, versions, requirements, start."""

from __future__ import annotations

import fnmatch
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import setuptools
import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")


def instructions(name: str) -> list[str]:
    """The arguments of every instruction of a name, lines that go on joined, in order."""
    text = re.sub(r"^\s*#.*\n", "", DOCKERFILE, flags=re.MULTILINE).replace("\\\n", " ")
    return [line.partition(" ")[2] for line in text.splitlines() if line.startswith(f"{name} ")]


ARGS = dict(line.split("=") for line in instructions("ARG") if "=" in line)


@pytest.fixture(scope="module")
def packaging() -> dict[str, Any]:
    """What setup.py hands to setuptools."""
    found: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setuptools, "setup", lambda **fields: found.update(fields))
        runpy.run_path(str(ROOT / "setup.py"))
    return found


def copies() -> list[list[str]]:
    """Sources and target of each COPY out of the checkout."""
    return [words for words in map(shlex.split, instructions("COPY")) if not words[0].startswith("--from")]


def is_sent(path: str) -> bool:
    """Whether Docker gets a file: the last line of .dockerignore that names it, or a folder above it, decides."""
    parts = path.split("/")
    above = ["/".join(parts[: number + 1]) for number in range(len(parts))]
    sent = True
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.lstrip("!")
        if not line or line.startswith("#"):
            continue
        if any(matches(pattern, name) for name in above):
            sent = line.startswith("!")
    return sent


def matches(pattern: str, path: str) -> bool:
    if pattern.startswith("**/"):
        return fnmatch.fnmatchcase(path.rpartition("/")[2], pattern[3:])
    return pattern.count("/") == path.count("/") and fnmatch.fnmatchcase(path, pattern)


def test_everything_that_is_copied_exists_and_is_sent() -> None:
    for *sources, _ in copies():
        for source in sources:
            found = ROOT / source
            files = [found] if found.is_file() else [*found.rglob("*.py"), *found.rglob("*.yaml")]
            assert files, source
            assert [path for path in files if not is_sent(str(path.relative_to(ROOT)))] == []


def test_image_holds_both_packages_and_the_configs() -> None:
    assert {source for *sources, _ in copies() for source in sources} == {
        *("setup.py", "pyproject.toml", "README.md", "pipelines/", "transforms/", "configs/")
    }


@pytest.mark.parametrize(
    "path",
    [
        *(".env", ".git/config", ".venv/bin/python", "key.json", "out/corpus/manifest.json", "tests/jobs.py"),
        *("demo-output/raw/digits.tfrecord", "pipelines/__pycache__/cli.cpython-311.pyc", "transforms/steps/load.pyc"),
    ],
)
def test_nothing_else_is_sent(path: str) -> None:
    assert not is_sent(path)


def test_versions_are_among_those_that_gristmill_runs_on(packaging: dict[str, Any]) -> None:
    assert f"Programming Language :: Python :: {ARGS['PYTHON_VERSION']}" in packaging["classifiers"]
    required = {one.name: one for one in map(Requirement, packaging["install_requires"])}
    assert ARGS["BEAM_VERSION"] in required["apache-beam"].specifier
    assert ARGS["ARRAY_RECORD_VERSION"] in required["array-record"].specifier


def test_requirements_are_those_of_setup_py(packaging: dict[str, Any]) -> None:
    installs = [shlex.split(command) for run in instructions("RUN") for command in run.split("&&")]
    words = [words for words in installs if words[:2] == ["pip", "install"]]
    assert [word for word in words[0][2:] if word.startswith("--")] == ["--no-cache-dir"]
    *pinned, own = [word for word in words[0][2:] if not word.startswith("--")]
    assert own == ".[http]"
    assert "http" in packaging["extras_require"]
    pins = [Requirement(re.sub(r"\$\{(\w+)\}", lambda name: ARGS[name[1]], pin)) for pin in pinned]
    required = {one.name: one.extras for one in map(Requirement, packaging["install_requires"])}
    assert {pin.name: pin.extras for pin in pins} == {name: required[name] for name in ("apache-beam", "array-record")}
    assert words[1:] == [["pip", "install", "--no-cache-dir", "--no-deps", "--force-reinstall", "."]]


def test_conflicts_of_requirements_end_the_build() -> None:
    checked = [run for run in instructions("RUN") if "pip install" in run]
    assert [run.split("&&")[-1].strip() for run in checked] == ["pip check", "gristmill --version"]
    assert all("pip check" in run for run in checked)
    assert all("||" not in run and ";" not in run for run in checked)


def test_workers_start_as_beam_starts_them() -> None:
    stages = instructions("FROM")
    assert stages[-1] == "apache/beam_python${PYTHON_VERSION}_sdk:${BEAM_VERSION}"
    assert instructions("ENTRYPOINT") == ['["/opt/apache/beam/boot"]']
    assert instructions("USER") == []  # Beam's boot program makes folders and an environment: it stays root.


def test_launcher_is_where_the_service_looks_for_it() -> None:
    assert instructions("FROM")[0].startswith("gcr.io/dataflow-templates-base/python311-template-launcher-base:")
    launcher = "/opt/google/dataflow/python_template_launcher"
    assert f"--from=launcher {launcher} {launcher}" in instructions("COPY")


def test_launcher_finds_configs_where_it_runs() -> None:
    assert DOCKERFILE.partition("WORKDIR /template\n")[2].startswith("COPY configs/ configs/\n")
    assert instructions("WORKDIR")[-1] == "/template"


def test_script_of_the_launcher_starts_the_template(tmp_path: Path) -> None:
    [script] = [run for run in instructions("RUN") if run.startswith("printf")]
    assert "\nWORKDIR /opt/launcher\nRUN printf" in DOCKERFILE
    assert instructions("ENV") == ["FLEX_TEMPLATE_PYTHON_PY_FILE=/opt/launcher/main.py"]
    subprocess.run(["sh", "-c", script], cwd=tmp_path, check=True)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(tmp_path / "main.py"), "--input=gs://b/raw/*"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.endswith("gristmill template: error: parameters are missing: output, sdk_container_image\n")


def test_cloud_build_does_the_same_with_the_same_versions() -> None:
    build = yaml.safe_load((ROOT / "cloudbuild.yaml").read_text())
    [step] = build["steps"]
    assert step == {
        "name": "gcr.io/cloud-builders/docker",
        "args": ["build", "--tag=$_IMAGE", *(f"--build-arg={name}=$_{name}" for name in ARGS), "."],
    }
    assert build["images"] == ["$_IMAGE"]
    assert build["substitutions"] == {f"_{name}": value for name, value in ARGS.items()}
