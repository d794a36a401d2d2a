"""The options that every step may have beside its own parameters. No Beam here."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal


@dataclasses.dataclass(frozen=True)
class StepOptions:
    """How a step is run, whatever it does.

    Attributes:
        isolate: Run it in a child process that can be killed, so that a crash or a hang costs one record.
        timeout_secs: Longest time for one record (for each item, where a step returns an iterator); None for no bound.
        retries: How often a failing call is tried again.
        max_per_sec: Calls a second, of the whole job; None for no bound.
        max_memory_bytes: Memory of the child process; None for no bound.
        journal: Whether what the step returned is kept until the shard is committed, so that a job that was killed
            does not ask again: true, false, or "auto" for steps that call services or turn out to be slow.
    """

    isolate: bool = False
    timeout_secs: float | None = None
    retries: int = 0
    max_per_sec: float | None = None
    max_memory_bytes: int | None = None
    journal: bool | Literal["auto"] = "auto"


OPTION_NAMES = tuple(field.name for field in dataclasses.fields(StepOptions))


def split_options(step: dict[str, Any]) -> tuple[StepOptions, dict[str, Any]]:
    """Parts the options of a step in the config from the parameters of its function.

    Args:
        step: `use` or `call`, options and parameters.

    Returns:
        The options and the parameters.
    """
    options = {name: step[name] for name in OPTION_NAMES if step.get(name) is not None}
    parameters = {key: value for key, value in step.items() if key not in ("use", "call", *OPTION_NAMES)}
    return StepOptions(**options), parameters
