"""A short torture, and that the oracles see what they are there to see."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest

import corpora
import jobs
from torture import damaged, oracle, run
from torture.damage import KINDS, Damaged, damage
from torture.make_files import TortureFile
from torture.oracle import DiscrepancyError
from torture.tally import Case

PAYLOADS = [jobs.payload(0, at) for at in range(30)]
DATA = corpora.frame_all(PAYLOADS)
STARTS = corpora.frame_starts(PAYLOADS)


def test_short_torture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--corpora", "10", "--kills", "2", "--steps", "1", "--owners", "1", "--seconds", "120"]
    status = run.main([*flags, "--folder", str(tmp_path / "torture")])
    printed = capsys.readouterr().out
    assert status == 0, printed
    assert "discrepancies: 0" in printed
    assert not (tmp_path / "torture").exists()


def letter(position: int, length: int, reason: str = "data_checksum") -> oracle.Letter:
    return {"position": position, "length": length, "reason": reason, "payload_index": None}


def make_file(change: int | None = None) -> TortureFile:
    """A file, whose 11th record is damaged unless told otherwise."""
    file = Damaged(DATA)
    at = STARTS[10] + 14 if change is None else change
    file.overwrite(at, bytes([DATA[at] ^ 1]))
    return TortureFile(Path("f"), "none", PAYLOADS, DATA, file)


DEAD = letter(STARTS[10], STARTS[11] - STARTS[10])
ALIVE = PAYLOADS[:10] + PAYLOADS[11:]


def test_oracle_accepts_what_is_right() -> None:
    assert damaged.check_tfrecord(make_file(), [DEAD], iter(ALIVE)) == 29


@pytest.mark.parametrize(
    ("letters", "records", "message"),
    [
        pytest.param([DEAD], ALIVE[:5] + ALIVE[6:], "stands not at", id="lost"),
        pytest.param([DEAD], [*ALIVE[:5], *ALIVE[4:]], "stands not at", id="twice"),
        pytest.param([DEAD], [*ALIVE[:3], ALIVE[4], ALIVE[3], *ALIVE[5:]], "stands not at", id="order"),
        pytest.param([DEAD], ALIVE[:-1], "in no record and no dead letter", id="last lost"),
        pytest.param([], ALIVE, "stands not at", id="damage unnamed"),
        pytest.param([letter(STARTS[10], 5)], ALIVE, "stands not at", id="named in part"),
        pytest.param([letter(STARTS[10], 0), DEAD], ALIVE, "names no byte", id="letter of nothing"),
        pytest.param([DEAD, letter(STARTS[20] + 1, 3)], ALIVE, "stand beyond", id="named twice"),
        pytest.param(
            [letter(STARTS[10], STARTS[12] - STARTS[10])], ALIVE[:10] + ALIVE[11:], "outside the damage", id="too much"
        ),
    ],
)
def test_oracle_sees_what_is_wrong(letters: list[oracle.Letter], records: list[bytes], message: str) -> None:
    with pytest.raises(DiscrepancyError, match=message):
        damaged.check_tfrecord(make_file(), letters, iter(records))


@pytest.mark.parametrize("seed", range(40))
def test_damage_knows_what_it_left_alone(seed: int) -> None:
    rng = random.Random(seed)
    file = Damaged(DATA)
    for _ in range(rng.randint(1, 5)):
        damage(file, rng, STARTS, KINDS)
    assert len(file.origin) == len(file.data)
    assert all(origin < 0 or DATA[origin] == byte for origin, byte in zip(file.origin, file.data, strict=True))
    places = file.places(STARTS)
    for place, (start, end) in zip(places, itertools.pairwise(STARTS), strict=True):
        assert (place is not None) == (list(range(start, end)) in _windows(file, start, end))
        assert place is None or file.data[place : place + end - start] == DATA[start:end]


def _windows(file: Damaged, start: int, end: int) -> list[list[int]]:
    """What stands wherever the first byte of a piece is found."""
    return [file.origin[at : at + end - start].tolist() for at in (file.origin == start).nonzero()[0]]


def test_case_says_how_to_run_it_again() -> None:
    assert Case(7, "damage", 17).command == 'make torture TORTURE_FLAGS="--seed 7 --only damage:17"'
