"""Names of files are bytes in every locale: what is written is the same, and no terminal makes a command fail."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

import jobs
from gcs_jobs import shards

NAMES = ["plain", "café", "日本", "über"]
LATIN_1 = "xx_XX"

CHARMAP = "".join(f"<U{number:04X}> /x{number:02x} any\n" for number in range(256))
CHARMAP = f"<code_set_name> ISO-8859-1\n<escape_char> /\n<mb_cur_max> 1\nCHARMAP\n{CHARMAP}END CHARMAP\n"


@pytest.fixture(scope="module")
def locales(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of locales with one in Latin-1, of which only the encoding matters; whatever the machine has."""
    folder = tmp_path_factory.mktemp("locales")
    (folder / "charmap").write_text(CHARMAP)
    (folder / "source").write_text("escape_char /\nLC_CTYPE\nEND LC_CTYPE\n")
    # It warns of all that is not in the source, and so ends with 1.
    command = ["localedef", "-c", "-i", "source", "-f", "./charmap", f"./{LATIN_1}"]
    subprocess.run(command, cwd=folder, capture_output=True, check=False)
    encoding = "import sys; print(sys.getfilesystemencoding())"
    env = {**os.environ, "LOCPATH": str(folder), "LC_ALL": LATIN_1, "PYTHONUTF8": "0"}
    assert subprocess.run([sys.executable, "-c", encoding], env=env, capture_output=True).stdout == b"iso8859-1\n"
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of names within and beyond Latin-1, one of its files cut; and what a job makes of it in UTF-8."""
    folder = tmp_path_factory.mktemp("names")
    for file, name in enumerate(NAMES):
        jobs.write_tfrecord(folder / f"in/{name}.tfrecord", [jobs.payload(file, number) for number in range(10)])
    cut = folder / "in/über.tfrecord"
    cut.write_bytes(cut.read_bytes()[:-20])
    (folder / "in" / os.fsdecode(b"odd-\xff\xfe.tfrecord")).write_bytes(jobs.frame(b"odd"))
    (folder / "passing.py").write_text("def same(value):\n    return value\n")
    done = jobs.spawn(["convert", *arguments("reference")], folder, {"LC_ALL": "C.UTF-8"})
    assert done.returncode == 0, done.stderr
    return folder


def arguments(out: str, *more: str) -> list[str | Path]:
    budget = ("--set", "dead_letters.max_fraction=1")
    return [
        "--input",
        "in/[cpüo]*",
        "in/日本.tfrecord",
        "--output",
        out,
        "--shards",
        "3",
        "--workers",
        "0",
        *budget,
        *more,
    ]


@pytest.mark.parametrize("name", ["C", "POSIX", "C without UTF-8", LATIN_1])
def test_a_job_is_the_same_in_every_locale(folder: Path, locales: Path, name: str) -> None:
    env = {"LOCPATH": str(locales), "LC_ALL": name.split()[0]}
    if "without" in name:
        env |= {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = jobs.spawn(["convert", *arguments(f"out-{name}")], folder, env)
    assert done.returncode == 0, done.stderr
    assert shards(folder / f"out-{name}") == shards(folder / "reference")
    assert jobs.report(folder / f"out-{name}")["records_written"] == 40
    [letter] = jobs.dead_letters(folder / f"out-{name}")
    assert (letter["source"], letter["reason"]) == (str(folder / "in/über.tfrecord"), "truncated")


def test_workers_isolated_steps_and_the_other_commands_keep_to_it(folder: Path, locales: Path) -> None:
    env = {"LOCPATH": str(locales), "LC_ALL": LATIN_1}
    more = ["--workers", "2", "--step", "passing:same,isolate=true"]
    done = jobs.spawn(["convert", *arguments("out-of-workers", *more)], folder, env)
    assert done.returncode == 0, done.stderr
    assert shards(folder / "out-of-workers") == shards(folder / "reference")
    for command in (["verify", "out-of-workers"], ["replay", "out-of-workers"], ["report", "out-of-workers", "--json"]):
        done = jobs.spawn([*command], folder, env)
        assert done.returncode == 0, done.stderr
    assert [one["source"] for one in json.loads(done.stdout)["sources"]] == [str(folder / "in/über.tfrecord")]


def test_a_config_spells_names_in_utf8_whatever_the_locale(folder: Path, locales: Path) -> None:
    env = {"LOCPATH": str(locales), "LC_ALL": LATIN_1}
    config = {"source": {"patterns": ["in/日*"]}, "write": {"output": "out-of-config-山"}}
    (folder / "job.yaml").write_text(json.dumps(config, ensure_ascii=False), encoding="utf-8")
    (folder / "list").write_text("in/日本.tfrecord\nin/café.tfrecord\n", encoding="utf-8")
    done = jobs.spawn(["convert", "--config", "job.yaml", "--workers", "0"], folder, env)
    assert done.returncode == 0, done.stderr
    assert len(jobs.records(folder / "out-of-config-山")) == 10
    more = ["--input", "in/日*", "@list", "--append", "--workers", "0"]
    done = jobs.spawn(["convert", "--config", "job.yaml", *more], folder, env)
    assert done.returncode == 0, done.stderr
    assert len(jobs.records(folder / "out-of-config-山")) == 20


def on_terminal(command: list[str | Path], cwd: Path, env: dict[str, str]) -> tuple[int, bytes]:
    """Runs a command whose streams are a terminal; returns its status and what the terminal got."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*jobs.GRISTMILL, *map(str, command)],
        cwd=cwd,
        env=jobs.environment(env),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    said = b""
    try:
        while data := os.read(ours, 1 << 16):
            said += data
    except OSError:  # How a terminal ends on Linux.
        pass
    os.close(ours)
    return process.wait(timeout=60), said


def test_a_terminal_gets_its_own_signs_and_escapes_for_others(folder: Path, locales: Path) -> None:
    env = {"LOCPATH": str(locales), "LC_ALL": LATIN_1}
    status, said = on_terminal(["convert", "--input", "in/日本-é", "--output", "out-of-none"], folder, env)
    assert status == 2
    assert rb"in/\u65e5\u672c-" + "é".encode("latin-1") in said
    assert b"Traceback" not in said
    status, said = on_terminal(["inspect", "in/日本.tfrecord", "in/café.tfrecord"], folder, env)
    assert status == 0
    assert b"caf\xe9.tfrecord" in said
    assert rb"\u65e5\u672c.tfrecord" in said
