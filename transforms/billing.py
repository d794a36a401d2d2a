"""Which project pays for requests to Google Cloud Storage. No Beam here.

The owner of a bucket may leave that to whoever asks (requester pays); then every request must name a project. It is
named in all requests of a job, once it is given, and never otherwise: naming one takes a permission.
"""

from __future__ import annotations

import re

_PROJECT = re.compile(r"([a-z0-9.-]+:)?[a-z0-9][a-z0-9-]{1,62}")


class _Payer:
    """What a process has once."""

    project = ""


def pay_by(project: str) -> None:
    """Has a project pay for the requests of this process from now on; "" for none."""
    _Payer.project = project


def check_project(project: str) -> str:
    """Returns the id of a project as it was given.

    Raises:
        ValueError: It is none.
    """
    if project and not _PROJECT.fullmatch(project):
        raise ValueError("expected the id of a Google Cloud project, such as my-project-123")
    return project


def billing_project() -> str:
    """Returns the project that pays, "" where the owners of the buckets do."""
    return _Payer.project
