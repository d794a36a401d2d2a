"""Seeded TFRecord data sets for the benchmarks, written without TensorFlow.

Two kinds are made: `text`, serialized `tf.train.Example` records of about 1.2 KB whose words
compress like English, and `blob`, records of 40 KB that do not compress at all. A data set is a
folder of TFRecord files beside a `dataset.json`; a folder that holds that file is complete, and
is used again by any later call with the same parameters.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path

import google_crc32c
import numpy as np

SEED = 20240229
BLOB_RECORD_BYTES = 40_000
TEXT_RECORD_BYTES = (900, 1500)
WRITE_BUFFER_BYTES = 8 << 20
FORMAT_VERSION = 1  # Part of a cached folder's name: raise it when the bytes made here change.

_LETTERS = b"etaoinshrdlcumwfgypbvk"
_VOCABULARY = 3000
_TOKEN_TABLE = 1 << 16
_PASSAGES = 20_000
_PASSAGE_TOKENS = 150
_PASSAGE_PHRASES = 15
_PHRASE_SHARE = 0.6
_RECORDS_PER_DRAW = 10_000
_ID = b"doc-%010d"


@dataclasses.dataclass(frozen=True)
class Dataset:
    """A folder of TFRecord files.

    Attributes:
        kind: `text` or `blob`.
        folder: The folder that holds the files.
        files: How many files there are.
        records: The number of records in all files.
        payload_bytes: The bytes of all records, framing left out.
    """

    kind: str
    folder: Path
    files: int
    records: int
    payload_bytes: int

    @property
    def pattern(self) -> str:
        """The glob that matches the data set's files."""
        return str(self.folder / "part-*.tfrecord")

    @property
    def gigabytes(self) -> float:
        """The payload in GB of 10**9 bytes."""
        return self.payload_bytes / 1e9


def make_dataset(root: Path, kind: str, payload_bytes: int, files: int, records: int | None = None) -> Dataset:
    """Returns a data set, made first unless the work folder already holds it.

    Args:
        root: The work folder.
        kind: `text` or `blob`.
        payload_bytes: The size to make; the last record may exceed it.
        files: How many files to spread the records over.
        records: Stops after this many records in all, if given.
    """
    limit = f"-r{records}" if records is not None else ""
    folder = root / f"{kind}-v{FORMAT_VERSION}-s{SEED}-b{payload_bytes}-f{files}{limit}"
    meta = folder / "dataset.json"
    if not meta.exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        totals = _write_files(folder, kind, payload_bytes, files, records)
        meta.write_text(json.dumps({"records": totals[0], "payload_bytes": totals[1]}))
    totals_read = json.loads(meta.read_text())
    return Dataset(kind, folder, files, totals_read["records"], totals_read["payload_bytes"])


def frame(record: bytes) -> bytes:
    """Returns a record as TFRecord frames it: length, CRC of it, data, CRC of them."""
    length = struct.pack("<Q", len(record))
    return b"".join(
        (length, _masked_crc(length), record, _masked_crc(record)),
    )


def text_records(rng: np.random.Generator) -> Iterator[bytes]:
    """Yields serialized `tf.train.Example` records of English-like text, without end.

    Each text is a slice of one long text, at a random place: records are compressed one by one,
    so what two of them share makes neither smaller.
    """
    corpus = _corpus()
    low, high = TEXT_RECORD_BYTES
    for first in itertools.count(step=_RECORDS_PER_DRAW):
        starts = rng.integers(0, len(corpus) - high, _RECORDS_PER_DRAW).tolist()
        sizes = rng.integers(low, high, _RECORDS_PER_DRAW, endpoint=True).tolist()
        for number, start, size in zip(itertools.count(first), starts, sizes, strict=False):
            yield _text_example(corpus[start : start + size - _EXAMPLE_OVERHEAD], number)


def blob_records(rng: np.random.Generator) -> Iterator[bytes]:
    """Yields records of random bytes, without end."""
    while True:
        yield rng.bytes(BLOB_RECORD_BYTES)


_GENERATORS = {"text": text_records, "blob": blob_records}


