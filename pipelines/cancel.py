"""`gristmill cancel`: stops the job that writes to a directory, wherever it runs."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import Any

from pipelines.dataflow_service import Service
from pipelines.errors import DONE, FAILED, UsageError
from pipelines.output import open_output
from transforms.job_lock import describe, has_process_here, is_stale, read_lock, release_lock
from transforms.plan_file import PLAN_NAME
from transforms.store import Store

_PATIENCE_SECS = 600.0
_LOOK_SECS = 2.0


def run(output: str) -> int:
    """Stops the job that holds the lock of a directory, and waits for its end.

    Returns:
        0 once nobody writes there; 1 when the job could not be stopped from here.

    Raises:
        UsageError: There is nothing to stop, or it cannot be reached.
    """
    store = open_output(output)
    found = read_lock(store)
    if found is None and store.size(PLAN_NAME) is None:
        raise UsageError(f"{output} holds no job of gristmill: there is no {PLAN_NAME}")
    if found is None:
        print(f"{store.root}: nothing runs")
        return DONE
    holder = found[0]
    ended = _cancel_job(store, holder) if holder.get("job") else _stop_process(store, holder)
    if not ended:
        print(f"{store.root}: {describe(holder)} has not ended yet; see gristmill status")
        return FAILED
    print(f"{store.root}: {describe(holder)} is stopped; the same command goes on from what is committed")
    return DONE


def _cancel_job(store: Store, holder: dict[str, Any]) -> bool:
    job = holder["job"]
    if "project" not in job:
        raise UsageError(f"{describe(holder)} can be stopped only where it runs, with the tools of {job.get('runner')}")
    service = Service(job)
    try:
        service.cancel()
        ended = _wait(lambda: not service.is_running())
    except OSError as error:
        raise UsageError(f"{describe(holder)} cannot be stopped: {error}") from error
    if ended:
        release_lock(store, str(holder.get("token")))
    return ended


def _stop_process(store: Store, holder: dict[str, Any]) -> bool:
    if is_stale(holder):
        release_lock(store, str(holder.get("token")))
        return True
    if not has_process_here(holder):
        raise UsageError(f"{store.root} is written by {describe(holder)}; stop it there")
    with contextlib.suppress(ProcessLookupError):
        os.kill(int(holder["pid"]), signal.SIGTERM)
    return _wait(lambda: (read_lock(store) or ({}, None))[0].get("token") != holder.get("token"))


def _wait(is_over: Any) -> bool:
    deadline = time.monotonic() + _PATIENCE_SECS
    while not is_over():
        if time.monotonic() > deadline:
            return False
        time.sleep(_LOOK_SECS)
    return True
