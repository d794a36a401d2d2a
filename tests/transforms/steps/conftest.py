"""The service that steps call, and the step that calls it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from http_steps import QUICK
from services import Service, serving
from transforms.steps.http import Post


@pytest.fixture
def service() -> Iterator[Service]:
    with serving() as service:
        yield service


@pytest.fixture
def post(service: Service) -> Iterator[Callable[..., Post]]:
    """Makes steps that call the service, and closes them."""
    made: list[Post] = []

    def make(path: str = "", **parameters: Any) -> Post:
        made.append(Post(service.url + path, **{**QUICK, **parameters}))
        return made[-1]

    yield make
    for step in made:
        step.close()
