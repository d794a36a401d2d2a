"""Random damage that remembers which bytes of the file it left as they were."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence

import numpy as np

KINDS = ("flip", "zero", "noise", "cut", "insert", "remove", "swap")
IN_PLACE = ("flip", "zero", "noise")
NEW = -1

_NEAR_BYTES = 40


class Damaged:
    """A file and what was done to it.

    Attributes:
        original: The bytes as they were written.
        data: The bytes as they are now.
        origin: For each byte of `data` its place in `original`, `NEW` for a byte that was changed, moved or put in.
        kinds: What was done, in order.
    """

    def __init__(self, original: bytes) -> None:
        self.original = original
        self.data = original
        self.origin = np.arange(len(original))
        self.kinds: list[str] = []

    def overwrite(self, at: int, new: bytes) -> None:
        """Puts bytes in the place of others; those that happen to be the same are not changed."""
        new = new[: len(self.data) - at]
        before = np.frombuffer(self.data, np.uint8, len(new), at)
        changed = before != np.frombuffer(new, np.uint8)
        self.origin[at : at + len(new)][changed] = NEW
        self.data = self.data[:at] + new + self.data[at + len(new) :]

    def insert(self, at: int, new: bytes) -> None:
        """Pushes bytes in."""
        self.data = self.data[:at] + new + self.data[at:]
        self.origin = np.insert(self.origin, at, np.full(len(new), NEW))

    def remove(self, at: int, num_bytes: int) -> None:
        """Takes bytes out."""
        self.data = self.data[:at] + self.data[at + num_bytes :]
        self.origin = np.delete(self.origin, slice(at, at + num_bytes))

    def places(self, edges: Sequence[int]) -> list[int | None]:
        """Returns where each piece of the original between two edges stands untouched; None if it does not."""
        place = np.full(len(self.original), NEW)
        kept = np.flatnonzero(self.origin != NEW)
        place[self.origin[kept]] = kept
        run = np.concatenate([[0], np.cumsum(np.diff(self.origin) != 1)])  # Bytes of one run were never parted.
        found: list[int | None] = []
        for start, end in itertools.pairwise(edges):
            first, last = int(place[start]), int(place[end - 1])
            found.append(first if NEW not in (first, last) and run[first] == run[last] else None)
        return found

    def changed(self) -> list[int]:
        """Returns the places of all bytes that are new."""
        return np.flatnonzero(self.origin == NEW).tolist()


def damage(file: Damaged, rng: random.Random, targets: Sequence[int], kinds: Sequence[str] = KINDS) -> None:
    """Does one random thing to a file, more often than not near one of the targets."""
    if not file.data:
        return
    kind = rng.choice(kinds)
    _ACTIONS[kind](file, rng, _place(file, rng, targets), _num_bytes(rng))
    file.kinds.append(kind)


def _place(file: Damaged, rng: random.Random, targets: Sequence[int]) -> int:
    at = rng.randrange(len(file.data))
    if targets and rng.random() < 0.6:
        at = rng.choice(targets) + rng.randint(-_NEAR_BYTES, _NEAR_BYTES)
    return min(max(at, 0), len(file.data) - 1)


def _num_bytes(rng: random.Random) -> int:
    """A few bytes, a few small records, or a block of a disk."""
    return rng.choice([rng.randint(1, 30), 8 * rng.randint(1, 40), rng.randint(1, 600), 512, 4096, 8192])


def _flip(file: Damaged, rng: random.Random, at: int, _: int) -> None:
    for _ in range(rng.choice([1, 1, 1, 2, 8])):
        place = min(at + rng.randint(0, 20), len(file.data) - 1)
        file.overwrite(place, bytes([file.data[place] ^ 1 << rng.randrange(8)]))


def _zero(file: Damaged, _: random.Random, at: int, num_bytes: int) -> None:
    file.overwrite(at, bytes(num_bytes))


def _noise(file: Damaged, rng: random.Random, at: int, num_bytes: int) -> None:
    file.overwrite(at, rng.randbytes(num_bytes))


def _cut(file: Damaged, rng: random.Random, at: int, _: int) -> None:
    if rng.random() < 0.7:  # Most files that are cut miss little; else cuts would hide all other damage.
        at = max(at, len(file.data) - rng.randint(1, 300))
    file.remove(at, len(file.data) - at)


def _insert(file: Damaged, rng: random.Random, at: int, num_bytes: int) -> None:
    copied = rng.randrange(len(file.data))
    new = [bytes(num_bytes), rng.randbytes(num_bytes), file.data[copied : copied + num_bytes]]
    file.insert(at, rng.choice(new))


def _remove(file: Damaged, _: random.Random, at: int, num_bytes: int) -> None:
    file.remove(at, num_bytes)


def _swap(file: Damaged, rng: random.Random, at: int, num_bytes: int) -> None:
    low, high = sorted((at, rng.randrange(len(file.data))))
    num_bytes = min(num_bytes, high - low, len(file.data) - high)
    first, second = file.data[low : low + num_bytes], file.data[high : high + num_bytes]
    file.overwrite(low, second)
    file.overwrite(high, first)


_ACTIONS: dict[str, Callable[[Damaged, random.Random, int, int], None]] = {
    "flip": _flip,
    "zero": _zero,
    "noise": _noise,
    "cut": _cut,
    "insert": _insert,
    "remove": _remove,
    "swap": _swap,
}
