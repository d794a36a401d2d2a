"""Pieces: what a planned shard is worked on in where the steps are slow. No Beam here.

A shard that would take a worker an hour is an hour's work lost to a kill, and keeps the other workers idle. So it is
cut further, into pieces of a minute or two. A piece is a checkpoint and nothing else: what the steps made of it lies in
a file of its attempt, and its entry, created *put-if-absent*, is the commit. Once all pieces are there, the shard is
written from them as if it had been read in one go, and only then has its ledger. How long steps take differs from run
to run, and nothing of that reaches what is published: neither the plan nor any byte depends on how a shard was cut.

pieces.jsonl has the form of plan.jsonl, with a line for each piece of the shards that are cut.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

from transforms.elements import JobSpec, ShardTask, Span
from transforms.ledger import StoredFile
from transforms.plan_file import read_header
from transforms.store import Store

PIECES_NAME = "_gristmill/pieces.jsonl"
PIECE_ENTRIES = "_gristmill/pieces/"
ALL_OF_PIECES = "_gristmill/pieces"
"""What the names of both begin with."""
_ENTRY_VERSION = 1


@dataclasses.dataclass(frozen=True)
class PieceEntry:
    """What a committed attempt at a piece made.

    Attributes:
        plan_id: The plan it belongs to.
        task: The piece.
        file: Its batches, see `transforms.piece_log`.
        first_span: What it covered of its first input; None where that has no span.
        books: Records read, written, dropped and dead, and bytes, for whoever watches the job.
        dead_by_reason: Dead letters by reason.
        committed_at: Unix time by the worker's clock.
    """

    plan_id: str
    task: ShardTask
    file: StoredFile
    first_span: Span | None
    books: dict[str, int]
    dead_by_reason: dict[str, int]
    committed_at: float = 0.0

    def to_json(self) -> bytes:
        """Returns the entry as it is stored."""
        return json.dumps({"gristmill_piece": _ENTRY_VERSION, **dataclasses.asdict(self)}).encode()

    @classmethod
    def from_json(cls, data: bytes) -> PieceEntry:
        """Reads a stored entry.

        Raises:
            ValueError: It is not a whole entry of this version.
        """
        try:
            fields = json.loads(data)
            if fields.pop("gristmill_piece") != _ENTRY_VERSION:
                raise ValueError("another version")
            span = fields.pop("first_span")
            task, file = ShardTask(**fields.pop("task")), StoredFile(**fields.pop("file"))
            return cls(task=task, file=file, first_span=None if span is None else Span(**span), **fields)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not an entry of a piece: {error!r}") from error


def entry_name(spec: JobSpec, shard: int, piece: int) -> str:
    """Returns the name of a piece's entry."""
    return f"{PIECE_ENTRIES}{spec.piece_key(shard, piece)}.json"


def shard_key_of(name: str) -> str:
    """Returns the shard of the piece whose entry has a name, as `JobSpec.shard_key` writes it."""
    return name.removeprefix(PIECE_ENTRIES).partition("-")[0]


def find_piece(store: Store, spec: JobSpec, task: ShardTask) -> PieceEntry | None:
    """Returns the entry of a piece, None where there is none that counts."""
    found = store.get(entry_name(spec, task.shard, task.piece or 0))
    return None if found is None else _counting(store, spec, task, found[0])


def _counting(store: Store, spec: JobSpec, task: ShardTask, data: bytes) -> PieceEntry | None:
    """Returns the entry if it is of this plan and of this very range, and its file is there."""
    try:
        entry = PieceEntry.from_json(data)
    except ValueError:
        return None
    if entry.plan_id != spec.plan_id or _range_of(entry.task) != _range_of(task):
        return None
    return entry if store.size(entry.file.name) == entry.file.size else None


def _range_of(task: ShardTask) -> tuple[int, ...]:
    return (task.first_offset, task.start, task.last_offset, task.end)


def commit_piece(store: Store, spec: JobSpec, entry: PieceEntry) -> bool:
    """Creates the entry of a piece, unless another attempt has done so; returns whether it is ours that stands.

    An entry that does not count makes room, as a ledger does.
    """
    name, data = entry_name(spec, entry.task.shard, entry.task.piece or 0), entry.to_json()
    while not store.put_if_absent(name, data):
        found = store.get(name)
        if found is None:
            continue
        if found[0] == data:
            return True  # A store whose answer was lost: the entry is ours.
        if _counting(store, spec, entry.task, found[0]) is not None:
            return False
        store.delete(name, found[1])
    return True


def tasks_of_shard(store: Store, shard: int) -> list[ShardTask]:
    """Returns the pieces of a shard in order; none where it is not cut."""
    beginning = b'{"shard": %d, ' % shard
    with store.open(PIECES_NAME) as lines:
        return [ShardTask(**json.loads(line)) for line in lines if line.startswith(beginning)]


def pieces_header(store: Store) -> dict[str, Any] | None:
    """Returns the header of pieces.jsonl; None where there is no such file that can be read."""
    try:
        with store.open(PIECES_NAME) as lines:
            return read_header(lines)
    except (FileNotFoundError, ValueError):
        return None


def list_entries(store: Store) -> Iterator[str]:
    """Yields the names of all entries of pieces, whether or not they count."""
    return (name for name, _ in store.list(PIECE_ENTRIES))


def delete_piece_files(store: Store, spec: JobSpec, shard: int) -> None:
    """Deletes the files of a shard that is committed: they hold the same records once more. The entries stay."""
    for task in tasks_of_shard(store, shard):
        entry = find_piece(store, spec, task)
        if entry is not None:
            store.delete(entry.file.name)
