"""The program of the process in which isolated steps run.

Two processes come of it. The first, which stays as small as it began, watches over the second (`warden`); the second
runs the steps (`serve`). Run as a script with the numbers of inherited files and the import path of the worker, so
that neither Beam nor anything else that the steps do not need is imported.
"""

from __future__ import annotations

import json
import os
import sys


def main(arguments: list[str]) -> None:
    """Runs until the worker closes the life pipe, or is gone.

    Args:
        arguments: Numbers of the files for input, signals, life and memory; import path as JSON.
    """
    input_fd, signal_fd, life_fd, memory_fd = map(int, arguments[:4])
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    path = json.loads(arguments[4])
    sys.path[:] = [root, *path]
    import transforms  # noqa: F401  (this very package, and not a module of that name in a folder of the user's)

    sys.path[:] = path
    from transforms.steps.exchange import Exchange
    from transforms.steps.serve import serve
    from transforms.steps.warden import run_watched

    exchange = Exchange(memory_fd)
    run_watched(lambda: serve(exchange, input_fd, signal_fd), exchange, life_fd)


if __name__ == "__main__":
    main(sys.argv[1:])
