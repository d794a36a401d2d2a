"""How far attempts at shards are: a note an attempt, for those who watch the job. No Beam here.

A note is no promise: the ledger is what counts, and a note goes when its shard is committed or given up.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Iterator

from transforms.ahead import map_ahead
from transforms.elements import JobSpec, ShardTask
from transforms.generations import unfenced
from transforms.store import OutputError, Store

PROGRESS = "_gristmill/progress/"
NEAR_SECS = 2.0
"""How often a note is written where that takes milliseconds."""

FAR_SECS = 30.0
"""The same for a store that is far away: 10,000 workers then make some 330 requests a second."""


@dataclasses.dataclass(frozen=True)
class Running:
    """How far an attempt at a shard is.

    Attributes:
        plan_id: The plan it belongs to.
        shard: The shard.
        planned_bytes: What the plan expects it to read.
        books: Its totals so far, by name, as in a ledger.
        dropped_by_reason: Dropped records by reason.
        dead_by_reason: Dead letters by reason.
        started_at: Unix time at which it began, by the worker's clock.
        at: Unix time of the note.
        piece: Number of the piece of the shard that it is at, None for the shard itself.
    """

    plan_id: str
    shard: int
    planned_bytes: int
    books: dict[str, int]
    dropped_by_reason: dict[str, int]
    dead_by_reason: dict[str, int]
    started_at: float
    at: float
    piece: int | None = None

    @classmethod
    def from_json(cls, data: bytes) -> Running:
        """Reads a note.

        Raises:
            ValueError: It is none.
        """
        try:
            note = cls(**json.loads(data))
            counts = (note.books, note.dropped_by_reason, note.dead_by_reason)
            numbers = [*(number for count in counts for number in count.values()), note.shard, note.planned_bytes]
        except (TypeError, AttributeError) as error:
            raise ValueError(f"not a note of progress: {error}") from error
        if not all(isinstance(number, int | float) for number in (*numbers, note.started_at, note.at)):
            raise ValueError("not a note of progress: a number is none")
        return note

    @property
    def share(self) -> float:
        """How much of the shard is done, as far as the plan knows; never quite all of it."""
        return min(0.99, self.books.get("bytes_read", 0) / max(1, self.planned_bytes))


class ProgressNote:
    """Writes the note of one attempt, now and then.

    Args:
        store: The output directory as the job sees it.
        spec: The job.
        task: The planned shard.
    """

    def __init__(self, store: Store, spec: JobSpec, task: ShardTask) -> None:
        self._store = unfenced(store)  # A note of a run that lost its lock misleads nobody for long.
        self._spec = spec
        self._task = task
        self._started_at = time.time()
        self._pause = NEAR_SECS if store.requests_at_once == 1 else FAR_SECS
        self._next = time.monotonic() + self._pause
        self._stands = False

    def is_due(self) -> bool:
        """Whether it is time to write the note."""
        return time.monotonic() >= self._next

    def write(self, books: dict[str, int], dropped: dict[str, int], dead: dict[str, int]) -> None:
        """Writes how far the attempt is; what cannot be written is nobody's loss."""
        self._next = time.monotonic() + self._pause
        note = Running(
            self._spec.plan_id,
            self._task.shard,
            self._task.planned_bytes,
            books,
            dropped,
            dead,
            self._started_at,
            time.time(),
            self._task.piece,
        )
        with contextlib.suppress(OutputError, OSError):
            self._store.put(
                progress_name(self._spec, self._task.shard, self._task.piece),
                json.dumps(dataclasses.asdict(note)).encode(),
            )
            self._stands = True

    def forget(self) -> None:
        """Deletes the note."""
        if self._stands:
            with contextlib.suppress(OutputError, OSError):
                self._store.delete(progress_name(self._spec, self._task.shard, self._task.piece))


def progress_name(spec: JobSpec, shard: int, piece: int | None = None) -> str:
    """Returns the name of the note of a shard or a piece: the latest of its attempts counts."""
    return f"{PROGRESS}{spec.piece_key(shard, piece)}"


def list_running(store: Store, spec: JobSpec) -> Iterator[Running]:
    """Yields how far the attempts of a job are, one a shard."""
    names = [name for name, _ in store.list(PROGRESS)]
    for found in map_ahead(store.get, names, store.requests_at_once):
        with contextlib.suppress(ValueError):  # What somebody else has put there.
            running = None if found is None else Running.from_json(found[0])
            if running is not None and spec.accepts(running.plan_id):
                yield running
