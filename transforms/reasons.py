"""Counts by reason, in a bounded table: a step may give each of a billion records a reason of its own. No Beam here.

The first reasons are counted by themselves, in the order of the records, and all others together. Those that the
budget names are always counted by themselves, in the shards that are written under it; for other shards their dead
letters, which keep their reasons, are counted again.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping

from transforms.dead_letters import MAX_REASONS, OTHER_REASONS
from transforms.elements import JobSpec, ShardInfo, ShardTask
from transforms.generations import find_letters
from transforms.ledger import Ledger, find_ledger, read_published
from transforms.store import OutputError, Store

BEFORE_NAME = "_gristmill/before.json"
"""The books of the whole before a replay, and its budget: what it is judged by."""


class ReasonCounts:
    """Counts by reason: the first `MAX_REASONS` by themselves, the others together as `other_reasons`.

    Args:
        named: Reasons that are counted by themselves in any case, beside the first ones.
        limit: How many others are.
    """

    def __init__(self, named: Iterable[str] = (), limit: int = MAX_REASONS) -> None:
        self._named = frozenset(named)
        self._left = limit
        self._counts: dict[str, int] = {}

    def add(self, reason: str, count: int = 1) -> None:
        """Counts records or letters with a reason."""
        if reason not in self._counts and reason != OTHER_REASONS and reason not in self._named:
            if self._left:
                self._left -= 1
            else:
                reason = OTHER_REASONS
        self._counts[reason] = self._counts.get(reason, 0) + count

    def update(self, counts: Mapping[str, int]) -> None:
        """Adds a table to this one, in its order."""
        for reason, count in counts.items():
            self.add(reason, count)

    def subtract(self, counts: Mapping[str, int]) -> None:
        """Takes a table off; what is not counted by itself is among the others."""
        for reason, count in counts.items():
            own = count if reason == OTHER_REASONS else min(count, self._counts.get(reason, 0))
            self._counts[reason] = self._counts.get(reason, 0) - own
            if count > own:
                self._counts[OTHER_REASONS] = self._counts.get(OTHER_REASONS, 0) - (count - own)

    def to_fields(self) -> dict[str, int]:
        """Returns the table in the order in which reasons were met."""
        return {reason: count for reason, count in self._counts.items() if count > 0}


def named_reasons(store: Store, spec: JobSpec) -> frozenset[str]:
    """Returns the reasons that the budget names by which a job is judged: a replay by that of the whole."""
    if spec.replay is None:
        return frozenset(spec.max_count_by_reason)
    found = store.get(BEFORE_NAME)
    return frozenset() if found is None else frozenset(json.loads(found[0])["budget"]["max_count_by_reason"])


def dead_by_reason(store: Store, spec: JobSpec, ledger: Ledger, named: Collection[str]) -> dict[str, int]:
    """Returns a shard's dead letters by reason, those that are named by themselves.

    Args:
        store: The output directory, as the job sees it.
        spec: The job.
        ledger: The shard's; a budget that names other reasons now may have come later.
        named: The reasons that must not be among the others.

    Raises:
        OutputError: The dead letters cannot be read.
    """
    found = ledger.dead_by_reason
    missing = {reason for reason in named if reason not in found}
    if not missing or OTHER_REASONS not in found or ledger.dead_lines is None or spec.replay is not None:
        return found  # What a replay must name is known when it is planned.
    counts = dict(found)
    for reason, count in _count_lines(store, spec, ledger, missing).items():
        counts[reason] = count
        counts[OTHER_REASONS] -= count
    return {reason: count for reason, count in counts.items() if count > 0}


def info_of(store: Store, spec: JobSpec, ledger: Ledger, task: ShardTask, named: Collection[str]) -> ShardInfo:
    """Returns what leaves the worker of a committed shard."""
    found = dead_by_reason(store, spec, ledger, named) if named else {}
    return ledger.to_info(task, {reason: found[reason] for reason in sorted(named) if reason in found})


def committed_info(store: Store, spec: JobSpec, task: ShardTask, named: Collection[str]) -> ShardInfo:
    """Returns what a shard that was found committed gave.

    Raises:
        OutputError: Its files have vanished since.
    """
    found = find_ledger(store, spec, task.shard)
    if found is None or found.ledger is None:
        raise OutputError(f"the files of shard {task.shard} vanished while the job ran; run it again")
    return info_of(store, spec, found.ledger, task, named)


def _count_lines(store: Store, spec: JobSpec, ledger: Ledger, reasons: set[str]) -> dict[str, int]:
    """Counts the letters with some reasons; none where a replay has consumed the file and it cannot be found."""
    assert ledger.dead_lines is not None
    attempt = ledger.dead_lines.name
    final = read_published(store, spec, ledger.shard).get(attempt)
    names = [attempt] if final is None else [find_letters(store, spec.generation, final), attempt]
    counts = dict.fromkeys(sorted(reasons), 0)
    for name in names:
        if store.size(name) != ledger.dead_lines.size:
            continue
        with store.open(name) as lines:
            for line in lines:
                reason = json.loads(line)["reason"]
                if reason in counts:
                    counts[reason] += 1
        break
    return counts
