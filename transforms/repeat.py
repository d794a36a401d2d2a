"""Ranges that do not meet: a range that began at a false boundary is read again from where the one before it ended.

TFRecord framing nested in a payload looks like records to a range that begins inside that payload. The range before
knows better, since it read the payload as one record. No Beam here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from transforms.books import add_up
from transforms.elements import JobSpec, ShardInfo, ShardTask
from transforms.reasons import committed_info, named_reasons
from transforms.shard_reader import read_shard
from transforms.shard_writer import ShardWriter
from transforms.steps.job_chain import Chain
from transforms.store import Store

_MAX_ROUNDS = 8
"""One round settles every mistaken start; more are for mistakes that hid others. Each settles one at least."""


def find_apart(infos: list[ShardInfo], round_number: int) -> Iterator[ShardTask]:
    """Yields the shards whose range does not begin where the range before it ended, to be read from there.

    None when the job was called off: where a shard was not read, nothing is known.
    """
    if any(info.not_run for info in infos):
        return
    for info, boundary in add_up(infos).apart:
        yield dataclasses.replace(info.task, start_at=boundary, round=round_number)


def repeat_shard(store: Store, spec: JobSpec, chain: Chain, task: ShardTask) -> ShardInfo:
    """Reads, cleans and commits one shard in a plain loop.

    Raises:
        OutputError: The output cannot be written.
    """
    writer = ShardWriter(store, spec, task)
    try:
        for batch in read_shard(store, spec, task):
            if batch.committed:
                return committed_info(store, spec, task, named_reasons(store, spec))
            if batch.not_run:
                writer.abandon()
                return ShardInfo(task, 0, {}, not_run=True)
            for out in chain.apply(batch):
                writer.add(out)
        return writer.commit()
    except BaseException:
        writer.abandon()
        raise


def settle(store: Store, spec: JobSpec, chain: Chain, infos: list[ShardInfo]) -> list[ShardInfo]:
    """Reads again what still does not meet after the parallel round, and returns all shards.

    What does not meet even then (an input that changes while it is read) the books report.
    """
    for round_number in range(2, 2 + _MAX_ROUNDS):
        tasks = list(find_apart(infos, round_number))
        if not tasks:
            break
        again = {task.shard: repeat_shard(store, spec, chain, task) for task in tasks}
        infos = [again.get(info.task.shard, info) for info in infos]
    return infos
