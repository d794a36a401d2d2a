"""`gristmill replay`: dead letters go through the mended steps and readers again, as a generation of their own."""

from __future__ import annotations

import argparse
import importlib
import linecache
import os
import sys
from collections.abc import Iterable
from typing import Any

from pipelines.beam_options import check_flags, config_flags, tell_file_systems
from pipelines.config import JobConfig, load_config, parse_change
from pipelines.convert import check_steps, parse_workers
from pipelines.dataflow_service import is_running
from pipelines.errors import DONE, UsageError, did_you_mean
from pipelines.generation_jobs import (
    complete,
    finished,
    forget,
    is_base_published,
    mend,
    stored_config,
    unfinished,
)
from pipelines.output import open_job
from pipelines.plan_replay import PlannedReplay, plan_replay
from pipelines.remote_job import check_remote
from pipelines.run_job import Run, run_locked
from pipelines.supervisor import JobProcess
from transforms.billing import billing_project, pay_by
from transforms.generations import generation_name, see_as
from transforms.job_lock import JobLock
from transforms.letters import Selection
from transforms.report import changed_keys
from transforms.scratch import scratch_folder
from transforms.state import read_report
from transforms.store import Store
from transforms.whole import Generation, load_generation

_CHANGEABLE = (
    *("steps", "source.max_record_bytes", "source.billing_project"),
    *("dead_letters.max_fraction", "dead_letters.max_count", "beam"),
)


def run(args: argparse.Namespace, unknown: list[str], process: JobProcess | None = None) -> int:
    """Runs `gristmill replay`.

    Args:
        args: Parsed arguments.
        unknown: Arguments that are not ours; Beam's, or mistakes.
        process: Process for the first local pipeline; None to run all in this one.

    Returns:
        The exit status.

    Raises:
        UsageError: Something is wrong that can be mended before any work.
    """
    flags = check_flags(unknown)
    tell_file_systems(flags, [args.output])
    base = _load_base(args.output)
    config = config_of(args, base)
    pay_by(config.source.billing_project)
    flags = config_flags(config.beam) + flags
    workers = parse_workers(args.workers)
    _import_anew(config.steps)
    check_steps(config)
    check_remote(flags, args.output, detach=args.detach)
    selection = Selection(*(_flat(values) for values in (args.reason, args.step, args.source)))
    with scratch_folder() as scratch:
        how = Run(flags, workers, scratch, JobLock(base.store, is_running=is_running), process, args.detach)
        return run_locked("replay", base.store, how.lock, lambda held: replay(held, config, selection, how))


def _flat(values: list[list[str]] | None) -> tuple[str, ...]:
    return tuple(value for some in values or [] for value in some)


def _load_base(output: str) -> Generation:
    with open_job(output) as store:
        base = load_generation(store, "")
    if base.spec.limit:
        raise UsageError(f"{output} is a trial run with --limit; replay belongs to whole jobs")
    return base


def config_of(args: argparse.Namespace, base: Generation) -> JobConfig:
    """Returns the config of a replay: the job's own, with steps, bounds and budget of `--config` and `--set`.

    Raises:
        UsageError: A key or value is wrong.
    """
    own = stored_config(base)
    changes = [parse_change(change) for change in args.changes or []]
    for key, _ in changes:
        if not key.startswith(_CHANGEABLE):
            raise UsageError(f"--set {key}: a replay keeps to the job's keys, except for {', '.join(_CHANGEABLE)}")
    given: dict[str, Any] = {} if args.config is not None else own.model_dump()
    config = load_config(args.config, [*given.items(), *changes])
    limits = config.dead_letters.model_dump(exclude={"path", "max_payload_bytes"})
    payer = billing_project() if args.billing_project else config.source.billing_project
    source = {"max_record_bytes": config.source.max_record_bytes, "billing_project": payer or billing_project()}
    return own.model_copy(
        update={
            "source": own.source.model_copy(update=source),
            "steps": config.steps,
            "dead_letters": own.dead_letters.model_copy(update=limits),
            "beam": config.beam,
        }
    )


def _import_anew(steps: Iterable[dict[str, Any]]) -> None:
    """Forgets the user's modules that steps call, so that mended code is what runs also where this process is old."""
    for step in steps:
        name = str(step.get("call", "")).partition(":")[0]
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is not None and os.path.dirname(file) == os.getcwd():
            del sys.modules[name]
    importlib.invalidate_caches()
    linecache.checkcache()


def replay(store: Store, config: JobConfig, selection: Selection, run: Run) -> int:
    """Runs the selected dead letters again, or completes a replay whose publishing had begun.

    The caller holds the lock.

    Raises:
        UsageError: The set is not published, or an append must be completed first.
    """
    base = load_generation(store, "")
    if not is_base_published(base):
        raise UsageError(
            f"{store.root} is not published yet; run convert again first, with a larger budget if that is what is "
            "missing (--set dead_letters.max_fraction=...), then replay"
        )
    stopped = unfinished(store)
    if stopped is not None and stopped.is_decided():
        status = complete(run.waiting(), stopped)
        if stopped.spec.replay is not None:
            print(f"replay {stopped.name} was stopped while it was published; now it is complete")
            return status
        stopped = None
    if stopped is not None and stopped.spec.replay is None:
        raise UsageError(
            f"append {stopped.name} of {store.root} is not finished; give the convert --append command again first"
        )
    made = finished(store)
    mend(run.waiting(), made)
    planned = plan_replay(store, config, selection, made, run.scratch)
    if not planned.job.header["num_shards"]:
        print(_nothing_selected(store, selection, planned))
        if stopped is not None:
            forget(stopped)
        return DONE
    name = generation_name(len(made))
    if stopped is not None and changed_keys(stopped.header["fingerprint"], planned.job.header["fingerprint"]):
        forget(stopped)
    status = run.job(see_as(store, name), config, planned.job)
    _tell(store, name, planned)
    return status


def _nothing_selected(store: Store, selection: Selection, planned: PlannedReplay) -> str:
    if not planned.reasons:
        return f"{store.root}: nothing to replay; there are no dead letters"
    held = ", ".join(f"{reason} ({step}) {count:,}" for (reason, step), count in planned.reasons.most_common(20))
    hint = "".join(did_you_mean(one, {reason for reason, _ in planned.reasons}) for one in selection.reasons)
    return f"{store.root}: nothing to replay; no dead letter is selected{hint}. There are: {held}"


def _tell(store: Store, name: str, planned: PlannedReplay) -> None:
    report = read_report(see_as(store, name))
    if report is None or report["status"] != "done":
        return
    consumed = planned.job.header["consumed"]["records"]
    print(
        f"replay {name}: of {consumed:,} dead letters came {report['records_written']:,} written, "
        f"{report['records_dropped']:,} dropped and {report['records_dead']:,} dead records"
        + ("" if report["records_written"] else "; nothing passed, so there is no new shard")
    )
