"""The budget of dead letters: how many may be lost before the job is called off. No Beam here."""

from __future__ import annotations

import dataclasses
import json
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from transforms.elements import JobSpec, ShardInfo
from transforms.store import Store

ABORT_NAME = "_gristmill/abort.json"
ESTIMATE = "records_dead_estimate"
"""Name in books: dead records where each damaged region counts as the records that it probably held."""

LOOK_SECS = 30.0
"""How often a task that reads looks whether the job was called off."""

_ENOUGH_SHARE = 0.1
_ENOUGH_BYTES = 1 << 30
_ENOUGH_RECORDS = 1_000
_ENOUGH_FILES = 1_000
_FEWEST_FILES = 10


@dataclasses.dataclass(frozen=True)
class Budget:
    """What the job may lose.

    Attributes:
        max_fraction: Largest dead/all by records, bytes and files.
        max_count: Largest number of dead letters; None for no bound.
        max_count_by_reason: Largest number of dead letters of a reason.
        planned_bytes: Bytes that the plan expects to read, decompressed.
        planned_files: Files that the plan reads.
    """

    max_fraction: float
    max_count: int | None = None
    max_count_by_reason: dict[str, int] = dataclasses.field(default_factory=dict)
    planned_bytes: int = 0
    planned_files: int = 0

    @classmethod
    def of(cls, spec: JobSpec) -> Budget:
        """Returns the budget of a job."""
        by_reason = dict(spec.max_count_by_reason)
        return cls(spec.max_fraction, spec.max_count, by_reason, spec.planned_bytes, spec.planned_files)

    def broken(self, totals: dict[str, int], dead_by_reason: dict[str, int]) -> str | None:
        """Returns how the totals of a finished job break the budget, None when they do not."""
        counted = self._count_broken(totals, dead_by_reason)
        if counted is not None:
            return counted
        fraction = dead_fraction(totals)
        worst = max(fraction, key=lambda key: fraction[key])
        if fraction[worst] <= self.max_fraction:
            return None
        dead = f"{fraction[worst]:.2%} of {worst} are dead{_in_brackets(totals)}"
        return f"{dead}; dead_letters.max_fraction allows {self.max_fraction:.2%}"

    def broken_early(self, totals: dict[str, int], dead_by_reason: dict[str, int]) -> str | None:
        """Returns how the totals of a running job break the budget, None while they do not.

        Counts break it at once. So do dead bytes and files that are more than the whole job may lose. Otherwise a
        tenth of the job (or 1 GiB, or 1,000 files of it) must have been read, and because the rest may be better than
        what came first, the fraction must be worse than allowed by a tenth of the way to 1.
        """
        counted = self._count_broken(totals, dead_by_reason)
        if counted is not None:
            return counted
        fraction = dead_fraction(totals)
        limit = self.max_fraction + 0.1 * (1 - self.max_fraction)
        for key in ("records", "bytes", "files"):
            certain = self._is_certain(key, totals)
            if certain or (fraction[key] > limit and self._is_enough(key, totals)):
                allowed = f"dead_letters.max_fraction allows {self.max_fraction:.2%} of the job"
                return f"{fraction[key]:.2%} of the {key} that were read are dead{_in_brackets(totals)}; {allowed}"
        return None

    def _count_broken(self, totals: dict[str, int], dead_by_reason: dict[str, int]) -> str | None:
        if self.max_count is not None and totals["records_dead"] > self.max_count:
            return f"{say_letters(totals)}; dead_letters.max_count allows {self.max_count}"
        for reason, limit in self.max_count_by_reason.items():
            if dead_by_reason.get(reason, 0) > limit:
                count = dead_by_reason[reason]
                return f"{count} dead letters for {reason}; dead_letters.max_count_by_reason allows {limit}"
        return None

    def _is_certain(self, key: str, totals: dict[str, int]) -> bool:
        """Whether more is dead already than the whole job may lose."""
        if key == "files":
            return totals["files_dead"] > self.max_fraction * self.planned_files > 0
        return key == "bytes" and totals["bytes_dead"] > self.max_fraction * self.planned_bytes > 0

    def _is_enough(self, key: str, totals: dict[str, int]) -> bool:
        if key == "files":
            seen = sum(totals[name] for name in ("files_read", "files_empty", "files_dead"))
            return seen >= max(_FEWEST_FILES, min(_ENOUGH_SHARE * self.planned_files, _ENOUGH_FILES))
        enough = totals["bytes_read"] >= min(_ENOUGH_SHARE * self.planned_bytes, _ENOUGH_BYTES)
        return enough and (key == "bytes" or totals["records_read"] >= _ENOUGH_RECORDS)


