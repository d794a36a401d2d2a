"""A replay or append that is killed at any moment: what was published stays whole, and repeating completes it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import jobs
from fakes import Killed, WorstStore, read_array_record
from pipelines import append, convert, replay
from pipelines import run_job as run_job_module
from pipelines.cli import make_parser
from pipelines.config import JobConfig
from pipelines.generation_jobs import unfinished
from pipelines.output import prepare_output
from pipelines.plan_job import plan_job
from pipelines.run_job import Run
from transforms.generations import see_as
from transforms.job_lock import JobLock
from transforms.letters import Selection
from transforms.state import CONFIG_NAME, MANIFEST_NAME
from transforms.store import Store
from transforms.tries import forget_marks
from transforms.whole import build_whole

HOOKS = str(Path(__file__).parent.parent / "hooks")


def payloads(file: int) -> list[bytes]:
    return [jobs.payload(file, number) for number in range(12)]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two files: one with a damaged record and failing ones, one with a failing record only."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    sys.modules.pop("steps_of_kill_test", None)
    (tmp_path / "steps_of_kill_test.py").write_text(jobs.STEP_WITH_BAD_NUMBERS)
    (tmp_path / "bad.json").write_text("[2, 7]")
    for file in range(2):
        jobs.write_tfrecord(tmp_path / f"in/f{file}.tfrecord", payloads(file))
    data = bytearray((tmp_path / "in/f0.tfrecord").read_bytes())
    data[14] ^= 1
    (tmp_path / "in/f0.tfrecord").write_bytes(data)
    return tmp_path


def arguments(out: str) -> list[str]:
    step = ["--step", "steps_of_kill_test:clean", "--set", "dead_letters.max_fraction=1"]
    return ["--input", "in/*", "--output", out, "--shards", "2", *step]


def run_job(store: Store, config: JobConfig, job: Any, *_: Any) -> int:
    """What `run_job.run_job` does, without Beam."""
    prepare_output(store, job)
    store.put(CONFIG_NAME, json.dumps(config.model_dump()).encode())
    jobs.run_plainly(dataclasses.replace(job.spec, root=store.root), [], 1)
    return 0


def copy_of(store: WorstStore, list_delay: int) -> WorstStore:
    copy = WorstStore(list_delay=list_delay)
    for name, data in store.tree().items():
        copy.put(name, data)
    copy.restart()
    return copy


def contents(store: WorstStore) -> dict[str, Any]:
    """All that must be the same however often it was killed."""
    kept = ("corpus-", MANIFEST_NAME, "_dead_letters/", "_gristmill/replayed/")
    found: dict[str, Any] = {name: data for name, data in store.tree().items() if name.startswith(kept)}
    for name in [name for name in found if name.endswith(".jsonl")]:
        found[name] = [without_traceback(line) for line in found[name].splitlines()]
    found["finished"] = [name for name in store.tree() if name.endswith("finished.json")]
    whole = build_whole(store)
    found["report"] = {key: value for key, value in whole.items() if key not in ("seconds", "config")}
    assert not [name for name in store.tree() if "/attempts/" in name]
    return found


def without_traceback(line: bytes) -> dict[str, Any]:
    """A second try runs steps in a process of their own, where they have other frames."""
    return {**json.loads(line), "traceback": ""}


def check_at_any_moment(store: WorstStore, base: list[dict[str, Any]]) -> None:
    """Whoever opens what the manifest names finds it whole, and the base first."""
    manifest = json.loads(store.tree()[MANIFEST_NAME])
    assert manifest["shards"][: len(base)] == base
    for shard in manifest["shards"]:
        assert len(store.tree()[shard["name"]]) == shard["bytes"]


def check_nothing_is_lost(store: WorstStore, files: int) -> None:
    """Every record is in a shard or a dead letter, exactly once."""
    names = [shard["name"] for shard in json.loads(store.tree()[MANIFEST_NAME])["shards"]]
    names += [name for name in store.tree() if name.startswith("_dead_letters/") and name.endswith(".payloads")]
    records = [record for name in names for record in read_array_record(store, name)]
    assert sorted(records) == sorted(record for file in range(files) for record in payloads(file))


def kill_everywhere(
    base: WorstStore,
    act: Callable[[WorstStore], object],
    check: Callable[[WorstStore], None],
    *,
    after_effect: bool,
    stride: int,
) -> int:
    """Kills the act at every call to the store (or each `stride`th) and then repeats it; returns the last call."""
    base_shards = json.loads(base.tree()[MANIFEST_NAME])["shards"]
    undisturbed = copy_of(base, 0)
    act(undisturbed)
    expected = contents(undisturbed)
    check(undisturbed)
    for number in range(1, 2000, stride):
        store = copy_of(base, 1000 if number % 2 else 0)
        store.stop_at(number, after_effect=after_effect)
        with contextlib.suppress(Killed):
            act(store)
            return number
        check_at_any_moment(store, base_shards)
        store.restart()
        if number % 50 != 1:  # The marks of a killed process make its shards start processes, which takes time.
            forget_marks(see_as(store, "g001"))
        if unfinished(store) is not None or "_gristmill/g001/finished.json" not in store.tree():
            act(store)
        store.settle()
        assert contents(store) == expected, number
    pytest.fail("it never came to its end")


def make_base(monkeypatch: pytest.MonkeyPatch) -> WorstStore:
    store = WorstStore()
    args = make_parser().parse_args(["convert", *arguments(store.root)])
    config = convert.config_of(args)
    job = plan_job(config, limit=0, scratch=str(Path.cwd()))
    run_job(store, config, job)
    store.settle()
    monkeypatch.setattr(run_job_module, "run_job", run_job)
    return store


STRIDES = [5, pytest.param(1, marks=pytest.mark.slow)]


@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize("after_effect", [False, True], ids=["before", "after"])
def test_replay_killed_at_any_call_is_completed_by_the_same_command(
    after_effect: bool, stride: int, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = make_base(monkeypatch)
    jobs.write_tfrecord(place / "in/f0.tfrecord", payloads(0))
    (place / "bad.json").write_text("[2]")
    config = JobConfig.model_validate(json.loads(base.tree()["_gristmill/config.json"]))
    # The letters for number 7 of the second file are not taken; the first file's all pass but number 2.
    selection = Selection(sources=("*f0*", "*nothing*"))

    def act(store: WorstStore) -> object:
        return replay.replay(store, config, selection, Run([], 0, str(place), JobLock(store)))

    calls = kill_everywhere(
        base, act, lambda store: check_nothing_is_lost(store, 2), after_effect=after_effect, stride=stride
    )
    assert calls > 100


@pytest.mark.parametrize("stride", STRIDES)
def test_append_killed_at_any_call_is_completed_by_the_same_command(
    stride: int, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs.write_tfrecord(place / "in/f0.tfrecord", payloads(0))
    base = make_base(monkeypatch)
    jobs.write_tfrecord(place / "in/f2.tfrecord", payloads(2))
    config = JobConfig.model_validate(json.loads(base.tree()["_gristmill/config.json"]))

    def act(store: WorstStore) -> object:
        return append.append(store, config, Run([], 0, str(place), JobLock(store)))

    calls = kill_everywhere(
        base, act, lambda store: check_nothing_is_lost(store, 3), after_effect=stride == 5, stride=stride
    )
    assert calls > 50


def test_replay_after_a_kill_in_the_midst_of_publishing_is_completed_whatever_is_selected(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_base(monkeypatch)
    (place / "bad.json").write_text("[]")
    config = JobConfig.model_validate(json.loads(store.tree()["_gristmill/config.json"]))
    run = Run([], 0, str(place), JobLock(store))
    number = 1
    while "_gristmill/g001/decided.json" not in store.tree():
        store.restart()
        store.stop_at(number)
        number += 20
        with contextlib.suppress(Killed):
            replay.replay(store, config, Selection(sources=("*f1*",)), run)
    store.restart()
    replay.replay(store, config, Selection(sources=("*f0*",)), run)
    whole = build_whole(store)
    assert [(one["name"], one["letters_consumed"]) for one in whole["generations"]] == [("g001", 2)]
    replay.replay(store, config, Selection(sources=("*f0*",)), run)
    assert len(build_whole(store)["generations"]) == 2


MOMENTS = {
    "while_reading": "before-put_if_absent g001/shards/00001 {marker}",
    "decided": "after-put g001/decided {marker}",
    "moved": "after-copy replayed/g001 {marker}",
    "replaced": "after-copy _dead_letters/corpus-train-00000 {marker}",
    "before_manifest": "before-put manifest.json {marker}",
    "after_manifest": "after-put manifest.json {marker}",
}


def start(place: Path, *command: str, stop: str = "") -> subprocess.Popen[bytes]:
    env = jobs.environment({"GRISTMILL_TEST_STOP": stop} if stop else None)
    env["PYTHONPATH"] = os.pathsep.join([HOOKS, env["PYTHONPATH"]])
    log = (place / "log").open("wb")
    return subprocess.Popen(
        [*jobs.GRISTMILL, *command], cwd=place, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
    )


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
def test_process_killed_while_it_replays(moment: str, place: Path) -> None:
    for out in ("reference", "out"):
        (place / "bad.json").write_text("[2, 7]")
        assert jobs.convert(*arguments(out)) == 0
        (place / "bad.json").write_text("[7]")
        if out == "reference":
            assert jobs.replay(out) == 0
    marker = place / "marker"
    process = start(place, "replay", "out", "--workers", "0", stop=MOMENTS[moment].format(marker=marker))
    deadline = time.monotonic() + 120
    while not marker.exists():
        assert process.poll() is None, (place / "log").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert start(place, "replay", "out", "--workers", "0").wait(timeout=120) == 0, (place / "log").read_text()
    assert jobs.content(place / "out") == jobs.content(place / "reference")
    assert jobs.verify(place / "out") == 0
