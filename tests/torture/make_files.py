"""Random input files of every format that Gristmill reads, with what is known of them."""

from __future__ import annotations

import dataclasses
import itertools
import random
import zlib
from collections.abc import Callable
from pathlib import Path

import corpora
import jobs
from torture.damage import Damaged

MAX_PAYLOAD_BYTES = 64 << 10
_FILE_BYTES = 200_000


@dataclasses.dataclass
class TortureFile:
    """One input.

    Attributes:
        path: Where it stands.
        compression: `none`, `gzip`, `zlib`; nothing else is compressed.
        payloads: Its records.
        stream: The framed records; for other formats than TFRecord the bytes of the file.
        file: The bytes of the file, and the damage.
    """

    path: Path
    compression: str
    payloads: list[bytes]
    stream: bytes
    file: Damaged


def _text(rng: random.Random, number: int) -> bytes:
    return corpora.text_payload(number, rng.randint(0, 300))


def _int64(rng: random.Random, number: int) -> bytes:
    """A label: with its checksum it is itself a valid header."""
    return corpora.int64_payload(rng.choice([number, rng.randrange(100)]), 8)


def _tokens(rng: random.Random, number: int) -> bytes:
    return corpora.int64_payload(number, 8 * rng.randint(0, 200))


def _zeros(rng: random.Random, number: int) -> bytes:
    return corpora.zeros_payload(number, rng.choice([0, 1, 8, 100, 5000]))


def _nested(rng: random.Random, number: int) -> bytes:
    """TFRecord framing inside a record."""
    return corpora.frame_all(b"nested-%d-%d" % (number, part) * rng.randint(0, 9) for part in range(rng.randint(1, 9)))


def _random(rng: random.Random, _: int) -> bytes:
    return rng.randbytes(rng.choice([0, 1, 7, 100, 1000, 9000, rng.randint(0, MAX_PAYLOAD_BYTES)]))


def _mixed(rng: random.Random, number: int) -> bytes:
    return rng.choice([_text, _int64, _tokens, _zeros, _nested, _random])(rng, number)


_PAYLOADS: list[Callable[[random.Random, int], bytes]] = [_text, _int64, _tokens, _zeros, _nested, _random, _mixed]


def make_payloads(rng: random.Random) -> list[bytes]:
    """Returns records of one character, or of all of them."""
    make = rng.choice([*_PAYLOADS, _mixed, _mixed])
    payloads: list[bytes] = []
    left = rng.choice([100, 5_000, 40_000, _FILE_BYTES])
    while left > 0:
        payloads.append(make(rng, len(payloads)))
        left -= len(payloads[-1]) + corpora.FRAME_BYTES
    return payloads


def make_tfrecord(rng: random.Random, folder: Path, number: int) -> TortureFile:
    """Makes a TFRecord file, compressed at times, whatever its name says."""
    payloads = make_payloads(rng)
    stream = corpora.frame_all(payloads)
    compression = rng.choice(["none", "none", "none", "gzip", "zlib"])
    data = {"none": lambda: stream, "gzip": lambda: _gzip(rng, stream), "zlib": lambda: zlib.compress(stream, 6)}
    suffix = rng.choice(["", ".gz"]) if compression == "gzip" else ""
    path = folder / f"f{number:02}.tfrecord{suffix}"
    return TortureFile(path, compression, payloads, stream, Damaged(data[compression]()))


def _gzip(rng: random.Random, stream: bytes) -> bytes:
    """One member or several, cut anywhere."""
    cuts = sorted(rng.randrange(len(stream) + 1) for _ in range(rng.choice([0, 0, 1, 3])))
    edges = [0, *cuts, len(stream)]
    return b"".join(corpora.gzip_of(stream[low:high]) for low, high in itertools.pairwise(edges))


def make_array_record(rng: random.Random, folder: Path, number: int) -> TortureFile:
    """Makes an ArrayRecord whose payloads can be found in its bytes, since it is not compressed."""
    payloads = [b"%06d" % index + rng.randbytes(rng.randint(20, 900)) for index in range(rng.choice([3, 40, 200]))]
    path = folder / f"f{number:02}.array_record"
    corpora.write_array_record(path, payloads, "group_size:1,uncompressed")
    data = path.read_bytes()
    return TortureFile(path, "none", payloads, data, Damaged(data))


def make_raw(rng: random.Random, folder: Path, number: int) -> TortureFile:
    """Makes a raw file, one record."""
    payload = rng.randbytes(rng.choice([1, 100, 5000]))
    return TortureFile(folder / f"f{number:02}.bin", "none", [payload], payload, Damaged(payload))


MAKERS: dict[str, Callable[[random.Random, Path, int], TortureFile]] = {
    "tfrecord": make_tfrecord,
    "array_record": make_array_record,
    "files": make_raw,
}


def read_payloads(out: Path, letters: list[dict[str, object]]) -> list[bytes | None]:
    """Returns the payload of each dead letter, in order, read from the files beside the lines."""
    payloads: list[bytes] = []
    for path in sorted((out / "_dead_letters").glob("*.payloads")):
        payloads += jobs.read_array_record(path)
    found = iter(payloads)
    return [None if letter["payload_index"] is None else next(found) for letter in letters]
