"""Holds the parameters of steps against the annotations of their functions, before any record is read."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Iterable, Iterator
from typing import Any

import pydantic

from transforms.steps.load import Step
from transforms.steps.options import split_options


def find_mismatches(steps: Iterable[dict[str, Any]], loaded: Iterable[Step]) -> Iterator[str]:
    """Yields what is wrong with each parameter that is not of the type that its step declares.

    Types are taken as pydantic takes them: a path may be given as text, an int for a float. What pydantic knows nothing
    of, and what has no annotation, is left to the step.

    Args:
        steps: The steps of the config.
        loaded: The same steps, loaded.
    """
    for number, (step, made) in enumerate(zip(steps, loaded, strict=True)):
        hints = _annotations(made.owner)
        for name, value in split_options(step)[1].items():
            problem = _check(hints[name], value) if name in hints else None
            if problem is not None:
                yield f"steps[{number}].{name}: {made.name} expects {_describe(hints[name])}: {problem}, got {value!r}"


def _annotations(owner: Any) -> dict[str, Any]:
    called = owner if inspect.isroutine(owner) else type(owner).__init__
    try:
        return typing.get_type_hints(called)
    except Exception:  # Names that exist for type checkers only, or nothing that has annotations.
        return {}


def _check(annotation: Any, value: Any) -> str | None:
    try:
        pydantic.TypeAdapter(annotation).validate_python(value)
    except pydantic.ValidationError as error:
        return error.errors()[0]["msg"].removeprefix("Input ")
    except Exception:  # No type that pydantic knows.
        return None
    return None


def _describe(annotation: Any) -> str:
    return annotation.__name__ if isinstance(annotation, type) else str(annotation).replace("typing.", "")