def _write_files(folder: Path, kind: str, payload_bytes: int, files: int, records: int | None) -> tuple[int, int]:
    """Writes all files of a data set; returns their records and payload bytes."""
    total_records = total_bytes = 0
    for index in range(files):
        path = folder / f"part-{index:05d}-of-{files:05d}.tfrecord"
        source = _GENERATORS[kind](np.random.default_rng([SEED, index]))
        share = None if records is None else _share(records, files, index)
        written = _write_file(path, source, _share(payload_bytes, files, index), share)
        total_records += written[0]
        total_bytes += written[1]
    return total_records, total_bytes


def _share(total: int, parts: int, index: int) -> int:
    """Returns how much of a total falls to one of several equal parts."""
    return total * (index + 1) // parts - total * index // parts


def _write_file(path: Path, source: Iterator[bytes], payload_bytes: int, records: int | None) -> tuple[int, int]:
    """Writes one TFRecord file; returns its records and payload bytes."""
    count = size = 0
    with path.open("wb", buffering=WRITE_BUFFER_BYTES) as out:
        while size < payload_bytes and (records is None or count < records):
            record = next(source)
            out.write(frame(record))
            count += 1
            size += len(record)
    return count, size


def _masked_crc(data: bytes) -> bytes:
    """Returns TFRecord's masked CRC32C of some bytes, packed."""
    crc = google_crc32c.value(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _token_table() -> np.ndarray:
    """Returns words, each with what follows it, as often as Zipf's law has them in English."""
    rng = np.random.default_rng(SEED)
    odds = 1 / np.arange(1, len(_LETTERS) + 1) ** 0.6
    letters = rng.choice(np.frombuffer(_LETTERS, np.uint8), (_VOCABULARY, 14), p=odds / odds.sum())
    shortest = np.minimum(2 + np.log2(np.arange(1, _VOCABULARY + 1)) / 4, 5)
    lengths = (shortest + rng.poisson(1.6, _VOCABULARY)).astype(int).clip(1, 14)
    words = [letters[i, :n].tobytes() for i, n in enumerate(lengths.tolist())]
    frequency = 1 / np.arange(2.7, _VOCABULARY + 2.7)
    picks = rng.choice(_VOCABULARY, _TOKEN_TABLE, p=frequency / frequency.sum())
    ends = rng.choice(3, _TOKEN_TABLE, p=(0.89, 0.06, 0.05))
    table = np.empty(_TOKEN_TABLE, dtype=object)
    table[:] = [words[w] + (b" ", b", ", b". ")[e] for w, e in zip(picks, ends, strict=True)]
    return table


@functools.cache
def _corpus() -> bytes:
    """Returns the text that the text records are cut from.

    As in real text, a passage keeps coming back to a few words and turns of phrase of its own.
    """
    rng = np.random.default_rng(SEED)
    tokens = _token_table()
    words = tokens[rng.integers(0, _TOKEN_TABLE, (_PASSAGES, _PASSAGE_TOKENS))]
    turns = tokens[rng.integers(0, _TOKEN_TABLE, (3, _PASSAGES, _PASSAGE_PHRASES))].sum(axis=0)
    phrases = turns[np.arange(_PASSAGES)[:, None], rng.integers(0, _PASSAGE_PHRASES, words.shape)]
    mixed = np.where(rng.random(words.shape) < _PHRASE_SHARE, phrases, words)
    return b"".join(mixed.ravel().tolist())


def _varint(value: int) -> bytes:
    """Returns a number as protocol buffers encode it."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _field(number: int, payload: bytes) -> bytes:
    """Returns a length-delimited protocol buffer field."""
    return bytes((number << 3 | 2,)) + _varint(len(payload)) + payload


def _feature(key: bytes, value: bytes) -> bytes:
    """Returns an entry of `tf.train.Features` that maps a key to a list of one string."""
    return _field(1, _field(1, key) + _field(2, _field(1, _field(1, value))))


@functools.cache
def _example_parts(text_bytes: int) -> tuple[bytes, bytes]:
    """Returns what stands before and after the id in an example, up to a text of that size."""
    features = _feature(b"id", _ID % 0) + _feature(b"lang", b"en")
    whole = _field(1, features + _feature(b"text", bytes(text_bytes)))
    before, after = whole.split(_ID % 0, 1)
    return before, after[: len(after) - text_bytes]


def _text_example(text: bytes, number: int) -> bytes:
    """Returns a serialized `tf.train.Example` of a text and its number."""
    before, after = _example_parts(len(text))
    return b"".join((before, _ID % number, after, text))


_EXAMPLE_OVERHEAD = len(_text_example(bytes(1000), 0)) - 1000
