"""Steps that do the worst, and what the tests of isolation share to run them."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from fakes import make_batch, make_spec
from transforms.elements import DeadLetter, RecordBatch
from transforms.steps.job_chain import load_chain

MODULE = r'''
import ctypes, os, signal, sys, time

from transforms import BadRecordError, Drop


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("no text")

    def __reduce__(self):
        raise TypeError("cannot be pickled")


class HangingText(Exception):
    def __str__(self):
        time.sleep(1000)


class DyingText(Exception):
    def __str__(self):
        os._exit(3)


def fail(error):
    raise error


def recurse(n):
    return recurse(n + 1)


def close_files():
    os.closerange(3, 4096)


def spawn_all(folder):
    """A child in our group, one in a session of its own, one forked, and a daemon."""
    import multiprocessing, subprocess

    sleep = [sys.executable, "-c", "import time; time.sleep(1000)", folder]
    subprocess.Popen(sleep)
    subprocess.Popen(sleep, start_new_session=True)
    multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,), daemon=False).start()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execv(sys.executable, sleep)
        os._exit(0)
    os.wait()


def flood():
    for _ in range(200):
        os.write(2, b"x" * 100_000 + b"\n")
    print("y" * 10_000_000)


def die_in_a_thread():
    import threading

    threading.Thread(target=lambda: ctypes.string_at(0)).start()
    time.sleep(1000)


def stray():
    if os.fork() == 0:
        return
    os.wait()


def allocate_in_cpp():
    os.write(2, b"terminate called after throwing an instance of 'std::bad_alloc'\n")
    os.abort()


ACTIONS = {
    "segv": lambda: ctypes.string_at(0),
    "abort": os.abort,
    "bad_alloc": allocate_in_cpp,
    "exit0": lambda: os._exit(0),
    "exit9": lambda: os._exit(9),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "hang": lambda: time.sleep(1000),
    "hang_c": lambda: ctypes.PyDLL(None).sleep(1000),
    "spin": lambda: [None for _ in iter(int, 1)],
    "stubborn": lambda: (signal.signal(signal.SIGABRT, signal.SIG_IGN), time.sleep(1000)),
    "memory": lambda: bytearray(1 << 40),
    "memory_slowly": lambda: [bytearray(1 << 24) for _ in iter(int, 1)],
    "unprintable": lambda: fail(Unprintable()),
    "undecodable": lambda: b"\xff".decode(),
    "surrogate": lambda: fail(ValueError("half \ud83d")),
    "long_text": lambda: fail(ValueError("x" * 50_000_000)),
    "bytes_text": lambda: fail(ValueError(b"\xff\x00")),
    "hanging_text": lambda: fail(HangingText()),
    "dying_text": lambda: fail(DyingText()),
    "sys_exit": lambda: sys.exit("bye"),
    "interrupt": lambda: fail(KeyboardInterrupt()),
    "recursion": lambda: recurse(0),
    "bad_record": lambda: fail(BadRecordError("my_reason", "my text")),
    "print": lambda: print("printed", flush=True),
    "print_stderr": lambda: print("printed", file=sys.stderr),
    "close_stdout": lambda: sys.stdout.close(),
    "flood": flood,
    "stray": stray,
    "close_files": close_files,
    "thread_dies": die_in_a_thread,
}


class Act:
    """Does what the record says, `action` or `action:anything`, after noting that it was called."""

    def __init__(self, log):
        self.log = log

    def __call__(self, record):
        with open(self.log, "ab") as file:
            file.write(record + b"\n")
        name = record.decode().partition(":")[0]
        if name == "spawn":
            spawn_all(self.log)
        elif name in ACTIONS:
            ACTIONS[name]()
        return record + b"!"


def items(record):
    """Yields three items of which the last does what the record says."""
    yield record + b"-1"
    yield record + b"-2"
    if record.decode() in ACTIONS:
        ACTIONS[record.decode()]()
    yield record + b"-3"


def same(record):
    return record


def mixed(record):
    if record == b"drop":
        return Drop("half \ud83d")
    if record == b"none":
        return None
    if record == b"many":
        return iter([b"a", None, Drop("short"), b"", b"b"])
    return record


def grow(record):
    return record[:1] * int(record[1:])


def pid(record):
    return b"%d" % os.getpid()


def decode(record):
    return record.decode()


def encode(text):
    return text.encode() + b"."
'''


@dataclasses.dataclass
class Steps:
    """A folder with the steps, and chains of them."""

    folder: Path

    def run(self, records: Sequence[bytes], *calls: dict[str, Any], **spec: Any) -> list[RecordBatch]:
        """Puts one batch through a chain; without calls, the step that does what the records say."""
        with self.chain(*calls, **spec) as chain:
            return list(chain.apply(make_batch(records)))

    @contextlib.contextmanager
    def chain(self, *calls: dict[str, Any], **spec: Any) -> Iterator[Any]:
        calls = calls or (self.act(isolate=True),)
        folder = str(self.folder)
        with contextlib.closing(load_chain(make_spec(folder, steps=calls, import_paths=(folder,), **spec))) as chain:
            yield chain

    def act(self, **options: Any) -> dict[str, Any]:
        return {"call": "odd_steps:Act", "log": str(self.folder / "log"), **options}

    def calls(self) -> list[bytes]:
        """The records that the step was called with, in order."""
        return (self.folder / "log").read_bytes().split(b"\n")[:-1]

    def processes(self) -> list[psutil.Process]:
        """All processes that have the folder in their command line or descend from one of these."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if any(str(self.folder) in word for word in process.cmdline()):
                    found += [process, *process.children(recursive=True)]
        return [process for process in found if process.status() != psutil.STATUS_ZOMBIE]


def outputs(batches: list[RecordBatch]) -> list[bytes]:
    return [record for batch in batches for record in batch.records]


def letters(batches: list[RecordBatch]) -> list[DeadLetter]:
    return [letter for batch in batches for letter in batch.dead]


def check_books(batches: list[RecordBatch], read: int) -> None:
    assert sum(batch.records_read for batch in batches) == read
    added = sum(batch.records_added for batch in batches)
    dropped = sum(sum(batch.dropped.values()) for batch in batches)
    assert read + added == len(outputs(batches)) + dropped + len(letters(batches))


def wait_until(condition: Callable[[], bool], secs: float = 30) -> None:
    """Waits; the bound is only there so that a failing test ends."""
    deadline = time.monotonic() + secs
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.01)
