"""Fakes that the tests share: the worst object store there is, and a scheduler that runs attempts in every order.

Toy content is arithmetic (`record-000042`), so that loss, order and duplication show in a plain comparison.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from array_record.python.array_record_module import ArrayRecordReader

from transforms.elements import DeadLetter, Input, JobSpec, RecordBatch, ShardTask
from transforms.store import OutputError, Store, Version, register_store

T = TypeVar("T")


class Killed(BaseException):
    """The process is gone: what `kill -9` does to an attempt, which gets no chance to clean up."""


@dataclasses.dataclass
class _Object:
    data: bytes
    generation: int
    listed_at: int  # Number of the call from which on listings show the name.


class WorstStore:
    """The worst object store that the Store interface allows, in memory.

    No rename. The last writer wins `put`. A new name shows in `list` only after `list_delay` further calls, or once
    `settle` was called. Every call that talks to the store is a yield point of `scheduler`. Calls are numbered
    from 1, and any of them can be made to fail, or to be the last one before the process dies.

    Args:
        root: Name under which `open_store` finds it, `worst://NAME`; one of its own by default.
        list_delay: Calls until a new name is listed.
    """

    requests_at_once = 1  # So that calls come in one order.

    def __init__(self, root: str | None = None, *, list_delay: int = 0) -> None:
        self.root = root or f"worst://store-{next(_NUMBERS)}"
        self.scheduler: Interleaving | None = None
        self.calls: list[str] = []
        self._list_delay = list_delay
        self._objects: dict[str, _Object] = {}
        self._generations = itertools.count(1)
        self._lock = threading.RLock()
        self._failures: dict[int, Exception] = {}
        self._stop: tuple[int, bool] | None = None
        self._meanwhile: tuple[Callable[[str], bool], Callable[[], object]] | None = None
        self._stopped = False
        self._scratch: str | None = None
        _STORES[self.root] = self

    # What tests do to it.

    def fail_at(self, number: int, error: Exception | None = None) -> None:
        """Makes one call from now fail without effect: the next one is number 1."""
        self._failures[len(self.calls) + number] = error or OutputError(f"cannot write {self.root}: quota exceeded")

    def stop_at(self, number: int, *, after_effect: bool = False) -> None:
        """Kills the caller at one call from now; whatever it calls afterwards kills it again, until `restart`."""
        self._stop = (len(self.calls) + number, after_effect)

    def suspend_at(self, number: int, meanwhile: Callable[[], object]) -> None:
        """Suspends the caller before one call from now while something else happens; then it goes on."""
        target = len(self.calls) + number
        self._meanwhile = (lambda _: len(self.calls) + 1 == target, meanwhile)

    def suspend_before(self, call: str, meanwhile: Callable[[], object]) -> None:
        """Suspends the caller before the next call that begins so while something else happens; then it goes on."""
        self._meanwhile = (lambda text: text.startswith(call), meanwhile)

    def restart(self) -> None:
        """Begins a new process: nothing fails any more, and calls count from 1 again."""
        self._failures.clear()
        self._stop, self._stopped = None, False
        self.settle()
        self.calls.clear()

    def settle(self) -> None:
        """Lets listings catch up."""
        for stored in self._objects.values():
            stored.listed_at = 0

    def forget(self, name: str) -> bool:
        """Loses a name, as if somebody had deleted it; returns whether it was there."""
        return self._objects.pop(name, None) is not None

    def copy_of_tree(self) -> WorstStore:
        """Returns another store that holds the same."""
        other = WorstStore(list_delay=self._list_delay)
        for name, data in self.tree().items():
            other._store(name, data)
        other.settle()
        return other

    def tree(self) -> dict[str, bytes]:
        """Returns everything that is stored."""
        return {name: self._objects[name].data for name in sorted(self._objects)}

    # What the code under test does.

    def put_if_absent(self, name: str, data: bytes) -> bool:
        with self._call("put_if_absent", name):
            if name in self._objects:
                return False
            self._store(name, data)
            return True

    def put(self, name: str, data: bytes) -> None:
        with self._call("put", name):
            self._store(name, data)

    def put_file(self, path: str, name: str) -> None:
        with self._call("put_file", name), open(path, "rb") as file:
            self._store(name, file.read())

    def put_if_version(self, name: str, data: bytes, version: Version | None) -> Version | None:
        with self._call("put_if_version", name):
            return self._store_onto(version, name, data)

    def put_file_if_version(self, path: str, name: str, version: Version | None) -> Version | None:
        with self._call("put_file_if_version", name), open(path, "rb") as file:
            return self._store_onto(version, name, file.read())

    def version(self, name: str) -> Version | None:
        with self._call("version", name):
            return self._generation(name)

    def get(self, name: str) -> tuple[bytes, Version] | None:
        with self._call("get", name):
            found = self._objects.get(name)
            return None if found is None else (found.data, found.generation)

    def open(self, name: str) -> BinaryIO:
        with self._call("open", name):
            return io.BytesIO(self._existing(name).data)

    def size(self, name: str) -> int | None:
        with self._call("size", name):
            found = self._objects.get(name)
            return None if found is None else len(found.data)

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        with self._call("list", prefix):
            now = len(self.calls)
            found = [
                (name, len(stored.data))
                for name, stored in self._objects.items()
                if name.startswith(prefix) and stored.listed_at <= now
            ]
        return iter(sorted(found))

    def copy(self, source: str, target: str) -> None:
        with self._call("copy", f"{source} {target}"):
            self._store(target, self._existing(source).data)

    def copy_if_version(self, source: str, target: str, version: Version | None) -> Version | None:
        with self._call("copy_if_version", f"{source} {target}"):
            return self._store_onto(version, target, self._existing(source).data)

    def delete(self, name: str, version: Version | None = None) -> bool:
        with self._call("delete", name):
            found = self._objects.get(name)
            if found is None or (version is not None and found.generation != version):
                return False
            del self._objects[name]
            return True

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        yield

    def guarded(self, check: Callable[[], object]) -> None:
        """Cannot: no object waits for another."""

    def spool(self, name: str) -> _WorstSpool:
        with self._call("spool", name, pauses=False):  # Nothing that others could see happens here.
            return _WorstSpool(self, name, self._scratch_path())

    def clean(self) -> None:
        """An upload that was not sealed leaves nothing in the store."""

    @contextlib.contextmanager
    def local_copy(self, name: str) -> Iterator[str]:
        path = self._scratch_path()
        with self._call("local_copy", name), open(path, "wb") as file:
            file.write(self._existing(name).data)
        try:
            yield path
        finally:
            os.unlink(path)

    def upload(self, path: str, name: str) -> int:
        """Stores a spooled file."""
        with self._call("seal", name), open(path, "rb") as file:
            self._store(name, file.read())
            return len(self._objects[name].data)

    @contextlib.contextmanager
    def _call(self, kind: str, what: str, *, pauses: bool = True) -> Iterator[None]:
        """One request: a yield point, then its effect as a whole or not at all."""
        if pauses and self.scheduler is not None:
            self.scheduler.pause(f"{kind} {what}")
        if self._meanwhile is not None and self._meanwhile[0](f"{kind} {what}"):
            meanwhile, self._meanwhile = self._meanwhile[1], None
            meanwhile()
        with self._lock:
            if self._stopped:
                raise Killed
            self.calls.append(f"{kind} {what}")
            number = len(self.calls)
            dies, after_effect = (self._stop[0] == number, self._stop[1]) if self._stop else (False, False)
            if dies:
                self._stopped = True
            if dies and not after_effect:
                raise Killed
            if number in self._failures:
                raise self._failures[number]
            yield
            if dies:
                raise Killed

    def _store(self, name: str, data: bytes) -> None:
        before = self._objects.get(name)
        listed_at = len(self.calls) + self._list_delay if before is None else before.listed_at
        self._objects[name] = _Object(bytes(data), next(self._generations), listed_at)

    def _store_onto(self, version: Version | None, name: str, data: bytes) -> Version | None:
        if self._generation(name) != version:
            return None
        self._store(name, data)
        return self._generation(name)

    def _generation(self, name: str) -> int | None:
        return self._objects[name].generation if name in self._objects else None

    def _existing(self, name: str) -> _Object:
        if name not in self._objects:
            raise FileNotFoundError(name)
        return self._objects[name]

    def _scratch_path(self) -> str:
        if self._scratch is None:
            self._scratch = tempfile.mkdtemp(prefix="worst-store-")
            weakref.finalize(self, shutil.rmtree, self._scratch, ignore_errors=True)
        descriptor, path = tempfile.mkstemp(dir=self._scratch)
        os.close(descriptor)
        return path


class _WorstSpool:
    def __init__(self, store: WorstStore, name: str, path: str) -> None:
        self.path = path
        self._store = store
        self._name = name

    def seal(self) -> int:
        return self._store.upload(self.path, self._name)


_NUMBERS = itertools.count()
_STORES: weakref.WeakValueDictionary[str, WorstStore] = weakref.WeakValueDictionary()


def open_worst(root: str) -> Store:
    """Returns the fake of that name, a new one where there is none."""
    return _STORES.get(root) or WorstStore(root)


register_store("worst", open_worst)


class Interleaving:
    """Runs functions in threads of which one moves at a time, in an order that is chosen at each yield point.

    Args:
        choices: Which of the functions that can still move does so, turn by turn; the first one once they run out.
    """

    def __init__(self, choices: Sequence[int] = ()) -> None:
        self._choices = list(choices)
        self.trace: list[tuple[int, int]] = []  # (choice, number of functions there were to choose from)
        self.order: list[str] = []  # What moved, for messages.
        self._turns: dict[threading.Thread, threading.Semaphore] = {}
        self._back = threading.Semaphore(0)

    def run(self, functions: Sequence[Callable[[], T]]) -> list[T | BaseException]:
        """Runs the functions to their ends and returns what each returned or raised."""
        results: list[Any] = [None] * len(functions)

        ended: set[int] = set()

        def body(number: int) -> None:
            self._turns[threading.current_thread()].acquire()
            try:
                results[number] = functions[number]()
            except BaseException as error:
                results[number] = error
            finally:
                ended.add(number)
                self._back.release()

        threads = [threading.Thread(target=body, args=(number,), daemon=True) for number in range(len(functions))]
        for thread in threads:
            self._turns[thread] = threading.Semaphore(0)
            thread.start()
            self._move(thread)  # To its first yield point: nothing that others can see happens before.
        while moving := [thread for number, thread in enumerate(threads) if number not in ended]:
            choice = self._choices[len(self.trace)] if len(self.trace) < len(self._choices) else 0
            self.trace.append((choice, len(moving)))
            self._move(moving[choice])
        return results

    def pause(self, call: str) -> None:
        """The yield point; threads that are not part of the run pass."""
        turn = self._turns.get(threading.current_thread())
        if turn is not None:
            self._back.release()
            turn.acquire()
            self.order.append(f"{threading.current_thread().name}: {call}")

    def _move(self, thread: threading.Thread) -> None:
        self._turns[thread].release()
        if not self._back.acquire(timeout=60):
            raise TimeoutError(f"no yield point within 60 s after {self.order[-3:]}")


def every_interleaving(limit: int = 100_000) -> Iterator[Interleaving]:
    """Yields schedules until every order was run; the caller runs each once before it asks for the next.

    Raises:
        RuntimeError: There are more than `limit`.
    """
    choices: list[int] = []
    for _ in range(limit):
        interleaving = Interleaving(choices)
        yield interleaving
        trace = list(interleaving.trace)
        while trace and trace[-1][0] == trace[-1][1] - 1:
            trace.pop()
        if not trace:
            return
        choices = [choice for choice, _ in trace[:-1]] + [trace[-1][0] + 1]
    raise RuntimeError(f"more than {limit} interleavings; make the case smaller")


# Toy data.


def toy_records(count: int, first: int = 0) -> list[bytes]:
    """Returns records whose content is their number."""
    return [b"record-%06d" % number for number in range(first, first + count)]


def make_spec(root: str, **changes: Any) -> JobSpec:
    """Returns a job of one shard."""
    return dataclasses.replace(JobSpec(root=root, plan_id="plan-a", num_shards=1, format="tfrecord"), **changes)


def make_task(shard: int = 0) -> ShardTask:
    """Returns a planned shard."""
    return ShardTask(shard, first_offset=0, first_index=0, start=0, last_offset=0, end=1000, planned_bytes=1000)


def make_source(index: int = 0, size: int = 1000) -> Input:
    """Returns an input whose name is its number."""
    return Input(index, f"/corpus/input-{index:06d}", size, 0)


def make_letter(number: int, payload: bytes | None = b"") -> DeadLetter:
    """Returns a dead letter whose position and payload are its number."""
    payload = b"dead-%06d" % number if payload == b"" else payload
    return DeadLetter(
        make_source().name, number, 11, "read", "data_checksum", error=f"letter {number}", payload=payload
    )


def make_batch(records: Iterable[bytes] = (), *, sequence: int = 0, shard: int = 0, **changes: Any) -> RecordBatch:
    """Returns a batch whose books balance."""
    records = list(records)
    batch = RecordBatch(make_task(shard), sequence, source=make_source(), records=records)
    batch.positions = list(range(len(records)))
    batch.num_bytes = sum(map(len, records))
    batch = dataclasses.replace(batch, **changes)
    dropped = sum(batch.dropped.values())
    batch.records_read = len(batch.records) + len(batch.dead) + dropped - batch.records_added
    return batch


def read_array_record(store: Store, name: str) -> list[bytes]:
    """Returns the records of a stored ArrayRecord file."""
    with store.local_copy(name) as path:
        reader = ArrayRecordReader(os.fsencode(path))
        try:
            assert reader.ok(), f"{name} is no ArrayRecord file"
            return list(reader.read_all()) if reader.num_records() else []
        finally:
            reader.close()


# Running things.


def files_below(root: str | Path) -> dict[str, bytes]:
    """Every file below a folder, hidden and temporary ones too."""
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(Path(root).rglob("*")) if path.is_file()}


def run_together(functions: list[Callable[[], Any]]) -> list[Any]:
    """Runs functions in threads at once and returns what they return; the first exception is raised."""
    results: list[Any] = [None] * len(functions)
    errors: list[BaseException] = []
    together = threading.Barrier(len(functions))

    def body(number: int) -> None:
        together.wait()
        try:
            results[number] = functions[number]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=body, args=(number,)) for number in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def run_python(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a program in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=20, check=False
    )
