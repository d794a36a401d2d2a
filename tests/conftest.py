"""Fixtures that several test modules share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import gcs_emulator
from transforms import gcs


@pytest.fixture(scope="session")
def _emulator() -> Iterator[gcs_emulator.Emulator]:
    with gcs_emulator.emulating() as emulator:
        yield emulator


@pytest.fixture
def emulator(_emulator: gcs_emulator.Emulator, monkeypatch: pytest.MonkeyPatch) -> Iterator[gcs_emulator.Emulator]:
    """Google Cloud Storage on this machine, without faults and requests of the tests before."""
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", _emulator.url)
    monkeypatch.setattr(gcs, "_FIRST_WAIT_SECS", 0.05)
    monkeypatch.setattr(gcs, "_process", gcs._Process())
    _emulator.left()
    _emulator.seen.clear()
    yield _emulator
    _emulator.left()
