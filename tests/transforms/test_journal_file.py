"""A journal's file: what was appended is found, what is damaged is not there, and memory stays small."""

from __future__ import annotations

import hashlib
import os
import random
from pathlib import Path

import pytest

from fakes import run_together
from transforms.journal_file import JournalFile, JournalIndex

PLAN = "plan-a"


def key(number: int) -> bytes:
    return hashlib.blake2b(b"%d" % number, digest_size=16).digest()


def place(number: int) -> tuple[int, int]:
    """Records of two inputs."""
    return number // 100, number % 100


def write(path: Path, numbers: range, answer: bytes = b"answer", plan: str = PLAN) -> list[int]:
    file = JournalFile(str(path), plan)
    return [file.append(key(number), place(number), answer + b" %d" % number) for number in numbers]


def index(*paths: Path, max_indexed: int = 1000) -> JournalIndex:
    return JournalIndex(list(map(str, paths)), {PLAN}.__contains__, max_indexed)


def found(index: JournalIndex, numbers: range) -> dict[int, bytes]:
    frames = {number: index.find(key(number), place(number)) for number in numbers}
    return {number: frame.body for number, frame in frames.items() if frame is not None}


def answers(numbers: range, answer: bytes = b"answer") -> dict[int, bytes]:
    return {number: answer + b" %d" % number for number in numbers}


def test_what_was_appended_is_found(tmp_path: Path) -> None:
    write(tmp_path / "a", range(150))
    write(tmp_path / "b", range(150, 200))
    assert found(index(tmp_path / "a", tmp_path / "b"), range(250)) == answers(range(200))


def test_without_files_nothing_is_found() -> None:
    assert index().is_empty
    assert index().find(key(1), place(1)) is None


def test_a_file_comes_into_being_with_its_first_frame(tmp_path: Path) -> None:
    file = JournalFile(str(tmp_path / "folder/a"), PLAN)
    assert not (tmp_path / "folder").exists()
    file.append(key(1), place(1), b"")
    assert found(index(tmp_path / "folder/a"), range(2)) == {1: b""}


def test_threads_append_whole_frames(tmp_path: Path) -> None:
    file = JournalFile(str(tmp_path / "a"), PLAN)

    def append(first: int) -> None:
        for number in range(first, 400, 8):
            file.append(key(number), place(number), b"answer %d" % number)

    run_together([lambda first=first: append(first) for first in range(8)])  # type: ignore[misc]
    assert found(index(tmp_path / "a"), range(400)) == answers(range(400))


def test_of_two_answers_the_first_counts(tmp_path: Path) -> None:
    write(tmp_path / "a", range(3), b"first")
    write(tmp_path / "b", range(5), b"second")
    expected = {**answers(range(5), b"second"), **answers(range(3), b"first")}
    assert found(index(tmp_path / "a", tmp_path / "b"), range(5)) == expected


@pytest.mark.parametrize("max_indexed", [1, 7, 50])
def test_a_journal_of_more_frames_than_are_indexed_is_gone_through_by_stretches(
    max_indexed: int, tmp_path: Path
) -> None:
    write(tmp_path / "a", range(150))
    write(tmp_path / "b", range(100, 300))
    assert found(index(tmp_path / "a", tmp_path / "b", max_indexed=max_indexed), range(300)) == answers(range(300))


def test_records_in_flight_are_found_on_both_sides_of_a_stretch(tmp_path: Path) -> None:
    numbers = list(range(300))
    write(tmp_path / "a", range(300))
    rng = random.Random(3)
    for start in range(0, 300, 20):  # Twenty at a time, in any order.
        part = numbers[start : start + 20]
        rng.shuffle(part)
        numbers[start : start + 20] = part
    small = index(tmp_path / "a", max_indexed=40)
    assert [number for number in numbers if small.find(key(number), place(number)) is None] == []


def test_frames_of_one_record_stay_together_however_many_they_are(tmp_path: Path) -> None:
    file = JournalFile(str(tmp_path / "a"), PLAN)
    for number in range(40):
        file.append(key(number), (0, 5), b"%d" % number)
    file.append(key(99), (0, 6), b"next")
    small = index(tmp_path / "a", max_indexed=4)
    assert [small.find(key(number), (0, 5)) is not None for number in range(40)] == [True] * 40
    assert small.find(key(99), (0, 6)) is not None


