"""Marks of tries: they count up, and what is left when a process died names the shard it was at."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from fakes import WorstStore
from transforms.elements import JobSpec
from transforms.store import LocalStore, Store
from transforms.tries import (
    TRIES,
    forget_marks,
    forget_tries,
    forgive_marks,
    list_marks,
    mark_name,
    mark_try,
    unmark_try,
)

SPEC = JobSpec("/out", "plan", 12, "tfrecord")


@pytest.fixture(params=["local", "worst"])
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Store:
    if request.param == "worst":
        return WorstStore()
    return LocalStore(str(tmp_path_factory.mktemp("out")))


def names(store: Store) -> list[str]:
    return sorted(mark.name for mark in list_marks(store))


def test_tries_of_a_shard_are_numbered_from_1_whatever_other_shards_do(store: Store) -> None:
    assert [mark_try(store, SPEC, shard) for shard in (3, 3, 11, 3)] == [1, 2, 1, 3]


def test_an_orderly_end_takes_its_own_mark_away(store: Store) -> None:
    mark_try(store, SPEC, 3)
    mark_try(store, SPEC, 3)
    unmark_try(store, SPEC, 3, 2)
    assert [store.size(mark_name(SPEC, 3, number)) is not None for number in (1, 2)] == [True, False]
    assert mark_try(store, SPEC, 3) == 2


def test_a_commit_takes_all_marks_of_its_shard_away(store: Store) -> None:
    for shard in (3, 3, 4):
        mark_try(store, SPEC, shard)
    forget_tries(store, SPEC, 3, 2)
    assert mark_try(store, SPEC, 3) == 1
    assert mark_try(store, SPEC, 4) == 2


def test_marks_say_whose_they_are(tmp_path: os.PathLike[str]) -> None:
    store = LocalStore(str(tmp_path))
    mark_try(store, SPEC, 3)
    [mark] = list_marks(store)
    assert (mark.name, mark.shard_key, mark.number) == (f"{TRIES}00003-1", "00003", 1)
    assert (mark.host, mark.pid) == (socket.gethostname(), os.getpid())


def test_only_marks_of_the_named_processes_are_forgotten(tmp_path: os.PathLike[str]) -> None:
    store = LocalStore(str(tmp_path))
    program = (
        "import sys; from transforms.store import LocalStore; from transforms.tries import mark_try\n"
        "from transforms.elements import JobSpec\n"
        "mark_try(LocalStore(sys.argv[1]), JobSpec('/out', 'plan', 12, 'tfrecord'), 5)"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True)
    mark_try(store, SPEC, 3)
    forget_marks(store, {os.getpid()})
    assert names(store) == [f"{TRIES}00005-1"]
    forget_marks(store)
    assert names(store) == []


def test_a_shard_is_forgiven_once_and_only_if_it_was_tried_once(store: Store) -> None:
    for shard in (3, 4, 4):
        mark_try(store, SPEC, shard)
    mark_try(store, SPEC, 5, 7)
    forgive_marks(store)
    assert names(store) == [f"{TRIES}00004-1", f"{TRIES}00004-2"]
    assert [mark_try(store, SPEC, 3), mark_try(store, SPEC, 4), mark_try(store, SPEC, 5, 7)] == [1, 3, 1]
    forgive_marks(store)
    assert [mark_try(store, SPEC, 3), mark_try(store, SPEC, 4), mark_try(store, SPEC, 5, 7)] == [2, 4, 2]
