"""Opening inputs: what can be wrong with a file, and what is wrong with the machine."""

from __future__ import annotations

import errno
import os
import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

import corpora
from privileges import as_anybody
from transforms.elements import Input
from transforms.sources import InputChangedError, LocalFile, explain_error, open_input


@pytest.fixture(autouse=True)
def no_hang() -> Iterator[None]:
    """A file that is waited for must not stop the whole run."""

    def give_up(*_: object) -> None:
        raise TimeoutError("opening or reading an input hangs")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def reason_of(source: Input) -> tuple[str, str]:
    with pytest.raises(OSError) as caught:  # noqa: PT011  (the reason is what is looked at)
        open_input(source).close()
    return explain_error(caught.value)


@pytest.mark.parametrize("size", [0, 1, 100, 3_000_000])
def test_an_unchanged_file_opens_with_its_size(tmp_path: Path, size: int) -> None:
    data = corpora.text_payload(7, size)
    file = open_input(corpora.write_file(tmp_path / "x", data))
    assert file.size == size
    assert file.read_at(0, size) == data
    assert file.read_at(size // 2, 10) == data[size // 2 : size // 2 + 10]
    assert file.read_at(0, size + 100) == data
    assert file.read_at(size, 100) == b""
    assert file.read_at(size + 5, 100) == b""
    file.close()


def test_short_reads_are_put_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = corpora.text_payload(7, 1000)
    file = open_input(corpora.write_file(tmp_path / "x", data))
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, num_bytes, at: pread(fd, min(num_bytes, 7), at))
    assert file.read_at(0, 1000) == data
    assert file.read_at(13, 500) == data[13:513]
    assert file.read_at(990, 500) == data[990:]
    file.close()


def test_names_that_are_not_utf8_open(tmp_path: Path) -> None:
    path = os.fsencode(tmp_path) + b"/\xff\xfe [1]*?.bin"
    with open(path, "wb") as out:
        out.write(b"content")
    info = os.stat(path)
    file = open_input(Input(0, os.fsdecode(path), info.st_size, info.st_mtime_ns))
    assert file.read_at(0, 100) == b"content"
    file.close()


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (errno.ENOENT, "not_found"),
        (errno.ENOTDIR, "not_found"),
        (errno.EACCES, "permission_denied"),
        (errno.EPERM, "permission_denied"),
        (errno.ELOOP, "symlink_loop"),
        (errno.EIO, "io_error"),
        (errno.ESTALE, "io_error"),
        (errno.EISDIR, "not_a_file"),
        (errno.ENXIO, "not_a_file"),
        (errno.ENAMETOOLONG, "os_error"),
        (errno.EOVERFLOW, "os_error"),
        (errno.ETIMEDOUT, "os_error"),
    ],
)
def test_each_errno_has_its_reason_and_says_its_number(number: int, reason: str) -> None:
    code, text = explain_error(OSError(number, os.strerror(number), "/some/file"))
    assert code == reason
    assert os.strerror(number) in text
    assert f"errno {number}" in text


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_a_fault_of_the_machine_is_raised_on(number: int) -> None:
    fault = OSError(number, os.strerror(number))
    with pytest.raises(OSError) as caught:  # noqa: PT011
        explain_error(fault)
    assert caught.value is fault


def test_an_error_without_a_number_still_has_words() -> None:
    code, text = explain_error(OSError("something else"))
    assert code == "os_error"
    assert "something else" in text


def test_a_vanished_file_is_not_found(tmp_path: Path) -> None:
    source = corpora.write_file(tmp_path / "x", b"abc")
    (tmp_path / "x").unlink()
    assert reason_of(source)[0] == "not_found"


def test_a_file_whose_folder_became_a_file_is_not_found(tmp_path: Path) -> None:
    (tmp_path / "folder").write_bytes(b"")
    assert reason_of(Input(0, str(tmp_path / "folder" / "x"), 3, 0))[0] == "not_found"


@pytest.mark.parametrize(("before", "after"), [(b"abc", b"abcd"), (b"abc", b"ab"), (b"abc", b""), (b"", b"a")])
def test_a_file_that_grew_or_shrank_after_listing_is_changed(tmp_path: Path, before: bytes, after: bytes) -> None:
    source = corpora.write_file(tmp_path / "x", before)
    (tmp_path / "x").write_bytes(after)
    os.utime(tmp_path / "x", ns=(source.mtime_ns, source.mtime_ns))
    with pytest.raises(InputChangedError):
        open_input(source)
    code, text = reason_of(source)
    assert code == "input_changed"
    assert re.search(rf": {len(before)} bytes of 20.* UTC then, {len(after)} of 20.* UTC now; ", text)


def test_a_file_written_again_with_the_same_size_is_changed(tmp_path: Path) -> None:
    source = corpora.write_file(tmp_path / "x", b"abc")
    os.utime(tmp_path / "x", ns=(10**18, 10**18 + 1))
    code, text = reason_of(source)
    assert code == "input_changed"
    assert text.endswith(
        " then, 3 of 2001-09-09 01:46:40.000000001 UTC now; convert it again once nothing writes to it"
    )


def test_a_refused_file_is_closed_again(tmp_path: Path) -> None:
    source = corpora.write_file(tmp_path / "x", b"abc")
    (tmp_path / "x").write_bytes(b"abcd")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        assert reason_of(source)[0] == "input_changed"
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_pipe_among_the_inputs_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert reason_of(corpora.listed(tmp_path / "pipe"))[0] == "not_a_file"


def test_a_pipe_that_took_the_place_of_a_file_does_not_hang(tmp_path: Path) -> None:
    source = corpora.write_file(tmp_path / "x", b"abc")
    (tmp_path / "x").unlink()
    os.mkfifo(tmp_path / "x")
    assert reason_of(source)[0] == "not_a_file"


def test_folders_sockets_and_devices_are_not_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert reason_of(corpora.listed(tmp_path))[0] == "not_a_file"
    assert reason_of(corpora.listed(Path("/dev/null")))[0] == "not_a_file"
    with socket.socket(socket.AF_UNIX) as server:
        monkeypatch.chdir(tmp_path)  # The name of a socket may have 107 bytes only.
        server.bind("socket")
        assert reason_of(corpora.listed(tmp_path / "socket"))[0] == "not_a_file"


def test_a_link_to_itself_is_a_loop(tmp_path: Path) -> None:
    os.symlink(tmp_path / "x", tmp_path / "x")
    assert reason_of(Input(0, str(tmp_path / "x"), 3, 0))[0] == "symlink_loop"


def test_a_link_to_nothing_is_not_found(tmp_path: Path) -> None:
    os.symlink(tmp_path / "gone", tmp_path / "x")
    assert reason_of(Input(0, str(tmp_path / "x"), 3, 0))[0] == "not_found"


def test_a_file_without_read_permission_is_denied(tmp_path: Path) -> None:
    source = corpora.write_file(tmp_path / "x", b"abc")
    (tmp_path / "x").chmod(0)
    with as_anybody():
        assert reason_of(source)[0] == "permission_denied"


def test_a_file_whose_bytes_cannot_be_read_is_an_io_error() -> None:
    """The memory of this process is a regular file whose first page no one may read: EIO, as from a bad disk."""
    file = LocalFile(corpora.listed(Path("/proc/self/mem")))
    with pytest.raises(OSError) as caught:  # noqa: PT011
        file.read_at(0, 16)
    file.close()
    assert explain_error(caught.value)[0] == "io_error"
