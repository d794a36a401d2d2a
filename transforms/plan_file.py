"""plan.jsonl: a header line that says what the job is, then one line of constant size a shard."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import Any, BinaryIO

from transforms.elements import ShardTask, to_json

PLAN_VERSION = 1
PLAN_NAME = "_gristmill/plan.jsonl"
INPUTS_NAME = "_gristmill/inputs.jsonl"


class DamagedLineError(ValueError):
    """A line of the plan or of inputs.jsonl is none; the message goes on from the name of the file."""


def write_plan(path: str, make_header: Callable[[int], dict[str, Any]], tasks: Iterable[ShardTask]) -> int:
    """Writes the plan.

    Args:
        path: Where to.
        make_header: Gets the number of shards and returns the facts of the job, "plan_id" among them.
        tasks: Shards in order; they are streamed.

    Returns:
        The number of shards.
    """
    count = 0
    with tempfile.TemporaryFile() as body:
        for task in tasks:
            body.write(to_json(_to_fields(task)))
            count += 1
        body.seek(0)
        with open(path, "wb") as out:
            out.write(to_json({"gristmill_plan": PLAN_VERSION, **make_header(count)}))
            shutil.copyfileobj(body, out)
    return count


def replace_header(path: str, fields: dict[str, Any]) -> None:
    """Gives a plan file another header; the shards stay."""
    with tempfile.TemporaryFile() as body:
        with open(path, "rb") as plan:
            plan.readline()
            shutil.copyfileobj(plan, body)
        body.seek(0)
        with open(path, "wb") as out:
            out.write(to_json({"gristmill_plan": PLAN_VERSION, **fields}))
            shutil.copyfileobj(body, out)


def _to_fields(task: ShardTask) -> dict[str, int]:
    piece = {} if task.piece is None else {"piece": task.piece}
    return {
        "shard": task.shard,
        **piece,
        "first_offset": task.first_offset,
        "first_index": task.first_index,
        "start": task.start,
        "last_offset": task.last_offset,
        "end": task.end,
        "planned_bytes": task.planned_bytes,
    }


def read_header(plan: BinaryIO) -> dict[str, Any]:
    """Returns the header of an open plan.

    Raises:
        ValueError: It is not a plan, or one of another version; the message goes on from the name of the file.
    """
    plan.seek(0)
    line = plan.readline()
    try:
        header = json.loads(line)
        version = header["gristmill_plan"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"is not a plan: it begins with {line[:60]!r}") from error
    if version != PLAN_VERSION:
        raise ValueError(f"has version {version}, expected {PLAN_VERSION}")
    return dict(header)


def read_tasks(plan: BinaryIO) -> Iterator[tuple[int, ShardTask]]:
    """Yields (byte offset of its line, task) for every shard of an open plan.

    Raises:
        DamagedLineError: A line is no task.
    """
    plan.seek(0)
    offset = len(plan.readline())
    for line in plan:
        try:
            task = ShardTask(**json.loads(line))
        except (ValueError, TypeError) as damage:
            raise DamagedLineError(f"is damaged at byte {offset}") from damage
        yield offset, task
        offset += len(line)


def read_task(plan: BinaryIO, offset: int) -> ShardTask:
    """Returns the task whose line begins at `offset`."""
    plan.seek(offset)
    return ShardTask(**json.loads(plan.readline()))
