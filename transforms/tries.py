"""Marks of tries: a worker that dies leaves behind which shards it was at. No Beam here.

A mark is created before a shard is read, and deleted when its try ends in any orderly way: committed, failed, or found
committed by another. What is left when a process has died tells which shards may have killed it, so that the next try
takes precautions: from the second on every step runs in a child process, from the third on the reader does as well.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
from collections.abc import Iterator

from transforms.elements import JobSpec
from transforms.store import Store

TRIES = "_gristmill/tries/"
ISOLATE_STEPS_FROM = 2
ISOLATE_READER_FROM = 3
_FORGIVEN = "0"
"""Number of the mark of a shard that was forgiven once; it stays until the job is done."""


@dataclasses.dataclass(frozen=True)
class Mark:
    """One mark.

    Attributes:
        name: Its name in the store.
        shard_key: The shard, as `JobSpec.shard_key` writes it; `.` and a number behind it for a piece of it.
        number: Which try of the shard it stands for, from 1.
        host: Machine of the worker.
        pid: Its process.
    """

    name: str
    shard_key: str
    number: int
    host: str
    pid: int


def mark_try(store: Store, spec: JobSpec, shard: int, piece: int | None = None) -> int:
    """Marks that a try at a shard, or at a piece of it, begins, and returns its number, from 1."""
    data = json.dumps({"host": socket.gethostname(), "pid": os.getpid()}).encode()
    number = 1
    while not store.put_if_absent(mark_name(spec, shard, number, piece), data):
        number += 1
    return number


def mark_name(spec: JobSpec, shard: int, number: int, piece: int | None = None) -> str:
    """Returns the name of a mark."""
    of_piece = "" if piece is None else f".{piece:05d}"
    return f"{TRIES}{spec.shard_key(shard)}{of_piece}-{number}"


def unmark_try(store: Store, spec: JobSpec, shard: int, number: int, piece: int | None = None) -> None:
    """Takes the mark of a try away that ended in an orderly way, whatever came of it."""
    store.delete(mark_name(spec, shard, number, piece))


def forget_tries(store: Store, spec: JobSpec, shard: int, number: int, piece: int | None = None) -> None:
    """Takes the marks of a committed shard or piece away, up to the try that committed it."""
    for earlier in range(1, number + 1):
        store.delete(mark_name(spec, shard, earlier, piece))


def list_marks(store: Store) -> Iterator[Mark]:
    """Yields every mark that stands."""
    for name, _ in list(store.list(TRIES)):
        shard_key, _, number = name.removeprefix(TRIES).rpartition("-")
        found = store.get(name) if number != _FORGIVEN else None
        if found is not None and number.isdigit():
            fields = json.loads(found[0])
            yield Mark(name, shard_key, int(number), fields["host"], fields["pid"])


def forgive_marks(store: Store) -> None:
    """Has shards tried as for the first time at which a job was that was killed as a whole, its command included.

    Hardly ever it was a record that did this, and precautions make a shard slow whose steps have many calls in flight.
    If it was one, the job is killed again: a shard is forgiven once.

    Args:
        store: The output directory, whose job does not run yet.
    """
    marks = list(list_marks(store))
    often = {mark.shard_key for mark in marks if mark.number > 1}
    for mark in marks:
        if mark.shard_key not in often and store.put_if_absent(f"{TRIES}{mark.shard_key}-{_FORGIVEN}", b"{}"):
            store.delete(mark.name)


def forget_marks(store: Store, pids: set[int] | None = None) -> None:
    """Takes away the marks of processes of this machine that did not die of what they read.

    Args:
        store: The output directory.
        pids: Those processes; None for all, of whatever machine.
    """
    for mark in list_marks(store):
        if pids is None or (mark.host == socket.gethostname() and mark.pid in pids):
            store.delete(mark.name)
