"""`gristmill verify`: the same is printed however the records are read, and wherever they are."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import gcs_emulator
import jobs
from gcs_emulator import Emulator
from grown_set import DAMAGES, GrownSet, check_differences, content, damage_all, delete
from pipelines import local_runner, verify
from pipelines.cli import main
from transforms.check_shard import Found, ShardChecker
from transforms.gcs_store import GcsStore
from transforms.store import OutputError

IN_MEMORY = "--runner=FnApiRunner"
WAYS = {
    "here": [],
    "in_memory": [IN_MEMORY],
    "runner_left_open": ["--direct_running_mode=in_memory"],
    "every_bundle_twice": ["--runner=BundleBasedDirectRunner", "--direct_runner_bundle_repeat=1"],
}
TWO_PROCESSES = ["--direct_running_mode=multi_processing", "--direct_num_workers=2"]
WHOLE = "verified, 113 records in 5 shards, 7 dead letters"


def check_printed(printed: str, root: str, differences: tuple[str, ...]) -> None:
    """Checks all that verify printed of a damaged set."""
    *told, last = printed.splitlines()
    check_differences(told, differences)
    assert last == f"{root}: {len(differences)} differences; 113 records in 5 shards"


@pytest.mark.parametrize("flags", WAYS.values(), ids=WAYS)
def test_every_way_prints_the_same(flags: list[str], grown: GrownSet, capsys: pytest.CaptureFixture[str]) -> None:
    assert jobs.verify(grown.out, *flags) == 0
    assert capsys.readouterr().out == f"{grown.out}: {WHOLE}\n"
    differences = damage_all(grown.store)
    assert jobs.verify(grown.out, *flags) == 4
    check_printed(capsys.readouterr().out, str(grown.out), differences)


def test_two_worker_processes_print_the_same(grown: GrownSet) -> None:
    differences = damage_all(grown.store)
    done = jobs.spawn(["verify", grown.out, *TWO_PROCESSES], cwd=grown.out.parent)
    assert done.returncode == 4, done.stderr
    check_printed(done.stdout, str(grown.out), differences)


def test_the_result_stands_in_the_output_directory(grown: GrownSet, capsys: pytest.CaptureFixture[str]) -> None:
    place = grown.out / "_gristmill/verify.json"
    assert jobs.verify(grown.out) == 0
    assert not place.exists()  # A folder that may only be read can be verified.
    assert jobs.verify(grown.out, IN_MEMORY) == 0
    first = json.loads(place.read_text())
    assert (first["status"], first["planned_shards"], first["records"]) == ("verified", 5, 113)
    DAMAGES["shard_flipped"].act(grown.store)
    assert jobs.verify(grown.out, IN_MEMORY) == 4
    second = json.loads(place.read_text())
    assert (second["status"], second["num_differences"]) == ("different", 1)
    assert second["verify_id"] != first["verify_id"]
    assert second["differences"][0] in capsys.readouterr().out


def test_a_job_that_was_stopped_differs_in_nothing_but_is_not_published(
    grown: GrownSet, capsys: pytest.CaptureFixture[str]
) -> None:
    grown.make_stopped()
    assert jobs.verify(grown.out) == 3
    told = "nothing is published: 1 of 3 planned shards are committed; what was kept is whole"
    assert capsys.readouterr().out == f"{grown.out}: {told}\n"


def test_a_generation_that_is_being_published_is_told_without_a_pipeline(
    grown: GrownSet, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    delete("_gristmill/g002/finished.json")(grown.store)
    monkeypatch.setattr(local_runner, "submit_pipeline", None)
    for flags in ([], [IN_MEMORY]):
        assert jobs.verify(grown.out, *flags) == 4
        assert "the next `replay` completes it" in capsys.readouterr().out
    assert json.loads((grown.out / "_gristmill/verify.json").read_text())["num_differences"] == 1


def test_no_more_than_fifty_differences_are_printed(grown: GrownSet, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(70):
        grown.store.put(f"corpus-train.array_record-{number:05d}-of-00070", b"")
    for flags in ([], [IN_MEMORY]):
        assert jobs.verify(grown.out, *flags) == 4
        printed = capsys.readouterr().out.splitlines()
        assert len(printed) == 52
        assert printed[-2:] == ["and 20 more", f"{grown.out}: 70 differences; 113 records in 5 shards"]


class TestProcesses:
    @pytest.fixture(autouse=True)
    def _worth_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(verify, "_WORTH_PROCESSES_BYTES", 0)

    def test_of_its_own_find_the_same(self, grown: GrownSet, capsys: pytest.CaptureFixture[str]) -> None:
        assert jobs.verify(grown.out) == 0
        assert WHOLE in capsys.readouterr().out
        differences = damage_all(grown.store)
        assert jobs.verify(grown.out) == 4
        check_printed(capsys.readouterr().out, str(grown.out), differences)

    def test_that_die_cost_the_shard_that_they_read(
        self, grown: GrownSet, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(verify, "ChildCall", _DiesAtEach(("", 1), ("g001", 0)).call)
        assert jobs.verify(grown.out) == 4
        assert capsys.readouterr().out.splitlines() == [
            "reading shard 1 ended its process: SIGSEGV",
            "reading shard 0 of g001 ended its process: SIGSEGV",
            f"{grown.out}: 2 differences; 113 records in 5 shards",
        ]


class _DiesAtEach:
    """Stands in for a process of its own that dies when it reads one of these shards."""

    def __init__(self, *deadly: tuple[str, int]) -> None:
        self._deadly = deadly
        self.death: str | None = None

    def call(self, target: str, **arguments: Any) -> _DiesAtEach:
        assert target == "pipelines.verify:check_shards"
        process = _DiesAtEach(*self._deadly)
        process._arguments = arguments
        return process

    _arguments: dict[str, Any]

    def items(self) -> Iterator[Found]:
        for task in self._arguments["tasks"]:
            if task in self._deadly:
                self.death = signal.Signals.SIGSEGV.name
                return
            yield from verify.check_shards(self._arguments["store"], [task])


@pytest.mark.parametrize("worth_processes_bytes", [1 << 40, 0])
@pytest.mark.parametrize("flags", [[], [IN_MEMORY]], ids=["here", "in_memory"])
def test_a_store_that_does_not_answer_is_no_difference(
    worth_processes_bytes: int,
    flags: list[str],
    grown: GrownSet,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> Found:
        raise OutputError("cannot read gs://bucket/x: 503")

    monkeypatch.setattr(verify, "_WORTH_PROCESSES_BYTES", worth_processes_bytes)
    monkeypatch.setattr(ShardChecker, "check", fail)
    monkeypatch.setattr(verify, "ChildCall", _DiesAtEach().call)
    assert jobs.verify(grown.out, *flags) == 1
    ended = capsys.readouterr()
    assert "cannot read gs://bucket/x: 503. Not everything was looked at" in ended.err
    assert ended.out == ""


class TestFlags:
    def test_that_beam_does_not_know_are_refused(self, grown: GrownSet, capsys: pytest.CaptureFixture[str]) -> None:
        assert jobs.verify(grown.out, "--runnr=FnApiRunner") == 2
        assert "did you mean --runner" in capsys.readouterr().err
        assert jobs.verify(grown.out, "--runner=NoSuchRunner") == 2
        assert "--runner NoSuchRunner" in capsys.readouterr().err

    @pytest.mark.parametrize("unknown", [[], [IN_MEMORY], ["--direct_num_workers=2"]])
    def test_detach_wants_a_runner_elsewhere(self, unknown: list[str], grown: GrownSet) -> None:
        with pytest.raises(ValueError, match="--detach is for runners elsewhere"):
            verify.run(str(grown.out), unknown, detach=True)

    def test_detach_leaves_the_result_to_the_runner(
        self, grown: GrownSet, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        left: list[tuple[Any, list[str]]] = []
        monkeypatch.setattr(local_runner, "submit_pipeline", lambda transform, flags: left.append((transform, flags)))
        DAMAGES["shard_flipped"].act(grown.store)
        grown.store.put("_gristmill/verify.json", b"an older one")
        elsewhere = ["--runner=PortableRunner", "--job_endpoint=localhost:1"]
        assert verify.run(str(grown.out), elsewhere, detach=True) == 0
        assert "the result will stand in _gristmill/verify.json" in capsys.readouterr().out
        [(transform, flags)] = left
        assert flags[:2] == elsewhere
        assert flags[2].startswith("--setup_file=")
        assert not (grown.out / "_gristmill/verify.json").exists()
        monkeypatch.undo()
        local_runner.wait_for(local_runner.submit_pipeline(transform, local_runner.local_flags([IN_MEMORY], 0)))
        assert json.loads((grown.out / "_gristmill/verify.json").read_text())["num_differences"] == 1

    def test_a_folder_without_a_job_is_wrong_usage(self, tmp_path: Path) -> None:
        for flags in ([], [IN_MEMORY]):
            assert main(["verify", str(tmp_path), *flags]) == 2


class TestRemote:
    @pytest.fixture
    def remote(self, emulator: Emulator, grown: GrownSet) -> GcsStore:
        """The set in Google Cloud Storage."""
        store = GcsStore(f"{emulator.new_bucket()}/out")
        for name, _ in grown.store.list(""):
            store.put_file(os.path.join(grown.out, name), name)
        return store

    @pytest.mark.parametrize("way", ["here", "in_memory", "every_bundle_twice"])
    def test_every_way_prints_the_same(self, way: str, remote: GcsStore, capsys: pytest.CaptureFixture[str]) -> None:
        assert jobs.verify(remote.root, *WAYS[way]) == 0
        assert capsys.readouterr().out == f"{remote.root}: {WHOLE}\n"
        differences = damage_all(remote)
        assert jobs.verify(remote.root, *WAYS[way]) == 4
        check_printed(capsys.readouterr().out, remote.root, differences)

    def test_processes_find_the_same(
        self, remote: GcsStore, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(verify, "_WORTH_PROCESSES_BYTES", 0)
        differences = damage_all(remote)
        assert jobs.verify(remote.root) == 4
        check_printed(capsys.readouterr().out, remote.root, differences)

    def test_two_worker_processes_find_the_same(self, remote: GcsStore, tmp_path: Path) -> None:
        differences = damage_all(remote)
        done = jobs.spawn(["verify", remote.root, *TWO_PROCESSES], cwd=tmp_path)
        assert done.returncode == 4, done.stderr
        check_printed(done.stdout, remote.root, differences)

    @pytest.mark.slow
    def test_every_damage_is_found_both_ways(self, remote: GcsStore, capsys: pytest.CaptureFixture[str]) -> None:
        whole = {name: content(remote, name) for name, _ in remote.list("")}
        for damage in DAMAGES.values():
            damage.act(remote)
            for flags in ([], [IN_MEMORY]):
                assert jobs.verify(remote.root, *flags) == 4
                check_differences(capsys.readouterr().out.splitlines()[:-1], damage.differences)
            _restore(remote, whole)
        assert jobs.verify(remote.root) == 0

    def test_failures_that_pass_are_no_difference(
        self, emulator: Emulator, remote: GcsStore, capsys: pytest.CaptureFixture[str]
    ) -> None:
        passing = [gcs_emulator.status(503), gcs_emulator.reset, gcs_emulator.status(429)]
        emulator.fail("GET .*corpus-train.array_record", *passing)
        emulator.fail("GET .*shards%2F", gcs_emulator.status(503))
        assert jobs.verify(remote.root, IN_MEMORY) == 0
        assert emulator.left() == 0
        assert WHOLE in capsys.readouterr().out


def _restore(store: GcsStore, whole: dict[str, bytes]) -> None:
    for name in [name for name, _ in store.list("") if name not in whole]:
        store.delete(name)
    for name, data in whole.items():
        if store.get(name) is None or content(store, name) != data:
            store.put(name, data)
