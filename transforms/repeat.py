"""Ranges that do not meet: a range that began at a false boundary is read again from where the one before it ended.

TFRecord framing nested in a payload looks like records to a range that begins inside that payload. The range before
knows better, since it read the payload as one record. No Beam here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from transforms.books import EdgeWalk, add_up
from transforms.elements import JobSpec, ShardInfo, ShardTask
from transforms.reasons import committed_info, named_reasons
from transforms.shard_reader import read_shard
from transforms.shard_writer import ShardWriter
from transforms.steps.job_chain import Chain
from transforms.store import Store

SETTLED_ROUND = 2
"""The round after the parallel one."""


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
    """Reads again, in order, what still does not meet after the parallel round, and returns all shards.

    The parallel round takes a range to end where it ended before, which is wrong where payloads hold framing that never
    comes to an end with the records around it: several tracks of it run side by side, and each range had followed the
    first it met. Here each range begins where the one before it has truly ended, as if one worker read the file from
    its start: once over the plan, each shard read again at most once, with the sizes that were planned.
    """
    if any(info.not_run for info in infos):
        return infos
    walk = EdgeWalk()
    settled: list[ShardInfo] = []
    for info in infos:
        boundary = walk.expected_start(info)
        if boundary is not None:
            task = dataclasses.replace(info.task, start_at=boundary, round=SETTLED_ROUND)
            info = repeat_shard(store, spec, chain, task)
        settled.append(info)
        if info.not_run:
            return [*settled, *infos[len(settled) :]]
        walk.step(info)
    return settled
