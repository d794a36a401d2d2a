"""What is found in a shard stays small, and adds up the same in any order."""

from __future__ import annotations

import json
import pickle
import random
from pathlib import Path

import google_crc32c
import pytest

from grown_set import APPENDED, LINES, SHARD, GrownSet, edit
from transforms.check_shard import MAX_TEXTS, Differences, Found, ShardChecker, add_up


class TestDifferences:
    def test_the_first_texts_are_kept_and_all_are_counted(self) -> None:
        differences = Differences(2)
        for text in "abc":
            differences.add(text)
        assert (differences.count, differences.texts) == (3, ["a", "b"])

    def test_a_long_text_loses_its_middle(self) -> None:
        differences = Differences(1)
        differences.add("begin" + "x" * 10_000 + "delete it")
        [text] = differences.texts
        assert len(text) < 700
        assert text.startswith("begin")
        assert text.endswith("delete it")


class TestAddUp:
    def test_is_the_same_in_any_order_and_grouping(self) -> None:
        found = [
            Found(1, 2, 10 * shard, 100, 1, 2, ((generation, shard, "one"), (generation, shard, "two")))
            for generation in ("", "g001")
            for shard in range(3)
        ]
        whole = add_up(found)
        texts = [(g, shard, text) for g in ("", "g001") for shard in range(3) for text in ("one", "two")]
        assert whole == Found(6, 12, 60, 600, 6, 12, tuple(texts))
        rng = random.Random(0)
        for _ in range(20):
            rng.shuffle(found)
            cut = rng.randrange(7)
            assert add_up([add_up(found[:cut]), add_up(found[cut:])]) == whole

    def test_keeps_the_first_texts_of_very_many(self) -> None:
        found = [Found(1, num_differences=50, differences=(("", shard, "x"),) * 50) for shard in range(40)]
        random.Random(0).shuffle(found)
        whole = add_up(found)
        assert whole.num_differences == 2_000
        assert [text[1] for text in whole.differences] == [number // 50 for number in range(MAX_TEXTS)]

    def test_nothing_is_nothing(self) -> None:
        assert add_up([]) == Found()


def test_a_file_that_was_written_wrong_is_told_though_its_checksum_holds(grown: GrownSet) -> None:
    (grown.out / SHARD).write_bytes(b"no ArrayRecord" * 10)
    (grown.out / LINES).write_bytes(b"{}\n")
    for name, key in ((SHARD, "parts"), (LINES, "dead_lines")):
        data = (grown.out / name).read_bytes()
        crc = google_crc32c.Checksum(data).digest().hex()

        def claim(ledger: dict, key: str = key, size: int = len(data), crc: str = crc) -> None:
            file = ledger[key][0] if key == "parts" else ledger[key]
            file.update(size=size, crc32c=crc)

        edit("_gristmill/shards/00001.json", claim)(grown.store)
    found = ShardChecker(grown.store).check("", 1)
    again = "; delete it, and the same convert command again makes it anew, given the same inputs and steps"
    assert [text for _, _, text in found.differences] == [
        f"{SHARD} cannot be read to its end: it cannot be opened as ArrayRecord{again}",
        f"{LINES} cannot be read to its end: line 1 is no dead letter{again}",
    ]


def test_a_file_that_the_disk_does_not_give_is_told(grown: GrownSet, monkeypatch: pytest.MonkeyPatch) -> None:
    from transforms import check_shard

    def fail(path: str) -> str:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(check_shard, "file_crc32c", fail)
    found = ShardChecker(grown.store).check("g001", 0)
    assert found.differences[0] == (
        "g001",
        0,
        f"{APPENDED} cannot be read: [Errno 5] Input/output error; delete it, and the next `convert --append` or "
        "`replay` makes it anew, given the same inputs and steps",
    )


def test_what_leaves_a_shard_is_small_however_much_differs(grown: GrownSet) -> None:
    ledger = json.loads((grown.out / "_gristmill/shards/00001.json").read_text())
    row = ledger["sources"][0]
    row[4] += 1
    ledger["sources"] = [[index, *row[1:]] for index in range(10_000)]
    Path(grown.out / "_gristmill/shards/00001.json").write_text(json.dumps(ledger))
    found = ShardChecker(grown.store).check("", 1)
    assert found.num_differences > 10_000
    assert len(found.differences) == 50
    assert len(pickle.dumps(found)) < 50_000
