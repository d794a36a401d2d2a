"""Put on PYTHONPATH by tests: stops a process for ever at a named moment of a job, so that it can be killed there.

GRISTMILL_TEST_STOP is "MOMENT TEXT FILE": at the first store call of that moment whose name holds TEXT, FILE is created
and the process sleeps.
"""

import os
import time


def _stop(file: str) -> None:
    with open(file, "w", encoding="utf-8"):
        pass
    while True:
        time.sleep(60)


def _install(moment: str, text: str, file: str) -> None:
    from transforms.store import LocalStore

    when, _, method = moment.partition("-")
    original = getattr(LocalStore, method)

    def stopping(self: LocalStore, *arguments: object) -> object:
        if any(text in str(argument) for argument in arguments) and not os.path.exists(file):
            if when == "after":
                original(self, *arguments)
            _stop(file)
        return original(self, *arguments)

    setattr(LocalStore, method, stopping)


if os.environ.get("GRISTMILL_TEST_STOP"):
    _install(*os.environ["GRISTMILL_TEST_STOP"].split())
