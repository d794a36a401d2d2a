"""`gristmill convert`: config -> plan -> lock -> pipeline -> report -> exit status."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
from typing import Any

from pipelines import append
from pipelines.beam_options import check_flags, config_flags, tell_file_systems
from pipelines.config import JobConfig, load_config, parse_change, parse_step
from pipelines.dataflow_service import is_running
from pipelines.dry_run import show_dry_run
from pipelines.errors import DONE, UsageError
from pipelines.output import (
    check_holds_no_other,
    check_output,
    has_its_inputs,
    is_published,
    open_output,
    put_inputs_back,
)
from pipelines.packages import check_modules
from pipelines.plan_job import PlannedJob, plan_job
from pipelines.plan_pieces import plan_pieces
from pipelines.remote_job import check_remote, outlives
from pipelines.resume import accept_touched, recall_earlier_plans, resume_anyway
from pipelines.run_job import Run, conclude, put_config, run_locked
from pipelines.space import check_space
from pipelines.step_types import find_mismatches
from pipelines.supervisor import JobProcess
from transforms.billing import pay_by
from transforms.finish import delete_leftovers
from transforms.generations import fence
from transforms.job_lock import JobLock, LockedError, read_lock
from transforms.scratch import scratch_folder
from transforms.state import read_config, read_report
from transforms.steps.load import StepError, load_steps
from transforms.steps.surroundings import Surroundings, stay_alive
from transforms.store import OutputError, Store
from transforms.tries import TRIES

_MAX_WORKERS = 1_000


def run(args: argparse.Namespace, unknown: list[str], process: JobProcess | None = None) -> int:
    """Runs `gristmill convert`.

    Args:
        args: Parsed arguments.
        unknown: Arguments that are not ours; Beam's, or mistakes.
        process: Process for a local pipeline; None to run it in this one.

    Returns:
        The exit status.

    Raises:
        UsageError: Something is wrong that can be mended before any work.
    """
    config = config_of(args)
    pay_by(config.source.billing_project)
    flags = config_flags(config.beam) + check_flags(unknown)
    workers = parse_workers(args.workers)
    check_steps(config)
    check_remote(flags, config.write.output, config.source.patterns, detach=args.detach)
    tell_file_systems(flags, [config.write.output, *config.source.patterns])
    store = open_output(config.write.output)
    with scratch_folder() as scratch:
        how = Run(flags, workers, scratch, JobLock(store, is_running=is_running), process, args.detach)
        if args.append and append.has_job(store):
            return append.run(args, store, config, how)
        if args.dry_run:
            job = plan_pieces(plan_job(config, limit=0, scratch=scratch), config, scratch)
            show_dry_run(job, num_records=args.limit)
            return DONE
        job = plan_job(config, limit=args.limit or 0, scratch=scratch)
        job = recall_earlier_plans(store, job)
        if args.resume_anyway:
            job = resume_anyway(store, job)
        elif not args.overwrite:
            job = accept_touched(store, job, by_word=args.accept_touched)
        check_output(store, job, overwrite=args.overwrite)
        if is_published(store, job.spec):
            report = read_report(store)
            _tidy_up(store)
            _put_state_back(store, job, config, how.lock)
            print(f"{store.root} is complete: nothing left to do")
            return conclude(store, report)
        if config.write.check_space and not outlives(flags):
            job.header["notes"] += filter(None, [check_space(store, job)])

        def run_held(held: Store) -> int:
            check_holds_no_other(
                held, job, overwrite=args.overwrite
            )  # Somebody may have come before the lock was ours.
            return how.job(held, config, job)

        return run_locked("convert", store, how.lock, run_held, job.spec)


def _put_state_back(store: Store, job: PlannedJob, config: JobConfig, lock: JobLock) -> None:
    """Writes anew what a published job keeps and somebody has damaged since."""
    if read_config(store) and has_its_inputs(store, job):
        return
    with contextlib.suppress(LockedError), lock:  # Whoever runs writes them itself.
        held = fence(store, lock.token)
        if not read_config(held):
            put_config(held, config)
        put_inputs_back(held, job)


def _tidy_up(store: Store) -> None:
    """Takes away what a command left that was killed when all but this was done."""
    if read_lock(store) is None and next(iter(store.list(TRIES)), None) is None:
        return
    lock = JobLock(store)
    with contextlib.suppress(LockedError, OutputError, OSError), lock:  # Whoever still runs tidies up itself.
        held = fence(store, lock.token)
        held.clean()
        delete_leftovers(held)


def config_of(args: argparse.Namespace) -> JobConfig:
    """Merges config file, flags and `--set`, in this order.

    Raises:
        UsageError: A key or value is wrong, or input or output is missing.
    """
    overrides: list[tuple[str, Any]] = []
    if args.input:
        overrides.append(("source.patterns", [pattern for patterns in args.input for pattern in patterns]))
    for name, key in (
        ("format", "source.format"),
        ("billing_project", "source.billing_project"),
        ("output", "write.output"),
        ("name", "write.name"),
        ("split", "write.split"),
        ("shards", "write.shards"),
    ):
        if getattr(args, name) is not None:
            overrides.append((key, getattr(args, name)))
    if args.step:
        overrides.append(("steps", [parse_step(step) for step in args.step]))
    overrides += [parse_change(change) for change in args.changes or []]
    config = load_config(args.config, overrides)
    if not config.source.patterns:
        raise UsageError("no input; pass --input GLOB, or source.patterns in the config")
    if not config.write.output:
        raise UsageError("no output; pass --output DIR, or write.output in the config")
    if args.limit is not None and args.limit < 1:
        raise UsageError(f"--limit must be at least 1, got {args.limit}")
    return config


def parse_workers(text: str | None) -> int | None:
    """Reads `--workers`; None leaves the choice to us.

    Raises:
        UsageError: It is no number that one machine can run.
    """
    if text is None or text == "auto":
        return None
    if not re.fullmatch("[0-9]{1,9}", text) or int(text) > _MAX_WORKERS:
        raise UsageError(f"--workers must be auto or a number of processes, at most {_MAX_WORKERS:,}, got {text!r}")
    return int(text)


def check_steps(config: JobConfig) -> None:
    """Checks that the steps can be loaded and take their parameters, and that the modules exist that they import later.

    Raises:
        UsageError: One cannot, or does not.
    """
    try:
        stay_alive()
        with Surroundings().of_steps():
            loaded = load_steps(config.steps, (os.getcwd(),))
    except StepError as error:
        raise UsageError(str(error)) from error
    mismatches = list(find_mismatches(config.steps, loaded))
    if mismatches:
        raise UsageError("\n".join(mismatches))
    check_modules(config.py_modules)
