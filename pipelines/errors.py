"""Exit statuses, and the error that stands for wrong usage."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

DONE = 0
FAILED = 1
USAGE = 2
OVER_BUDGET = 3
UNBALANCED = 4

STATUS_CODES = {"done": DONE, "incomplete": FAILED, "over_budget": OVER_BUDGET, "nothing_written": OVER_BUDGET}
STATUS_CODES["unbalanced"] = UNBALANCED

CAUSES = ("OutputError", "LostLockError", "BrokenSequenceError", "StepError", "StateError")
"""Errors of `transforms` that end a job with a message of their own, by name: in a worker's log they are text."""


class UsageError(ValueError):
    """Something the user can mend before any work was done: exit status 2."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Returns "; did you mean X?" for the nearest known word, or "" when none is near."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""
