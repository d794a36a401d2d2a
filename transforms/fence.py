"""Keeps a run that has lost its lock from changing the output: every change looks at the lock. No Beam here.

A run may lose its lock without noticing: its process was suspended, its machine asleep or moved, its clock wrong. When
it goes on, another run may have replaced the output. So each change (put, copy, delete) of a run is fenced:

- On a file system (`Store.guarded`) the change, one call to it, is made while the lock cannot change hands, right after
  it was read. Nothing can come between, and who is suspended just there keeps others from taking over. Where folders
  cannot be locked, or only within one machine, the moment between the two is what is left.
- Elsewhere, as in Cloud Storage, the order is: look at the version of what is to be changed, read the lock, change
  exactly that version. What another run has made meanwhile has another version and stays. What it has *not* touched is
  changed: at most one name for each request that was under way. So the lock is read once more after a name was created,
  and if it is lost the name is deleted again, once more only that version. What was deleted in such a moment, the new
  owner had deleted or was going to delete as well: all that it builds on, it has made itself or made anew (`renew`),
  such as the plan when it goes on by it, the published names, and everything that comes later.
- Other file systems of Beam's have no conditional change: there somebody may come between look and change. A stray
  file that a run left which was killed in just that moment, and everything that happened there, `verify` and the next
  run of the same command find as they find any damage.

Names that no other run ever has (files of attempts) may be written without a look; for deleting them the lock is read.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from typing import BinaryIO

from transforms.job_lock import LostLockError, check_lock
from transforms.plan_file import read_header
from transforms.store import OutputError, Spool, Store, Version

_OWN_NAMES = re.compile(r"_gristmill/(g\d+/)?(attempts|tries)/")
_NAMES_OF_PLAN = re.compile(r"(_gristmill/(?:g\d+/)?)(shards/|finished\.json)")
_MAX_RACES = 5
"""Changes of one name by workers of the same run at the same time are rare, and each makes one of them look again."""


class FencedStore:
    """A store whose changes are made only while a run holds the lock of the output.

    Args:
        base: The store.
        token: The holder of the lock, see `transforms.job_lock.JobLock.token`.
    """

    def __init__(self, base: Store, token: str) -> None:
        self.base = base
        self.root = base.root
        self.requests_at_once = base.requests_at_once
        self._looks = _Looks(lambda: check_lock(base, token))
        self._guarded = base.guarded(self._looks.look)

    # Changes.

    def put_if_absent(self, name: str, data: bytes) -> bool:
        """See `Store`, as all that follows.

        Raises:
            LostLockError: The run has lost its lock; nothing was changed, here and in all that follows.
        """
        if self._guarded is not None:
            return self._guarded.put_if_absent(name, data)
        self.check()
        made = self.base.put_if_version(name, data, None)
        if made is not None:
            self._check_created(name, made)
        return made is not None

    def put(self, name: str, data: bytes) -> None:
        """See `Store`."""
        if self._guarded is not None:
            return self._guarded.put(name, data)
        return self._change(name, lambda seen: self.base.put_if_version(name, data, seen))

    def put_file(self, path: str, name: str) -> None:
        """See `Store`."""
        if self._guarded is not None:
            return self._guarded.put_file(path, name)
        return self._change(name, lambda seen: self.base.put_file_if_version(path, name, seen))

    def copy(self, source: str, target: str) -> None:
        """See `Store`."""
        if self._guarded is not None:
            self._guarded.copy(source, target)
        elif source != target:
            self._change(target, lambda seen: self.base.copy_if_version(source, target, seen))

    def renew(self, name: str) -> None:
        """Gives a name that exists a new version where that keeps others, which saw the old one, from changing it."""
        if self._guarded is None:
            self._change(name, lambda seen: self.base.copy_if_version(name, name, seen))

    def delete(self, name: str, version: Version | None = None) -> bool:
        """See `Store`."""
        if self._guarded is not None:
            return self._guarded.delete(name, version)
        if _OWN_NAMES.match(name):
            self.check()
            return self.base.delete(name, version)
        return self._delete_seen(name, version)

    def _delete_seen(self, name: str, version: Version | None) -> bool:
        for _ in range(_MAX_RACES):
            seen = version if version is not None else self.base.version(name)
            if seen is None:
                return False
            self.check()
            if self.base.delete(name, seen):
                return True
            if version is not None:
                return False
        raise OutputError(f"cannot delete {name} of {self.root}: it is being written by others")

    def put_if_version(self, name: str, data: bytes, version: Version | None) -> Version | None:
        """See `Store`."""
        self.check()
        return self.base.put_if_version(name, data, version)

    def put_file_if_version(self, path: str, name: str, version: Version | None) -> Version | None:
        """See `Store`."""
        self.check()
        return self.base.put_file_if_version(path, name, version)

    def copy_if_version(self, source: str, target: str, version: Version | None) -> Version | None:
        """See `Store`."""
        self.check()
        return self.base.copy_if_version(source, target, version)

    def clean(self) -> None:
        """See `Store`."""
        if self._guarded is not None:
            return self._guarded.clean()
        self.check()
        return self.base.clean()

    def _change(self, name: str, change: Callable[[Version | None], Version | None]) -> None:
        """Looks, reads the lock, and changes what was seen; again when a worker of the same run was quicker."""
        first = seen = self.base.version(name)
        for _ in range(_MAX_RACES):
            self.check()
            made = change(seen)
            if made is not None:
                return self._check_created(name, made) if first is None else None
            seen = self.base.version(name)
        self.check()
        raise OutputError(f"cannot write {name} of {self.root}: it is being written by others")

    def check(self) -> None:
        """Checks that the run still holds the lock.

        Raises:
            LostLockError: It does not.
        """
        self._looks.look()

    def _check_created(self, name: str, version: Version) -> None:
        """Checks the lock after a name was created, and takes the name back if it was lost before."""
        try:
            self.check()
        except LostLockError:
            with contextlib.suppress(OutputError, OSError):
                if not self._counts(name):
                    self.base.delete(name, version)
            raise

    def _counts(self, name: str) -> bool:
        """Whether whoever goes on by the same plan takes a name as its own: the ledger of a shard, the end of a job."""
        found = _NAMES_OF_PLAN.match(name)
        entry = self.base.get(name) if found else None
        if found is None or entry is None:
            return False
        with (
            contextlib.suppress(OSError, ValueError, KeyError, TypeError),
            self.base.open(f"{found[1]}plan.jsonl") as plan,
        ):
            header = read_header(plan)
            plans = [header["plan_id"], *header["spec"].get("earlier_plans", ())]
            return json.loads(entry[0])["plan_id"] in plans
        return False

    # What changes nothing that others have.

    def get(self, name: str) -> tuple[bytes, Version] | None:
        """See `Store`."""
        return self.base.get(name)

    def version(self, name: str) -> Version | None:
        """See `Store`."""
        return self.base.version(name)

    def open(self, name: str) -> BinaryIO:
        """See `Store`."""
        return self.base.open(name)

    def size(self, name: str) -> int | None:
        """See `Store`."""
        return self.base.size(name)

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        """See `Store`."""
        return self.base.list(prefix)

    def hold(self) -> contextlib.AbstractContextManager[None]:
        """See `Store`."""
        return self.base.hold()

    def guarded(self, check: Callable[[], object]) -> Store | None:
        """See `Store`; this one is guarded already."""
        return self.base.guarded(check)

    def spool(self, name: str) -> Spool:
        """See `Store`; only attempts spool, under names of their own."""
        return self.base.spool(name)

    def local_copy(self, name: str) -> contextlib.AbstractContextManager[str]:
        """See `Store`."""
        return self.base.local_copy(name)


class _Looks:
    """Has threads that want to look at the same time share a look, which must begin after they have asked.

    Args:
        look: Looks, and raises what there is to raise.
    """

    def __init__(self, look: Callable[[], object]) -> None:
        self._look = look
        self._turn = threading.Lock()
        self._begun = 0
        self._good = 0

    def look(self) -> None:
        """Looks, or takes a look of another thread that began after this call."""
        asked = self._begun
        with self._turn:
            if self._good > asked:
                return
            self._begun += 1
            self._look()
            self._good = self._begun
