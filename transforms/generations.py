"""Generations: what `--append` and `replay` add to a published set, each with state and names of its own.

A generation is a job like any other. It shares the output directory with the set that `convert` made (the base), but
what a job keeps under `_gristmill/` it keeps under `_gristmill/g001/`, and its shards have `_g001` in their names.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator
from typing import BinaryIO

from transforms.billing import pay_by
from transforms.elements import JobSpec
from transforms.fence import FencedStore
from transforms.plan_file import PLAN_NAME
from transforms.store import Spool, Store, Version, open_store

STATE = "_gristmill/"
REPLAYED = "_gristmill/replayed/"
DECIDED_NAME = "_gristmill/decided.json"
"""Stands once a generation is going to be published: from then on it is completed, whatever is asked for."""
LETTERS_NAME = "_gristmill/letters.jsonl"
"""Which dead-letter files a replay consumes, see `transforms.letters`."""
FINISHED_NAME = "_gristmill/finished.json"
"""Stands once a generation is part of the manifest and nothing of it is left to do."""
_SHARED = ("_gristmill/lock.json", "_gristmill/job.log", REPLAYED)


class GenerationStore:
    """The output directory as a generation sees it: its state under a folder of its own, all else shared.

    Args:
        base: The output directory.
        generation: Name of the generation, such as "g001".
    """

    def __init__(self, base: Store, generation: str) -> None:
        self.base = base
        self.root = base.root
        self.requests_at_once = base.requests_at_once
        self.generation = generation
        self._folder = f"{STATE}{generation}/"

    def _name(self, name: str) -> str:
        if name.startswith(STATE) and not name.startswith(_SHARED):
            return self._folder + name.removeprefix(STATE)
        return name

    def put_if_absent(self, name: str, data: bytes) -> bool:
        """See `Store`, as all that follows."""
        return self.base.put_if_absent(self._name(name), data)

    def put(self, name: str, data: bytes) -> None:
        """See `Store`."""
        self.base.put(self._name(name), data)

    def put_file(self, path: str, name: str) -> None:
        """See `Store`."""
        self.base.put_file(path, self._name(name))

    def put_if_version(self, name: str, data: bytes, version: Version | None) -> Version | None:
        """See `Store`."""
        return self.base.put_if_version(self._name(name), data, version)

    def put_file_if_version(self, path: str, name: str, version: Version | None) -> Version | None:
        """See `Store`."""
        return self.base.put_file_if_version(path, self._name(name), version)

    def get(self, name: str) -> tuple[bytes, Version] | None:
        """See `Store`."""
        return self.base.get(self._name(name))

    def version(self, name: str) -> Version | None:
        """See `Store`."""
        return self.base.version(self._name(name))

    def open(self, name: str) -> BinaryIO:
        """See `Store`."""
        return self.base.open(self._name(name))

    def size(self, name: str) -> int | None:
        """See `Store`."""
        return self.base.size(self._name(name))

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        """See `Store`; state of others is not listed."""
        for name, size in self.base.list(self._name(prefix)):
            if name.startswith(self._folder):
                yield STATE + name.removeprefix(self._folder), size
            elif not name.startswith(STATE) or name.startswith(_SHARED):
                yield name, size

    def copy(self, source: str, target: str) -> None:
        """See `Store`."""
        self.base.copy(self._name(source), self._name(target))

    def copy_if_version(self, source: str, target: str, version: Version | None) -> Version | None:
        """See `Store`."""
        return self.base.copy_if_version(self._name(source), self._name(target), version)

    def delete(self, name: str, version: Version | None = None) -> bool:
        """See `Store`."""
        return self.base.delete(self._name(name), version)

    def hold(self) -> contextlib.AbstractContextManager[None]:
        """See `Store`."""
        return self.base.hold()

    def guarded(self, check: Callable[[], object]) -> Store | None:
        """See `Store`."""
        guarded = self.base.guarded(check)
        return None if guarded is None else GenerationStore(guarded, self.generation)

    def spool(self, name: str) -> Spool:
        """See `Store`."""
        return self.base.spool(self._name(name))

    def clean(self) -> None:
        """See `Store`."""
        self.base.clean()

    def local_copy(self, name: str) -> contextlib.AbstractContextManager[str]:
        """See `Store`."""
        return self.base.local_copy(self._name(name))


def open_job_store(spec: JobSpec) -> Store:
    """Opens the output directory as the job's generation sees it, and as its run may change it.

    The job's project pays from now on for what this process asks of gs://.
    """
    pay_by(spec.billing_project)
    return see_as(fence(open_store(spec.root), spec.run_token), spec.generation)


def fence(store: Store, token: str) -> Store:
    """Returns the output directory as the run that holds its lock may change it; as it is where there is none, ""."""
    return _rebase(store, FencedStore(base_of(unfenced(store)), token)) if token else store


def unfenced(store: Store) -> Store:
    """Returns the output directory for changes that cannot hurt another run: of files that no other has."""
    base = base_of(store)
    return _rebase(store, base.base) if isinstance(base, FencedStore) else store


def _rebase(store: Store, base: Store) -> Store:
    return GenerationStore(base, store.generation) if isinstance(store, GenerationStore) else base


def renew(store: Store, name: str) -> bool:
    """Makes a file that a run builds on its own: a run that has lost the lock can no longer delete what it saw before.

    Returns:
        Whether it is still there.
    """
    base = base_of(store)
    try:
        if isinstance(base, FencedStore):
            base.renew(base_name(store, name))
    except FileNotFoundError:
        return False
    return True


def see_as(store: Store, generation: str) -> Store:
    """Returns the output directory as a generation sees it, as the base does for ""."""
    base = base_of(store)
    return GenerationStore(base, generation) if generation else base


def base_of(store: Store) -> Store:
    """Returns the output directory as the base sees it."""
    return store.base if isinstance(store, GenerationStore) else store


def base_name(store: Store, name: str) -> str:
    """Returns what the output directory calls a file that a generation's store calls `name`."""
    return store._name(name) if isinstance(store, GenerationStore) else name


