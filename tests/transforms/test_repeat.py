"""Ranges that do not meet: whatever framing payloads hold, a file comes out as if read from its start by one."""

from __future__ import annotations

from pathlib import Path

import pytest

import corpora
import jobs

TRACKS = [
    pytest.param({}, id="two-tracks"),
    pytest.param({"tracks": 3}, id="three-tracks"),
    pytest.param({"tracks": 7, "size": 900}, id="seven-tracks"),
    pytest.param({"late": 100}, id="second-track-begins-late"),
]


def convert(folder: Path, data: bytes, *flags: str, out: str = "out", shards: int = 40) -> Path:
    (folder / "in").mkdir(exist_ok=True)
    (folder / "in/x.tfrecord").write_bytes(data)
    status = jobs.convert("--input", folder / "in", "--output", folder / out, "--shards", str(shards), *flags)
    assert status == 0, jobs.report(folder / out)["message"]
    return folder / out


@pytest.mark.parametrize("tracks", TRACKS)
def test_a_whole_file_converts_whatever_tracks_of_framing_its_payloads_hold(
    tracks: dict[str, int], tmp_path: Path
) -> None:
    data, payloads = corpora.interleaved(300, **tracks)
    assert data == corpora.frame_all(payloads)
    out = convert(tmp_path, data)
    assert jobs.records(out) == payloads
    assert jobs.dead_letters(out) == []
    assert len(jobs.shards(out)) == 40  # As planned and of the planned size, though read by one worker.
    assert {len(jobs.read_array_record(path)) for path in jobs.shards(out)} == {7, 8}
    assert jobs.verify(out) == 0


@pytest.mark.parametrize("at", [5_000, 60_000])
def test_tracks_of_framing_and_damage_end_as_one_reader_reads_them(at: int, tmp_path: Path) -> None:
    data, payloads = corpora.interleaved(300)
    data = corpora.remove(corpora.flip_bit(data, at, 3), at + 30_000, 7)
    whole = convert(tmp_path, data, "--set", "dead_letters.max_fraction=1", out="whole", shards=1)
    split = convert(tmp_path, data, "--set", "dead_letters.max_fraction=1", out="split")
    assert jobs.records(split) == jobs.records(whole)
    assert set(jobs.records(split)) & set(payloads)
    regions = [
        [(one["position"], one["length"], one["reason"]) for one in jobs.dead_letters(out)] for out in (split, whole)
    ]
    assert regions[0] == regions[1] != []
    assert jobs.verify(split) == 0


def test_tracks_of_framing_are_appended_and_read_by_workers_alike(tmp_path: Path) -> None:
    data, payloads = corpora.interleaved(200)
    jobs.write_tfrecord(tmp_path / "in/a.tfrecord", [b"first"])
    jobs.convert("--input", tmp_path / "in", "--output", tmp_path / "out")
    (tmp_path / "in/x.tfrecord").write_bytes(data)
    arguments: list[str | Path] = ["convert", "--input", "in", "--output", "out", "--append", "--shards", "20"]
    done = jobs.spawn([*arguments, "--workers", "2"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert sorted(jobs.records(tmp_path / "out")) == sorted([b"first", *payloads])
