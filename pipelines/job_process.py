"""The process that runs the pipeline of a local job, so that whatever happens in it the command lives on.

Started by `pipelines.supervisor`, which writes a pickled `Order` to its standard input and reads one line of JSON from
the file descriptor named on the command line: how it ended. No line means that the process died.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pickle
import signal
import sys
import threading
from typing import Any

from pipelines.imports import without_collecting, without_google
from pipelines.process_ties import die_before_parent, end_with_parent
from pipelines.signals import children, end_children
from transforms.elements import JobSpec

_LOOK_SECS = 0.5
_GRACE_SECS = 3.0
"""How long the pipeline may still run after a worker has died; the local runner may wait for ever."""


@dataclasses.dataclass(frozen=True)
class Order:
    """What the process is to do.

    Attributes:
        spec: The job; its plan stands in the output directory.
        flags: Beam flags.
        num_workers: Worker processes that the flags ask for; 0 when the pipeline runs in this very process.
    """

    spec: JobSpec
    flags: list[str]
    num_workers: int


def main() -> None:
    """Runs one pipeline."""
    _prepare()
    with without_collecting(), without_google():
        from pipelines import local_runner
        from pipelines.beam_options import tell_file_systems
        from pipelines.job_log import log_to_job
        from transforms.billing import pay_by
        from transforms.convert import ConvertCorpus  # noqa: F401  (the order comes while this loads)
        from transforms.store import open_store
    data = sys.stdin.buffer.read()
    if not data:
        return  # The command found nothing to do.
    order: Order = pickle.loads(data)
    tell_file_systems(order.flags, [order.spec.root])
    pay_by(order.spec.billing_project)
    with log_to_job(open_store(order.spec.root)):
        watch = _WorkerWatch(order, int(sys.argv[1]))
        watch.answer(local_runner.describe_run(order.spec, order.flags, max(1, order.num_workers)))


def _prepare() -> None:
    """Ties this process to the one that started it, and lets the kernel take it first when memory runs out.

    The terminal's signals are for the command, which ends its processes itself.
    """
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    end_with_parent()
    die_before_parent()


class _WorkerWatch:
    """Ends the process when one of its workers has died, and answers the command once."""

    def __init__(self, order: Order, answer_fd: int) -> None:
        self._order = order
        self._answer_fd = answer_fd
        self._lock = threading.Lock()
        self._lost = threading.Event()
        threading.excepthook = self._on_thread_failure
        if order.num_workers:
            threading.Thread(target=self._count_workers, name="gristmill-workers", daemon=True).start()

    def answer(self, outcome: dict[str, Any]) -> None:
        """Says how the pipeline ended; an error that a dead worker explains is left to the watch."""
        if outcome.get("unexplained") and self._order.num_workers and self._lost.wait(_GRACE_SECS):
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

    def _count_workers(self) -> None:
        """Notices a worker that is gone, also one that ended as if all were well. Linux only."""
        seen: set[int] = set()
        while not self._lost.wait(_LOOK_SECS):
            present = set(children(os.getpid()))
            if seen - present:
                self._lose("a worker process ended")
            seen |= present

    def _lose(self, what: str) -> None:
        if not self._lost.is_set():
            self._lost.set()
            threading.Timer(_GRACE_SECS, self._give_up, [what, self._living()]).start()

    def _living(self) -> list[int]:
        """Returns the workers that were at a shard and live: they are not to blame."""
        from transforms.generations import open_job_store
        from transforms.tries import list_marks

        return [mark.pid for mark in list_marks(open_job_store(self._order.spec)) if _is_alive(mark.pid)]

    def _give_up(self, text: str, living: list[int]) -> None:
        self._send({"lost": text, "living": living})


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    main()
