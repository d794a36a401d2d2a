"""What `convert --append` and `replay` share: finding generations, and completing those that were stopped."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
import os
import shutil
from collections.abc import Iterator
from typing import BinaryIO

from pipelines.config import JobConfig
from pipelines.errors import DONE
from pipelines.output import forget_generation, missing_shards
from pipelines.plan_job import PlannedJob
from pipelines.run_job import Run
from transforms.ahead import call_ahead
from transforms.elements import Input, ShardTask, display_name
from transforms.generations import STATE
from transforms.inputs import read_inputs
from transforms.ledger import ATTEMPTS
from transforms.plan_file import read_tasks
from transforms.sources import explain_error, open_input
from transforms.state import (
    CONFIG_NAME,
    FROM_COPY,
    StateError,
    check_inputs,
    open_inputs,
    open_plan,
    read_config,
    read_manifest,
    read_report,
)
from transforms.steps.load import source_digest
from transforms.store import OutputError, Store
from transforms.whole import Generation, list_generations, load_generation

_LOGGER = logging.getLogger("gristmill")


def is_base_published(base: Generation) -> bool:
    """Whether the base has its manifest and nothing of its publishing is left to do."""
    manifest, report = read_manifest(base.store), read_report(base.store)
    if manifest is None or report is None or manifest["plan_id"] != base.spec.plan_id:
        return False
    return report["plan_id"] == base.spec.plan_id and not any(True for _ in base.store.list(ATTEMPTS))


def stored_config(generation: Generation, budget: JobConfig | None = None) -> JobConfig:
    """Returns the config with which a job ran last, with the budget of another one if that is given.

    Raises:
        StateError: It is gone or damaged.
    """
    fields = read_config(generation.store)
    if not fields:
        cure = FROM_COPY if generation.name else "the same convert command again writes it anew"
        raise StateError(generation.store, CONFIG_NAME, "is missing or damaged", cure)
    config = JobConfig.model_validate(fields)
    return config if budget is None else config.model_copy(update={"dead_letters": budget.dead_letters})


def stored_job(generation: Generation, config: JobConfig, scratch: str) -> PlannedJob:
    """Returns a job as it was planned, whatever its inputs are now."""
    store = generation.store
    plan_path, inputs_path = os.path.join(scratch, "stored-plan.jsonl"), os.path.join(scratch, "stored-inputs.jsonl")
    for opened, path in ((open_plan(store), plan_path), (open_inputs(store), inputs_path)):
        with opened as source, open(path, "wb") as out:
            shutil.copyfileobj(source, out)
    limits = config.dead_letters.model_dump(include={"max_fraction", "max_count", "max_count_by_reason"})
    if generation.spec.replay is not None:
        limits = {
            "max_fraction": 1.0,
            "max_count": None,
            "max_count_by_reason": {},
        }  # The whole is judged, see `transforms.whole`.
    spec = dataclasses.replace(generation.spec, import_paths=(os.getcwd(),), **limits)  # Who pays is as it is now.
    total = generation.header["total_bytes"]
    return PlannedJob(spec, generation.header, inputs_path, plan_path, total, total // 1000, total, [])


def complete(run: Run, generation: Generation, budget: JobConfig | None = None) -> int:
    """Runs a job on as it was planned, and returns its exit status."""
    config = stored_config(generation, budget)
    job = stored_job(generation, config, run.scratch)
    return run.job(generation.store, config, job)


def mend(run: Run, generations: list[Generation]) -> None:
    """Makes files of a published set anew that are missing, unless code has changed since: that gives others.

    Args:
        run: How to run their jobs.
        generations: The base and all finished generations.

    Raises:
        OutputError: An input of theirs is no longer what it was, or they could not be made.
    """
    for generation in generations:
        missing = list(missing_shards(generation.store, generation.spec))
        if not missing:
            continue
        what = f"{generation.kind} {generation.name}".strip()
        if source_digest(generation.spec.steps) != generation.header["fingerprint"]["code of steps"]:
            _LOGGER.warning("files of %s are missing, but the code of its steps has changed since", what)
            continue
        _check_inputs(generation, what, missing)
        _LOGGER.info("files of %s are missing; they are made again", what)
        if complete(run, generation) != DONE:
            raise OutputError(f"files of {what} are missing and could not be made again")


def _check_inputs(generation: Generation, what: str, shards: list[int]) -> None:
    """Checks that shards would come out as they were: what has changed since would be lost without a word.

    Replays are not checked: they are judged by the books of the whole.

    Raises:
        OutputError: An input of the shards has changed or is gone.
    """
    if generation.spec.replay is not None:
        return
    wanted = set(shards)
    with open_plan(generation.store) as plan, open_inputs(generation.store) as lines:
        for _, task in read_tasks(plan):
            if task.shard in wanted:
                check = functools.partial(_check_input, generation, what)
                call_ahead(check, _inputs_of(lines, task), generation.store.requests_at_once)


def _inputs_of(lines: BinaryIO, task: ShardTask) -> Iterator[Input]:
    inputs = read_inputs(lines, task.first_offset, task.first_index)
    return (source for _, source in itertools.takewhile(lambda found: found[0] <= task.last_offset, inputs))


def _check_input(generation: Generation, what: str, source: Input) -> None:
    if source.error is not None:
        return  # It could not be read then either.
    try:
        with contextlib.closing(open_input(source)) as file:
            file.read_at(0, 1)
    except OSError as error:
        raise OutputError(
            f"files of {what} are missing, and cannot be made again as they were: {display_name(source.name)}: "
            f"{explain_error(error)[1]}. Put the input back as it was, or the missing files from a copy, or convert "
            f"everything again with --overwrite (all of {generation.spec.root} is as it was before this command)"
        ) from error


def unfinished(store: Store) -> Generation | None:
    """Returns the generation that was stopped, None when there is none; it is always the last one."""
    generations = list_generations(store)
    return generations[-1] if generations and not generations[-1].is_finished() else None


def forget(generation: Generation) -> None:
    """Gives up a generation of which nothing is published."""
    _LOGGER.info("the %s %s that was stopped is given up: nothing of it is published", generation.kind, generation.name)
    forget_generation(generation.store)


def finished(store: Store) -> list[Generation]:
    """Returns the base and all finished generations.

    Raises:
        StateError: State of a generation is missing, whose name and place the next one would take; or a list of
            inputs is damaged, by which what is new is told.
    """
    made = list_generations(store)
    report = read_report(store) or {}
    published = [entry["name"] for entry in report.get("generations", ())]
    lost = sorted(set(published) - {one.name for one in made})
    if lost:
        raise _lost_state(store, f"{STATE}{lost[0]}/plan.jsonl")
    for one in made[:-1]:
        if not one.is_finished():
            raise _lost_state(store, f"{STATE}{one.name}/finished.json")
    found = [load_generation(store, ""), *(one for one in made if one.is_finished())]
    for one in found:
        check_inputs(one.store, one.header)
    return found


def _lost_state(store: Store, name: str) -> StateError:
    return StateError(store, name, "is missing, so what is published cannot be told")
