"""The reader in a process of its own, for ranges that kill their reader. Started by `transforms.isolated_reader`.

It gets two pickles on standard input, the import path and what to read, and answers with frames on the file descriptor
named on its command line: a length of eight bytes, then a pickled `Chunk`, None at the end, or an OSError that is the
machine's fault.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Iterator
from typing import Any, BinaryIO


def main() -> None:
    """Reads one range and answers."""
    sys.path[:] = pickle.load(sys.stdin.buffer)
    read, probe = pickle.load(sys.stdin.buffer)
    with os.fdopen(int(sys.argv[1]), "wb") as out:
        for answer in _answers(*read, probe=probe):
            _send(out, answer)
        _send(out, None)


def _answers(spec: Any, source: Any, start: int, end: int, trusted: bool, *, probe: bool) -> Iterator[object]:
    from transforms.shard_reader import read_input

    try:
        for chunk in read_input(spec, source, start, end, trusted=trusted):
            if probe:
                chunk.records, chunk.positions, chunk.dead, chunk.origins = [], [], [], None
            yield chunk
    except OSError as error:
        yield error


def _send(out: BinaryIO, answer: object) -> None:
    data = pickle.dumps(answer)
    out.write(len(data).to_bytes(8, "little") + data)
    out.flush()


if __name__ == "__main__":
    main()
