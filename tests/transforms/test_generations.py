"""Generations: state of their own in a shared directory, names of their own, and where their dead letters are."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from fakes import WorstStore, make_spec
from transforms.elements import JobSpec
from transforms.generations import (
    GenerationStore,
    base_of,
    find_letters,
    generation_names,
    moved_name,
    name_generation,
    open_job_store,
    see_as,
)
from transforms.names import check_template, dead_letter_names, shard_file_name, shard_file_pattern
from transforms.report import spec_from_header, spec_to_header
from transforms.store import LocalStore

TFDS_NAME = re.compile(r"(?P<dataset>\w[\w.]*)-(?P<split>\w+)\.(?P<format>\w+)-(\d+)-of-(\d+)")


class TestStore:
    @pytest.mark.parametrize("kind", ["local", "worst"])
    def test_state_is_apart_and_all_else_shared(self, kind: str, tmp_path: Path) -> None:
        base = LocalStore(str(tmp_path)) if kind == "local" else WorstStore()
        one, other = GenerationStore(base, "g001"), GenerationStore(base, "g002")
        for number, store in enumerate((base, one, other)):
            store.put("_gristmill/shards/00000.json", b"%d" % number)
            store.put("_gristmill/lock.json", b"lock %d" % number)
            store.put("manifest.json", b"manifest %d" % number)
        assert [store.get("_gristmill/shards/00000.json")[0] for store in (base, one, other)] == [b"0", b"1", b"2"]
        assert {store.get("_gristmill/lock.json")[0] for store in (base, one, other)} == {b"lock 2"}
        assert base.get("_gristmill/g001/shards/00000.json")[0] == b"1"
        assert [name for name, _ in one.list("_gristmill/shards/")] == ["_gristmill/shards/00000.json"]
        assert [name for name, _ in base.list("_gristmill/shards/")] == ["_gristmill/shards/00000.json"]
        assert [name for name, _ in one.list("_gristmill/")] == ["_gristmill/shards/00000.json"]

    def test_every_call_goes_to_the_own_state(self, tmp_path: Path) -> None:
        base = LocalStore(str(tmp_path))
        store = GenerationStore(base, "g001")
        assert store.put_if_absent("_gristmill/a", b"a")
        assert not store.put_if_absent("_gristmill/a", b"b")
        store.copy("_gristmill/a", "final")
        store.copy("final", "_gristmill/b")
        (tmp_path / "file").write_bytes(b"file")
        store.put_file(str(tmp_path / "file"), "_gristmill/c")
        spool = store.spool("_gristmill/attempts/d")
        Path(spool.path).write_bytes(b"d")
        assert spool.seal() == 1
        with store.open("_gristmill/c") as opened, store.local_copy("_gristmill/b") as path:
            assert (opened.read(), Path(path).read_bytes()) == (b"file", b"a")
        assert store.size("_gristmill/attempts/d") == 1
        assert store.delete("_gristmill/c")
        names = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
        assert names == {"file", "final", "_gristmill/g001/a", "_gristmill/g001/b", "_gristmill/g001/attempts/d"}

    def test_temporary_files_of_killed_writers_go(self, tmp_path: Path) -> None:
        left = tmp_path / "_gristmill/g001/shards/.gristmill-0123"
        left.parent.mkdir(parents=True)
        left.write_bytes(b"x")
        GenerationStore(LocalStore(str(tmp_path)), "g001").clean()
        assert not left.exists()

    def test_job_opens_as_its_generation(self) -> None:
        base = WorstStore()
        assert open_job_store(make_spec(base.root)) is base
        store = open_job_store(make_spec(base.root, generation="g003"))
        assert isinstance(store, GenerationStore)
        assert base_of(store) is base
        assert base_of(see_as(store, "g001")) is base
        assert see_as(store, "") is base


class TestNames:
    def spec(self, **changes: str) -> JobSpec:
        return name_generation(make_spec("out", **changes), "g001")

    def test_shards_are_named_so_that_tfds_parses_them(self) -> None:
        name = shard_file_name(self.spec(), 0, 2)
        assert name == "corpus-train_g001.array_record-00000-of-00002"
        match = TFDS_NAME.fullmatch(name)
        assert match is not None
        assert match["split"] == "train_g001"
        assert dead_letter_names(self.spec(), 3)[0] == "_dead_letters/corpus-train_g001-00003.jsonl"

    @pytest.mark.parametrize(
        "template",
        [
            "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}",
            "{DATASET}-{SHARD_X_OF_Y}.arrayrecord",
            "data/{SHARD_INDEX}",
            "{SHARD_INDEX}-of-{NUM_SHARDS}",
            "{NUM_SHARDS}/{SHARD_INDEX}.{SPLIT}",
        ],
    )
    def test_names_never_meet_those_of_the_base_or_of_others(self, template: str) -> None:
        base = make_spec("out", template=template)
        specs = [base, name_generation(base, "g001"), name_generation(base, "g002")]
        for spec in specs:
            check_template(spec.template)
        names = [shard_file_name(spec, number, 2) for spec in specs for number in range(2)]
        assert len(set(names)) == 6
        for spec in specs:
            others = [name for name in names if shard_file_pattern(spec).fullmatch(name)]
            assert others == [shard_file_name(spec, number, 2) for number in range(2)]

    def test_header_keeps_generation_and_selection(self) -> None:
        spec = make_spec("out", generation="g002", replay={"reasons": ["exception"], "steps": [], "sources": []})
        kept = spec_from_header({"spec": spec_to_header(spec)}, "out")
        assert (kept.generation, kept.replay) == (spec.generation, spec.replay)


class TestFindLetters:
    def test_letters_are_where_the_next_replay_has_put_them(self) -> None:
        base = WorstStore()
        final = "_dead_letters/corpus-train-00000.jsonl"
        assert find_letters(base, "", final) == final
        for number in (1, 2, 3, 1000):
            base.put(f"_gristmill/g{number:03d}/plan.jsonl", b"")
        base.put(moved_name("g002", final), b"those of the base")
        base.put(moved_name("g003", final), b"those of g002")
        assert find_letters(base, "", final) == find_letters(base, "g001", final) == moved_name("g002", final)
        assert find_letters(see_as(base, "g002"), "g002", final) == moved_name("g003", final)
        assert find_letters(base, "g003", final) == final

    def test_generations_have_no_gaps_and_go_on_past_three_digits(self) -> None:
        base = WorstStore()
        for number in range(1, 1002):
            base.put(f"_gristmill/g{number:03d}/plan.jsonl", b"")
        assert list(generation_names(base))[-2:] == ["g1000", "g1001"]
        final = "_dead_letters/x.jsonl"
        base.put(moved_name("g1001", final), b"")
        assert find_letters(base, "g999", final) == moved_name("g1001", final)


def test_letters_that_a_replay_has_consumed_are_its_own_though_somebody_deleted_them() -> None:
    store = WorstStore()
    file = {"lines": "_dead_letters/a.jsonl", "payloads": "_dead_letters/a.payloads"}
    replay = see_as(store, "g001")
    replay.put("_gristmill/plan.jsonl", b"{}")
    replay.put("_gristmill/letters.jsonl", json.dumps(file).encode() + b"\n")
    for final in file.values():
        assert find_letters(store, "", final) == final  # It may still be given up.
    replay.put("_gristmill/finished.json", b"{}")
    for final in file.values():
        assert find_letters(store, "", final) == moved_name("g001", final)
    assert find_letters(store, "", "_dead_letters/b.jsonl") == "_dead_letters/b.jsonl"
    assert find_letters(store, "g001", file["lines"]) == file["lines"]
    replay.put("_gristmill/letters.jsonl", b"{")
    assert find_letters(store, "", file["lines"]) == file["lines"]
