"""Calls a generator of ours in a child process, so that native code which crashes takes the child and not us."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import transforms


class ChildCall:
    """One generator in one process.

    Args:
        target: The generator function, as `module:function`.
        arguments: Its keyword arguments, which are pickled, as its items are.

    Attributes:
        death: After `items` has ended: how the process died, None when it did not.
    """

    def __init__(self, target: str, **arguments: Any) -> None:
        self.death: str | None = None
        # The path comes first: the rest can only be read by a process that finds our package.
        self._order = pickle.dumps([str(Path(transforms.__file__).parents[1]), *sys.path])
        self._order += pickle.dumps((target, arguments))

    def items(self) -> Iterator[Any]:
        """Starts the process and yields what the generator yields, as far as it comes.

        Raises:
            OSError: The generator raised it.
        """
        read_end, write_end = os.pipe()
        command = [sys.executable, "-P", str(Path(__file__).with_name("call_child.py")), str(write_end)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, pass_fds=[write_end])
        os.close(write_end)
        try:
            with os.fdopen(read_end, "rb") as answers:
                yield from self._receive(process, answers)
        finally:
            process.kill()
            process.wait()

    def _receive(self, process: subprocess.Popen[bytes], answers: BinaryIO) -> Iterator[Any]:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin:
            process.stdin.write(self._order)
        while True:
            length = answers.read(8)
            data = answers.read(int.from_bytes(length, "little")) if len(length) == 8 else b""
            if len(length) < 8 or len(data) < int.from_bytes(length, "little"):
                self.death = status_name(process.wait())
                return
            answer: Any = pickle.loads(data)
            if answer is None:
                return
            if isinstance(answer, OSError):
                raise answer
            yield answer


def status_name(status: int) -> str:
    """Returns how a process ended, in words: the signal's name, or the exit status."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"
