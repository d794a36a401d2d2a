"""The reader of TFRecord alone, on many files damaged at random and cut into ranges, against the torture's oracle."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pytest

import corpora
from torture import damaged, make_files
from torture.damage import damage
from torture.oracle import require
from transforms.formats import tfrecord


@pytest.mark.parametrize("batch", range(10))
def test_every_record_outside_the_damage_is_read_and_every_byte_inside_is_named(batch: int) -> None:
    for number in range(30 * batch, 30 * batch + 30):
        rng = random.Random(f"reader/{number}")
        file = make_files.make_tfrecord(rng, Path("/"), number)
        for _ in range(rng.choice([1, 1, 2, 3, 6])):
            damage(file.file, rng, damaged.targets(file, "4"))
        data = file.file.data
        cuts = [rng.randrange(len(data) + 1) for _ in range(rng.choice([0, 1, 3, 8]))]
        ranges = corpora.cut_ranges(len(data), cuts)
        results, _ = corpora.read_until_they_meet(tfrecord.read_range, data, ranges) if data else ([], False)
        letters = [dataclasses.asdict(letter) for result in results for letter in result.dead]
        records = iter([record for result in results for record in result.records])
        damaged.check_tfrecord(file, letters, records)
        require(next(records, None) is None, f"file {number}: more records than the bytes account for")