def generation_name(number: int) -> str:
    """Returns the name of the generation of that number, from 1."""
    return f"g{number:03d}"


def _number(generation: str) -> int:
    return int(generation[1:] or 0)


def generation_names(store: Store) -> Iterator[str]:
    """Yields the generations that are planned, in order. Their numbers have no gaps."""
    base = base_of(store)
    number = 1
    while see_as(base, generation_name(number)).size(PLAN_NAME) is not None:
        yield generation_name(number)
        number += 1


def name_generation(spec: JobSpec, generation: str) -> JobSpec:
    """Returns the job with file names of its generation: `train` becomes `train_g001`, which TFDS parses as a split."""
    template = spec.template
    if "{SPLIT}" not in template:  # Then the split cannot keep the names of generations apart.
        first = min((place, name) for name in _NUMBERS if (place := template.find(name)) >= 0)[1]
        template = template.replace(first, f"{generation}-{first}", 1)
    return dataclasses.replace(spec, generation=generation, split=f"{spec.split}_{generation}", template=template)


_NUMBERS = ("{SHARD_X_OF_Y}", "{SHARD_INDEX}")


def moved_name(generation: str, final: str) -> str:
    """Returns where a replay keeps the dead-letter file that it consumed under a final name."""
    return f"{REPLAYED}{generation}/{final.rpartition('/')[2]}"


def find_letters(store: Store, generation: str, final: str) -> str:
    """Returns where the dead-letter file is that a generation published under a final name.

    That is there, unless a later replay has put another one in its place. One that has consumed it says so also where
    somebody has deleted what it kept: what stands under the final name is another file then, if any.
    """
    base = base_of(store)
    for later in generation_names(base):
        if _number(later) <= _number(generation):
            continue
        if base.size(moved_name(later, final)) is not None or _has_consumed(see_as(base, later), final):
            return moved_name(later, final)
    return final


def _has_consumed(replay: Store, final: str) -> bool:
    """Whether a generation is a replay that is finished and took a dead-letter file of that name."""
    if replay.size(FINISHED_NAME) is None or replay.size(LETTERS_NAME) is None:
        return False
    try:
        with replay.open(LETTERS_NAME) as lines:
            return any(final in (file["lines"], file["payloads"]) for file in map(json.loads, lines))
    except (ValueError, TypeError, KeyError):  # Damaged, which verify tells.
        return False
