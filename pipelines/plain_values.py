"""What a config may hold: text, numbers, true, false, null, lists and groups of these.

YAML can say more: dates, binary values, sets, groups that contain themselves or each other many times. The config
travels to workers and into plan and report as JSON, where none of that survives, so it is refused before any work.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

_MAX_VALUES = 1_000_000
_FILE_NAMES = ("source.patterns", "write.output")
"""Where text may stand for bytes that are not UTF-8, as Python gives such names."""


def find_problems(config: dict[str, Any]) -> Iterator[str]:
    """Yields "key path: what is wrong" for each value of a config that JSON cannot hold.

    Args:
        config: Keys and values, nested.
    """
    walk = _Walk()
    yield from walk.look(config, "")
    if walk.sizes[id(config)] > _MAX_VALUES:
        yield f"the config has more than {_MAX_VALUES:,} values once its YAML anchors are filled in"


class _Walk:
    """Goes through a config, once through what several anchors share.

    Attributes:
        sizes: Values in each group and list that was gone through, by its id.
    """

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}
        self._inside: set[int] = set()

    def look(self, value: Any, path: str) -> Iterator[str]:
        """Yields the problems of a value and of all that is in it."""
        if isinstance(value, dict | list):
            if id(value) in self._inside:
                yield f"{path}: contains itself through a YAML anchor"
            elif id(value) not in self.sizes:
                yield from self._look_inside(value, path)
        else:
            problem = _problem(value, path)
            if problem is not None:
                yield f"{path}: {problem}"

    def _look_inside(self, value: dict[Any, Any] | list[Any], path: str) -> Iterator[str]:
        self._inside.add(id(value))
        size = 1
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            where = f"[{key}]" if isinstance(value, list) else f".{key}" if path else str(key)
            if isinstance(value, dict) and (not isinstance(key, str) or _problem(key, "") is not None):
                yield f"{path or 'the config'}: the key {key!r} must be text in UTF-8; quote it"
            yield from self.look(inner, path + where)
            size += self.sizes.get(id(inner), 1)
        self._inside.discard(id(value))
        self.sizes[id(value)] = size


def _problem(value: Any, path: str) -> str | None:
    if isinstance(value, str):
        errors = "surrogateescape" if path.startswith(_FILE_NAMES) else "strict"
        try:
            value.encode("utf-8", errors)
        except UnicodeEncodeError:
            return f"expected text in UTF-8, got {value!r}"
    elif isinstance(value, float) and not math.isfinite(value):
        return f"expected a finite number, got {value}"
    elif value is not None and not isinstance(value, int | float):
        return f"{type(value).__name__} is no plain value; quote it, so that it is text, got {value!r}"
    return None
