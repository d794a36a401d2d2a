"""The contract of a store, the same for a local folder and for the worst object store."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import pytest

import memory_files
from fakes import WorstStore, files_below, run_together
from transforms.beam_store import BeamStore
from transforms.gcs_store import GcsStore
from transforms.store import LocalStore, Store, open_store

ODD_NAMES = [
    "a b.jsonl",
    "a[1]*?.jsonl",
    "a%2Fb.jsonl",
    "ünïcödé-山.jsonl",
    "line\nend.jsonl",
    "'quoted\"name'.jsonl",
    "-dash.jsonl",
    "folder/with space/x.jsonl",
    "bytes-\udcff\udcfe.jsonl",
]


KINDS = ["local", "worst", "beam", "gcs"]


def _may_be_called(kind: str, name: str) -> bool:
    """Whether a kind of store has such names: those of objects are UTF-8 without line ends."""
    return kind != "gcs" or ("\n" not in name and "\udcff" not in name)


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "gcs":
        return GcsStore(request.getfixturevalue("emulator").new_bucket() + "/jobs/out")
    if request.param == "beam":
        return BeamStore(memory_files.new_root())
    if request.param == "local":
        return LocalStore(str(tmp_path / "out"))
    return WorstStore()


@pytest.fixture(params=["local", "worst", "gcs"])
def versioned(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """A store that tells equal contents apart, which Beam's file systems do not."""
    if request.param == "gcs":
        return GcsStore(request.getfixturevalue("emulator").new_bucket())
    return LocalStore(str(tmp_path / "out")) if request.param == "local" else WorstStore()


class TestPutIfAbsent:
    def test_first_call_creates_and_second_leaves_it(self, store: Store) -> None:
        assert store.put_if_absent("shards/0.json", b"first") is True
        assert store.put_if_absent("shards/0.json", b"second, longer") is False
        found = store.get("shards/0.json")
        assert found is not None
        assert found[0] == b"first"
        assert list(store.list("")) == [("shards/0.json", 5)]

    def test_sixteen_threads_have_one_winner_whose_content_stays(self, store: Store) -> None:
        for round_number in range(20):
            name = f"shards/{round_number}.json"
            contents = [b"winner-%02d" % number for number in range(16)]
            results = run_together([functools.partial(store.put_if_absent, name, content) for content in contents])
            won = [number for number, result in enumerate(results) if result]
            assert len(won) == 1
            found = store.get(name)
            assert found is not None
            assert found[0] == b"winner-%02d" % won[0]

    def test_a_deleted_name_can_be_created_again(self, store: Store) -> None:
        store.put_if_absent("x", b"one")
        store.delete("x")
        assert store.put_if_absent("x", b"two") is True
        assert dict(store.list("")) == {"x": 3}

    def test_empty_content_counts_as_existing(self, store: Store) -> None:
        assert store.put_if_absent("x", b"") is True
        assert store.put_if_absent("x", b"data") is False
        assert store.size("x") == 0


class TestPut:
    def test_last_writer_wins(self, store: Store) -> None:
        store.put("x", b"first, longer")
        store.put("x", b"last")
        found = store.get("x")
        assert found is not None
        assert found[0] == b"last"

    def test_readers_see_one_content_or_the_other_and_never_half(self, store: Store) -> None:
        contents = {b"a" * 100_000, b"b" * 50_000}
        store.put("x", b"a" * 100_000)
        seen: set[bytes] = set()

        def read() -> None:
            for _ in range(300):
                found = store.get("x")
                assert found is not None
                seen.add(found[0])

        def write() -> None:
            for number in range(100):
                store.put("x", sorted(contents)[number % 2])

        run_together([read, write, read])
        assert seen <= contents

    def test_put_file_takes_the_content_of_a_local_file(self, store: Store, tmp_path: Path) -> None:
        source = tmp_path / "plan.jsonl"
        source.write_bytes(b"plan\n" * 1000)
        store.put("_gristmill/plan.jsonl", b"old")
        store.put_file(str(source), "_gristmill/plan.jsonl")
        source.write_bytes(b"changed")
        found = store.get("_gristmill/plan.jsonl")
        assert found is not None
        assert found[0] == b"plan\n" * 1000


