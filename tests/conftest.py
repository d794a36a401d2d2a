"""Fixtures that several test modules share."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import gcs_emulator
from dataflow import cloud as clouds

if TYPE_CHECKING:
    from grown_set import GrownSet


@pytest.fixture(autouse=True)
def _modules_of_one_test(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Forgets the steps of a test: the next one may have others of the same name, in a folder of its own."""
    before, path = set(sys.modules), list(sys.path)
    yield
    sys.path[:] = path
    folder = str(tmp_path_factory.getbasetemp())
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(folder):
            del sys.modules[name]


@pytest.fixture(scope="session")
def _emulator() -> Iterator[gcs_emulator.Emulator]:
    with gcs_emulator.emulating() as emulator:
        yield emulator


@pytest.fixture
def emulator(_emulator: gcs_emulator.Emulator, monkeypatch: pytest.MonkeyPatch) -> Iterator[gcs_emulator.Emulator]:
    """Google Cloud Storage on this machine, without faults and requests of the tests before."""
    from transforms import gcs  # Nothing that other tests should wait for.

    monkeypatch.setenv("STORAGE_EMULATOR_HOST", _emulator.url)
    monkeypatch.setattr(gcs, "_FIRST_WAIT_SECS", 0.05)
    monkeypatch.setattr(gcs, "_process", gcs._Process())
    _emulator.be_well()
    yield _emulator
    _emulator.be_well()


@pytest.fixture(scope="session")
def _grown_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from grown_set import make_grown_set  # Nothing that other tests should wait for.

    return make_grown_set(tmp_path_factory.mktemp("grown"))


@pytest.fixture
def grown(_grown_folder: Path, tmp_path: Path) -> Iterator[GrownSet]:
    """A set of its own with an append and a replay, for a test to damage."""
    from grown_set import GrownSet, at_home

    with at_home(_grown_folder):
        yield GrownSet.copy_of(_grown_folder, tmp_path / "out")


@pytest.fixture
def cloud() -> Iterator[clouds.Cloud]:
    """Credentials and Dataflow on this machine."""
    with clouds.running() as running:
        yield running


@pytest.fixture(scope="session")
def base_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of an environment that stands for Beam's container image; takes most of a minute."""
    from dataflow import execute

    return execute.make_base(tmp_path_factory.mktemp("base") / "environment")
