"""The journal of a shard as the process uses it that runs the steps; it needs no store. No Beam here."""

from __future__ import annotations

import array
import dataclasses
import json
import logging
import os
import uuid
from collections.abc import Sequence

from transforms.journal_file import NO_KEY, Frame, JournalFile, JournalIndex, Place

_LOGGER = logging.getLogger("gristmill")


@dataclasses.dataclass(frozen=True)
class JournalHome:
    """Where the processes that are at a shard find its journal, and what they may write.

    Attributes:
        folder: Local folder of all its files.
        stream: How the names of the files of this attempt begin.
        plan_ids: The plan of the job, and those before it whose shards count.
    """

    folder: str
    stream: str
    plan_ids: tuple[str, ...]


class ShardJournal:
    """The journal of a shard as one process uses it, from several threads. Nothing here ends a job.

    Args:
        home: Where it is.
    """

    def __init__(self, home: JournalHome) -> None:
        self.home = home
        self._index = JournalIndex(journal_files(home.folder), home.plan_ids.__contains__)
        path = os.path.join(home.folder, f"{home.stream}-{uuid.uuid4().hex[:8]}")
        self._file = JournalFile(path, home.plan_ids[0])
        self._failed = False

    @property
    def is_empty(self) -> bool:
        """Whether earlier processes have left nothing in it."""
        return self._index.is_empty

    def find(self, key: bytes, place: Place) -> Frame | None:
        """Returns what an earlier process has left under a key; see `JournalIndex.find`."""
        return self._index.find(key, place)

    def item(self, frame: Frame, offset: int) -> bytes | None:
        """Returns what stands at an offset of the file that a frame was found in, None where that is damaged."""
        found = self._index.read(frame.file, offset)
        return None if found is None else found.body

    def put(self, key: bytes, place: Place, body: bytes) -> int | None:
        """Keeps a frame; returns its offset, None when the journal cannot be written."""
        try:
            return self._file.append(key, place, body)
        except FileNotFoundError:
            return None  # Another attempt has committed the shard and deleted the journal, or this one has ended.
        except OSError as error:
            if not self._failed:
                self._failed = True
                _LOGGER.warning("answers are not kept in a journal any more: %s: %s", self._file.path, error)
            return None

    def put_item(self, place: Place, body: bytes) -> int | None:
        """Keeps a frame that another one is going to point to."""
        return self.put(NO_KEY, place, body)


def journal_files(folder: str) -> list[str]:
    """Returns the files of a journal, those of the earliest process first."""
    try:
        return [os.path.join(folder, name) for name in sorted(os.listdir(folder))]
    except OSError:
        return []


def pack_origins(home: JournalHome, source: int, positions: Sequence[int]) -> bytes:
    """Returns what a process that runs isolated steps must know of a batch to use the journal.

    Args:
        home: The journal of its shard.
        source: Index of its input.
        positions: Positions of its records there.
    """
    fields = {**dataclasses.asdict(home), "source": source}
    return json.dumps(fields).encode() + b"\n" + array.array("q", positions).tobytes()


def unpack_origins(note: bytes) -> tuple[JournalHome, int, Sequence[int]]:
    """The inverse of `pack_origins`."""
    line, _, packed = note.partition(b"\n")
    fields = json.loads(line)
    home = JournalHome(fields["folder"], fields["stream"], tuple(fields["plan_ids"]))
    return home, fields["source"], array.array("q", packed)