class TestPutIfVersion:
    def test_version_that_stands_is_replaced_and_another_stays(self, store: Store) -> None:
        store.put("_gristmill/x", b"one")
        found = store.get("_gristmill/x")
        assert found is not None
        new = store.put_if_version("_gristmill/x", b"two, longer", found[1])
        assert new is not None
        assert store.put_if_version("_gristmill/x", b"three", found[1]) is None
        assert store.put_if_version("_gristmill/x", b"four", None) is None
        assert store.get("_gristmill/x") == (b"two, longer", new)

    def test_none_stands_for_a_name_that_is_not_there(self, store: Store) -> None:
        new = store.put_if_version("_gristmill/x", b"one", None)
        assert new is not None
        assert store.delete("_gristmill/x", new) is True
        assert store.put_if_version("_gristmill/x", b"two", new) is None
        assert list(store.list("")) == []

    def test_one_of_sixteen_threads_replaces_a_version(self, versioned: Store) -> None:
        for _ in range(10):
            versioned.put("shards/x", b"entry")
            found = versioned.get("shards/x")
            assert found is not None
            contents = [b"winner-%02d" % number for number in range(16)]
            calls = [functools.partial(versioned.put_if_version, "shards/x", data, found[1]) for data in contents]
            made = run_together(calls)
            [winner] = [number for number, version in enumerate(made) if version is not None]
            assert versioned.get("shards/x") == (contents[winner], made[winner])

    def test_creating_replacing_and_deleting_exclude_each_other(self, versioned: Store) -> None:
        """Of those that saw a version one deletes or replaces it; who creates the name comes after a deletion."""
        for _ in range(20):
            versioned.put("shards/x", b"old")
            found = versioned.get("shards/x")
            assert found is not None
            deleted, replaced, created = run_together(
                [
                    functools.partial(versioned.delete, "shards/x", found[1]),
                    functools.partial(versioned.put_if_version, "shards/x", b"replaced", found[1]),
                    functools.partial(versioned.put_if_absent, "shards/x", b"created"),
                ]
            )
            assert deleted is (replaced is None)
            assert deleted or not created
            stands = versioned.get("shards/x")
            assert (stands and stands[0]) == (b"replaced" if replaced else b"created" if created else None)

    def test_file_and_copy_go_onto_the_version_that_was_seen(self, store: Store, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(b"from a file")
        first = store.put_file_if_version(str(tmp_path / "file"), "a/x", None)
        assert first is not None
        assert store.put_file_if_version(str(tmp_path / "file"), "a/x", None) is None
        assert store.version("a/x") == first
        store.put("a/y", b"source")
        second = store.copy_if_version("a/y", "a/x", first)
        assert second is not None
        assert second != first
        assert store.copy_if_version("a/y", "a/x", None) is None
        assert (store.version("a/x"), store.version("nothing")) == (second, None)
        with store.open("a/x") as file:
            assert file.read() == b"source"
        with pytest.raises(FileNotFoundError):
            store.copy_if_version("nothing", "a/z", None)


class TestReading:
    def test_missing_names_are_none_or_not_found(self, store: Store) -> None:
        store.put("file", b"x")
        for name in ("nothing", "no/folder/nothing", "file/below"):
            assert store.get(name) is None
            assert store.size(name) is None
            assert store.delete(name) is False
            assert list(store.list(name)) == []
        with pytest.raises(FileNotFoundError):
            store.open("nothing")

    def test_open_seeks(self, store: Store) -> None:
        store.put("x", bytes(range(256)))
        with store.open("x") as file:
            assert file.seek(200) == 200
            assert file.read(5) == bytes(range(200, 205))
            file.seek(3)
            assert file.readline(2) == b"\x03\x04"
            file.seek(-2, os.SEEK_END)
            assert file.read() == b"\xfe\xff"

    def test_local_copy_is_a_path_with_the_content(self, store: Store) -> None:
        store.put("x", b"content")
        with store.local_copy("x") as path:
            assert Path(path).read_bytes() == b"content"

    def test_spool_is_under_its_name_once_sealed(self, store: Store) -> None:
        spool = store.spool("attempts/00000-a/part")
        Path(spool.path).write_bytes(b"records")
        assert spool.seal() == 7
        assert Path(spool.path).read_bytes() == b"records"  # It is counted and summed after sealing.
        found = store.get("attempts/00000-a/part")
        assert found is not None
        assert found[0] == b"records"


class TestDelete:
    def test_current_version_deletes(self, store: Store) -> None:
        store.put("x", b"one")
        found = store.get("x")
        assert found is not None
        assert store.delete("x", found[1]) is True
        assert store.get("x") is None
        assert store.delete("x", found[1]) is False

    def test_stale_version_does_nothing(self, store: Store) -> None:
        store.put("x", b"one")
        found = store.get("x")
        assert found is not None
        store.put("x", b"two")
        assert store.delete("x", found[1]) is False
        again = store.get("x")
        assert again is not None
        assert again[0] == b"two"

    def test_stale_version_does_nothing_to_equal_content_created_anew(self, versioned: Store) -> None:
        versioned.put_if_absent("x", b"same")
        found = versioned.get("x")
        assert found is not None
        versioned.put("x", b"same")
        assert versioned.delete("x", found[1]) is False
        assert versioned.size("x") == 4

    def test_one_of_sixteen_threads_deletes_a_version(self, versioned: Store) -> None:
        for _ in range(20):
            versioned.put("shards/x", b"entry")
            found = versioned.get("shards/x")
            assert found is not None
            results = run_together([functools.partial(versioned.delete, "shards/x", found[1])] * 16)
            assert sorted(results) == [False] * 15 + [True]

    def test_folders_of_deleted_names_do_not_show(self, store: Store) -> None:
        store.put("a/b/x", b"one")
        store.delete("a/b/x")
        assert list(store.list("")) == []
        store.put("a/b/x", b"two")
        assert list(store.list("a/")) == [("a/b/x", 3)]


class TestList:
    def test_sorted_by_whole_name(self, store: Store) -> None:
        names = ["a/b", "a-b", "a.b", "a", "a0", "B", "a/b-c/d", "a/b.c"]
        names.remove("a")  # A local folder cannot stand beside a file of its name.
        for name in names:
            store.put(name, name.encode())
        assert list(store.list("")) == [(name, len(name)) for name in sorted(names)]

    def test_prefix_may_end_inside_a_name(self, store: Store) -> None:
        for name in ("corpus-train-00000", "corpus-train-00001", "corpus-test-00000", "corpus/x", "other"):
            store.put(name, b"x")
        assert [name for name, _ in store.list("corpus-tr")] == ["corpus-train-00000", "corpus-train-00001"]
        assert [name for name, _ in store.list("corpus/")] == ["corpus/x"]
        assert [name for name, _ in store.list("corpus")] == [
            "corpus-test-00000",
            "corpus-train-00000",
            "corpus-train-00001",
            "corpus/x",
        ]

    def test_names_may_be_deleted_while_they_are_listed(self, store: Store) -> None:
        for number in range(50):
            store.put(f"attempts/{number:05d}/part", b"x")
        for name, _ in store.list("attempts/"):
            store.delete(name)
        assert list(store.list("")) == []

    def test_writing_leaves_no_temporary_names(self, store: Store, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(b"file")
        store.put_if_absent("a", b"1")
        store.put_if_absent("a", b"2")
        store.put("b", b"1")
        store.put("b", b"2")
        store.copy("a", "c")
        store.copy("a", "c")
        store.put_file(str(tmp_path / "file"), "d")
        assert list(store.list("")) == [("a", 1), ("b", 1), ("c", 1), ("d", 4)]
        if isinstance(store, LocalStore):
            assert sorted(files_below(store.root)) == ["a", "b", "c", "d"]


class TestCopy:
    def test_gives_a_further_name(self, store: Store) -> None:
        store.put("attempts/part", b"records")
        store.copy("attempts/part", "corpus-00000-of-00001")
        assert list(store.list("")) == [("attempts/part", 7), ("corpus-00000-of-00001", 7)]

    def test_may_be_repeated_and_goes_onto_its_own_link(self, store: Store) -> None:
        store.put("part", b"records")
        for _ in range(3):
            store.copy("part", "final")
            store.copy("final", "part")
            store.copy("part", "part")
        assert list(store.list("")) == [("final", 7), ("part", 7)]
        if isinstance(store, LocalStore):
            assert files_below(store.root) == {"final": b"records", "part": b"records"}

    def test_replaces_what_stands_there(self, store: Store) -> None:
        store.put("final", b"an older and longer shard")
        store.put("part", b"records")
        store.copy("part", "final")
        found = store.get("final")
        assert found is not None
        assert found[0] == b"records"

    def test_final_name_outlives_the_attempt(self, store: Store) -> None:
        store.put("attempts/part", b"records")
        store.copy("attempts/part", "final")
        store.delete("attempts/part")
        assert list(store.list("")) == [("final", 7)]

    def test_missing_source_is_not_found_and_leaves_the_target(self, store: Store) -> None:
        store.put("final", b"records")
        with pytest.raises(FileNotFoundError):
            store.copy("attempts/part", "final")
        assert list(store.list("")) == [("final", 7)]


@pytest.mark.parametrize(
    ("store", "name"),
    [(kind, name) for kind in KINDS for name in ODD_NAMES if _may_be_called(kind, name)],
    indirect=["store"],
)
def test_odd_names_come_back_as_they_went_in(store: Store, name: str) -> None:
    assert store.put_if_absent(name, b"one") is True
    assert store.put_if_absent(name, b"two") is False
    store.copy(name, name + ".copy")
    assert list(store.list("")) == [(name, 3), (name + ".copy", 3)]
    assert store.size(name) == 3
    with store.open(name) as file:
        assert file.read() == b"one"
    assert store.delete(name) is True
    assert list(store.list("")) == [(name + ".copy", 3)]


class TestOpenStore:
    def test_scheme_opens_the_registered_store(self) -> None:
        store = WorstStore()
        assert open_store(store.root) is store

    def test_path_opens_a_folder(self, tmp_path: Path) -> None:
        store = open_store(str(tmp_path))
        assert isinstance(store, LocalStore)
        assert store.root == str(tmp_path)

    def test_unknown_scheme_is_named(self) -> None:
        with pytest.raises(
            ValueError, match=r"nope://bucket/x cannot be opened: .*; expected a local path, gs://, or a file system"
        ):
            open_store("nope://bucket/x")
