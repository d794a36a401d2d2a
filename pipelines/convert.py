"""`gristmill convert`: config -> plan -> lock -> pipeline -> report -> exit status."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import logging
import os
import sys
import tempfile
import time
from typing import Any

from pipelines import local_runner
from pipelines.beam_options import check_flags, config_flags
from pipelines.config import JobConfig, load_config, parse_change, parse_step
from pipelines.dry_run import show_dry_run
from pipelines.errors import DONE, FAILED, STATUS_CODES, UsageError
from pipelines.job_log import log_to_job
from pipelines.job_process import Order
from pipelines.output import check_output, is_published, prepare_output
from pipelines.plan_job import PlannedJob, plan_job, planned_shards
from pipelines.progress import JobWatch, watch_job
from pipelines.report import print_report
from pipelines.resume import resume_anyway
from pipelines.signals import stop_on_signals
from pipelines.space import check_space
from pipelines.supervisor import JobProcess, run_supervised
from transforms.finish import delete_leftovers
from transforms.job_lock import JobLock, LockedError, read_lock
from transforms.report import CONFIG_NAME, build_report, read_report
from transforms.steps.load import StepError, load_steps
from transforms.steps.rate import forget_rates
from transforms.store import OutputError, Store, open_store
from transforms.tries import TRIES, forget_marks

_LOGGER = logging.getLogger("gristmill")


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
    flags = config_flags(config.beam) + check_flags(unknown)
    workers = _parse_workers(args.workers)
    _check_steps(config)
    store = _open_output(config)
    with tempfile.TemporaryDirectory(prefix="gristmill-") as scratch:
        if args.dry_run:
            show_dry_run(plan_job(config, limit=0, scratch=scratch), num_records=args.limit)
            return DONE
        job = plan_job(config, limit=args.limit or 0, scratch=scratch)
        if args.resume_anyway:
            job = resume_anyway(store, job)
        check_output(store, job, overwrite=args.overwrite)
        if is_published(store, job.spec):
            report = read_report(store)
            _tidy_up(store)
            print(f"{store.root} is complete: nothing left to do")
            return _conclude(store, report)
        if config.write.check_space:
            job.header["notes"] += filter(None, [check_space(store, job)])
        return _convert(store, config, job, flags, workers, process)


def _tidy_up(store: Store) -> None:
    """Takes away what a command left that was killed when all but this was done."""
    if read_lock(store) is None and next(iter(store.list(TRIES)), None) is None:
        return
    with contextlib.suppress(LockedError, OutputError, OSError), JobLock(store):  # Whoever still runs tidies up itself.
        store.clean()
        delete_leftovers(store)


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


def _parse_workers(text: str | None) -> int | None:
    if text is None or text == "auto":
        return None
    if not text.isdigit():
        raise UsageError(f"--workers must be auto or a number of processes, got {text!r}")
    return int(text)


def _check_steps(config: JobConfig) -> None:
    try:
        load_steps(config.steps, (os.getcwd(),))
    except StepError as error:
        raise UsageError(str(error)) from error


def _open_output(config: JobConfig) -> Store:
    try:
        return open_store(config.write.output)
    except ValueError as error:
        raise UsageError(f"write.output: {error}") from error


def _convert(
    store: Store,
    config: JobConfig,
    job: PlannedJob,
    flags: list[str],
    workers: int | None,
    process: JobProcess | None,
) -> int:
    """Holds the lock, runs the pipeline and reports."""
    try:
        with JobLock(store), log_to_job(store), stop_on_signals():
            return _convert_locked(store, config, job, flags, workers, process)
    except LockedError as error:
        watch = JobWatch(store, job.spec)
        watch.look()
        print(f"gristmill convert: {error}; wait for it, or stop it. {watch.describe()}", file=sys.stderr)
        return FAILED
    except OutputError as error:
        print(f"gristmill convert: {error}. Nothing is lost: the same command goes on from here.", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("gristmill convert: stopped. Nothing is lost: the same command goes on from here.", file=sys.stderr)
        return FAILED


def _convert_locked(
    store: Store,
    config: JobConfig,
    job: PlannedJob,
    flags: list[str],
    workers: int | None,
    process: JobProcess | None,
) -> int:
    prepare_output(store, job)
    store.put(CONFIG_NAME, json.dumps(config.model_dump(), indent=1).encode())
    spec = dataclasses.replace(job.spec, root=store.root, started_at=time.time())
    for note in job.header["notes"]:
        _LOGGER.info(note)
    spread, count = 1, 0
    if local_runner.is_local(flags):
        count = _choose_workers(job, flags, workers)
        flags = local_runner.local_flags(flags, count)
        spread = max(1, count)
    _LOGGER.info("converting %d inputs to %d shards, %s", job.header["num_inputs"], spec.num_shards, _describe(flags))
    try:
        with watch_job(store, spec):
            if process is None or not local_runner.is_local(flags):
                local_runner.run_pipeline(spec, flags, spread)
            else:
                run_supervised(store, Order(spec, flags, count), process)
    except (OutputError, KeyboardInterrupt) as error:
        _LOGGER.error("the job ended early: %s", error or type(error).__name__)
        forget_marks(store)  # All processes have ended, and none of what it read.
        raise
    finally:
        forget_rates(spec.plan_id, len(spec.steps))
    report = read_report(store) or build_report(store, spec, job.header)
    counts = (report["records_written"], report["records_dropped"], report["records_dead"])
    _LOGGER.info("%s: %d records written, %d dropped, %d dead", report["status"], *counts)
    return _conclude(store, report)


def _choose_workers(job: PlannedJob, flags: list[str], workers: int | None) -> int:
    asked = workers if workers is not None else local_runner.asked_workers(flags)
    if asked is not None:
        return asked
    codec = job.spec.writer_options.split(",", 1)[1].split(":")[0]
    cpu_secs = local_runner.estimate_cpu_secs(codec, job.estimated_bytes, job.estimated_records, len(job.spec.steps))
    busy = sum(1 for planned_bytes in planned_shards(job.plan_path) if planned_bytes)
    return local_runner.choose_workers(cpu_secs, max(1, busy))


def _describe(flags: list[str]) -> str:
    return " ".join(flag for flag in flags if "runner" in flag or "direct" in flag) or "default runner"


def _conclude(store: Store, report: dict[str, Any] | None) -> int:
    if report is None:
        raise OutputError("the pipeline ended without a report")
    with contextlib.suppress(OSError):  # The terminal may be gone.
        print_report(store, report)
    return STATUS_CODES[report["status"]]
