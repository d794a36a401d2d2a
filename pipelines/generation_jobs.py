"""What `convert --append` and `replay` share: finding generations, and completing those that were stopped."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import shutil

from pipelines.config import JobConfig
from pipelines.output import all_count, forget_generation
from pipelines.plan_job import PlannedJob
from pipelines.run_job import Run
from transforms.ledger import ATTEMPTS
from transforms.plan_file import INPUTS_NAME, PLAN_NAME
from transforms.report import MANIFEST_NAME, read_config, read_report
from transforms.steps.load import source_digest
from transforms.store import Store
from transforms.whole import Generation, list_generations, load_generation

_LOGGER = logging.getLogger("gristmill")


def is_base_published(base: Generation) -> bool:
    """Whether the base has its manifest and nothing of its publishing is left to do."""
    found = base.store.get(MANIFEST_NAME)
    report = read_report(base.store)
    if found is None or report is None or json.loads(found[0])["plan_id"] != base.spec.plan_id:
        return False
    return report["plan_id"] == base.spec.plan_id and not any(True for _ in base.store.list(ATTEMPTS))


def is_whole(generation: Generation) -> bool:
    """Whether a finished generation still has all its files."""
    return all_count(generation.store, generation.spec)


def stored_config(generation: Generation, budget: JobConfig | None = None) -> JobConfig:
    """Returns the config with which a job ran last, with the budget of another one if that is given."""
    config = JobConfig.model_validate(read_config(generation.store))
    return config if budget is None else config.model_copy(update={"dead_letters": budget.dead_letters})


def stored_job(generation: Generation, config: JobConfig, scratch: str) -> PlannedJob:
    """Returns a job as it was planned, whatever its inputs are now."""
    plan_path, inputs_path = os.path.join(scratch, "stored-plan.jsonl"), os.path.join(scratch, "stored-inputs.jsonl")
    for name, path in ((PLAN_NAME, plan_path), (INPUTS_NAME, inputs_path)):
        with generation.store.open(name) as source, open(path, "wb") as out:
            shutil.copyfileobj(source, out)
    limits = config.dead_letters.model_dump(include={"max_fraction", "max_count", "max_count_by_reason"})
    if generation.spec.replay is not None:
        limits = {
            "max_fraction": 1.0,
            "max_count": None,
            "max_count_by_reason": {},
        }  # The whole is judged, see `transforms.whole`.
    spec = dataclasses.replace(generation.spec, import_paths=(os.getcwd(),), **limits)
    total = generation.header["total_bytes"]
    return PlannedJob(spec, generation.header, inputs_path, plan_path, total, total // 1000, total, [])


def complete(run: Run, generation: Generation, budget: JobConfig | None = None) -> int:
    """Runs a job on as it was planned, and returns its exit status."""
    config = stored_config(generation, budget)
    job = stored_job(generation, config, run.scratch)
    return run.job(generation.store, config, job)


def mend(run: Run, generations: list[Generation]) -> None:
    """Makes files of a published set anew that are missing, unless code has changed since: that gives others."""
    for generation in generations:
        if (generation.name and not generation.is_finished()) or is_whole(generation):
            continue
        what = f"{generation.kind} {generation.name}".strip()
        if source_digest(generation.spec.steps) != generation.header["fingerprint"]["code of steps"]:
            _LOGGER.warning("files of %s are missing, but the code of its steps has changed since", what)
        else:
            _LOGGER.info("files of %s are missing; they are made again", what)
            complete(run, generation)


def unfinished(store: Store) -> Generation | None:
    """Returns the generation that was stopped, None when there is none; it is always the last one."""
    generations = list_generations(store)
    return generations[-1] if generations and not generations[-1].is_finished() else None


def forget(generation: Generation) -> None:
    """Gives up a generation of which nothing is published."""
    _LOGGER.info("the %s %s that was stopped is given up: nothing of it is published", generation.kind, generation.name)
    forget_generation(generation.store)


def finished(store: Store) -> list[Generation]:
    """Returns the base and all finished generations."""
    return [load_generation(store, ""), *(one for one in list_generations(store) if one.is_finished())]
