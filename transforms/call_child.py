"""Runs one generator in a process of its own, for work that may kill its process. Started by `transforms.child_call`.

It gets two pickles on standard input, the import path and what to call, and answers with frames on the file descriptor
named on its command line: a length of eight bytes, then a pickled item, None at the end, or an OSError that was raised.
"""

from __future__ import annotations

import importlib
import os
import pickle
import sys
from collections.abc import Iterator
from typing import Any, BinaryIO


def main() -> None:
    """Calls and answers."""
    sys.path[:] = pickle.load(sys.stdin.buffer)
    target, arguments = pickle.load(sys.stdin.buffer)
    with os.fdopen(int(sys.argv[1]), "wb") as out:
        for answer in _answers(target, arguments):
            _send(out, answer)
        _send(out, None)


def _answers(target: str, arguments: dict[str, Any]) -> Iterator[object]:
    module, _, name = target.partition(":")
    try:
        yield from getattr(importlib.import_module(module), name)(**arguments)
    except OSError as error:
        yield error


def _send(out: BinaryIO, answer: object) -> None:
    data = pickle.dumps(answer)
    out.write(len(data).to_bytes(8, "little") + data)
    out.flush()


if __name__ == "__main__":
    main()
