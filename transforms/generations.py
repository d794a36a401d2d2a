"""Generations: what `--append` and `replay` add to a published set, each with state and names of its own."""

from __future__ import annotations

from transforms.elements import JobSpec
from transforms.store import Store, open_store


def open_job_store(spec: JobSpec) -> Store:
    """Opens the output directory as the job's generation sees it."""
    return open_store(spec.root)
