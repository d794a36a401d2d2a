"""Flags and config keys that belong to Apache Beam: checked by name, because Beam discards unknown ones silently."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

from pipelines.errors import UsageError, did_you_mean

GRISTMILL_FLAGS = (
    *("--input", "--output", "--config", "--format", "--name", "--split", "--shards", "--step", "--set"),
    *("--dry-run", "--limit", "--overwrite", "--resume-anyway", "--workers"),
)


def beam_option_names() -> set[str]:
    """Returns the name of every pipeline option that Beam knows, without dashes."""
    return _names(_beam_parser())


def _names(parser: Any) -> set[str]:
    return {name.lstrip("-") for action in parser._actions for name in action.option_strings}


class _Parser(argparse.ArgumentParser):
    """Tells what is wrong to us, where Beam's own ends the process."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message.removeprefix("argument "))


def _beam_parser() -> Any:
    from apache_beam.options.pipeline_options import PipelineOptions

    parser: Any = _Parser(add_help=False, allow_abbrev=False, conflict_handler="resolve")
    for options in PipelineOptions.__subclasses__():
        options._add_argparse_args(parser)
    return parser


def check_flags(unknown: list[str]) -> list[str]:
    """Returns the flags for Beam.

    Raises:
        UsageError: A flag is neither ours nor exactly one of Beam's, or Beam does not take its value.
    """
    if not unknown:
        return []
    parser = _beam_parser()
    known = _names(parser)
    flags = list(_join_values(unknown))
    for flag in flags:
        name = flag.lstrip("-").split("=", 1)[0]
        if f"--{name}" in GRISTMILL_FLAGS:
            raise UsageError(f"{flag}: a flag of gristmill convert that this command does not have")
        if name not in known:
            choices = [*GRISTMILL_FLAGS, *(f"--{option}" for option in known)]
            hint = did_you_mean(f"--{name}", choices) or "; see gristmill convert --help"
            raise UsageError(f"unknown flag {flag!r}{hint}")
    _check_values(parser, flags)
    return flags


def _check_values(parser: Any, flags: list[str]) -> None:
    """Checks values as Beam will, which is after the job has begun.

    Raises:
        UsageError: Beam does not take one.
    """
    workers = parser.parse_args(flags).direct_num_workers
    if workers is not None and workers < 0:
        raise UsageError(f"--direct_num_workers must be a number of processes, or 0 for all cores, got {workers}")
    runner = flag_value(flags, "runner")
    if runner is not None:
        _check_runner(runner)


def _join_values(words: list[str]) -> Iterator[str]:
    """Yields `--flag value` as `--flag=value`, so that every flag is one word."""
    flag = None
    for word in words:
        if word.startswith("--"):
            if flag is not None:
                yield flag
            flag = word
        elif flag is None or "=" in flag:
            raise UsageError(f"unexpected argument {word!r}")
        else:
            yield f"{flag}={word}"
            flag = None
    if flag is not None:
        yield flag


def flag_value(flags: list[str], name: str) -> str | None:
    """Returns the value that Beam flags give an option, None when they do not."""
    for number, flag in enumerate(flags):
        if flag.startswith(f"--{name}="):
            return flag.split("=", 1)[1]
        if flag == f"--{name}" and number + 1 < len(flags):
            return flags[number + 1]
    return None


def tell_file_systems(flags: list[str], names: Iterable[str]) -> None:
    """Gives Beam's file systems their options, if any of these names is one of theirs."""
    if any("://" in name and not name.startswith("gs://") for name in names):
        from transforms.beam_files import use_flags

        use_flags(flags)


def _check_runner(name: str) -> None:
    from apache_beam.runners import create_runner

    try:
        create_runner(name)
    except (ValueError, ImportError, AttributeError) as error:
        raise UsageError(f"--runner {name}: {error}") from error


def config_flags(beam: dict[str, Any]) -> list[str]:
    """Returns the config's `beam` group as flags.

    Raises:
        UsageError: A key is no option of Beam, or Beam does not take its value.
    """
    if not beam:
        return []
    parser = _beam_parser()
    known = _names(parser)
    flags: list[str] = []
    for key, value in beam.items():
        if key not in known:
            raise UsageError(f"beam.{key}: Apache Beam has no such option{did_you_mean(key, known)}")
        flags += _to_flags(key, value)
    try:
        _check_values(parser, flags)
    except UsageError as error:
        raise UsageError(f"beam: {error}") from error
    return flags


def _to_flags(key: str, value: Any) -> list[str]:
    if value is True:
        return [f"--{key}"]
    if value is None or value is False:
        return []
    values = value if isinstance(value, list) else [value]
    return [f"--{key}={item}" for item in values]
