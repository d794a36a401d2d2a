"""Checks one planned shard: its ledger's books, and every file that the ledger names, read to its end. No Beam here.

What was found is small whatever the shard holds, and adds up in any order: it does not matter who checked what.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TypeVar

from array_record.python.array_record_module import ArrayRecordReader

from transforms.books import COUNTS, is_balanced
from transforms.generations import LETTERS_NAME, REPLAYED, base_name, find_letters, moved_name
from transforms.ledger import Ledger, StoredFile, find_ledger, ledger_name, read_published
from transforms.letters import consumed_lines, letters_file
from transforms.replaced import final_letters
from transforms.shard_writer import file_crc32c
from transforms.store import Store
from transforms.whole import Generation, list_generations, load_generation

T = TypeVar("T")

MAX_TEXTS = 200
"""Differences that a result names; the rest is counted."""
_MAX_TEXTS_OF_SHARD = 50
_MAX_CHARS = 600
_PIECE_BYTES = 512 << 10  # Of a shard file, read at a time.
_COUNTED = ("shards", "files", "records", "num_bytes", "letters", "num_differences")


@dataclasses.dataclass
class Differences:
    """Counts differences and keeps the texts of the first ones.

    Attributes:
        limit: Texts to keep; those that are too long lose their middle, since the end says what to do.
        count: Differences so far.
        texts: What was kept of them.
    """

    limit: int
    count: int = 0
    texts: list[str] = dataclasses.field(default_factory=list)

    def add(self, text: str) -> None:
        """Takes a difference in."""
        self.count += 1
        if len(self.texts) < self.limit:
            half = _MAX_CHARS // 2
            self.texts.append(text if len(text) <= _MAX_CHARS else f"{text[:half]} ... {text[-half:]}")


@dataclasses.dataclass(frozen=True)
class Found:
    """What checking some planned shards found.

    Attributes:
        shards: Planned shards that were checked.
        files: Files that were read to their end.
        records: Records in those of them that are shards.
        num_bytes: Bytes of those files.
        letters: Lines of the dead-letter files that stand under their final names.
        num_differences: Differences.
        differences: The first of them as (generation, planned shard, text), in this order.
    """

    shards: int = 0
    files: int = 0
    records: int = 0
    num_bytes: int = 0
    letters: int = 0
    num_differences: int = 0
    differences: tuple[tuple[str, int, str], ...] = ()


def add_up(founds: Iterable[Found]) -> Found:
    """Returns all that was found as one; the order does not matter."""
    counts = dict.fromkeys(_COUNTED, 0)
    texts: list[tuple[str, int, str]] = []
    for found in founds:
        for name in _COUNTED:
            counts[name] += getattr(found, name)
        if found.differences:
            texts += found.differences
            texts.sort(key=lambda text: text[:2])  # Stable: the texts of one shard come from one check.
            del texts[MAX_TEXTS:]
    return Found(**counts, differences=tuple(texts))


class ShardChecker:
    """Checks planned shards of an output directory.

    Args:
        store: The directory.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._generations: dict[str, Generation] = {}
        self._consumed: dict[str, set[str]] | None = None

    def check(self, generation: str, shard: int) -> Found:
        """Reads a planned shard of a generation and returns what was found.

        Raises:
            OutputError: The store does not answer, or the disk has no room for a copy.
        """
        if generation not in self._generations:
            self._generations[generation] = load_generation(self._store, generation)
        return _ShardCheck(self, self._generations[generation], shard).run()

    def find_letters(self, generation: str, lines: str, final: str) -> str:
        """Returns where a dead-letter file of a generation is: under its final name, or kept by a replay.

        Args:
            generation: The generation.
            lines: Final name of the lines of the pair that it belongs to.
            final: Its own final name.
        """
        if self._consumed is None:
            self._consumed = {one.name: _consumed_by(one) for one in list_generations(self._store)}
        names = list(self._consumed)
        for later in names[names.index(generation) + 1 if generation else 0 :]:
            if lines in self._consumed[later]:
                return moved_name(later, final)
        return find_letters(self._store, generation, final)


