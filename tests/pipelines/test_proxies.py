"""Connections within this machine never use a proxy, and workers that do not report end the job with a message."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import jobs
from pipelines import proxies

NOWHERE = "http://127.0.0.1:9"
LOOPBACK = "localhost,127.0.0.1,::1"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    jobs.write_tfrecord(tmp_path / "in/a", [jobs.payload(0, i) for i in range(100)])
    return tmp_path


def without_exceptions(**proxies: str) -> dict[str, str]:
    return {"no_proxy": "", "NO_PROXY": "", "no_grpc_proxy": "", **proxies}


def test_workers_are_reached_past_every_kind_of_proxy(folder: Path) -> None:
    env = without_exceptions(**dict.fromkeys(("http_proxy", "https_proxy", "grpc_proxy", "ALL_PROXY"), NOWHERE))
    command = ["convert", "--input", "in/*", "--output", "out", "--workers", "2", "--shards", "2"]
    done = jobs.spawn(command, folder, env, timeout_secs=50)
    assert done.returncode == 0, done.stderr
    assert jobs.records(folder / "out") == [jobs.payload(0, i) for i in range(100)]
    done = jobs.spawn(["verify", "out", "--direct_num_workers=2"], folder, env, timeout_secs=50)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{folder / 'out'}: verified, 100 records in 2 shards, 0 dead letters\n"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (LOOPBACK, LOOPBACK)),
        ({"no_proxy": ".corp, localhost"}, (".corp,localhost,127.0.0.1,::1",) * 2),
        ({"NO_PROXY": ".corp"}, (f".corp,{LOOPBACK}",) * 2),
        ({"no_proxy": "a", "no_grpc_proxy": "b"}, (f"a,{LOOPBACK}", f"b,{LOOPBACK}")),
        ({"no_proxy": "*"}, ("*", f"*,{LOOPBACK}")),
    ],
)
def test_what_was_excepted_stays_so(given: dict[str, str], expected: tuple[str, str]) -> None:
    plain, grpc = expected
    assert proxies.exceptions(given) == {"no_proxy": plain, "NO_PROXY": plain, "no_grpc_proxy": grpc}


def test_the_environment_of_the_caller_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "x")
    monkeypatch.delenv("no_grpc_proxy", raising=False)
    before = dict(os.environ)
    with proxies.direct_to_this_machine():
        assert os.environ["no_proxy"] == f"x,{LOOPBACK}"
        os.environ.pop("no_grpc_proxy")
    assert dict(os.environ) == before


SILENT_WORKER = """
import sys, threading
if "pipelines.worker_process" in " ".join(sys.orig_argv):
    threading.Event().wait()
if "pipelines.job_process" in " ".join(sys.orig_argv):
    from pipelines import worker_watch
    worker_watch._REPORT_SECS = 1.0
"""


@pytest.mark.parametrize("command", [["convert", "--input", "in/*", "--output", "new", "--workers", "2"], ["verify"]])
def test_workers_that_do_not_report_end_the_command_with_a_message(command: list[str], folder: Path) -> None:
    if command == ["verify"]:
        assert jobs.convert("--input", folder / "in/*", "--output", folder / "out") == 0
        command = ["verify", "out", "--direct_num_workers=2"]
    hooks = folder / "hooks"
    hooks.mkdir()
    (hooks / "sitecustomize.py").write_text(SILENT_WORKER)
    env = {"PYTHONPATH": os.pathsep.join([str(hooks), jobs.environment()["PYTHONPATH"]]), "https_proxy": NOWHERE}
    done = jobs.spawn(command, folder, env, timeout_secs=50)
    assert done.returncode == 1
    assert f"gristmill {command[0]}: the worker processes have not reported within 1 s" in done.stderr
    assert "https_proxy" in done.stderr
    assert NOWHERE not in done.stderr


LOADING_WORKER = """
import sys, time
if "pipelines.worker_process" in " ".join(sys.orig_argv):
    end = time.process_time() + 1.5
    while time.process_time() < end:
        pass
if "pipelines.job_process" in " ".join(sys.orig_argv):
    from pipelines import worker_watch
    worker_watch._REPORT_SECS = 1.0
"""


@pytest.mark.slow
def test_a_worker_that_takes_long_to_load_is_waited_for(folder: Path) -> None:
    hooks = folder / "hooks"
    hooks.mkdir()
    (hooks / "sitecustomize.py").write_text(LOADING_WORKER)
    (folder / "model.py").write_text(
        "import time\nclass Model:\n    def __init__(self):\n        time.sleep(2)\n"
        "    def __call__(self, value):\n        return value\n"
    )
    env = {"PYTHONPATH": os.pathsep.join([str(hooks), jobs.environment()["PYTHONPATH"]])}
    command = ["convert", "--input", "in/*", "--output", "out", "--workers", "2", "--shards", "2"]
    done = jobs.spawn([*command, "--step", "model:Model"], folder, env)
    assert done.returncode == 0, done.stderr
    assert jobs.records(folder / "out") == [jobs.payload(0, i) for i in range(100)]
