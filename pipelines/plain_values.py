"""What a config may hold: text, numbers, true, false, null, lists and groups of these.

YAML can say more: dates, binary values, sets, groups that contain themselves. The config travels to workers and into
plan and report as JSON, where none of that survives, so it is refused before any work.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any


def find_problems(config: dict[str, Any]) -> Iterator[str]:
    """Yields "key path: what is wrong" for each value of a config that JSON cannot hold.

    Args:
        config: Keys and values, nested.
    """
    yield from _walk(config, "", ())


def _walk(value: Any, path: str, inside: tuple[int, ...]) -> Iterator[str]:
    if isinstance(value, dict | list):
        if id(value) in inside:
            yield f"{path}: contains itself through a YAML anchor"
            return
        for where, inner in _parts(value, path):
            yield from _walk(inner, where, (*inside, id(value)))
        if isinstance(value, dict):
            yield from (f"{path}: the key {key!r} must be text; quote it" for key in value if not isinstance(key, str))
    elif isinstance(value, float) and not math.isfinite(value):
        yield f"{path}: expected a finite number, got {value}"
    elif value is not None and not isinstance(value, str | int | float):
        yield f"{path}: {type(value).__name__} is no plain value; quote it, so that it is text, got {value!r}"


def _parts(value: dict[Any, Any] | list[Any], path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield from ((f"{path}.{key}" if path else str(key), inner) for key, inner in value.items())
    else:
        yield from ((f"{path}[{number}]", inner) for number, inner in enumerate(value))