def _consumed_by(one: Generation) -> set[str]:
    if one.spec.replay is None or not one.is_finished():
        return set()
    try:
        return consumed_lines(one.store)
    except (OSError, ValueError, TypeError, KeyError):  # Its own shards tell of that.
        return set()


def _remake(generation: str) -> str:
    """Returns what makes a shard of a generation anew, as the end of a sentence."""
    command = "the next `convert --append` or `replay`" if generation else "the same convert command again"
    return f"{command} makes it anew, given the same inputs and steps"


class _ShardCheck:
    def __init__(self, checker: ShardChecker, one: Generation, shard: int) -> None:
        self._checker = checker
        self._store = one.store
        self._spec = one.spec
        self._shard = shard
        self._of = f"shard {shard}" + (f" of {one.name}" if one.name else "")
        self._remake = _remake(one.name)
        self._ledger_name = base_name(one.store, ledger_name(one.spec, shard))
        self._names = read_published(one.store, one.spec, shard)
        self._differences = Differences(_MAX_TEXTS_OF_SHARD)
        self._counts: Counter[str] = Counter(shards=1)

    def run(self) -> Found:
        found = find_ledger(self._store, self._spec, self._shard, check_files=False)
        if found is not None and found.ledger is not None:
            self._check_books(found.ledger)
            self._check_parts(found.ledger)
            self._check_letters(found.ledger)
        elif found is not None:
            self._say(f"{self._ledger_name} is no ledger of this plan; {self._remake}")
        elif self._names:
            self._say(f"{self._ledger_name} is missing; {self._remake}")
        texts = tuple((self._spec.generation, self._shard, text) for text in self._differences.texts)
        return Found(**self._counts, num_differences=self._differences.count, differences=texts)

    def _say(self, text: str) -> None:
        self._differences.add(text)

    def _say_of_ledger(self, text: str) -> None:
        self._say(f"{text}; delete {self._ledger_name}, and {self._remake}")

    def _check_books(self, ledger: Ledger) -> None:
        books = ledger.books()
        if not is_balanced(books):
            self._say_of_ledger(f"the books of {self._of} do not balance: { ({name: books[name] for name in COUNTS}) }")
        for row in ledger.rows:
            if row.read + row.added != row.written + row.dropped + row.dead:
                self._say_of_ledger(f"the books of input {row.index} in {self._of} do not balance")
        written = sum(part.records for part in ledger.parts)
        if written != books["records_written"]:
            self._say_of_ledger(
                f"{self._of} has {written} records in its files, {books['records_written']} in its books"
            )

    def _check_parts(self, ledger: Ledger) -> None:
        for part in ledger.parts:
            name = self._names.get(part.name, part.name)
            records = self._check_file(name, part, _read_records)
            if records is None:
                continue
            self._counts["records"] += records
            if records != part.records:
                self._say_of_ledger(f"{name} has {records} records, the ledger says {part.records}")

    def _check_letters(self, ledger: Ledger) -> None:
        dead = sum(row.dead * row.count for row in ledger.rows)
        if self._spec.replay is not None:
            try:
                dead += letters_file(self._store, self._shard).kept
            except (OSError, ValueError, TypeError) as error:
                self._say(f"{base_name(self._store, LETTERS_NAME)} cannot be read: {error}")
                return
        if ledger.dead_lines is None:
            if dead:
                self._say_of_ledger(f"{self._of} has {dead} dead letters but no file of them")
            return
        name = self._find_letters(ledger, ledger.dead_lines)
        lines = self._check_file(name, ledger.dead_lines, _Lines)
        payloads = ledger.dead_payloads.records if ledger.dead_payloads is not None else 0
        if lines is not None and lines.count != dead:
            self._say_of_ledger(f"{name} has {lines.count} lines, the books have {dead} dead letters")
        if lines is not None and lines.payloads != list(range(payloads)):
            self._say_of_ledger(f"{name} names {len(lines.payloads)} payloads, the ledger {payloads}")
        if self._spec.replay is None:
            self._counts["letters"] += self._count_standing(name, lines)
        if ledger.dead_payloads is not None:
            name = self._find_letters(ledger, ledger.dead_payloads)
            records = self._check_file(name, ledger.dead_payloads, _read_records)
            if records is not None and records != payloads:
                self._say_of_ledger(f"{name} has {records} payloads, the ledger says {payloads}")

    def _find_letters(self, ledger: Ledger, file: StoredFile) -> str:
        """Where a dead-letter file is: with its attempt, under its final name, or moved by a replay."""
        final = self._names.get(file.name)
        if final is None or ledger.dead_lines is None:
            return file.name
        lines = self._names.get(ledger.dead_lines.name, final)
        return self._checker.find_letters(self._spec.generation, lines, final)

    def _cure(self, name: str, *, stands: bool) -> str:
        """What mends a file, as the end of a sentence; one that stands with the right size must be deleted for it."""
        if name.startswith(REPLAYED):
            replay = name.removeprefix(REPLAYED).partition("/")[0]
            return f"nothing of the set is lost, but {replay} can no longer be made anew"
        return f"delete it, and {self._remake}" if stands else self._remake

    def _count_standing(self, name: str, lines: _Lines | None) -> int:
        """Lines of what stands now where the shard's dead letters were put; it may be a replay's."""
        if not name.startswith(REPLAYED):
            return lines.count if lines is not None else 0
        final = final_letters(self._store, self._spec, self._shard)[0]
        try:
            with self._store.open(final) as standing:
                return sum(1 for _ in standing)
        except OSError:  # Gone, or for the replay's own shard to tell.
            return 0

    def _check_file(self, name: str, expected: StoredFile, read: Callable[[str], T]) -> T | None:
        """Returns what `read` makes of a file that is the one that was written; otherwise says how it is not."""
        shown = base_name(self._store, name)
        try:
            size = self._store.size(name)
            if size == expected.size:
                with self._store.local_copy(name) as path:
                    return self._read(name, path, expected, read)
            what = "is missing" if size is None else f"has {size} bytes, the ledger says {expected.size}"
            self._say(f"{shown} {what}; {self._cure(name, stands=False)}")
        except PermissionError:
            self._say(f"{shown} may not be read; verify needs the permission to")
        except OSError as error:
            self._say(f"{shown} cannot be read: {error}; {self._cure(name, stands=True)}")
        return None

    def _read(self, name: str, path: str, expected: StoredFile, read: Callable[[str], T]) -> T | None:
        shown, cure = base_name(self._store, name), self._cure(name, stands=True)
        if file_crc32c(path) != expected.crc32c:
            self._say(f"{shown} is not the file that was written: its crc32c differs from the ledger's; {cure}")
            return None
        try:
            content = read(path)
        except _UnreadableError as error:
            self._say(f"{shown} cannot be read to its end: {error}; {cure}")
            return None
        self._counts["files"] += 1
        self._counts["num_bytes"] += expected.size
        return content


class _UnreadableError(Exception):
    """A file is the one that was written, and is not what it should be."""


class _Lines:
    """What stands in a dead-letter file."""

    def __init__(self, path: str) -> None:
        self.count = 0
        self.payloads: list[int] = []
        with open(path, "rb") as lines:
            for line in lines:
                self._take_in(line)

    def _take_in(self, line: bytes) -> None:
        self.count += 1
        try:
            index = json.loads(line)["payload_index"]
        except (ValueError, KeyError, TypeError) as error:
            raise _UnreadableError(f"line {self.count} is no dead letter") from error
        if index is not None:
            self.payloads.append(index)


def _read_records(path: str) -> int:
    """Reads every record of an ArrayRecord file and returns how many there are."""
    reader = ArrayRecordReader(os.fsencode(path))
    try:
        if not reader.ok():
            raise _UnreadableError("it cannot be opened as ArrayRecord")
        count = int(reader.num_records())
        step = max(1, _PIECE_BYTES // max(1, os.path.getsize(path) // max(1, count)))
        for first in range(0, count, step):
            reader.read(first, min(count, first + step))
        return count
    except RuntimeError as error:
        raise _UnreadableError(str(error)[:300]) from error
    finally:
        with contextlib.suppress(Exception):
            reader.close()
