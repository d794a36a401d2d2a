"""Runs a planned job: lock, log, pipeline, report. What `convert`, `convert --append` and `replay` share."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from pipelines import local_runner, remote_job
from pipelines.config import JobConfig
from pipelines.errors import DONE, FAILED, STATUS_CODES
from pipelines.job_log import FILE_ONLY, log_to_job
from pipelines.job_process import Order
from pipelines.output import prepare_output
from pipelines.plan_job import PlannedJob
from pipelines.plan_pieces import choose_workers, num_tasks, plan_pieces, recall_pieces
from pipelines.progress import JobWatch, watch_job
from pipelines.report import print_report
from pipelines.streams import mend_files
from pipelines.supervisor import JobProcess, isolated_spec, may_be_of_steps, may_isolate, run_supervised
from transforms.budget import say_letters
from transforms.elements import JobSpec, to_json
from transforms.generations import fence
from transforms.job_lock import JobLock, LockedError, LostLockError
from transforms.journal import JOURNALS
from transforms.machine import describe_memory
from transforms.report import build_report
from transforms.scratch import delete_left_over
from transforms.state import CONFIG_NAME, read_report
from transforms.steps.rate import forget_rates
from transforms.steps.surroundings import stay_alive
from transforms.store import OutputError, Store
from transforms.tries import forget_marks, forgive_marks

_LOGGER = logging.getLogger("gristmill")


def run_locked(
    command: str, store: Store, lock: JobLock, body: Callable[[Store], int], spec: JobSpec | None = None
) -> int:
    """Runs the work of a command while it holds the lock; returns its exit status, or 1 when somebody else holds it.

    Args:
        command: Name of the command, for messages.
        store: The output directory.
        lock: Its lock.
        body: The work; is given the output directory as the lock's holder may change it, returns the exit status.
        spec: The job, to tell how far it is when somebody else holds the lock.
    """
    delete_left_over()
    try:
        with lock, log_to_job(store):
            try:
                status = body(fence(store, lock.token))
            except Exception:
                _check_lock(lock)  # What another run has changed may be all that is wrong.
                raise
            lock.check()  # A run that has lost its lock has no success to tell of.
            return status
    except LockedError as error:
        print(f"gristmill {command}: {error}; wait for it, or stop it{_how_far(store, spec)}", file=sys.stderr)
    return FAILED


def _how_far(store: Store, spec: JobSpec | None) -> str:
    if spec is None:
        return ""
    watch = JobWatch(store, spec, may_call_off=False)
    watch.look()
    return f". {watch.describe()}"


@dataclasses.dataclass(frozen=True)
class Run:
    """How a command runs its jobs.

    Attributes:
        flags: Beam flags.
        workers: Local worker processes, None to choose.
        scratch: Folder for plans.
        lock: The lock of the output directory.
        process: Process for the first local pipeline; None to run all in this one.
        detach: Whether the last job is left alone once it is submitted.
    """

    flags: list[str]
    workers: int | None
    scratch: str
    lock: JobLock
    process: JobProcess | None = None
    detach: bool = False
    _used: list[JobProcess] = dataclasses.field(default_factory=list)

    def waiting(self) -> Run:
        """Returns the same for jobs that others follow."""
        return dataclasses.replace(self, detach=False)

    def job(self, store: Store, config: JobConfig, job: PlannedJob) -> int:
        """Runs a planned job and returns its exit status."""
        if self.process is None or not self._used:
            self._used.extend(filter(None, [self.process]))
            return run_job(store, config, job, self)
        with JobProcess() as following:  # A process runs one pipeline only.
            return run_job(store, config, job, dataclasses.replace(self, process=following))


def run_job(store: Store, config: JobConfig, job: PlannedJob, run: Run) -> int:
    """Runs a planned job and reports, the base's or a generation's; the caller holds the lock.

    Args:
        store: The output directory as the job sees it.
        config: The config, to be kept with the job.
        job: The job.
        run: How to run it, in which process if any.

    Returns:
        The exit status.

    Raises:
        OutputError: The job could not finish.
        LostLockError: Another run has the lock by now; nothing of what it did was changed.
    """
    has_answers = next(iter(store.list(JOURNALS)), None) is not None
    job = recall_pieces(store, job) or plan_pieces(job, config, run.scratch, may_cut=not has_answers)
    spec = dataclasses.replace(job.spec, root=store.root, started_at=time.time(), run_token=run.lock.token)
    engine = _choose_engine(store, spec, config, job, run)
    prepare_output(store, job)
    if not remote_job.outlives(engine.flags):
        forgive_marks(store)  # A command that lived on has taken away what is forgiven.
    put_config(store, config)
    for note in job.header["notes"]:
        _LOGGER.info(note)
    words = " ".join(flag for flag in engine.flags if "runner" in flag or "direct" in flag)
    _LOGGER.info("converting %d inputs to %d shards, %s", job.header["num_inputs"], spec.num_shards, words)
    try:
        with watch_job(store, spec):
            if engine.run():
                return DONE
        run.lock.check()  # Else what stands there now may be another run's.
    except (OutputError, KeyboardInterrupt) as error:
        _check_lock(run.lock)  # If it is lost that is why, and nothing is ours to change.
        # For the file: on the terminal the command's last line says the same.
        _LOGGER.error("the job ended early: %s", local_runner.find_cause(error), extra=FILE_ONLY)
        if not remote_job.outlives(engine.flags):  # There, what is left tells which shards may have killed a worker.
            forget_marks(store)  # All processes have ended, and none of what it read.
        raise
    finally:
        forget_rates(spec.plan_id, len(spec.steps))
    report = read_report(store) or build_report(store, spec, job.header)
    counts = (report["records_written"], report["records_dropped"], say_letters(report))
    _LOGGER.info("%s: %d records written, %d dropped, %s", report["status"], *counts)
    return conclude(store, report, spec.generation)


def _check_lock(lock: JobLock) -> None:
    """Checks that the lock is not known to be lost; what cannot be read may be what ended the job."""
    try:
        lock.check()
    except LostLockError:
        raise
    except (OutputError, OSError):
        return


@dataclasses.dataclass(frozen=True)
class _Engine:
    """What runs a pipeline.

    Attributes:
        flags: Beam flags, all of them.
        run: Runs it; returns True when it goes on without this command.
    """

    flags: list[str]
    run: Callable[[], bool | None]


def _choose_engine(store: Store, spec: JobSpec, config: JobConfig, job: PlannedJob, run: Run) -> _Engine:
    """Chooses where the pipeline runs, before the output is touched.

    Raises:
        UsageError: It cannot run there.
    """
    flags = run.flags
    if remote_job.outlives(flags):
        scratch = tempfile.mkdtemp(dir=run.scratch)
        spec, flags = remote_job.prepare(spec, job, config, flags, scratch)
        return _Engine(flags, lambda: remote_job.run_remote(store, spec, flags, run.lock, detach=run.detach))
    count = 0
    if local_runner.is_local(flags):
        count = _choose_workers(job, flags, run.workers)
        flags = local_runner.local_flags(flags, count)
        if run.process is not None or count:
            return _Engine(flags, lambda: _run_supervised(store, Order(spec, flags, count), run.process))
        if run.workers is None:
            _LOGGER.warning("the pipeline runs in this process, no other fits: %s", describe_memory())
    return _Engine(flags, lambda: _run_here(store, spec, flags, max(1, count)))


def _run_here(store: Store, spec: JobSpec, flags: list[str], num_workers: int) -> None:
    """Runs a pipeline in this process, and in another one if steps may have spoiled this one."""
    stay_alive()
    try:
        local_runner.run_pipeline(spec, flags, num_workers)
    except OutputError as error:
        is_local = local_runner.is_local(flags) and may_isolate(spec)
        if not is_local or not may_be_of_steps(store, str(error), not local_runner.is_explained(error)):
            raise
        mend_files()
        _LOGGER.warning("%s; in case that steps did this to this process, they get processes of their own", error)
        forget_marks(store)
        store.clean()
        _run_supervised(store, Order(isolated_spec(spec), flags, 0), None)


def _run_supervised(store: Store, order: Order, process: JobProcess | None) -> None:
    if process is not None:
        run_supervised(store, order, process)
        return
    with JobProcess() as late:
        run_supervised(store, order, late)


def put_config(store: Store, config: JobConfig) -> None:
    """Keeps the resolved config with the job."""
    store.put(CONFIG_NAME, to_json(config.model_dump(), indent=1))


def _choose_workers(job: PlannedJob, flags: list[str], workers: int | None) -> int:
    asked = workers if workers is not None else local_runner.asked_workers(flags)
    if asked is not None:
        return min(asked, num_tasks(job))  # Others would find nothing to do.
    return choose_workers(job)


def conclude(store: Store, report: dict[str, Any] | None, generation: str = "") -> int:
    """Prints the report of a job and returns the exit status that it stands for.

    Raises:
        OutputError: There is no report.
    """
    if report is None:
        raise OutputError("the pipeline ended without a report")
    with contextlib.suppress(OSError):  # The terminal may be gone.
        print_report(store, report, generation)
    return STATUS_CODES[report["status"]]
