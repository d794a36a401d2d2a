"""How many pieces a shard is cut into, and that they hold what it holds: each record once, in order."""

from __future__ import annotations

import dataclasses
import io
import itertools
import random

import pytest

import corpora
from transforms.cut_pieces import MAX_PIECES, count_pieces, cut_pieces, piece_secs
from transforms.elements import Input, ShardTask


@pytest.mark.parametrize(
    ("total_secs", "secs"),
    [(20, 5), (57, 5), (320, 20), (1_440, 90), (100_000, 90), (900_000, 90), (9_000_000, 900)],
)
def test_a_piece_is_a_minute_and_a_half_less_in_short_jobs_and_more_in_ones_of_months(
    total_secs: float, secs: float
) -> None:
    assert piece_secs(total_secs) == secs


def test_shards_are_cut_by_their_share_of_the_work() -> None:
    assert count_pieces([100, 300, 0, 4], 404, 10_000) == [4, 12, 1, 1]


def test_shards_that_are_short_stay_whole() -> None:
    assert count_pieces([10] * 50, 500, 10_000) == [1] * 50


def test_no_piece_is_meant_to_have_less_than_a_record() -> None:
    assert count_pieces([100, 100], 10_000, 6) == [3, 3]


@pytest.mark.parametrize("num_shards", [1, 7, 100])
def test_there_are_never_more_than_so_many(num_shards: int) -> None:
    assert sum(count_pieces([1] * num_shards, 1e9, 10**9)) <= MAX_PIECES + num_shards


def make_inputs(rng: random.Random, name: str) -> list[Input]:
    sizes = [rng.choice([0, 1, 50, 1_000, 20_000]) for _ in range(rng.randrange(1, 12))]
    return [Input(index, name.format(index), size, 0) for index, size in enumerate(sizes)]


Places = list[tuple[int, int, int]]


def places(task: ShardTask, sources: list[Input], offsets: list[int]) -> Places:
    """Returns (index, start, end) of all that a shard or piece holds."""
    last = offsets.index(task.last_offset)
    found = []
    for source in sources[task.first_index : last + 1]:
        start = task.start if source.index == task.first_index else 0
        end = task.end if source.index == last else source.size
        found.append((source.index, start, end))
    return found


def joined(pieces: list[Places]) -> Places:
    """Returns the places of all pieces, ranges that meet as one."""
    found: Places = []
    for index, start, end in itertools.chain.from_iterable(pieces):
        if found and found[-1][0] == index:
            assert found[-1][2] == start
            found[-1] = (index, found[-1][1], end)
        else:
            found.append((index, start, end))
    return found


@pytest.mark.parametrize(
    ("format_name", "name", "splits"),
    [("tfrecord", "f{}", True), ("array_record", "f{}", True), ("tfrecord", "f{}.gz", False), ("files", "f{}", False)],
)
def test_pieces_hold_what_their_shard_holds(format_name: str, name: str, splits: bool) -> None:
    rng = random.Random(1)
    cut = 0
    for _ in range(200):
        sources = make_inputs(rng, name)
        lines = corpora.input_lines(sources)
        offsets = list(itertools.accumulate(map(len, lines[:-1]), initial=0))
        first, last = sorted(rng.choices(range(len(sources)), k=2))
        start = rng.randrange(sources[first].size) if splits and sources[first].size else 0
        least = start + 1 if first == last else 1
        end = rng.randrange(least, sources[last].size + 1) if splits and sources[last].size >= least else None
        end = sources[last].size if end is None else end
        task = ShardTask(5, offsets[first], first, start, offsets[last], end, 1_000)
        spec = corpora.make_spec(format=format_name)
        count = rng.randrange(2, 9)
        pieces = list(cut_pieces([task], [count], io.BytesIO(b"".join(lines)), spec, 100.0))
        if not pieces:
            continue
        cut += 1
        assert len(pieces) <= count
        assert [piece.piece for piece in pieces] == list(range(len(pieces)))
        assert {piece.shard for piece in pieces} == {5}
        assert joined([places(piece, sources, offsets) for piece in pieces]) == places(task, sources, offsets)
        if not splits:
            ends = [places(piece, sources, offsets)[-1] for piece in pieces]
            assert all(end == sources[index].size for index, _, end in ends)
    assert cut > 50


def test_only_shards_of_which_more_than_one_piece_is_wanted_are_cut() -> None:
    sources = [Input(0, "f", 1_000, 0)]
    tasks = [ShardTask(number, 0, 0, 100 * number, 0, 100 * number + 100, 100) for number in range(10)]
    lines = io.BytesIO(b"".join(corpora.input_lines(sources)))
    counts = [1, 2, 1, 1, 4, 1, 1, 1, 1, 1]
    pieces = list(cut_pieces(tasks, counts, lines, corpora.make_spec(format="tfrecord"), 10.0))
    assert [(piece.shard, piece.piece, piece.start, piece.end) for piece in pieces] == [
        *((1, 0, 100, 150), (1, 1, 150, 200)),
        *((4, 0, 400, 425), (4, 1, 425, 450), (4, 2, 450, 475), (4, 3, 475, 500)),
    ]


def test_files_that_are_one_record_each_are_shared_out_by_number_as_well_as_by_size() -> None:
    sources = [Input(index, f"f{index}", 100_000 if index == 0 else 10, 0) for index in range(101)]
    lines = corpora.input_lines(sources)
    offsets = list(itertools.accumulate(map(len, lines[:-1]), initial=0))
    task = ShardTask(0, 0, 0, 0, offsets[-1], 10, 101_000)
    spec = corpora.make_spec(format="files")
    pieces = list(cut_pieces([task], [4], io.BytesIO(b"".join(lines)), spec, 1_000.0))
    assert [len(places(piece, sources, offsets)) for piece in pieces] == [1, 50, 50]
    assert dataclasses.replace(pieces[0], piece=None).first_index == 0
