"""The worker's end of the process for isolated steps, also on systems that lack what newer ones have."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from fakes import make_spec
from isolation import MODULE, Steps, letters, outputs
from transforms.child_call import status_name
from transforms.steps.child_process import ChildEndedError, ChildProcess
from transforms.steps.exchange import CHECK, DONE, FILLED, OutcomeReader, pack_batch
from transforms.steps.load import StepError


@pytest.fixture
def steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Steps]:
    (tmp_path / "odd_steps.py").write_text(MODULE)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield Steps(tmp_path)
    sys.modules.pop("odd_steps", None)


@pytest.fixture
def child(steps: Steps) -> Iterator[ChildProcess]:
    spec = make_spec("/nowhere", steps=(steps.act(timeout_secs=5.0),), import_paths=(str(steps.folder),))
    process = ChildProcess(spec)
    yield process
    process.close()


def open_files() -> list[str]:
    """The pipes, shared memory and process handles of this process; connections of tests before may still close."""
    names = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            names.append(os.readlink(f"/proc/self/fd/{number}"))
    return sorted(name for name in names if name.startswith(("pipe:", "/memfd:", "anon_inode:[pidfd]")))


def children() -> list[psutil.Process]:
    """Processes that run steps; servers of other tests may be children, too."""
    return [one for one in psutil.Process().children() if any(word.endswith("child.py") for word in one.cmdline())]


def test_batch_goes_in_and_outcomes_come_out(child: ChildProcess) -> None:
    assert child.is_alive()
    assert child.timeouts == [5.0]
    child.send(pack_batch([b"a", b"b"]))
    assert child.wait(30) == DONE
    [first, second] = OutcomeReader().feed(child.exchange.arena[: child.exchange.slots[FILLED]])
    assert (first.outputs, second.outputs) == ([b"a!"], [b"b!"])
    assert child.wait(0.01) is None


def test_ending_says_how_far_it_was(child: ChildProcess) -> None:
    child.send(pack_batch([b"a", b"print_stderr", b"exit9", b"b"]))
    with pytest.raises(ChildEndedError) as ended:
        child.wait(30)
    ending = ended.value.ending
    assert (ending.begun, ending.step, ending.item, ending.timed_out) == (3, 0, 0, False)
    assert (ending.status, ending.stderr) == (9, "printed\n")
    assert not child.is_alive()
    with pytest.raises(ChildEndedError):
        child.send(pack_batch([b"a" * 10_000_000]))


def test_process_that_is_not_where_it_was_goes_on(child: ChildProcess) -> None:
    """The worker decides by what it saw; the process may have come back from the step meanwhile."""
    os.write(child._life, CHECK.pack(1, 0, 0, 12345))
    child.send(pack_batch([b"a"]))
    assert child.wait(30) == DONE


def test_close_gives_everything_back(steps: Steps) -> None:
    before = open_files()
    for _ in range(2):
        child = ChildProcess(make_spec("/nowhere", steps=(steps.act(),), import_paths=(str(steps.folder),)))
        child.close()
        child.close()
    assert open_files() == before
    assert children() == []


def test_process_ends_with_the_last_reference(steps: Steps) -> None:
    child = ChildProcess(make_spec("/nowhere", steps=(steps.act(),), import_paths=(str(steps.folder),)))
    [process] = children()
    del child
    gc.collect()
    assert not process.is_running()


def test_old_kernel_without_pidfd(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "pidfd_open")
    records = [b"a", b"segv", b"hang", b"b" * 300_000]
    batches = steps.run(records, steps.act(timeout_secs=0.3))
    assert outputs(batches) == [b"a!", b"b" * 300_000 + b"!"]
    assert [letter.reason for letter in letters(batches)] == ["process_died", "timeout"]


def test_program_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    before = open_files()
    with pytest.raises(StepError, match="cannot be started"):
        ChildProcess(make_spec("/nowhere"))
    gc.collect()
    assert open_files() == before


@pytest.mark.parametrize(
    ("status", "name"), [(0, "exit status 0"), (3, "exit status 3"), (-11, "SIGSEGV"), (-63, "signal 63")]
)
def test_status_in_words(status: int, name: str) -> None:
    assert status_name(status) == name
