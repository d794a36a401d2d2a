"""Writes a small real corpus for the demo: scanned digits as TFRecord, two of the files damaged on purpose.

The pictures are the 1,797 handwritten digits that scikit-learn ships, each as it is and turned by 90 degrees, as
`tf.train.Example`s written by TensorFlow's own writer. Six files, two of them gzipped. One file has a flipped bit in
a picture, another a record whose length is nonsense: what every large corpus holds somewhere. A note says what was
damaged and what the undamaged records are, so that a reader can prove that it has all of them, once each.

    python tests/demo/make_corpus.py demo-output

writes demo-output/raw/*.tfrecord*, demo-output/pictures/*.png (the first 200 digits as files of their own, for
configs/files.yaml) and demo-output/corpus_note.json.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import shutil
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # TensorFlow tells of its CPU kernels on import.

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

NUM_FILES = 6
GZIPPED_FILES = (2, 5)
FLIPPED = (1, 300)  # (file, record) whose picture gets a wrong bit.
BROKEN = (3, 100)  # (file, record) whose length is overwritten.
NUM_PICTURE_FILES = 200
HEADER_BYTES = 12  # Before the payload: its length and the checksum of the length.
FRAMING_BYTES = 16  # Header, and the checksum of the payload behind it.


def load_pictures() -> tuple[np.ndarray, np.ndarray]:
    """Returns (pictures of 8 x 8 grey values from 0 to 255, labels)."""
    digits = load_digits()
    return np.round(digits.images * 255 / 16).astype(np.uint8), digits.target


def make_examples(pictures: np.ndarray, labels: np.ndarray) -> Iterator[bytes]:
    """Yields a serialized example for every picture, and one for the picture turned."""
    for number, (picture, label) in enumerate(zip(pictures, labels, strict=True)):
        for degrees in (0, 90):
            turned = np.ascontiguousarray(np.rot90(picture, degrees // 90))
            text = f"handwritten digit {label}, picture {number:04d}, turned by {degrees} degrees"
            yield make_example(turned, int(label), text)


def make_example(picture: np.ndarray, label: int, text: str) -> bytes:
    """Returns one picture with what is known of it."""
    height, width = picture.shape
    feature = {
        "image": _bytes_feature(picture.tobytes()),
        "label": _int_feature(label),
        "height": _int_feature(height),
        "width": _int_feature(width),
        "text": _bytes_feature(text.encode()),
    }
    example = tf.train.Example(features=tf.train.Features(feature=feature))
    return bytes(example.SerializeToString(deterministic=True))


def _bytes_feature(value: bytes) -> Any:
    return tf.train.Feature(bytes_list=tf.train.BytesList(value=[value]))


def _int_feature(value: int) -> Any:
    return tf.train.Feature(int64_list=tf.train.Int64List(value=[value]))


def write_files(folder: Path, examples: list[bytes]) -> list[Path]:
    """Writes the examples to files of nearly equal length, in order, some of them gzipped."""
    folder.mkdir(parents=True)
    paths = []
    for number, part in enumerate(split_evenly(examples, NUM_FILES)):
        gzipped = number in GZIPPED_FILES
        path = folder / f"digits-{number:02d}.tfrecord{'.gz' if gzipped else ''}"
        options = tf.io.TFRecordOptions(compression_type="GZIP" if gzipped else "")
        with tf.io.TFRecordWriter(os.fspath(path), options) as writer:
            for example in part:
                writer.write(example)
        paths.append(path)
    return paths


def split_evenly(items: list[bytes], num_parts: int) -> list[list[bytes]]:
    """Cuts a list into parts whose lengths differ by one at most."""
    edges = [len(items) * part // num_parts for part in range(num_parts + 1)]
    return [items[first:last] for first, last in itertools.pairwise(edges)]


def damage_files(paths: list[Path], examples: list[bytes]) -> list[dict[str, Any]]:
    """Damages two of the plain files and returns what was done, with what a converter should say of it."""
    parts = split_evenly(examples, NUM_FILES)
    file, record = FLIPPED
    position = start_of(parts[file], record)
    flip_bit(paths[file], position + HEADER_BYTES + len(parts[file][record]) // 2)
    flipped = describe_damage(paths[file], record, position, parts[file][record], "a bit of the payload is flipped")
    flipped["expected_reason"] = "data_checksum"
    file, record = BROKEN
    position = start_of(parts[file], record)
    overwrite(paths[file], position, struct.pack("<Q", 1 << 50))
    broken = describe_damage(paths[file], record, position, parts[file][record], "the length of the record is nonsense")
    broken["expected_reason"] = "length_checksum"
    return [flipped, broken]


def start_of(part: list[bytes], record: int) -> int:
    """Returns the position in its file at which a record begins."""
    return sum(len(example) + FRAMING_BYTES for example in part[:record])


def describe_damage(path: Path, record: int, position: int, example: bytes, what: str) -> dict[str, Any]:
    """Returns the entry of the note for one damaged record."""
    return {
        "file": path.name,
        "record": record,
        "position": position,
        "length": len(example) + FRAMING_BYTES,
        "what": what,
        "sha256": hashlib.sha256(example).hexdigest(),
    }


def flip_bit(path: Path, position: int) -> None:
    """Turns one bit of a file over."""
    data = path.read_bytes()
    overwrite(path, position, bytes([data[position] ^ 1]))


def overwrite(path: Path, position: int, new: bytes) -> None:
    """Replaces bytes of a file."""
    with path.open("r+b") as file:
        file.seek(position)
        file.write(new)


def digest_of_all(records: Iterable[bytes]) -> str:
    """Returns a digest of a set of records that does not depend on their order, but on every one being there once."""
    digests = sorted(hashlib.sha256(record).digest() for record in records)
    return hashlib.sha256(b"".join(digests)).hexdigest()


def make_note(examples: list[bytes], damaged: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns what a reader needs for its proof."""
    lost = {entry["sha256"] for entry in damaged}
    good = [example for example in examples if hashlib.sha256(example).hexdigest() not in lost]
    return {
        "records": len(examples),
        "undamaged_records": len(good),
        "digest_of_undamaged": digest_of_all(good),
        "damaged": damaged,
    }


def write_pictures(folder: Path, pictures: np.ndarray, labels: np.ndarray) -> None:
    """Writes some pictures as PNG files of their own."""
    folder.mkdir(parents=True)
    for number, (picture, label) in enumerate(zip(pictures, labels, strict=True)):
        png = tf.io.encode_png(picture[:, :, np.newaxis]).numpy()
        (folder / f"picture-{number:04d}-digit-{label}.png").write_bytes(png)


def main() -> None:
    """Writes the corpus anew."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path, help="where to write, for example demo-output")
    folder = parser.parse_args().folder
    for name in ("raw", "pictures"):
        shutil.rmtree(folder / name, ignore_errors=True)
    pictures, labels = load_pictures()
    examples = list(make_examples(pictures, labels))
    paths = write_files(folder / "raw", examples)
    note = make_note(examples, damage_files(paths, examples))
    write_pictures(folder / "pictures", pictures[:NUM_PICTURE_FILES], labels[:NUM_PICTURE_FILES])
    (folder / "corpus_note.json").write_text(json.dumps(note, indent=1) + "\n")
    print(f"{folder / 'raw'}: {note['records']:,} examples in {len(paths)} files, {len(GZIPPED_FILES)} of them gzipped")
    for entry in note["damaged"]:
        print(f"  damaged: {entry['file']}, record {entry['record']} at byte {entry['position']:,}: {entry['what']}")


if __name__ == "__main__":
    main()
