"""Output on a file system of Beam's: the same files, failures that pass are tried again, others end the job at once."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import requests
import tenacity
from google.auth.exceptions import RefreshError, TransportError
from google.cloud.storage.exceptions import InvalidResponse

import jobs
import memory_files
from memory_files import MemoryFileSystem
from transforms.beam_store import BeamStore
from transforms.sources import InputChangedError, look_up, open_input
from transforms.store import OutputError, open_store
from transforms.transient import MAX_TRIES, is_transient


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenacity.nap.time, "sleep", lambda _: None)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    for file in range(2):
        jobs.write_tfrecord(tmp_path / f"in/f{file}", [jobs.payload(file, i) for i in range(50)] + [b"bad"] * file)
    with (tmp_path / "in/f1").open("ab") as last:
        last.write(b"tail")
    return tmp_path / "in"


def records(root: str, folder: Path) -> list[bytes]:
    """Reads the shards back through local copies, with array_record's own reader."""
    found: list[bytes] = []
    for name, data in memory_files.tree(root).items():
        if ".array_record-" in name:
            (folder / "copy").write_bytes(data)
            found += jobs.read_array_record(folder / "copy")
    return found


def test_the_tree_is_that_of_a_local_run(corpus: Path, tmp_path: Path) -> None:
    root = memory_files.new_root()
    for output in (root, tmp_path / "out"):
        assert jobs.convert("--input", corpus, "--output", output, "--shards", "3") == 0
    assert sorted(memory_files.tree(root)) == sorted(jobs.tree(tmp_path / "out"))
    for name, data in memory_files.tree(root).items():
        if not name.startswith("_gristmill"):
            assert data == (tmp_path / "out" / name).read_bytes()
    expected = [jobs.payload(0, i) for i in range(50)] + [jobs.payload(1, i) for i in range(50)] + [b"bad"]
    assert records(root, tmp_path) == expected


def test_failures_that_pass_are_tried_again(corpus: Path, tmp_path: Path) -> None:
    root = memory_files.new_root()
    left = memory_files.fail_next_writes(503, 429)
    assert jobs.convert("--input", corpus, "--output", root) == 0
    assert left == []
    assert len(records(root, tmp_path)) == 101


def test_refusals_are_not(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = memory_files.new_root()
    left = memory_files.fail_next_writes(403, 403, 403)
    assert jobs.convert("--input", corpus, "--output", root) == 2
    assert "403" in capsys.readouterr().err
    assert len(left) == 2
    memory_files.fail_next_writes()


def test_a_service_that_stays_away_ends_the_job_and_the_same_command_goes_on(corpus: Path, tmp_path: Path) -> None:
    root = memory_files.new_root()
    store = open_store(root)
    memory_files.fail_next_writes(*[503] * MAX_TRIES)
    with pytest.raises(OutputError, match=r"cannot write .*503"):
        store.put("x", b"data")
    assert memory_files.fail_next_writes() == []
    assert jobs.convert("--input", corpus, "--output", root) == 0
    assert jobs.convert("--input", corpus, "--output", root) == 0
    assert len(records(root, tmp_path)) == 101


def test_of_two_that_write_at_once_the_one_that_stands_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    store = BeamStore(memory_files.new_root())
    put = store.put

    def raced(name: str, data: bytes) -> None:
        put(name, data)
        put(name, b"theirs")

    monkeypatch.setattr(store, "put", raced)
    assert store.put_if_absent("entry", b"mine") is False
    found = store.get("entry")
    assert found is not None
    assert found[0] == b"theirs"


def response(code: int) -> requests.Response:
    answer = requests.Response()
    answer.status_code = code
    return answer


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (memory_files.ServiceError(503), True),
        (memory_files.ServiceError(429), True),
        (memory_files.ServiceError(403), False),
        (memory_files.ServiceError(404), False),
        (ConnectionResetError("reset"), True),
        (TimeoutError("timed out"), True),
        (OSError("Rename failed: {'s3://x': HTTP 503 Slow Down}"), True),
        (PermissionError("no"), False),
        (ValueError("no"), False),
        (FileNotFoundError("/data/500/x"), False),
        (requests.ConnectionError("HTTPSConnectionPool(host='x', port=443): refused"), True),
        (TransportError(requests.ConnectionError("port=443")), True),
        (RefreshError("invalid_grant"), False),
        (InvalidResponse(response(503), "failed"), True),
        (InvalidResponse(response(412), "failed"), False),
    ],
)
def test_what_may_pass(error: Exception, passes: bool) -> None:
    assert is_transient(error) is passes


def put_file(url: str, data: bytes) -> None:
    with MemoryFileSystem(None).create(url) as target:
        target.write(data)


def test_inputs_are_listed_and_read(corpus: Path, tmp_path: Path) -> None:
    root = memory_files.new_root()
    for path in sorted(corpus.iterdir()):
        put_file(f"{root}/in/{path.name}", path.read_bytes())
    put_file(f"{root}/in/_hidden", b"x")
    assert jobs.convert("--input", corpus, "--output", tmp_path / "local", "--shards", "3") == 0
    assert jobs.convert("--input", f"{root}/in/f*", "--output", tmp_path / "pattern", "--shards", "3") == 0
    assert jobs.convert("--input", f"{root}/in", "--output", f"{root}/in/out", "--shards", "3") == 0
    expected = jobs.records(tmp_path / "local")
    assert jobs.records(tmp_path / "pattern") == records(f"{root}/in/out", tmp_path) == expected
    assert jobs.report(tmp_path / "pattern")["files_skipped"] == 0


def test_an_array_record_is_copied_to_be_read(tmp_path: Path) -> None:
    root = memory_files.new_root()
    path = jobs.write_array_record(tmp_path / "x.array_record", [jobs.payload(0, i) for i in range(500)])
    put_file(f"{root}/x.array_record", path.read_bytes())
    assert jobs.convert("--input", f"{root}/x.array_record", "--output", tmp_path / "out", "--shards", "2") == 0
    assert jobs.records(tmp_path / "out") == [jobs.payload(0, i) for i in range(500)]


def test_an_input_that_changed_or_went_is_told(tmp_path: Path) -> None:
    url = memory_files.new_root() + "/x"
    put_file(url, b"data")
    source = look_up(url)
    assert open_input(source).read_at(1, 10) == b"ata"
    put_file(url, b"other data")
    with pytest.raises(InputChangedError):
        open_input(source)
    with pytest.raises(FileNotFoundError):
        open_input(dataclasses.replace(source, name=f"{url}-gone"))
