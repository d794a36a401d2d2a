"""What was done and what came of it: added up over cases, printed as a table."""

from __future__ import annotations

import dataclasses
from collections import Counter


@dataclasses.dataclass(frozen=True)
class Case:
    """One case; seed, kind and number make it again.

    Attributes:
        seed: Seed of the run.
        kind: `damage`, `steps`, `kill` or `owners`.
        number: Number among its kind.
    """

    seed: int
    kind: str
    number: int

    def __str__(self) -> str:
        return f"{self.kind}:{self.number}"

    @property
    def command(self) -> str:
        """How to run this case alone."""
        return f'make torture TORTURE_FLAGS="--seed {self.seed} --only {self}"'


@dataclasses.dataclass
class Tally:
    """Counts of one case, or of many together.

    Attributes:
        counts: Totals by name.
        damages: Damages by kind.
        kills: Kills by the process that was hit.
        misfortunes: What steps did, by kind.
        owners: Runs that lost their lock while they were suspended, by what they were at.
    """

    counts: Counter[str] = dataclasses.field(default_factory=Counter)
    damages: Counter[str] = dataclasses.field(default_factory=Counter)
    kills: Counter[str] = dataclasses.field(default_factory=Counter)
    misfortunes: Counter[str] = dataclasses.field(default_factory=Counter)
    owners: Counter[str] = dataclasses.field(default_factory=Counter)

    def add(self, other: Tally) -> None:
        """Adds another one."""
        for field in dataclasses.fields(self):
            getattr(self, field.name).update(getattr(other, field.name))

    def lines(self) -> list[str]:
        """Returns the table."""
        rows = [(name, f"{count:,}") for name, count in self.counts.items()]
        for field in ("damages", "kills", "misfortunes", "owners"):
            counter: Counter[str] = getattr(self, field)
            kinds = ", ".join(f"{count:,} {kind}" for kind, count in sorted(counter.items()))
            rows.append((field, f"{counter.total():,}" + (f": {kinds}" if kinds else "")))
        width = max(len(name) for name, _ in rows)
        return [f"  {name:{width}}  {text}" for name, text in rows]
