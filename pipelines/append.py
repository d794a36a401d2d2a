"""`gristmill convert --append`: converts what is new since, as a generation with names of its own."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import shutil
from typing import Any

from pipelines.config import JobConfig
from pipelines.dry_run import show_dry_run
from pipelines.errors import DONE, UsageError
from pipelines.generation_jobs import complete, finished, forget, is_base_published, mend, unfinished
from pipelines.output import check_output
from pipelines.plan_job import PlannedJob, plan_job
from pipelines.plan_pieces import plan_pieces
from pipelines.remote_job import outlives
from pipelines.run_job import Run, run_locked
from pipelines.space import check_space
from transforms.generations import generation_name, generation_names, see_as
from transforms.inputs import InputPatternError, Listing
from transforms.new_inputs import TOUCHED_NAME, ChangedInputsError, list_new_inputs
from transforms.report import changed_keys
from transforms.state import read_report
from transforms.store import Store
from transforms.touched import WAY_OUT
from transforms.whole import Generation, load_generation

_TOUCHED = "touched.jsonl"
_LOGGER = logging.getLogger("gristmill")
_MAY_DIFFER = {"inputs", "generation", "library versions", "write.shards", "write.compression"}
"""What may differ between generations: each has shards of its own, which need not be alike in size or compression."""


def has_job(store: Store) -> bool:
    """Whether there is a job in the directory to append to.

    Raises:
        StateError: What stands there is no plan.
    """
    try:
        load_generation(store, "")
    except FileNotFoundError:
        return False
    return True


def run(args: argparse.Namespace, store: Store, config: JobConfig, how: Run) -> int:
    """Runs `gristmill convert --append` where there is a job already.

    Raises:
        UsageError: Something is wrong that can be mended before any work.
    """
    if args.resume_anyway:
        raise UsageError("--resume-anyway goes on with the set and --append adds to it; give one of them")
    if args.overwrite:
        raise UsageError("--append adds to the set and --overwrite replaces it; give one of them")
    if args.dry_run:
        return show_plan(store, config, how.scratch, num_records=args.limit, accept_touched=args.accept_touched)
    if args.limit is not None:
        raise UsageError("--limit converts a trial, which cannot be appended; give it a directory of its own")
    return run_locked(
        "convert", store, how.lock, lambda held: append(held, config, how, accept_touched=args.accept_touched)
    )


def append(store: Store, config: JobConfig, run: Run, *, accept_touched: bool = False) -> int:
    """Converts what is new, after completing what was stopped; the caller holds the lock.

    Raises:
        UsageError: The config is not the one of the set, or converted inputs have changed.
    """
    base = load_generation(store, "")
    if not is_base_published(base):
        return _complete_base(base, config, run)
    stopped = unfinished(store)
    if stopped is not None and stopped.is_decided():
        complete(run.waiting(), stopped)
        stopped = None
    elif stopped is not None and stopped.spec.replay is not None:
        forget(stopped)
        stopped = None
    made = finished(store)
    mend(run.waiting(), made)
    listing = list_new(config, run.scratch, made, accept_touched=accept_touched)
    _keep_touched(store, run.scratch)
    if stopped is None and not listing.num_inputs:
        print(f"{store.root}: nothing to append; every input is known")
        return DONE
    if stopped is not None and not listing.num_inputs:
        return complete(run, stopped, config)
    name = generation_name(len(made))
    job = plan_append(config, name, run.scratch, listing, made)
    if stopped is not None and _only_inputs_differ(stopped, job):
        _LOGGER.info("append %s was planned before; inputs that came since are for the next --append", stopped.name)
        return complete(run, stopped, config)
    if config.write.check_space and not outlives(run.flags):
        job.header["notes"] += filter(None, [check_space(store, job)])
    return run.job(see_as(store, name), config, job)


def _keep_touched(store: Store, scratch: str) -> None:
    """Remembers which inputs have only a new time, so that the next append need not read them to know it."""
    path, both = f"{scratch}/{_TOUCHED}", f"{scratch}/all-{_TOUCHED}"
    if not os.path.getsize(path):
        return
    with open(both, "wb") as out, open(path, "rb") as new:
        with contextlib.suppress(FileNotFoundError), store.open(TOUCHED_NAME) as old:
            shutil.copyfileobj(old, out)
        shutil.copyfileobj(new, out)
    store.put_file(both, TOUCHED_NAME)


def show_plan(
    store: Store, config: JobConfig, scratch: str, *, num_records: int | None, accept_touched: bool = False
) -> int:
    """Prints what an append would do, and writes nothing."""
    made = finished(store)
    listing = list_new(config, scratch, made, accept_touched=accept_touched)
    if not listing.num_inputs:
        print(f"{store.root}: nothing to append; every input is known")
        return DONE
    name = generation_name(len(list(generation_names(store))) + 1)
    job = plan_pieces(plan_append(config, name, scratch, listing, made), config, scratch)
    show_dry_run(job, num_records=num_records)
    return DONE


def _complete_base(base: Generation, config: JobConfig, run: Run) -> int:
    job = plan_job(config, limit=0, scratch=run.scratch)
    if changed_keys(base.header["fingerprint"], job.header["fingerprint"]) == ["inputs"]:
        _LOGGER.info("the set itself is not finished; inputs that came since are for the next --append")
        return complete(run, base, config)
    check_output(base.store, job, overwrite=False)
    return run.job(base.store, config, job)


def list_new(config: JobConfig, scratch: str, made: list[Generation], *, accept_touched: bool = False) -> Listing:
    """Lists what is new into the scratch folder.

    Raises:
        UsageError: A list cannot be read, or converted inputs have changed.
    """
    try:
        return list_new_inputs(
            config.source.patterns,
            f"{scratch}/inputs.jsonl",
            config.write.output,
            made,
            accept_touched=accept_touched,
            touched_path=f"{scratch}/{_TOUCHED}",
        )
    except InputPatternError as error:
        raise UsageError(str(error)) from error
    except ChangedInputsError as error:
        raise UsageError(
            f"{error}. Their old records are in the set and would be doubled; put the old files back, give the new "
            f"ones names of their own, or {WAY_OUT}, or convert everything again with --overwrite or into another "
            "directory"
        ) from error


def plan_append(config: JobConfig, name: str, scratch: str, listing: Listing, made: list[Generation]) -> PlannedJob:
    """Plans a generation of new inputs.

    Raises:
        UsageError: The config is not the one of the set.
    """
    base = made[0]
    if base.spec.limit:
        raise UsageError(f"{base.spec.root} is a trial run with --limit, to which nothing can be appended")
    if config.source.format == "auto":
        source = config.source.model_copy(update={"format": base.spec.format})
        config = config.model_copy(update={"source": source})
    job = plan_job(config, limit=0, scratch=scratch, generation=name, listing=listing)
    after = job.header["fingerprint"]
    changed = [_job_differences(before, after) for one in reversed(made) for before in _fingerprints(one)]
    if all(changed):
        nearest = sorted(changed, key=len)[0]
        raise UsageError(
            f"{base.spec.root} was made by another job ({', '.join(nearest)} changed), and what is "
            "appended must fit the rest; give the same config, or take another directory, or pass --overwrite "
            "without --append to convert everything again. After a step was mended: replay first"
        )
    return job


def _fingerprints(generation: Generation) -> list[dict[str, Any]]:
    """What a generation was made by: more than one job where it was resumed although something had changed."""
    return [generation.header["fingerprint"], *generation.header.get("earlier_fingerprints", {}).values()]


def _job_differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    after = json.loads(json.dumps(after, default=str))
    return [name for name in changed_keys(before, after) if not _MAY_DIFFER & {name, name.split(".")[0]}]


def _only_inputs_differ(stopped: Generation, job: PlannedJob) -> bool:
    """Whether a stopped append goes on by its plan: not if it was refused, then what is there now is planned anew."""
    report = read_report(stopped.store)
    if report is not None and report["status"] == "over_budget":
        return False
    return changed_keys(stopped.header["fingerprint"], job.header["fingerprint"]) == ["inputs"]
