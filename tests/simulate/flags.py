"""Assumptions as flags: a dataclass of numbers, each with its default and what it means."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any, TypeVar

T = TypeVar("T")


def assumed(value: float, text: str) -> Any:
    """Returns a field with a default and a text."""
    return dataclasses.field(default=value, metadata={"help": text})


def add_flags(parser: argparse.ArgumentParser, kind: Any) -> None:
    """Adds a flag for every field of a dataclass."""
    group = parser.add_argument_group((kind.__doc__ or "").split("\n")[0].rstrip("."))
    for field in dataclasses.fields(kind):
        flag = f"--{field.name.replace('_', '-')}"
        group.add_argument(flag, type=float, default=field.default, metavar="X", help=field.metadata["help"])


def from_flags(args: argparse.Namespace, kind: type[T]) -> T:
    """Returns what the flags say, as the dataclass."""
    return kind(**{field.name: getattr(args, field.name) for field in dataclasses.fields(kind)})  # type: ignore[arg-type]
