"""A corpus that exists as numbers only: names, sizes and content of its files follow from a seed, page by page."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Iterator

import numpy as np

from bench.datagen import frame

FOLDER = "raw/"
FOLDER_FILES = 10_000
"""Files of one folder. What is known of them is made folder by folder, so that no number of files takes memory."""

_SIGMA = 1.8  # Of the logarithm of sizes: the mean is five times the median, one file in 1,000 is 50 times the mean.
_FILES_A_GIANT = 2_000_000
_GIANT_BYTES = (100e9, 300e9)
_GIANTS_SHARE = 0.1  # Giants of a small corpus are smaller: together no more than this of all bytes.
_GENERATION = 1_700_000_000_000_000
_RECORDS = 400
_WORDS = 60


@dataclasses.dataclass(frozen=True)
class Corpus:
    """So many files of so many bytes in all: log-normal sizes, and a few giants.

    Attributes:
        files: Files.
        num_bytes: Bytes of all of them, nearly.
        seed: Decides every size.
        gzip: How many of 100 files have the name of a compressed one.
    """

    files: int
    num_bytes: int
    seed: int = 1
    gzip: int = 0

    @property
    def url(self) -> str:
        """The URL of the folder that holds them all."""
        return f"gs://corpus/{FOLDER}"

    @property
    def num_folders(self) -> int:
        """Folders below it."""
        return -(-self.files // FOLDER_FILES)

    def name(self, index: int) -> str:
        """Returns the object name of a file; names sort as they count."""
        suffix = ".gz" if index % 100 < self.gzip else ""
        return f"{FOLDER}{index // FOLDER_FILES:05d}/part-{index:09d}.tfrecord{suffix}"

    def generation(self, index: int) -> int:
        """Returns the generation of a file."""
        return _GENERATION + index

    def folder_sizes(self, folder: int) -> np.ndarray:
        """Returns the sizes of the files of a folder."""
        sizes = (_draw(self.seed, folder, self._count(folder)) * self._scale).astype(np.int64)
        for index, size in self._giants.items():
            if index // FOLDER_FILES == folder:
                sizes[index % FOLDER_FILES] = size
        return sizes

    def sizes(self) -> np.ndarray:
        """Returns the sizes of all files: 8 bytes a file."""
        return np.concatenate([self.folder_sizes(folder) for folder in range(self.num_folders)])

    def _count(self, folder: int) -> int:
        return min(FOLDER_FILES, self.files - folder * FOLDER_FILES)

    @functools.cached_property
    def _giants(self) -> dict[int, int]:
        """Sizes of the giants by index, spread over the corpus."""
        count = max(1, self.files // _FILES_A_GIANT)
        most = self.num_bytes * _GIANTS_SHARE / count
        drawn = np.random.default_rng([self.seed, self.num_folders]).uniform(*_GIANT_BYTES, count)
        return {(2 * n + 1) * self.files // (2 * count): int(min(size, most)) for n, size in enumerate(drawn)}

    @functools.cached_property
    def _scale(self) -> float:
        """What makes the sizes that are drawn add up to the bytes."""
        drawn = sum(float(_draw(self.seed, folder, self._count(folder)).sum()) for folder in range(self.num_folders))
        return (self.num_bytes - sum(self._giants.values())) / drawn


def _draw(seed: int, folder: int, count: int) -> np.ndarray:
    return np.random.default_rng([seed, folder]).lognormal(0, _SIGMA, count)


def read_content(size: int, start: int, end: int) -> bytes:
    """Returns bytes [start, end) of a file: the same TFRecord records over and over, cut where the file ends."""
    block = _block()
    end = min(end, size)
    first = start % len(block)
    return (block * (2 + (end - start) // len(block)))[first : first + max(0, end - start)]


@functools.cache
def _block() -> bytes:
    """Records of about 1.2 KB that compress as text does."""
    rng = random.Random(0)
    words = ["".join(rng.choices("etaoinshrdlu", k=rng.randint(2, 9))) for _ in range(_WORDS * 20)]
    return b"".join(frame(" ".join(rng.choices(words, k=_WORDS * 3)).encode()) for _ in range(_RECORDS))


def pages(corpus: Corpus, first: int, count: int) -> Iterator[tuple[str, int, int]]:
    """Yields (name, size, generation) of up to `count` files from the one at `first` on; all lie in one folder."""
    sizes = _sizes_of(corpus, first // FOLDER_FILES)
    at = first % FOLDER_FILES
    for index, size in enumerate(sizes[at : at + count], first):
        yield corpus.name(index), size, corpus.generation(index)


@functools.lru_cache(maxsize=1)
def _sizes_of(corpus: Corpus, folder: int) -> list[int]:
    return list(map(int, corpus.folder_sizes(folder)))
