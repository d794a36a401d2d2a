"""Paths as people write them: `~` for a home folder, and in a config `${NAME}` for an environment variable.

What follows sees the path as if it had been written out.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

from pipelines.errors import UsageError

_PATHS = ("source.patterns", "write.output")
"""The keys of a config that hold paths."""
_GROUPS = ("", "source", "write", "beam")
"""Groups of keys that hold paths; those of Beam are its own affair, but for `~/`."""
_VARIABLE = re.compile(r"\$?\$\{[^}]*\}?")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def expand_home(path: str, where: str) -> str:
    """Returns a path, or an `@list`, with the home folder for a leading `~` or `~user`.

    Args:
        path: What was given. A name that itself begins with `~` is written `./~name`.
        where: The flag or key, for the message.

    Raises:
        UsageError: There is no such home folder.
    """
    mark = "@" if path.startswith("@~") and not os.path.lexists(path) else ""
    bare = path.removeprefix(mark)
    if not bare.startswith("~"):
        return path
    user = bare[1:].partition("/")[0]
    found = "" if not user and os.environ.get("HOME") == "" else os.path.expanduser(bare)
    if os.path.isabs(found):
        return mark + found
    if user:
        why = f"there is no user {user!r}"
    elif "HOME" in os.environ:
        why = f"HOME is {os.environ['HOME']!r}, which is no absolute path"
    else:
        why = f"HOME is not set, and user {os.getuid()} has no home folder"
    raise UsageError(f"{where} {path}: {why}; write the path out, or ./{bare} for a name that begins with ~")


def expand_variables(path: str, where: str) -> str:
    """Returns a path of a config with the values of its `${NAME}`; `$${NAME}` stands for these very signs.

    Args:
        path: What stands in the config.
        where: The key, for the message.

    Raises:
        UsageError: A variable is not set, or is empty, or what stands there names none.
    """

    def value(found: re.Match[str]) -> str:
        text = found[0]
        if text.startswith("$$"):
            return text[1:]
        name = text[2:].removesuffix("}")
        if not text.endswith("}") or not _NAME.fullmatch(name):
            raise UsageError(f"{where} {path}: expected ${{NAME}} of an environment variable, got {text}")
        if not os.environ.get(name):
            what = "empty" if name in os.environ else "not set"
            raise UsageError(
                f"{where} {path}: the environment variable {name} is {what}; set it, or write $${{{name}}} for these "
                "very signs"
            )
        return os.environ[name]

    return _VARIABLE.sub(value, path)


def expand_config(value: Any, key: str = "") -> Any:
    """Returns a value of a config with all its paths expanded.

    Args:
        value: As YAML gives it; what is no text is left to the checks of the config.
        key: Its key, "" for a whole config.

    Raises:
        UsageError: A path of it cannot be expanded.
    """
    return _walk(value, key, lambda path, where: expand_home(expand_variables(path, where), where))


def expand_flag(word: str) -> str:
    """Returns a word of a command line that is not ours, with the home folder where its value begins with `~/`.

    Raises:
        UsageError: There is no such home folder.
    """
    name, equals, value = word.partition("=") if word.startswith("-") else ("", "", word)
    return f"{name}{equals}{expand_home(value, name or 'argument')}" if value.startswith("~/") else word


def _walk(value: Any, key: str, expand: Callable[[str, str], str]) -> Any:
    if key.startswith("beam.") and isinstance(value, str):
        return expand_home(value, f"{key}:") if value.startswith("~/") else value
    if isinstance(value, dict) and key in _GROUPS:
        return {name: _walk(inner, f"{key}.{name}" if key else str(name), expand) for name, inner in value.items()}
    if key in _PATHS and isinstance(value, list):
        return [_walk(inner, key, expand) for inner in value]
    return expand(value, f"{key}:") if key in _PATHS and isinstance(value, str) else value
