"""Planning a corpus that is not there: what is listed is what it says, and memory does not grow with it."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from simulate.corpus import Corpus, read_content
from simulate.planner import plan
from simulate.run import graph_bytes, read_spec
from simulate.work import read_shards
from transforms import gcs
from transforms.elements import Input
from transforms.inputs import read_inputs
from transforms.plan_file import INPUTS_NAME


@pytest.fixture(autouse=True)
def _own_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)
    monkeypatch.setattr(gcs, "_process", gcs._Process())


def test_the_planner_lists_the_corpus_page_by_page(tmp_path: Path) -> None:
    corpus = Corpus(12_345, 10**12, seed=5, gzip=2)
    facts = plan(corpus, tmp_path)
    with (tmp_path / INPUTS_NAME).open("rb") as lines:
        inputs = [source for _, source in read_inputs(lines)]
    assert inputs == [
        Input(index, f"gs://corpus/{corpus.name(index)}", int(size), corpus.generation(index))
        for index, size in enumerate(corpus.sizes())
    ]
    assert (facts["files"], facts["bytes"], facts["pages"]) == (12_345, int(corpus.sizes().sum()), 13)
    assert abs(facts["bytes"] - 10**12) < 10**9
    assert sum(source.name.endswith(".gz") for source in inputs) == 248


def test_shards_hold_every_byte_once_and_know_their_files(tmp_path: Path) -> None:
    corpus = Corpus(3_000, 10**11, seed=5)
    facts = plan(corpus, tmp_path, shards="256MiB")
    shards, sizes = list(read_shards(tmp_path, 3_000)), corpus.sizes()
    assert facts["shards"] == len(shards) == 373
    assert sum(shard.task.planned_bytes for shard in shards) == sizes.sum()
    starts = np.concatenate([[0], np.cumsum(sizes)])
    at = 0
    for shard in shards:
        assert starts[shard.first] + shard.task.start == at
        at += shard.task.planned_bytes
        assert starts[shard.last] + shard.task.end == at
        assert shard.num_files >= 1


def test_memory_and_graph_do_not_grow_with_the_number_of_files(tmp_path: Path) -> None:
    peaks, graphs = [], []
    for files in (1_000, 6_000, 36_000):  # The first loads what is loaded once.
        folder = tmp_path / str(len(peaks))
        tracemalloc.start()
        plan(Corpus(files, 10**11), folder)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        graphs.append(graph_bytes(read_spec(folder), 1_000))
    assert peaks[2] < peaks[1] + (1 << 20)  # 35 bytes a file: less than its name.
    assert graphs[2] <= graphs[1] + 200  # Numbers of one more digit.


def test_a_corpus_has_the_bytes_that_were_asked_for_and_giants() -> None:
    sizes = Corpus(100_000, 10**13).sizes()
    assert abs(int(sizes.sum()) - 10**13) < 10**9
    assert sizes.max() >= 100e9
    assert sizes.mean() > 4 * np.median(sizes)
    assert np.array_equal(sizes, Corpus(100_000, 10**13).sizes())


@pytest.mark.parametrize(("start", "end"), [(0, 10), (5, 2_000_000), (999_990, 1_000_000), (700_000, 700_001)])
def test_any_range_of_a_file_is_a_part_of_the_whole(start: int, end: int) -> None:
    assert read_content(1_000_000, start, end) == read_content(1_000_000, 0, 1_000_000)[start:end]
