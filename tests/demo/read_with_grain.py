"""Reads a converted corpus the way a training job does, through Grain, and proves that nothing is missing.

    python tests/demo/read_with_grain.py demo-output/corpus --note demo-output/corpus_note.json

opens the shards that manifest.json names, shuffles all records globally, shows a few batches, stops and goes on
from a saved iterator state, and then checks that every undamaged record of the corpus is there exactly once. Reading
needs no TensorFlow.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

import grain
import numpy as np

from transforms.steps.example import parse_example

BATCH_SIZE = 32
SHOWN_BATCHES = 3


def open_source(folder: Path) -> Any:
    """Returns the data source of a converted corpus: the manifest names its shards in order."""
    manifest = json.loads((folder / "manifest.json").read_text())
    paths = [str(folder / shard["name"]) for shard in manifest["shards"]]
    source = grain.sources.ArrayRecordDataSource(paths)
    print(f"{len(source):,} records in {len(paths)} shards of {manifest['name']}-{manifest['split']}")
    return source


def parse(record: bytes) -> dict[str, Any]:
    """Returns the picture and its label from a serialized tf.train.Example."""
    feature = parse_example(record).features.feature
    height, width = feature["height"].int64_list.value[0], feature["width"].int64_list.value[0]
    image = np.frombuffer(feature["image"].bytes_list.value[0], np.uint8).reshape(height, width)
    return {"image": image, "label": feature["label"].int64_list.value[0]}


def make_dataset(source: Any) -> Any:
    """Returns the shuffled, parsed and batched corpus."""
    return grain.MapDataset.source(source).shuffle(seed=42).map(parse).batch(BATCH_SIZE, drop_remainder=True)


def show_batches(dataset: Any) -> None:
    """Prints the first batches, then goes on from a saved state with a new iterator, as after a crash."""
    batches = iter(dataset)
    for _ in range(SHOWN_BATCHES):
        batch = next(batches)
        print(
            f"  batch: image {batch['image'].shape} {batch['image'].dtype}, labels {batch['label'][:12].tolist()} ..."
        )
    state = batches.get_state()
    expected = next(batches)
    again = iter(dataset)
    again.set_state(state)
    np.testing.assert_equal(next(again), expected)
    print(f"  a new iterator goes on from the saved state {state}: labels {expected['label'][:12].tolist()} ...")


def check_records(source: Any, note: dict[str, Any]) -> None:
    """Checks that the source holds every undamaged record exactly once, byte for byte.

    Raises:
        SystemExit: It does not; the message says what is wrong.
    """
    digests = sorted(hashlib.sha256(source[index]).digest() for index in range(len(source)))
    if len(set(digests)) < len(digests):
        raise SystemExit(f"{len(digests) - len(set(digests))} records are there twice")
    if len(digests) != note["undamaged_records"]:
        raise SystemExit(f"{len(digests)} records, expected {note['undamaged_records']}")
    if hashlib.sha256(b"".join(digests)).hexdigest() != note["digest_of_undamaged"]:
        raise SystemExit("the records are not the ones that were written")
    print(f"all {len(digests):,} undamaged records of {note['records']:,} are there, once each and byte for byte")


def main() -> None:
    """Reads the corpus."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path, help="output folder of gristmill convert")
    parser.add_argument("--note", type=Path, help="corpus_note.json of make_corpus.py, to check against")
    args = parser.parse_args()
    source = open_source(args.folder)
    show_batches(make_dataset(source))
    if args.note is not None:
        check_records(source, json.loads(args.note.read_text()))


if __name__ == "__main__":
    main()
