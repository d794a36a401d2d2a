"""What steps do to their process holds for them and for nobody else."""

from __future__ import annotations

import builtins
import gc
import locale
import logging
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import jobs
from transforms.dead_letters import BadRecordError
from transforms.steps import surroundings
from transforms.steps.surroundings import SpoiledError, Surroundings


@pytest.fixture(autouse=True)
def _command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(surroundings._shared, "ends_process", False)


def umask() -> int:
    found = os.umask(0o022)
    os.umask(found)
    return found


def lower_limit() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 40, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def put_streams() -> None:
    sys.stdout = sys.stderr = sys.excepthook = None  # type: ignore[assignment]


def fail(*_: object) -> Any:
    raise OSError("a function of the step's")


def put_functions() -> None:
    builtins.open = time.sleep = os.link = os.urandom = uuid.uuid4 = random.uniform = fail  # type: ignore[assignment]


ACTS: dict[str, tuple[Callable[[], object], Callable[[], Any]]] = {
    "umask": (lambda: os.umask(0o777), umask),
    "folder": (lambda: os.chdir("/"), os.getcwd),
    "environment": (os.environ.clear, lambda: dict(os.environ)),
    "recursion": (lambda: sys.setrecursionlimit(5_000), sys.getrecursionlimit),
    "limits": (lower_limit, lambda: resource.getrlimit(resource.RLIMIT_FSIZE)),
    "blocked": (
        lambda: signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1}),
        lambda: signal.pthread_sigmask(signal.SIG_BLOCK, ()),
    ),
    "handlers": (lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN), lambda: signal.getsignal(signal.SIGTERM)),
    "streams": (put_streams, lambda: (sys.stdout, sys.stderr, sys.excepthook)),
    "collects": (gc.disable, gc.isenabled),
    "timeout": (lambda: socket.setdefaulttimeout(0.001), socket.getdefaulttimeout),
    "logging": (lambda: logging.disable(logging.CRITICAL), lambda: logging.root.manager.disable),
    "functions": (put_functions, lambda: (open, time.sleep, os.link, os.urandom, uuid.uuid4, random.uniform)),
}


@pytest.mark.parametrize("name", ACTS)
def test_what_a_step_changes_is_there_for_its_next_batch_and_not_in_between(name: str) -> None:
    act, look = ACTS[name]
    around = Surroundings()
    before = look()
    with around.of_steps():
        act()
        theirs = look()
    assert look() == before
    assert theirs != before
    with around.of_steps():
        assert look() == theirs
    assert look() == before


def test_a_folder_that_is_gone_is_left(tmp_path: Path) -> None:
    before = os.getcwd()
    around = Surroundings()
    (tmp_path / "gone").mkdir()
    with around.of_steps():
        os.chdir(tmp_path / "gone")
        (tmp_path / "gone").rmdir()
    assert os.getcwd() == before
    with around.of_steps():
        pass
    assert os.getcwd() == before


def test_an_alarm_does_not_go_off_in_our_code() -> None:
    def go_off(*_: object) -> None:
        raise AssertionError

    with Surroundings().of_steps():
        signal.signal(signal.SIGALRM, go_off)
        signal.setitimer(signal.ITIMER_REAL, 60)
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
    assert signal.getsignal(signal.SIGALRM) is not go_off


def test_the_locale_is_put_back() -> None:
    before = locale.setlocale(locale.LC_ALL)
    with Surroundings().of_steps():
        locale.setlocale(locale.LC_ALL, "C.UTF-8" if before == "C" else "C")
        assert locale.setlocale(locale.LC_ALL) != before
    assert locale.setlocale(locale.LC_ALL) == before


def test_the_code_between_two_batches_runs_in_our_state() -> None:
    before, seen = umask(), []

    def steps() -> Iterator[int]:
        for number in range(3):
            seen.append(umask())
            os.umask(0o777)
            yield number

    between = [umask() for _ in Surroundings().guard(steps)]
    assert between == [before] * 3
    assert seen == [before, 0o777, 0o777]


def test_two_threads_that_overlap_leave_our_state() -> None:
    before, around, other = umask(), Surroundings(), Surroundings()
    entered, leave = threading.Event(), threading.Event()

    def run() -> None:
        with other.of_steps():
            os.umask(0o770)
            entered.set()
            leave.wait()

    thread = threading.Thread(target=run)
    thread.start()
    entered.wait()
    with around.of_steps():
        os.umask(0o777)
    leave.set()
    thread.join()
    assert umask() == before


def test_an_exit_in_the_commands_own_process_is_a_failure_of_the_record() -> None:
    real = os._exit
    with Surroundings().of_steps():
        with pytest.raises(BadRecordError, match="exit status 0"):
            os._exit(0)
        pid = os.fork()
        if pid == 0:
            os._exit(7)  # A child of the step's may.
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert os._exit is real


def test_closed_files_are_noticed_and_only_once() -> None:
    around = Surroundings()
    with pytest.raises(SpoiledError, match="closed files"), around.of_steps():
        os.close(surroundings._shared.sentinel[0])
    with around.of_steps():
        pass


@pytest.mark.parametrize("act", ["os.closerange(3, 1000)", "os.closerange(3, 1000); threading.Event().wait()"])
def test_a_process_that_can_be_replaced_ends_at_once_when_its_files_are_closed(act: str) -> None:
    program = (
        "import os, threading\nfrom transforms.steps.surroundings import Surroundings, end_when_spoiled\n"
        f"end_when_spoiled()\nwith Surroundings().of_steps():\n    {act}\n"
    )
    command = [sys.executable, "-P", "-c", program]
    done = subprocess.run(command, env=jobs.environment(), capture_output=True, timeout=60, check=False)
    assert done.returncode == surroundings.SPOILED_STATUS
