"""`gristmill status`: how far a job is, how fast, and who runs it; from its ledgers, here or in a bucket."""

from __future__ import annotations

import json
from typing import Any

from pipelines import dataflow_service
from pipelines.errors import DONE
from pipelines.output import open_job
from pipelines.progress import JobWatch
from pipelines.report import print_counts
from transforms.books import BYTES, COUNTS
from transforms.budget import ESTIMATE, called_off
from transforms.job_lock import describe, is_stale, read_lock
from transforms.state import read_report
from transforms.store import Store
from transforms.whole import Generation, list_generations, load_generation


def run(output: str, *, as_json: bool) -> int:
    """Prints how far the job in a directory is; nothing is changed.

    Raises:
        UsageError: There is no job in the directory.
    """
    with open_job(output) as store:
        status = job_status(store)
    if as_json:
        print(json.dumps(status, indent=1))
    else:
        _print(store, status)
    return DONE


def job_status(store: Store) -> dict[str, Any]:
    """Returns how far the job is that was planned last: the set itself, or what is being added to it.

    Args:
        store: The output directory.

    Returns:
        `status` is running, or done, over_budget and so on as in the report, or stopped where the same command has
        to go on; `lock` is who holds the lock, `service` what the service that runs the job says of it. Then come the
        books of all committed shards and of the attempts that run, `running` with how many these are and what of the
        books is theirs, and `per_sec` with what was done a second lately.

    Raises:
        FileNotFoundError: There is no job.
        ValueError: What stands there is no plan.
    """
    job = (list_generations(store) or [load_generation(store, "")])[-1]
    holder, service = _holder(store)
    watch = JobWatch(job.store, job.spec, may_call_off=False, runs=holder is not None)
    watch.look()
    speed = watch.speed(None if holder is None else holder.get("since"))
    totals = watch.totals
    return {
        "status": "running" if holder is not None else _status_at_rest(job),
        "kind": job.kind,
        "generation": job.name,
        "lock": None if holder is None else describe(holder),
        "service": service,
        "called_off": called_off(job.store),
        "planned_shards": job.spec.num_shards,
        "committed_shards": watch.num_committed,
        "planned_pieces": watch.planned_pieces,
        "committed_pieces": watch.committed_pieces,
        **{name: totals.get(name, 0) for name in (*COUNTS, ESTIMATE, *BYTES)},
        "dead_by_reason": watch.dead_by_reason,
        "dropped_by_reason": watch.dropped_by_reason,
        "running": {
            "shards": len(watch.running),
            **{name: sum(one.books.get(name, 0) for one in watch.running) for name in (*COUNTS, *BYTES)},
        },
        "per_sec": speed,
        "secs_left": watch.secs_left(speed),
    }


def _holder(store: Store) -> tuple[dict[str, Any] | None, str | None]:
    """Returns who holds the lock, None for nobody or one that is gone; and what the service says of its job."""
    found = read_lock(store)
    if found is None:
        return None, None
    holder = found[0]
    service = dataflow_service.describe_state(holder["job"]) if holder.get("job") else None
    if service is not None and service.has_ended:
        return None, service.text
    lives = service is not None and service.is_known
    return (holder if lives or not is_stale(holder) else None), service.text if service is not None else None


def _status_at_rest(job: Generation) -> str:
    """Returns how a job ended that nobody runs."""
    report = read_report(job.store)
    if report is None or report["plan_id"] != job.spec.plan_id:
        return "stopped"
    return str(report["status"])


def _print(store: Store, status: dict[str, Any]) -> None:
    what = f"{status['kind']} {status['generation']}".strip()
    shards = f"{status['committed_shards']:,} of {status['planned_shards']:,} shards"
    if status["planned_pieces"]:
        shards += f", {status['committed_pieces']:,} of {status['planned_pieces']:,} pieces"
    print(f"{status['status']}: {store.root}, {what}, {shards}")
    if status["status"] == "stopped":
        print("  nobody runs it; the same command goes on from here")
    for name, text in (("held by", "lock"), ("service", "service"), ("off", "called_off")):
        if status[text] is not None:
            print(f"  {name:8} {status[text]}")
    print_counts(status)
    running = status["running"]
    if running["shards"]:
        print(f"  running  {running['records_read']:,} of these read in {running['shards']:,} shards that are not done")
    speed = status["per_sec"]
    if speed is not None:
        left = f", about {status['secs_left']:,.0f} s left" if status["secs_left"] is not None else ""
        rates = f"{speed['records']:,.0f} records/s, {speed['bytes'] / 1e6:,.1f} MB/s"
        kind = "pieces" if status["committed_pieces"] < status["planned_pieces"] else "shards"
        print(f"  speed    {rates}, {speed[kind]:,.2f} {kind}/s{left if status['status'] == 'running' else ''}")
