"""A worker process of a local job: Beam's own, loaded faster, which ends with the process that started it."""

from __future__ import annotations

import os
import sys

from pipelines.imports import without_collecting, without_google
from pipelines.process_ties import end_with_parent

COMMAND = f"exec {sys.executable} -P -m pipelines.worker_process"
"""For a shell that makes way for it, so that the worker is the child of whoever started it."""


def main() -> None:
    """Runs a worker until the runner ends it."""
    end_with_parent()
    with without_collecting(), without_google():
        from apache_beam.runners.worker import sdk_worker, sdk_worker_main

        import transforms.convert  # noqa: F401  (before the first bundle asks for it)
        from transforms.steps.surroundings import end_when_spoiled
    end_when_spoiled()
    sdk_worker.print = _say_nothing  # type: ignore[attr-defined]  # It prints each traceback that it logs as well.
    sdk_worker_main.main(sys.argv)
    os._exit(0)  # Nothing is left to do, and unloading Beam takes a while.


def _say_nothing(*_: object, **__: object) -> None:
    pass


if __name__ == "__main__":
    main()
