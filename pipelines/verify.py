"""`gristmill verify`: reads every output record and the ledgers back and recounts everything."""

from __future__ import annotations

import concurrent.futures
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from pipelines import local_runner
from pipelines.beam_options import check_flags, tell_file_systems
from pipelines.dataflow import Load, make_job_name
from pipelines.errors import DONE, FAILED, OVER_BUDGET, UNBALANCED
from pipelines.imports import without_collecting
from pipelines.job_log import log_to_terminal
from pipelines.job_process import Order
from pipelines.remote_job import check_remote, complete_flags, outlives
from pipelines.report import load_report
from pipelines.supervisor import run_once
from transforms.ahead import map_ahead
from transforms.check_shard import Found, ShardChecker, add_up
from transforms.child_call import ChildCall
from transforms.machine import available_bytes, num_cores
from transforms.report import VERIFIED_NAME
from transforms.scratch import scratch_folder
from transforms.store import OutputError, Store
from transforms.verify import VerifyOrder, conclude, list_tasks, order_verify, read_result, write_result

_WORTH_PROCESSES_BYTES = 128 << 20
_BYTES_PER_SEC = 200e6
"""What a core reads of shards in a second, for an estimate."""
_PROCESS_BYTES = 150 << 20
"""What one process that reads shards takes, with the blocks that it has inflated."""
_SHOWN = 50
_FILES_AT_ONCE = 8
"""Of a remote store: each may have two blocks of some MiB in memory."""


def run(output: str, unknown: Sequence[str] = (), *, detach: bool = False) -> int:
    """Verifies an output directory and prints every difference.

    Args:
        output: The directory.
        unknown: Arguments that are not ours; Beam's, or mistakes. With any, a Beam pipeline reads the shards.
        detach: Whether to end once the runner has the pipeline; the result comes to `_gristmill/verify.json`.

    Returns:
        0, or 4 when something differs, 3 when nothing is published, 1 when not all could be looked at.

    Raises:
        UsageError: There is no job in the directory, or a flag is wrong.
    """
    flags = check_flags(list(unknown))
    check_remote(flags, output, detach=detach)
    tell_file_systems(flags, [output])
    try:
        store, rebuilt = load_report(output)
        order = order_verify(store, rebuilt)
        if not flags:
            result = _verify_here(store, order, sum(shard["bytes"] for shard in rebuilt["shards"]))
        elif not order.generations:
            result = conclude(order, Found())
            write_result(store, result)
        else:
            store.delete(VERIFIED_NAME)
            _verify_on_runner(order, flags, [shard["bytes"] for shard in rebuilt["shards"]], detach=detach)
            if detach:
                print(f"{store.root}: the result will stand in {VERIFIED_NAME}")
                return DONE
            result = read_result(store, order)
    except (OutputError, OSError) as error:
        print(f"gristmill verify: {error}. Not everything was looked at: give the command again.", file=sys.stderr)
        return FAILED
    return print_result(store, rebuilt, result)


def print_result(store: Store, rebuilt: dict[str, Any], result: dict[str, Any]) -> int:
    """Prints the result and returns the exit status that it stands for.

    Args:
        store: The output directory.
        rebuilt: The report as the ledgers tell it.
        result: See `transforms.verify.conclude`.
    """
    count = result["num_differences"]
    shown = result["differences"][:_SHOWN]
    for difference in shown:
        print(difference)
    if count > len(shown):
        print(f"and {count - len(shown)} more")
    records = f"{rebuilt['records_written']:,} records in {len(rebuilt['shards'])} shards"
    if count:
        print(f"{store.root}: {count} differences; {records}")
        return UNBALANCED
    if rebuilt["status"] != "done":
        print(f"{store.root}: nothing is published: {rebuilt['message']}; what was kept is whole")
        return OVER_BUDGET
    print(f"{store.root}: verified, {records}, {rebuilt['records_dead']:,} dead letters")
    return DONE


def _verify_here(store: Store, order: VerifyOrder, num_bytes: int) -> dict[str, Any]:
    """Reads every file of every shard; if there is much to read, in as many processes as there are cores."""
    tasks = list(list_tasks(store, order))
    if num_bytes < _WORTH_PROCESSES_BYTES:
        return conclude(order, add_up(check_shards(store, tasks)))
    count = max(1, min(len(tasks), num_cores(), available_bytes() // _PROCESS_BYTES))
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        parts = pool.map(_check_apart, [store] * count, [tasks[number::count] for number in range(count)])
        return conclude(order, add_up(parts))


def _check_apart(store: Store, tasks: list[tuple[str, int]]) -> Found:
    """Checks shards in a process of their own: not a fork, which the library's threads would not survive."""
    found: list[Found] = []
    while len(found) < len(tasks):
        child = ChildCall("pipelines.verify:check_shards", store=store, tasks=tasks[len(found) :])
        found += child.items()
        if child.death is not None:
            generation, shard = tasks[len(found)]
            text = f"reading shard {shard}{generation and f' of {generation}'} ended its process: {child.death}"
            found.append(Found(shards=1, num_differences=1, differences=((generation, shard, text),)))
    return add_up(found)


def check_shards(store: Store, tasks: Sequence[tuple[str, int]]) -> Iterator[Found]:
    """Checks planned shards and yields what was found, in order.

    Args:
        store: The output directory.
        tasks: (generation, planned shard) of each.

    Raises:
        OSError: The store does not answer; of this kind, so that it reaches the command from a child process.
    """
    checker = ShardChecker(store)
    at_once = min(_FILES_AT_ONCE, store.requests_at_once)
    try:
        yield from map_ahead(lambda task: checker.check(*task), tasks, at_once)
    except OutputError as error:
        raise OSError(str(error)) from error


def _verify_on_runner(order: VerifyOrder, flags: list[str], sizes: list[int], *, detach: bool) -> None:
    """Runs the pipeline, which leaves its result in the output directory.

    Raises:
        UsageError: It cannot run there.
        OutputError: It could not finish; the message is the cause.
    """
    if local_runner.is_local(flags):
        _verify_in_processes(order, flags)
        return
    with without_collecting():
        from transforms.verify_shards import VerifyShards
    with scratch_folder() as scratch:
        if outlives(flags):
            load = Load(order.num_shards, sum(sizes) / _BYTES_PER_SEC, max(sizes, default=0))
            flags = complete_flags(flags, make_job_name("verify", "", order.plan_id), load, [], scratch)
        result = local_runner.submit_pipeline(VerifyShards(order), flags)
    if not detach:
        local_runner.wait_for(result)


def _verify_in_processes(order: VerifyOrder, flags: list[str]) -> None:
    """Runs the pipeline on this machine; worker processes are watched over as those of a job."""
    count = local_runner.asked_workers(flags) or 0
    flags = local_runner.local_flags(flags, count)
    if local_runner.has_worker_processes(flags):
        run_once(Order(order, flags, count))
    else:
        with log_to_terminal():
            transform = local_runner.root_transform(order, max(1, count))
            local_runner.wait_for(local_runner.submit_pipeline(transform, flags))
