"""What only a store on a local folder has to stand: no hard links, full disks, odd roots."""

from __future__ import annotations

import errno
import fcntl
import functools
import os
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest

from fakes import files_below, run_python, run_together
from transforms import folder_lock
from transforms.store import BusyError, LocalStore, OutputError


@pytest.fixture
def local(tmp_path: Path) -> LocalStore:
    return LocalStore(str(tmp_path / "out"))


@pytest.fixture
def no_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without hard links, as exFAT and some network mounts are."""

    def refuse(*_args: Any, **_kwargs: Any) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)


@pytest.mark.usefixtures("no_links")
class TestWithoutHardLinks:
    def test_put_if_absent_has_one_winner_under_sixteen_threads(self, local: LocalStore) -> None:
        for number in range(20):
            name = f"shards/{number}"
            results = run_together([functools.partial(local.put_if_absent, name, b"entry")] * 16)
            assert sorted(results) == [False] * 15 + [True]
            assert local.size(name) == 5

    def test_copy_copies_and_may_be_repeated(self, local: LocalStore) -> None:
        local.put("part", b"records")
        for _ in range(3):
            local.copy("part", "final")
            local.copy("final", "part")
        assert files_below(local.root) == {"final": b"records", "part": b"records"}

    def test_copy_of_a_missing_name_is_not_found(self, local: LocalStore) -> None:
        local.put("other", b"x")
        with pytest.raises(FileNotFoundError):
            local.copy("part", "final")
        assert files_below(local.root) == {"other": b"x"}

    def test_entry_that_is_being_written_cannot_be_deleted_as_malformed(
        self, local: LocalStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A second attempt looks at the half-written entry of the first and finds it malformed."""
        sync, opened = os.fsync, os.fdopen

        def look_and_delete() -> None:
            found = local.get("shards/0.json")
            if found is not None and found[0] != b"entry":
                local.delete("shards/0.json", found[1])

        def other_attempt() -> None:
            other = threading.Thread(target=look_and_delete, daemon=True)
            other.start()
            other.join(0.3)  # It may have to wait for us.

        def open_late(descriptor: int, *args: Any, **kwargs: Any) -> Any:
            other_attempt()
            return opened(descriptor, *args, **kwargs)

        def sync_late(descriptor: int) -> None:
            other_attempt()
            sync(descriptor)

        monkeypatch.setattr(os, "fdopen", open_late)
        monkeypatch.setattr(os, "fsync", sync_late)
        won = local.put_if_absent("shards/0.json", b"entry")
        found = local.get("shards/0.json")
        assert won is True
        assert found is not None
        assert found[0] == b"entry"

    def test_full_disk_is_an_output_error_and_leaves_nothing(
        self, local: LocalStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sync = os.fsync

        def sync_on_full_disk(descriptor: int) -> None:
            if os.readlink(f"/proc/self/fd/{descriptor}").endswith("0.json"):
                raise OSError(errno.ENOSPC, "No space left on device")
            sync(descriptor)

        monkeypatch.setattr(os, "fsync", sync_on_full_disk)
        with pytest.raises(OutputError, match="No space left"):
            local.put_if_absent("shards/0.json", b"entry")
        assert files_below(local.root) == {}


ON_FULL_DISK = """
    import resource, sys
    from transforms.store import LocalStore, OutputError
    store = LocalStore(sys.argv[1])
    store.put("small", b"x")
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    try:
        {call}
    except OutputError as error:
        print("refused:", error)
"""


@pytest.mark.parametrize(
    "call",
    [
        'store.put_if_absent("big", bytes(100_000))',
        'store.put("big", bytes(100_000))',
        'store.put("small", bytes(100_000))',
        'store.put_file(sys.argv[2], "big")',
    ],
)
def test_full_disk_is_an_output_error_and_leaves_what_was_there(tmp_path: Path, call: str) -> None:
    (tmp_path / "big").write_bytes(bytes(100_000))
    program = textwrap.dedent(ON_FULL_DISK).format(call=call)
    out = tmp_path / "out"
    done = run_python(program, str(out), str(tmp_path / "big"))
    assert done.stdout.startswith("refused: cannot write "), done.stderr
    assert files_below(out) == {"small": b"x"}


def test_seal_on_a_full_disk_is_an_output_error(local: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    spool = local.spool("attempts/0/part")
    Path(spool.path).write_bytes(b"records")

    def refuse(_descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OutputError, match=r"attempts/0/part: Input/output error"):
        spool.seal()


@pytest.mark.parametrize("call", ["put", "put_if_absent", "spool"])
def test_root_below_a_file_is_an_output_error(tmp_path: Path, call: str) -> None:
    (tmp_path / "file").write_bytes(b"x")
    store = LocalStore(str(tmp_path / "file" / "out"))
    arguments = ("x",) if call == "spool" else ("x", b"data")
    with pytest.raises(OutputError):
        getattr(store, call)(*arguments)
    assert files_below(tmp_path) == {"file": b"x"}


def test_name_of_a_folder_is_an_output_error_and_leaves_no_temporary(local: LocalStore) -> None:
    local.put("folder/file", b"x")
    with pytest.raises(OutputError):
        local.put("folder", b"data")
    assert files_below(local.root) == {"folder/file": b"x"}


def test_root_that_cannot_be_made_is_an_output_error_and_no_endless_loop() -> None:
    """/proc answers `mkdir` with "no such file", as a mount that has gone does."""
    program = """
        from transforms.store import LocalStore, OutputError
        try:
            LocalStore("/proc/nowhere/out").put("x", b"data")
        except OutputError as error:
            print("refused:", error)
    """
    done = run_python(textwrap.dedent(program))
    assert done.stdout.startswith("refused: cannot write /proc/nowhere/out/x"), done.stderr


def test_content_and_every_new_folder_are_synced(local: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cut after put_if_absent has returned must not take the entry, or a folder above it, away."""
    synced: list[str] = []
    sync = os.fsync

    def record(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    local.put_if_absent("_gristmill/shards/0.json", b"entry")
    folders = {local.root, os.path.dirname(local.root), f"{local.root}/_gristmill", f"{local.root}/_gristmill/shards"}
    assert folders <= set(synced)
    assert synced[-1] == f"{local.root}/_gristmill/shards"
    files = [path for path in synced if path not in folders]
    assert len(files) == 1
    assert os.path.basename(files[0]).startswith(".gristmill-")


def test_deleting_the_last_name_keeps_the_root(local: LocalStore) -> None:
    local.put("x", b"1")
    local.delete("x")
    assert os.path.isdir(local.root)


def test_clean_deletes_what_killed_writers_left_and_nothing_else(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path))
    names = ["shard", "_gristmill/plan.jsonl", "_gristmill/published/00000.json", "_dead_letters/a.jsonl"]
    for name in names:
        store.put(name, b"kept")
        (tmp_path / name).with_name(".gristmill-0123").write_bytes(b"half")
    store.clean()
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()) == sorted(names)


CHANGES = ["put_if_absent", "put", "put_file", "put_if_version", "copy", "delete", "delete_version", "clean"]


def change(store: LocalStore, kind: str, file: str) -> None:
    """Makes a change of each kind, of a tree that `make_tree` made."""
    match kind:
        case "put_if_absent":
            store.put_if_absent("_gristmill/new", b"x")
        case "put":
            store.put("_gristmill/entry", b"x")
        case "put_file":
            store.put_file(file, "final")
        case "put_if_version":
            store.put_if_version("_gristmill/shards/0", b"x", store.version("_gristmill/shards/0"))
        case "copy":
            store.copy("_gristmill/entry", "final")
        case "delete":
            store.delete("final")
        case "delete_version":
            store.delete("_gristmill/shards/0", store.version("_gristmill/shards/0"))
        case _:
            store.clean()


def make_tree(store: LocalStore) -> dict[str, bytes]:
    for name in ("_gristmill/entry", "_gristmill/shards/0", "final"):
        store.put(name, name.encode())
    Path(store.root, ".gristmill-left").write_bytes(b"half")
    return files_below(store.root)


class TestGuarded:
    @pytest.mark.parametrize("has_links", [True, False])
    @pytest.mark.parametrize("kind", CHANGES)
    def test_change_whose_check_fails_does_not_happen(
        self, local: LocalStore, kind: str, has_links: bool, request: pytest.FixtureRequest, tmp_path: Path
    ) -> None:
        if not has_links:
            request.getfixturevalue("no_links")
        before = make_tree(local)
        (tmp_path / "file").write_bytes(b"x")

        def refuse() -> None:
            raise OutputError("not now")

        with pytest.raises(OutputError, match="not now"):
            change(local.guarded(refuse), kind, str(tmp_path / "file"))
        assert files_below(local.root) == before

    @pytest.mark.parametrize("kind", CHANGES)
    def test_change_waits_for_whoever_holds_the_store_and_is_checked_only_then(
        self, local: LocalStore, kind: str, tmp_path: Path
    ) -> None:
        before = make_tree(local)
        (tmp_path / "file").write_bytes(b"x")
        is_free = threading.Event()
        checks: list[bool] = []
        guarded = local.guarded(lambda: checks.append(is_free.is_set()))
        other = threading.Thread(target=change, args=(guarded, kind, str(tmp_path / "file")))
        with local.hold():
            other.start()
            other.join(0.1)
            assert {**files_below(local.root), **before} == files_below(local.root)  # Only temporary files beside.
            is_free.set()
        other.join()
        assert checks == [True]
        assert files_below(local.root) != before

    def test_who_stands_still_in_a_change_keeps_others_from_holding_the_store(
        self, local: LocalStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(folder_lock.folder_lock.__wrapped__, "__kwdefaults__", {"shared": False, "wait_secs": 0.05})

        def try_to_hold() -> None:
            with pytest.raises(BusyError, match=r"in the middle of a change .*suspended"), local.hold():
                pytest.fail("two at a time")

        local.put("x", b"1")
        local.guarded(try_to_hold).put("x", b"2")
        with local.hold():
            pass

    @pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EBADF])
    def test_folder_that_cannot_be_locked_is_changed_after_a_check(
        self, local: LocalStore, monkeypatch: pytest.MonkeyPatch, number: int
    ) -> None:
        def refuse(*_: Any) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(fcntl, "flock", refuse)
        checks: list[int] = []
        guarded = local.guarded(lambda: checks.append(1))
        with local.hold():
            guarded.put("x", b"1")
        version = local.version("x")
        assert version is not None
        assert guarded.delete("x", version) is True
        assert len(checks) == 2
