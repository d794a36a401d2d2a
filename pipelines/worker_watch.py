"""Watches over the worker processes of a local pipeline: whether they report, and whether they live.

The local runner does neither: it waits for ever for a worker that never connects, and may do so for one that died.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections import Counter
from pathlib import Path
from typing import Any

from pipelines.proxies import named_proxies
from pipelines.signals import children, end_children

_LOOK_SECS = 0.5
_GRACE_SECS = 3.0
"""How long the pipeline may still run after a worker has died; the local runner may wait for ever."""
_REPORT_SECS = 60.0
"""How long a worker may wait without having reported. A worker that still loads, however slowly, does not wait."""


class WorkerWatch:
    """Ends the process when one of its workers has died or does not report, and answers the command once.

    Args:
        spec: What the pipeline is for; the workers of a job leave marks at which shard they are.
        num_workers: Worker processes that the pipeline has; 0 when it runs in this very process.
        answer_fd: Where the command reads the answer.
    """

    def __init__(self, spec: Any, num_workers: int, answer_fd: int) -> None:
        self._spec = spec
        self._num_workers = num_workers
        self._answer_fd = answer_fd
        self._lock = threading.Lock()
        self._lost = threading.Event()
        self._silence: Counter[int] = Counter()
        threading.excepthook = self._on_thread_failure
        if num_workers:
            self._reported = note_reports()
            threading.Thread(target=self._look, name="gristmill-workers", daemon=True).start()

    def answer(self, outcome: dict[str, Any]) -> None:
        """Says how the pipeline ended; an error that a dead worker explains is left to the watch."""
        if outcome.get("unexplained") and self._num_workers and self._lost.wait(_GRACE_SECS):
            threading.Event().wait()  # The watch ends the process.
        self._send(outcome)

    def _send(self, outcome: dict[str, Any]) -> None:
        self._lock.acquire()  # For ever: there is one answer.
        with contextlib.suppress(BrokenPipeError):
            os.write(self._answer_fd, json.dumps(outcome).encode() + b"\n")
        end_children(os.getpid())
        os._exit(0)

    def _on_thread_failure(self, failure: threading.ExceptHookArgs) -> None:
        """Beam waits for each worker in a thread, which fails when the worker does; so do those that talk to it."""
        if "Worker subprocess exited" in str(failure.exc_value):
            self._lose(str(failure.exc_value))
        elif not self._lost.is_set() and failure.exc_type.__name__ != "RpcError":
            threading.__excepthook__(failure)

    def _look(self) -> None:
        """Notices a worker that is gone, however it ended, and one that only waits. Linux only."""
        seen: set[int] = set()
        while not self._lost.wait(_LOOK_SECS):
            present = set(children(os.getpid()))
            if seen - present:
                self._lose("a worker process ended")
            seen |= present
            if self._has_silent(present):
                self._send({"error": describe_silence(_REPORT_SECS)})

    def _has_silent(self, present: set[int]) -> bool:
        """Whether a worker has waited for too long without having reported.

        Only looks at which it slept are counted: not those while it loaded, waited for a core or a disk, or was
        stopped with us. So it takes neither a slow machine nor one that was suspended for a worker that is silent.
        """
        if len(self._reported) >= self._num_workers:
            return False
        for pid in present:
            if _worker_id(pid) not in self._reported and _is_asleep(pid):
                self._silence[pid] += 1
        return any(
            looks * _LOOK_SECS >= _REPORT_SECS and _worker_id(pid) not in self._reported
            for pid, looks in self._silence.items()
        )

    def _lose(self, what: str) -> None:
        if not self._lost.is_set():
            self._lost.set()
            threading.Timer(_GRACE_SECS, self._give_up, [what, self._living()]).start()

    def _living(self) -> list[int]:
        """Returns the workers that were at a shard and live: they are not to blame."""
        from transforms.elements import JobSpec
        from transforms.generations import open_job_store
        from transforms.tries import list_marks

        if not isinstance(self._spec, JobSpec):
            return []
        return [mark.pid for mark in list_marks(open_job_store(self._spec)) if _is_alive(mark.pid)]

    def _give_up(self, text: str, living: list[int]) -> None:
        self._send({"lost": text, "living": living})


def note_reports() -> set[str]:
    """Returns the ids of the workers that have reported to the local runner, to which later ones are added."""
    from apache_beam.runners.portability.fn_api_runner.worker_handlers import BeamFnControlServicer

    reported: set[str] = set()
    control = BeamFnControlServicer.Control

    def noting(servicer: Any, responses: Any, context: Any) -> Any:
        reported.add(str(dict(context.invocation_metadata()).get("worker_id")))
        return control(servicer, responses, context)

    BeamFnControlServicer.Control = noting  # type: ignore[method-assign, assignment]
    return reported


def describe_silence(secs: float) -> str:
    """Returns the message for workers that have not reported in time."""
    text = (
        f"the worker processes have not reported within {secs:g} s; they connect to a port of localhost, which a "
        "firewall or a sandbox may forbid"
    )
    proxies = named_proxies(os.environ)
    if proxies:
        text += f", or a proxy may be in the way ({', '.join(proxies)} set)"
    return f"{text}; --workers 0 does without them"


def _worker_id(pid: int) -> str:
    """Returns the id under which a worker process reports; "" for other processes, and for one that is gone."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if line.startswith(b"WORKER_ID="):
                return line.partition(b"=")[2].decode("utf-8", "replace")
    return ""


def _is_asleep(pid: int) -> bool:
    """Whether the first thread of a process waits for something else than a core or a disk."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] == "S"
    return False


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True
