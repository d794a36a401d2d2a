"""Where a batch runs: in the worker, or in a process of its own."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fakes import make_batch
from isolation import MODULE, Steps, outputs
from transforms.steps.load import StepError

DEADLINES = """
import os

class Patient:
    own_deadline = True

    def __init__(self, timeout_secs=60):
        self.timeout_secs = timeout_secs

    def __call__(self, record):
        return b"%d %g" % (os.getpid(), self.timeout_secs)


def call(record, timeout_secs=60):
    return b"%d %g" % (os.getpid(), timeout_secs)


call.own_deadline = True
"""


@pytest.fixture
def steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Steps]:
    (tmp_path / "odd_steps.py").write_text(MODULE + DEADLINES)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield Steps(tmp_path)
    sys.modules.pop("odd_steps", None)


def run_pid(steps: Steps, batch: dict[str, Any], **options: Any) -> int:
    with steps.chain({"call": "odd_steps:pid", **options}) as chain:
        [pid] = outputs(list(chain.apply(make_batch([b"a"], **batch))))
        return int(pid)


@pytest.mark.parametrize("options", [{}, {"retries": 3}, {"max_per_sec": 1000.0}])
def test_runs_in_the_worker(options: dict[str, Any], steps: Steps) -> None:
    assert run_pid(steps, {}, **options) == os.getpid()


@pytest.mark.parametrize("options", [{"isolate": True}, {"timeout_secs": 9.0}, {"max_memory_bytes": 1 << 30}])
def test_runs_in_a_process_of_its_own(options: dict[str, Any], steps: Steps) -> None:
    assert run_pid(steps, {}, **options) != os.getpid()


def test_batch_of_a_shard_on_which_a_worker_died_is_isolated(steps: Steps) -> None:
    with steps.chain({"call": "odd_steps:pid"}) as chain:
        pids = [
            int(outputs(list(chain.apply(make_batch([b"a"], isolated=isolated))))[0])
            for isolated in (False, True, False, True)
        ]
    assert pids[0] == pids[2] == os.getpid()
    assert pids[1] == pids[3] != os.getpid()


@pytest.mark.parametrize("name", ["Patient", "call"])
def test_step_with_a_deadline_of_its_own_gets_it_and_is_not_isolated(name: str, steps: Steps) -> None:
    [found] = outputs(steps.run([b"a"], {"call": f"odd_steps:{name}", "timeout_secs": 2.5}))
    assert found == b"%d 2.5" % os.getpid()


def test_deadline_of_its_own_is_not_enforced_in_isolation_either(steps: Steps) -> None:
    calls = [{"call": "odd_steps:Patient", "timeout_secs": 0.001, "isolate": True}]
    with steps.chain(*calls) as chain:
        [found] = outputs(list(chain.apply(make_batch([b"a"]))))
        assert chain._isolated._child.timeouts == [None]
    assert found.endswith(b" 0.001")


def test_steps_that_are_isolated_are_not_imported_in_the_worker(steps: Steps) -> None:
    (steps.folder / "heavy_steps.py").write_text("def same(record):\n    return record\n")
    assert outputs(steps.run([b"a"], {"call": "heavy_steps:same", "isolate": True})) == [b"a"]
    assert "heavy_steps" not in sys.modules


def test_step_that_does_not_exist_is_refused_before_any_batch(steps: Steps) -> None:
    for options in ({}, {"timeout_secs": 1.0}):
        with pytest.raises(StepError, match="has no 'nothing'"), steps.chain({"call": "odd_steps:nothing", **options}):
            pass
