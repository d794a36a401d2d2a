"""Fixtures that several test modules share."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from pathlib import Path

import pytest

import gcs_emulator
from dataflow import cloud as clouds


@pytest.fixture(scope="session")
def _emulator() -> Iterator[gcs_emulator.Emulator]:
    if platform.machine() != "x86_64":
        pytest.skip("the emulator's package has a server for x86-64 only")
    with gcs_emulator.emulating() as emulator:
        yield emulator


@pytest.fixture
def emulator(_emulator: gcs_emulator.Emulator, monkeypatch: pytest.MonkeyPatch) -> Iterator[gcs_emulator.Emulator]:
    """Google Cloud Storage on this machine, without faults and requests of the tests before."""
    from transforms import gcs  # Nothing that other tests should wait for.

    monkeypatch.setenv("STORAGE_EMULATOR_HOST", _emulator.url)
    monkeypatch.setattr(gcs, "_FIRST_WAIT_SECS", 0.05)
    monkeypatch.setattr(gcs, "_process", gcs._Process())
    _emulator.left()
    _emulator.seen.clear()
    yield _emulator
    _emulator.left()


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
