"""The process that runs the pipeline of a local job, so that whatever happens in it the command lives on.

Started by `pipelines.supervisor`, which writes a pickled `Order` to its standard input and reads one line of JSON from
the file descriptor named on the command line: how it ended. No line means that the process died.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
import signal
import sys
from typing import TYPE_CHECKING

from pipelines.imports import without_collecting, without_google
from pipelines.process_ties import die_before_parent, end_with_parent
from pipelines.worker_watch import WorkerWatch
from transforms.elements import JobSpec
from transforms.machine import check_threads

if TYPE_CHECKING:
    from transforms.store import Store
    from transforms.verify import VerifyOrder


@dataclasses.dataclass(frozen=True)
class Order:
    """What the process is to do.

    Attributes:
        spec: The job, whose plan stands in the output directory; or what is to be verified there.
        flags: Beam flags.
        num_workers: Worker processes that the flags ask for; 0 when the pipeline runs in this very process.
    """

    spec: JobSpec | VerifyOrder
    flags: list[str]
    num_workers: int


def main() -> None:
    """Runs one pipeline."""
    _prepare()
    with without_collecting(), without_google():
        from pipelines import local_runner
        from pipelines.beam_options import tell_file_systems
        from transforms.billing import pay_by
        from transforms.convert import ConvertCorpus  # noqa: F401  (the order comes while this loads)
        from transforms.steps.surroundings import end_when_spoiled
        from transforms.store import open_store
    end_when_spoiled()
    data = sys.stdin.buffer.read()
    if not data:
        return  # The command found nothing to do.
    order: Order = pickle.loads(data)
    tell_file_systems(order.flags, [order.spec.root])
    pay_by(order.spec.billing_project)
    with _logging(order, open_store(order.spec.root)):
        watch = WorkerWatch(order.spec, order.num_workers, int(sys.argv[1]))
        problem = check_threads()
        if problem is not None:
            watch.answer({"error": problem})
        watch.answer(local_runner.describe_run(order.spec, order.flags, max(1, order.num_workers)))


def _logging(order: Order, store: Store) -> contextlib.AbstractContextManager[None]:
    from pipelines.job_log import log_to_job, log_to_terminal

    return log_to_job(store) if isinstance(order.spec, JobSpec) else log_to_terminal()


def _prepare() -> None:
    """Ties this process to the one that started it, and lets the kernel take it first when memory runs out.

    The terminal's signals are for the command, which ends its processes itself.
    """
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    end_with_parent()
    die_before_parent()


if __name__ == "__main__":
    main()