def test_a_torn_tail_costs_the_frame_that_is_torn(tmp_path: Path) -> None:
    offsets = write(tmp_path / "a", range(10))
    data = (tmp_path / "a").read_bytes()
    for cut in range(offsets[8], len(data)):
        (tmp_path / "a").write_bytes(data[:cut])
        assert found(index(tmp_path / "a"), range(10)) == answers(range(8 if cut < offsets[9] else 9))


def test_any_damage_costs_frames_and_changes_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path / "a", range(6))
    data = (tmp_path / "a").read_bytes()
    lost = 0
    for at in range(len(data)):
        for bit in (0, 7):
            damaged = bytearray(data)
            damaged[at] ^= 1 << bit
            (tmp_path / "a").write_bytes(bytes(damaged))
            kept = found(index(tmp_path / "a"), range(6))
            assert kept.items() <= answers(range(6)).items()
            lost += len(kept) < 6
    assert lost > len(data)  # Nearly every bit counts; those of the first line's own signs may not.
    assert "is not used" in caplog.text or "asked for again" in caplog.text


@pytest.mark.parametrize(
    "data",
    [b"", b"\n", b"{}\n", b"[]\n", b"\xff" * 5000, b'{"gristmill_journal": 2, "plan_id": "plan-a"}\n', b"x" * 100],
)
def test_what_is_no_journal_is_not_used(data: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a").write_bytes(data)
    assert index(tmp_path / "a").is_empty
    assert "is no journal of this job" in caplog.text


def test_the_journal_of_another_job_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path / "a", range(5), plan="plan-b")
    assert index(tmp_path / "a").is_empty
    assert "is no journal of this job" in caplog.text


def test_frames_that_claim_to_be_huge_are_not_read(tmp_path: Path) -> None:
    import google_crc32c

    from transforms import journal_file

    write(tmp_path / "a", range(2))
    head = journal_file._HEAD.pack(0, 1, 1 << 60, 0, 2, key(2))[4:]
    with (tmp_path / "a").open("ab") as file:
        file.write(google_crc32c.value(head).to_bytes(4, "little") + head)
    assert found(index(tmp_path / "a"), range(3)) == answers(range(2))


def test_a_file_that_cannot_be_written_raises_each_time_and_is_not_continued(tmp_path: Path) -> None:
    file = JournalFile(str(tmp_path / "folder/a"), PLAN)
    file.append(key(1), place(1), b"answer 1")
    os.rename(tmp_path / "folder", tmp_path / "gone")
    for _ in range(2):
        with pytest.raises(OSError, match=r"No such file|given up"):
            file.append(key(2), place(2), b"answer 2")
    os.rename(tmp_path / "gone", tmp_path / "folder")
    with pytest.raises(OSError, match="given up"):
        file.append(key(2), place(2), b"answer 2")
    assert found(index(tmp_path / "folder/a"), range(3)) == {1: b"answer 1"}


def test_files_that_vanish_or_cannot_be_read_are_no_error(tmp_path: Path) -> None:
    write(tmp_path / "a", range(5))
    opened = index(tmp_path / "a", tmp_path / "missing")
    os.unlink(tmp_path / "a")
    assert found(opened, range(5)) == {}


def test_memory_does_not_grow_with_the_answers(tmp_path: Path) -> None:
    import tracemalloc

    file = JournalFile(str(tmp_path / "a"), PLAN)
    for number in range(10_000):
        file.append(key(number), (0, number), b"x" * 500)
    tracemalloc.start()
    opened = JournalIndex([str(tmp_path / "a")], {PLAN}.__contains__)
    whole = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    small = JournalIndex([str(tmp_path / "a")], {PLAN}.__contains__, 1000)
    bounded = tracemalloc.get_traced_memory()[1] - whole[0]
    tracemalloc.stop()
    assert whole[0] < 10_000 * 40  # Key and offset, and the stretch of arrays that grow.
    assert bounded < 1_000_000
    assert opened.find(key(9_999), (0, 9_999)) is not None
    assert small.find(key(9_999), (0, 9_999)) is not None
