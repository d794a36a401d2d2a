"""Imports large libraries faster."""

from __future__ import annotations

import contextlib
import gc
import importlib.abc
import logging
import sys
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def without_collecting() -> Iterator[None]:
    """Suspends garbage collection while libraries load.

    Beam and its libraries make about a million objects that stay; looking for garbage among them again and again takes
    0.3 s of a start-up of 2 s. Afterwards they are left out of every later collection.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def without_google() -> Iterator[None]:
    """Has Beam load as if its extra for Google Cloud were not installed: for processes that run local pipelines alone.

    Pub/Sub, BigQuery and Dataflow are a quarter of what Beam loads, and no local pipeline of ours asks for them. What
    is imported afterwards finds all of it, such as our own client of Google Cloud Storage, or a step's.
    """
    hidden = _HiddenGoogle()
    sys.meta_path.insert(0, hidden)
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)  # Beam warns of what it does not find,
    quiet = logging.NullHandler()  # and a warning makes Python's logging print for ever, unless somebody listens.
    logging.root.addHandler(quiet)
    try:
        yield
    finally:
        logging.root.removeHandler(quiet)
        logging.disable(level)
        sys.meta_path.remove(hidden)


class _HiddenGoogle(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, *_: Any) -> None:
        if name.startswith(("google.cloud", "apitools")):
            raise ModuleNotFoundError(f"{name} is not loaded for a local pipeline", name=name)