def say_letters(totals: Mapping[str, Any]) -> str:
    """Returns how many dead letters there are and, where regions hide more, about how many records these held."""
    dead, estimate = totals["records_dead"], totals.get(ESTIMATE, 0)
    letters = f"{dead:,} dead letter{'s' if dead != 1 else ''}"
    return f"{letters}, about {estimate:,} records" if estimate > dead else letters


def _in_brackets(totals: dict[str, int]) -> str:
    return f" ({say_letters(totals)})" if totals.get(ESTIMATE, 0) > totals["records_dead"] else ""


def dead_fraction(totals: dict[str, int]) -> dict[str, float]:
    """Returns dead/all by records, bytes and files."""
    files = sum(totals[name] for name in ("files_read", "files_empty", "files_dead"))
    return {
        "records": _share(totals["records_dead"], totals["records_read"]),
        "bytes": _share(totals["bytes_dead"], totals["bytes_read"]),
        "files": _share(totals["files_dead"], files),
    }


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


class RunningTotals:
    """Adds up shards as they are committed and says when the budget is broken.

    Args:
        budget: The budget.
    """

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._totals: Counter[str] = Counter()
        self._dead: Counter[str] = Counter()

    def add(self, books: dict[str, int], dead_by_reason: dict[str, int]) -> str | None:
        """Adds a shard; returns how the budget is broken, None while it is not."""
        self._totals.update(books)
        for reason in self._budget.max_count_by_reason:
            self._dead[reason] += dead_by_reason.get(reason, 0)
        return self._budget.broken_early(self._totals, self._dead)

    def add_info(self, info: ShardInfo) -> str | None:
        """Adds a shard's metadata; returns how the budget is broken, None while it is not."""
        return self.add(info.books, info.dead_by_reason)

    @property
    def totals(self) -> dict[str, int]:
        """What was added up so far, by name."""
        return dict(self._totals)


def call_off(store: Store, message: str) -> None:
    """Calls the job off: its tasks end without reading, and nothing is published. Work that is done is kept."""
    fields: dict[str, Any] = {"message": message, "time": time.time()}
    store.put_if_absent(ABORT_NAME, json.dumps(fields).encode())


def called_off(store: Store) -> str | None:
    """Returns why the job was called off, None when it was not."""
    found = store.get(ABORT_NAME)
    if found is None:
        return None
    try:
        return str(json.loads(found[0])["message"])
    except (ValueError, KeyError, TypeError):
        return f"called off; {ABORT_NAME}, which says why, cannot be read"


class AbortWatch:
    """Looks now and then whether the job was called off.

    Args:
        store: The output directory.
        look_secs: Seconds between two looks.
    """

    def __init__(self, store: Store, look_secs: float = LOOK_SECS) -> None:
        self._store = store
        self._look_secs = look_secs
        self._next_look = time.monotonic() + look_secs
        self._found = called_off(store) is not None

    def is_off(self) -> bool:
        """Whether the job was called off; asks the store at most each `look_secs`."""
        if not self._found and time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + self._look_secs
            self._found = called_off(self._store) is not None
        return self._found
