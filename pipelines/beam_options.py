"""Flags and config keys that belong to Apache Beam: checked by name, because Beam discards unknown ones silently."""

from __future__ import annotations

import argparse
from typing import Any

from pipelines.errors import UsageError, did_you_mean

GRISTMILL_FLAGS = (
    *("--input", "--output", "--config", "--format", "--name", "--split", "--shards", "--step", "--set"),
    *("--dry-run", "--limit", "--overwrite", "--workers"),
)


def beam_option_names() -> set[str]:
    """Returns the name of every pipeline option that Beam knows, without dashes."""
    from apache_beam.options.pipeline_options import PipelineOptions

    parser: Any = argparse.ArgumentParser(add_help=False, conflict_handler="resolve")
    for options in PipelineOptions.__subclasses__():
        options._add_argparse_args(parser)
    return {name.lstrip("-") for action in parser._actions for name in action.option_strings}


def check_flags(unknown: list[str]) -> list[str]:
    """Returns the flags for Beam.

    Raises:
        UsageError: A flag is neither ours nor exactly one of Beam's.
    """
    if not unknown:
        return []
    known = beam_option_names()
    for number, flag in enumerate(unknown):
        if not flag.startswith("-"):
            if number == 0 or not unknown[number - 1].startswith("-"):
                raise UsageError(f"unexpected argument {flag!r}")
            continue
        name = flag.lstrip("-").split("=", 1)[0]
        if name not in known:
            choices = [*GRISTMILL_FLAGS, *(f"--{option}" for option in known)]
            hint = did_you_mean(f"--{name}", choices) or "; see gristmill convert --help"
            raise UsageError(f"unknown flag {flag!r}{hint}")
    return unknown


def config_flags(beam: dict[str, Any]) -> list[str]:
    """Returns the config's `beam` group as flags.

    Raises:
        UsageError: A key is no option of Beam.
    """
    if not beam:
        return []
    known = beam_option_names()
    flags: list[str] = []
    for key, value in beam.items():
        if key not in known:
            raise UsageError(f"beam.{key}: Apache Beam has no such option{did_you_mean(key, known)}")
        flags += _to_flags(key, value)
    return flags


def _to_flags(key: str, value: Any) -> list[str]:
    if value is True:
        return [f"--{key}"]
    if value is None or value is False:
        return []
    values = value if isinstance(value, list) else [value]
    return [f"--{key}={item}" for item in values]
