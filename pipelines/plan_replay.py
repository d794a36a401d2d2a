"""Plans a replay: which dead letters, of which sources, in which files. Writes into a scratch folder."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

from pipelines.config import JobConfig
from pipelines.plan_job import PlannedJob, digest
from transforms.ahead import map_ahead
from transforms.budget import Budget
from transforms.dead_letters import MAX_REASONS
from transforms.elements import DeadLetter, Input, JobSpec, ShardTask, name_from_fields
from transforms.generations import LETTERS_NAME, generation_name, name_generation
from transforms.inputs import read_inputs
from transforms.letters import LettersFile, Selection, read_lines, write_letters_files
from transforms.new_inputs import name_table
from transforms.plan import AUTO_SHARD_BYTES, AUTO_SHARD_RECORDS
from transforms.plan_file import write_plan
from transforms.reasons import BEFORE_NAME, ReasonCounts
from transforms.replaced import final_letters
from transforms.report import committed_shards, spec_to_header, versions
from transforms.reread import UNKNOWN_SIZE, Listed, is_unreadable, listed_line, needs_source
from transforms.state import open_inputs
from transforms.steps.load import source_digest
from transforms.store import Store
from transforms.whole import Generation, books_before, dead_sources, new_outcome, replayed_sources

_NO_TAIL = 1 << 62


@dataclasses.dataclass(frozen=True)
class PlannedReplay:
    """A planned replay.

    Attributes:
        job: The plan.
        reasons: All dead letters that there are, by (reason, step), of the first pairs of these.
    """

    job: PlannedJob
    reasons: Counter[tuple[str, str]]


def plan_replay(
    store: Store, config: JobConfig, selection: Selection, made: list[Generation], scratch: str
) -> PlannedReplay:
    """Plans the next generation from dead letters.

    Args:
        store: The output directory.
        config: The config of the replay.
        selection: Which dead letters it takes.
        made: The base and all finished generations.
        scratch: Folder for the plan's files.

    Returns:
        The plan; one without shards when nothing is selected.
    """
    paths = {name: os.path.join(scratch, f"replay-{name}") for name in ("inputs", "plan", "letters", "before")}
    generation = generation_name(len(made))
    limits = config.dead_letters
    budget = Budget(limits.max_fraction, limits.max_count, dict(limits.max_count_by_reason))
    before = books_before(store, budget)
    with name_table() as known, open(paths["inputs"], "wb") as out:
        _fill_known(known, made)
        walk = _Walk(selection, out, known, json.loads(before)["dead_by_reason"])
        for one in made:
            if one.spec.replay is None:
                walk.generation(store, one)
    write_letters_files(paths["letters"], walk.files)
    with open(paths["before"], "wb") as file:
        file.write(before)
    spec = _spec(made[0].spec, config, selection, generation)
    fingerprint = _fingerprint(made[0], config, selection, generation, walk)
    spec = dataclasses.replace(spec, plan_id=digest(fingerprint), num_shards=len(walk.tasks))
    header = _header(spec, fingerprint, walk)
    write_plan(paths["plan"], lambda _: header, walk.tasks)
    state = {LETTERS_NAME: paths["letters"], BEFORE_NAME: paths["before"]}
    total = walk.num_bytes
    job = PlannedJob(spec, header, paths["inputs"], paths["plan"], total, walk.records, total, [], state)
    return PlannedReplay(job, walk.reasons)


def _fill_known(table: sqlite3.Connection, made: list[Generation]) -> None:
    """Fills a table with what replays must know of sources: (name, nothing could be converted, its end was damaged)."""
    table.execute("BEGIN")
    for generation in made:
        if generation.spec.replay is None:
            for fields, row in dead_sources(generation):
                if row.read == row.dead:
                    _set(table, name_from_fields("name", fields), "size", 1)
            continue
        for listed, row in replayed_sources(generation):
            if new_outcome(listed, row) is not None:
                _set(table, listed.source.name, "size", 0)
            if listed.tail <= listed.size:
                _set(table, listed.source.name, "mtime_ns", 1)
    table.execute("COMMIT")


def _set(table: sqlite3.Connection, name: str, column: str, value: int) -> None:
    key = os.fsencode(name)
    table.execute("INSERT OR IGNORE INTO known (name, size, mtime_ns) VALUES (?, 0, 0)", [key])
    table.execute(f"UPDATE known SET {column} = ? WHERE name = ?", [value, key])


@dataclasses.dataclass(frozen=True)
class _OpenLetters:
    """A dead-letter file, open; from a remote store its beginning is here already."""

    lines: BinaryIO
    names_and_sizes: tuple[str, int, str, int | None]


def _open_letters(store: Store, lines_name: str, payloads_name: str) -> _OpenLetters | None:
    """Opens a dead-letter file; None where a replay has left nothing of it."""
    size = store.size(lines_name)
    if size is None:
        return None
    return _OpenLetters(store.open(lines_name), (lines_name, size, payloads_name, store.size(payloads_name)))


class _Walk:
    """Goes through all dead letters in the order of their sources, and plans what is taken.

    Attributes:
        tasks: The planned shards.
        files: Their dead-letter files.
        reasons: All letters by (reason, step), of the first pairs of these.
        records: Letters that are taken.
        estimate: Records that these probably held.
        num_bytes: Their bytes.
        taken: Those by reason, of the reasons in the table from which they are going to be taken off.
    """

    def __init__(self, selection: Selection, out: Any, known: sqlite3.Connection, table: Iterable[str]) -> None:
        self._selection = selection
        self._out = out
        self._known = known
        self._had_tail = False
        self._digest = hashlib.blake2b(digest_size=16)
        self._open: Listed | None = None  # The source whose letters are being counted; its line is not yet written.
        self._tail_end = -1  # Where the letters of the reader end that follow one another.
        self._end: DeadLetter | None = None  # The letter before, of any file.
        self._inputs: Iterator[tuple[int, Input]] = iter(())
        self._input: Input | None = None
        self.tasks: list[ShardTask] = []
        self.files: list[LettersFile] = []
        self.reasons: Counter[tuple[str, str]] = Counter()
        self.taken = ReasonCounts(table, limit=0)
        self.records = 0
        self.estimate = 0
        self.num_bytes = 0
        self.num_sources = 0

    def digest(self) -> str:
        """Returns a fingerprint of the dead letters."""
        return self._digest.hexdigest()

    def generation(self, store: Store, generation: Generation) -> None:
        """Goes through the dead-letter files of the base or of an append."""
        with open_inputs(generation.store) as lines:
            self._inputs = read_inputs(lines)
            self._input = None
            committed = committed_shards(generation.store, generation.spec)
            shards = (ledger.shard for _, ledger in committed if ledger.dead_lines is not None)
            names = (final_letters(generation.store, generation.spec, shard) for shard in shards)
            for found in map_ahead(lambda pair: _open_letters(store, *pair), names, store.requests_at_once):
                if found is not None:
                    self._file(found)
            self._close()

    def _file(self, found: _OpenLetters) -> None:
        first: tuple[Listed, int] | None = None
        last: Listed | None = None
        kept = 0
        joins = False
        with found.lines:
            for letter in read_lines(found.lines, None):
                self._hash(letter)
                taken = self._selection.takes(letter)
                joined = self._joins(letter)
                self._enter(letter, taken=taken)
                self._end = letter
                if not taken:
                    kept += 1
                    continue
                assert self._open is not None
                if first is None:
                    first, joins = (self._open, self._open.source.size - 1), joined
                last = self._open
                self._count(letter)
        if first is None or last is None:
            return
        started, start = first
        self.files.append(LettersFile(*found.names_and_sizes, kept, joins))
        place = started.offset, started.source.index, start, last.offset, last.source.size
        self.tasks.append(ShardTask(len(self.tasks), *place, planned_bytes=found.names_and_sizes[1]))

    def _hash(self, letter: DeadLetter) -> None:
        self._digest.update(json.dumps(letter.carried, sort_keys=True).encode())

    def _joins(self, letter: DeadLetter) -> bool:
        """Whether a letter goes on where the one before it ends inside an unreadable range."""
        before = self._end
        if before is None or before.source != letter.source or not is_unreadable(before):
            return False
        taken = self._selection.takes(before) and needs_source(letter)
        return taken and before.position + before.length == letter.position

    def _enter(self, letter: DeadLetter, *, taken: bool) -> None:
        """Counts a letter to its source; a source of which none is taken gets no line."""
        if (letter.reason, letter.step) in self.reasons or len(self.reasons) < MAX_REASONS:
            self.reasons[letter.reason, letter.step] += 1
        if self._open is not None and self._open.source.name != letter.source:
            self._close()
        if self._open is None:
            self._open = self._listed(letter.source)
        source = self._open.source
        if taken:
            source = dataclasses.replace(source, size=source.size + 1)
        estimate = self._open.taken_estimate + (1 + letter.hidden if taken else 0)
        taken_bytes = self._open.taken_bytes + (letter.length if taken else 0)
        tail = self._tail(letter)
        self._open = dataclasses.replace(
            self._open,
            source=source,
            letters=self._open.letters + 1,
            taken_bytes=taken_bytes,
            tail=tail,
            taken_estimate=estimate,
        )

    def _tail(self, letter: DeadLetter) -> int:
        """Returns where the letters of the reader begin that cover the source without a gap up to this one."""
        assert self._open is not None
        start, end = letter.position, letter.position + letter.length
        if letter.step != "read":
            self._tail_end = -1
            return _NO_TAIL
        joins = self._open.letters > 0 and self._tail_end == start
        self._tail_end = end
        return self._open.tail if joins else start

    def _listed(self, name: str) -> Listed:
        """Looks a source up in the inputs, which are in the same order."""
        while self._input is None or self._input.name != name:
            self._input = next(self._inputs)[1]
        query = "SELECT size, mtime_ns FROM known WHERE name = ?"
        was_dead, self._had_tail = map(bool, self._known.execute(query, [os.fsencode(name)]).fetchone() or (0, 0))
        size = 0 if self._input.error is not None else self._input.size
        source = Input(self.num_sources, name, 0, self._input.mtime_ns)
        return Listed(self._out.tell(), source, size, self._input.mtime_ns, 0, was_dead, 0, _NO_TAIL)

    def _close(self) -> None:
        if self._open is not None and self._tail_end < self._open.size:
            # Where a replay has mended the end, the size is another one now, and all in front is where it was.
            size = UNKNOWN_SIZE if self._had_tail else self._open.size
            self._open = dataclasses.replace(self._open, tail=_NO_TAIL, size=size)
        if self._open is not None and self._open.source.size:
            self._out.write(listed_line(self._open))
            self.num_sources += 1
        self._open = None

    def _count(self, letter: DeadLetter) -> None:
        self.records += 1
        self.estimate += 1 + letter.hidden
        self.num_bytes += letter.length
        self.taken.add(letter.reason)


def _spec(base: JobSpec, config: JobConfig, selection: Selection, generation: str) -> JobSpec:
    """Returns the job: the base's, with the steps of now. Its budget is the whole's, see `transforms.whole`."""
    spec = dataclasses.replace(
        base,
        steps=tuple(config.steps),
        import_paths=(os.getcwd(),),
        max_record_bytes=config.source.max_record_bytes,
        max_fraction=1.0,
        max_count=None,
        max_count_by_reason={},
        planned_bytes=0,
        planned_files=0,
        earlier_plans=(),
        part_max_records=AUTO_SHARD_RECORDS,
        part_max_bytes=AUTO_SHARD_BYTES,
        billing_project=config.source.billing_project,
        replay=selection.to_fields(),
    )
    return name_generation(spec, generation)


def _fingerprint(
    base: Generation, config: JobConfig, selection: Selection, generation: str, walk: _Walk
) -> dict[str, Any]:
    found = versions()
    before = base.header["fingerprint"]
    return {
        "inputs": walk.digest(),
        "source": {**before["source"], "max_record_bytes": config.source.max_record_bytes},
        "steps": config.steps,
        "code of steps": source_digest(config.steps),
        "write": before["write"],
        "dead letters": before["dead letters"],
        "limit": 0,
        "library versions": {name: found[name] for name in ("gristmill", "array-record")},
        "generation": generation,
        "selection": selection.to_fields(),
    }


def _header(spec: JobSpec, fingerprint: dict[str, Any], walk: _Walk) -> dict[str, Any]:
    consumed = {
        "records": walk.records,
        "estimate": walk.estimate,
        "bytes": walk.num_bytes,
        "by_reason": dict(sorted(walk.taken.to_fields().items())),
    }
    return {
        "plan_id": spec.plan_id,
        "num_shards": spec.num_shards,
        "num_inputs": walk.num_sources,
        "total_bytes": walk.num_bytes,
        "num_skipped": 0,
        "num_duplicates": 0,
        "notes": [f"{walk.records} dead letters of {walk.num_sources} inputs are replayed"],
        "consumed": consumed,
        "fingerprint": json.loads(json.dumps(fingerprint, default=str)),
        "spec": spec_to_header(spec),
    }
