"""Steps: plain functions `value -> value | Drop | iterator | None` that clean a record.

A chain runs record by record, depth first. Whatever a step raises costs that source record alone: none of its
outputs is written, and the record with its source bytes becomes one dead letter.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Drop:
    """Returned by a step to leave a record out for a named reason.

    Attributes:
        reason: Short snake_case code, counted in the report.
    """

    reason: str
