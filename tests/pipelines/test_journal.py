"""Answers that were paid for: after `kill -9` the same command asks a service only for what it was not told."""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import jobs
from gcs_emulator import Emulator
from gcs_files import download, upload
from services import Call, Service, serving
from slow_job import HOOKS
from transforms.journal import JOURNALS
from transforms.journal_file import _HEAD
from transforms.ledger import LEDGERS
from transforms.store import Store, open_store

IN_FLIGHT = 8
A_FEW = 8
"""Calls that may come beside those of the records: a plan asks for some on its sample."""
DEADLINE_SECS = 120


def pictures(count: int, num_bytes: int = 3_600) -> list[bytes]:
    return [b"picture %05d " % number * (num_bytes // 14) for number in range(count)]


def caption(picture: bytes) -> bytes:
    return b"a " + picture[:13].upper()


class Gate:
    """Lets so many calls of a service through; the others wait until it is opened."""

    def __init__(self, service: Service, passes: int, answer: Callable[[bytes], bytes] = caption) -> None:
        self.opened = threading.Event()
        self.waiting = 0
        self.given: dict[bytes, list[bytes]] = {}
        self._answer = answer
        self._left = passes
        self._lock = threading.Lock()
        service.answer = self._reply

    def _reply(self, call: Call) -> None:
        with self._lock:
            self._left -= 1
            waits = self._left < 0
            self.waiting += waits
        if waits:
            self.opened.wait()
        answer = self._answer(call.body)
        self.given.setdefault(call.body, []).append(answer)
        call.reply(200, answer)


class Captions:
    """A job that asks a service for a caption of each picture, as one shard."""

    def __init__(self, folder: Path, service: Service, count: int) -> None:
        self.folder = folder
        self.service = service
        self.pictures = pictures(count)
        self.input, self.out = "in/*", str(folder / "out")
        self.options = ""  # Further ones of the step.
        jobs.write_tfrecord(folder / "in/a", self.pictures)

    def command(self, *flags: str) -> list[str]:
        step = f"http.post,url={self.service.url},max_in_flight={IN_FLIGHT}{self.options}"
        where = ["--input", self.input, "--output", self.out, "--shards", "1"]
        return ["convert", *where, "--step", step, "--workers", "0", *flags]

    def start(self, *flags: str, stop: str = "") -> subprocess.Popen[bytes]:
        env = jobs.environment({"GRISTMILL_TEST_STOP": stop} if stop else None)
        env["PYTHONPATH"] = os.pathsep.join([HOOKS, env["PYTHONPATH"]])
        log = (self.folder / "log").open("ab")
        command = [*jobs.GRISTMILL, *self.command(*flags)]
        return subprocess.Popen(
            command, cwd=self.folder, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )

    def kill_when(self, ready: Callable[[], bool], *flags: str, stop: str = "") -> None:
        process = self.start(*flags, stop=stop)
        wait_until(ready, process)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def finish(self, *flags: str) -> None:
        assert self.start(*flags).wait(DEADLINE_SECS) == 0, (self.folder / "log").read_text()

    def calls(self) -> int:
        return len(self.service.seen)

    def store(self) -> Store:
        return open_store(self.out)


def wait_until(ready: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + DEADLINE_SECS
    while not ready():
        assert process.poll() is None, "the job came to its end"
        assert time.monotonic() < deadline, "the moment never came"
        time.sleep(0.02)


def left_over(store: Store) -> list[str]:
    prefixes = ("_gristmill/journal/", "_gristmill/progress/", "_gristmill/attempts/", "_gristmill/tries/")
    return [name for prefix in prefixes for name, _ in store.list(prefix)]


@pytest.fixture
def service() -> Iterator[Service]:
    with serving() as service:
        yield service


@pytest.mark.parametrize("how", ["in_the_process", "with_workers", "isolated"])
def test_a_killed_job_asks_again_only_for_what_was_in_flight(how: str, service: Service, tmp_path: Path) -> None:
    captions = Captions(tmp_path, service, 120)
    captions.options = ",isolate=true" if how == "isolated" else ""
    flags = ["--workers", "1"] if how == "with_workers" else []
    at_once = 1 if how == "isolated" else IN_FLIGHT
    gate = Gate(service, 60)
    captions.kill_when(lambda: gate.waiting >= max(1, at_once // 2), *flags)
    gate.opened.set()
    captions.finish(*flags)
    assert 120 + max(1, at_once // 2) <= captions.calls() <= 120 + at_once + A_FEW
    assert jobs.records(tmp_path / "out") == [caption(picture) for picture in captions.pictures]
    assert left_over(captions.store()) == []
    captions.out = str(tmp_path / "undisturbed")
    captions.input = str(tmp_path / "in/*")
    assert jobs.main(captions.command()) == 0
    assert jobs.content(tmp_path / "undisturbed") == jobs.content(tmp_path / "out")


def test_answers_that_differ_each_time_are_used_as_they_were_given_first(service: Service, tmp_path: Path) -> None:
    numbers = itertools.count()
    captions = Captions(tmp_path, service, 100)
    gate = Gate(service, 60, lambda body: caption(body) + b" %d" % next(numbers))
    captions.kill_when(lambda: gate.waiting >= IN_FLIGHT // 2)
    given = {body: gate.given[body][0] for body in captions.pictures[:50] if len(gate.given[body]) == 1}
    assert len(given) >= 50 - A_FEW
    gate.opened.set()
    captions.finish()
    records = dict(zip(captions.pictures, jobs.records(tmp_path / "out"), strict=True))
    assert {body: records[body] for body in given} == given
    assert all(record in gate.given[body] for body, record in records.items())


def test_after_the_ledger_nothing_is_asked_and_the_journal_goes(service: Service, tmp_path: Path) -> None:
    captions = Captions(tmp_path, service, 40)
    Gate(service, 1_000)
    marker = tmp_path / "marker"
    captions.kill_when(marker.exists, stop=f"after-put_if_absent {LEDGERS}00000 {marker}")
    before = captions.calls()
    assert list(captions.store().list(JOURNALS))
    captions.finish()
    assert captions.calls() <= before + A_FEW
    assert jobs.records(tmp_path / "out") == [caption(picture) for picture in captions.pictures]
    assert left_over(captions.store()) == []


def test_steps_that_come_to_the_chain_keep_what_was_paid_for(service: Service, tmp_path: Path) -> None:
    captions = Captions(tmp_path, service, 60)
    gate = Gate(service, 40)
    (tmp_path / "my_steps.py").write_text("def shorter(value):\n    return value[:5]\n")
    captions.kill_when(lambda: gate.waiting >= IN_FLIGHT // 2)
    gate.opened.set()
    captions.finish("--step", "my_steps:shorter", "--resume-anyway")
    assert captions.calls() <= 60 + IN_FLIGHT + A_FEW
    assert jobs.records(tmp_path / "out") == [caption(picture)[:5] for picture in captions.pictures]


def test_whether_answers_are_kept_makes_no_other_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my_steps.py").write_text("def shorter(value):\n    return value[:5]\n")
    jobs.write_tfrecord(tmp_path / "in/a", pictures(10))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    command = ["--input", "in/*", "--output", "out", "--step"]
    assert jobs.convert(*command, "my_steps:shorter") == 0
    for kept in ("true", "false", "auto"):
        assert jobs.convert(*command, f"my_steps:shorter,journal={kept}") == 0
        assert "nothing left to do" in capsys.readouterr().out


def test_on_gs_what_was_put_is_not_asked_for_again(emulator: Emulator, service: Service, tmp_path: Path) -> None:
    captions = Captions(tmp_path, service, 120)
    url = emulator.new_bucket()
    upload(tmp_path / "in", f"{url}/in")
    captions.input, captions.out = f"{url}/in/*", f"{url}/out"
    gate = Gate(service, 80)
    answered = sum(_HEAD.size + len(caption(picture)) for picture in captions.pictures[: 80 - A_FEW])
    store = captions.store()
    captions.kill_when(
        lambda: gate.waiting >= IN_FLIGHT // 2 and sum(size for _, size in store.list(JOURNALS)) > answered
    )
    assert len(list(store.list(JOURNALS))) <= 3  # One each five seconds.
    gate.opened.set()
    captions.finish()
    assert captions.calls() <= 120 + IN_FLIGHT + 2 * A_FEW
    assert left_over(store) == []
    out = download(captions.out, tmp_path / "remote")
    assert jobs.records(out) == [caption(picture) for picture in captions.pictures]


@pytest.mark.slow
def test_killed_at_half_of_many_captions_the_same_command_pays_for_the_other_half(
    service: Service, tmp_path: Path
) -> None:
    captions = Captions(tmp_path, service, 3_014)
    gate = Gate(service, 1_497)
    captions.kill_when(lambda: gate.waiting >= IN_FLIGHT // 2)
    gate.opened.set()
    captions.finish()
    assert captions.calls() <= 3_014 + IN_FLIGHT + A_FEW
    again = captions.out = str(tmp_path / "undisturbed")
    captions.finish()
    assert jobs.content(tmp_path / "out") == jobs.content(Path(again))


@pytest.mark.slow
def test_killed_ten_times_at_any_moment_a_job_pays_for_what_was_in_flight(service: Service, tmp_path: Path) -> None:
    captions = Captions(tmp_path, service, 400)
    rng = random.Random(11)
    service.answer = lambda call: (time.sleep(0.002), call.reply(200, caption(call.body)))[1]
    for _ in range(10):
        seen = captions.calls() + rng.randrange(1, 40)
        captions.kill_when(lambda seen=seen: captions.calls() >= seen)  # type: ignore[misc]
    captions.finish()
    assert captions.calls() <= 400 + 10 * (IN_FLIGHT + A_FEW)
    assert jobs.records(tmp_path / "out") == [caption(picture) for picture in captions.pictures]
    assert left_over(captions.store()) == []
