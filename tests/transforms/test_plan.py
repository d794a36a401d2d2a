"""Planning: sizes, the choice of shards, the cuts, the spreading over workers, and the plan file."""

from __future__ import annotations

import io
import itertools
import json
import re
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from transforms.elements import Input, ShardTask
from transforms.plan import (
    Estimate,
    Layout,
    ShardsRequest,
    choose_layout,
    cut_shards,
    parse_size,
    read_cost_us,
    spread,
)
from transforms.plan_file import read_header, read_task, read_tasks, write_plan

MIB, GIB = 1 << 20, 1 << 30
LINE = 100  # Bytes of an inputs.jsonl line in these tests.


class TestParseSize:
    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("0", 0),
            ("17", 17),
            ("17B", 17),
            ("1KB", 1000),
            ("1KiB", 1024),
            ("256MiB", 256 << 20),
            ("256 mib", 256 << 20),
            (" 1.5GB ", 1_500_000_000),
            ("2GiB", 2 << 30),
            ("0.5TiB", 1 << 39),
            ("1TB", 10**12),
        ],
    )
    def test_reads_decimal_and_binary_units(self, text: str, expected: int) -> None:
        assert parse_size(text) == expected

    @pytest.mark.parametrize("text", ["", "MiB", "-1", "1..5GB", "1e9", "1 M", "ten", "1GiB/s", "0x10", "nan", "1,000"])
    def test_refuses_what_is_no_size_and_shows_it(self, text: str) -> None:
        with pytest.raises(ValueError, match=re.escape(repr(text))):
            parse_size(text)

    @given(st.integers(0, 1 << 50))
    def test_whole_bytes_are_exact(self, num_bytes: int) -> None:
        assert parse_size(str(num_bytes)) == num_bytes


class TestShardsRequest:
    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("auto", ShardsRequest("auto")),
            (" match ", ShardsRequest("match")),
            ("8", ShardsRequest("count", count=8)),
            (8, ShardsRequest("count", count=8)),
            ("256MiB", ShardsRequest("size", max_bytes=256 << 20)),
            ("1B", ShardsRequest("size", max_bytes=1)),
            ("match,1GiB", ShardsRequest("match", max_bytes=1 << 30)),
            ("match, 64 MiB", ShardsRequest("match", max_bytes=64 << 20)),
        ],
    )
    def test_reads_every_form(self, text: str | int, expected: ShardsRequest) -> None:
        assert ShardsRequest.parse(text) == expected

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "0",
            "-1",
            "0MiB",
            "many",
            "auto,1MiB",
            "match,",
            "match,many",
            "8,1MiB",
            "match,1MiB,2MiB",
            "1.5",
            0,
            "1000001",
        ],
    )
    def test_refuses_the_rest(self, text: str | int) -> None:
        with pytest.raises(ValueError, match=r"^(expected auto, match|a number of shards|a shard size)"):
            ShardsRequest.parse(text)

    def test_refusal_shows_the_value_and_the_forms(self) -> None:
        with pytest.raises(ValueError, match=r"expected auto, match, .* number or a size such as 256MiB, got 'many'"):
            ShardsRequest.parse("many")


class TestChooseLayout:
    AUTO = ShardsRequest("auto")

    @pytest.mark.parametrize(
        ("total_bytes", "record_bytes", "num_shards", "records", "shard_bytes"),
        [
            (0, 1000.0, 1, 20_000, 256 * MIB),
            (1, 1000.0, 1, 20_000, 256 * MIB),
            (20_000 * 1000, 1000.0, 1, 20_000, 256 * MIB),  # Exactly full by records.
            (20_000 * 1000 + 1, 1000.0, 2, 20_000, 256 * MIB),
            (256 * MIB, 1 * MIB, 1, 20_000, 256 * MIB),  # Exactly full by bytes.
            (256 * MIB + 1, 1 * MIB, 2, 20_000, 256 * MIB),
            (1000 * 20_000 * 100, 100.0, 1000, 20_000, 256 * MIB),  # The last with small shards.
            (1001 * 20_000 * 100, 100.0, 1000, 20_020, 256 * MIB),  # Records a shard grow first.
            (10_000 * 20_000 * 100, 100.0, 1000, 200_000, 256 * MIB),
            (1000 * 256 * MIB, 1 * MIB, 1000, 20_000, 256 * MIB),
            (2000 * 256 * MIB, 1 * MIB, 1000, 20_000, 512 * MIB),  # Then bytes a shard.
            (1000 * GIB, 1 * MIB, 1000, 20_000, 1 * GIB),  # The largest shards.
            (1000 * GIB + 1, 1 * MIB, 1001, 20_000, 1_072_669_155),  # Then shards.
            (5000 * GIB, 1 * MIB, 5000, 20_000, 1 * GIB),
        ],
    )
    def test_auto(self, total_bytes: int, record_bytes: float, num_shards: int, records: int, shard_bytes: int) -> None:
        layout = choose_layout(self.AUTO, total_bytes, record_bytes)
        assert layout == Layout(num_shards, records, shard_bytes, 2)

    @given(st.integers(0, 1 << 50), st.floats(1, 1 << 30))
    def test_auto_keeps_its_rules(self, total_bytes: int, record_bytes: float) -> None:
        layout = choose_layout(self.AUTO, total_bytes, record_bytes)
        shard_bytes = total_bytes / layout.num_shards
        assert shard_bytes <= GIB
        assert layout.part_max_bytes <= GIB
        assert layout.num_shards <= 1000 or shard_bytes > GIB * 0.99
        if layout.num_shards < 1000:
            assert shard_bytes <= 256 * MIB
            assert shard_bytes / record_bytes <= 20_000 * (1 + 1e-9)
        assert layout.part_max_bytes >= shard_bytes
        assert layout.part_max_records >= min(shard_bytes / record_bytes, 20_000) * (1 - 1e-9)

    def test_count_is_what_was_asked_and_rolls_only_what_cannot_be_split(self) -> None:
        assert choose_layout(ShardsRequest("count", count=7), 1000, 10.0) == Layout(7, 0, 143, 0)
        assert choose_layout(ShardsRequest("count", count=7), 0, 10.0) == Layout(7, 0, 1, 0)

    @pytest.mark.parametrize(
        ("total_bytes", "num_shards"), [(0, 1), (1, 1), (100, 1), (101, 2), (1000, 10), (1001, 11)]
    )
    def test_size_divides_the_total(self, total_bytes: int, num_shards: int) -> None:
        assert choose_layout(ShardsRequest("size", max_bytes=100), total_bytes, 10.0) == Layout(num_shards, 0, 100, 2)

    def test_match_has_no_number_and_rolls_only_at_a_bound(self) -> None:
        assert choose_layout(ShardsRequest("match"), 1000, 10.0) == Layout(0, 0, 0, 0)
        assert choose_layout(ShardsRequest("match", max_bytes=64), 1000, 10.0) == Layout(0, 0, 64, 1)


class TestReadCost:
    @pytest.mark.parametrize(("records", "micros"), [(0, 3.0), (1000, 5.0), (10_000, 22.0), (1_000_000, 2500.0)])
    def test_measured_points(self, records: float, micros: float) -> None:
        assert read_cost_us(records) == pytest.approx(micros)

    def test_grows_on_beyond_the_measurements(self) -> None:
        assert read_cost_us(2_000_000) == pytest.approx(5000.0)

    @given(st.floats(0, 1e9), st.floats(0, 1e9))
    def test_more_records_never_cost_less(self, one: float, other: float) -> None:
        assert read_cost_us(min(one, other)) <= read_cost_us(max(one, other)) * (1 + 1e-12)


class TestEstimate:
    @pytest.mark.parametrize("name", ["a.gz", "a.tfrecord.GZ", "a.gzip", "a.zz", "a.zlib"])
    def test_compressed_names_weigh_what_they_inflate_to(self, name: str) -> None:
        assert Estimate(100.0, inflation=2.5).weigh(Input(0, name, 1000, 0)) == 2500

    @pytest.mark.parametrize("name", ["a.tfrecord", "a.gz.tfrecord", "gz"])
    def test_other_names_weigh_their_size(self, name: str) -> None:
        assert Estimate(100.0, inflation=2.5).weigh(Input(0, name, 1000, 0)) == 1000


def inputs_of(sizes: list[int], names: list[str] | None = None) -> list[tuple[int, Input]]:
    """Inputs as inputs.jsonl yields them; one of size -1 cannot be read."""
    found = []
    for index, size in enumerate(sizes):
        error = ("not_found", "no such file") if size < 0 else None
        name = names[index] if names else f"/in/{index:06d}"
        found.append((index * LINE, Input(index, name, max(0, size), 0, error)))
    return found


def cut(sizes: list[int], num_shards: int, *, splits: bool) -> list[ShardTask]:
    """The plan of inputs that all can, or all cannot, be split."""
    total = sum(max(0, size) for size in sizes)
    return list(cut_shards(inputs_of(sizes), total, num_shards, lambda source: source.size, lambda _: splits))


def pieces_of(tasks: list[ShardTask], sizes: list[int]) -> Iterator[tuple[int, int, int, int]]:
    """(shard, input, start, end) of everything the tasks read, the way workers slice their interval."""
    for task in tasks:
        for index in range(task.first_offset // LINE, task.last_offset // LINE + 1):
            start = task.start if index * LINE == task.first_offset else 0
            end = task.end if index * LINE == task.last_offset else max(0, sizes[index])
            yield task.shard, index, start, end


def check_covered_once(tasks: list[ShardTask], sizes: list[int]) -> None:
    """Every byte of every input is read once, in order; inputs without bytes are visited once."""
    assert [task.shard for task in tasks] == list(range(len(tasks)))
    assert [task.first_index * LINE for task in tasks] == [task.first_offset for task in tasks]
    position = dict.fromkeys(range(len(sizes)), 0)
    visits = dict.fromkeys(range(len(sizes)), 0)
    last = (0, 0)
    for _, index, start, end in pieces_of(tasks, sizes):
        assert (index, start) >= last
        assert start == position[index]
        assert end >= start
        assert end > start or max(0, sizes[index]) == 0
        last, position[index] = (index, end), end
        visits[index] += 1
    assert position == {index: max(0, size) for index, size in enumerate(sizes)}
    assert all(visits[index] == 1 for index, size in enumerate(sizes) if size <= 0)
    assert sum(task.planned_bytes for task in tasks) == sum(max(0, size) for size in sizes)


sizes_of_inputs = st.lists(st.integers(-1, 50) | st.integers(0, 5000), max_size=40)


class TestCutShards:
    @given(sizes_of_inputs, st.integers(0, 60), st.booleans())
    @settings(max_examples=300)
    @example([0, 0, 0], 5, True)
    @example([-1, 10, 0, 10, -1], 2, True)
    @example([1], 60, True)
    @example([5000, 0, 0, 1], 3, False)
    def test_every_input_is_covered_once_in_order(self, sizes: list[int], num_shards: int, splits: bool) -> None:
        check_covered_once(cut(sizes, num_shards, splits=splits), sizes)

    @given(sizes_of_inputs, st.integers(1, 60))
    @settings(max_examples=200)
    def test_splittable_input_gives_exactly_the_number_within_a_byte(self, sizes: list[int], num_shards: int) -> None:
        total = sum(size for size in sizes if size > 0)
        tasks = cut(sizes, num_shards, splits=True)
        weights = [task.planned_bytes for task in tasks]
        assert len(tasks) == num_shards if total >= num_shards else len(tasks) <= num_shards
        assert max(weights, default=0) - min(weights, default=0) <= 1

    @given(st.lists(st.integers(1, 1000), min_size=1, max_size=60), st.integers(1, 60))
    @settings(max_examples=200)
    def test_atomic_input_is_cut_within_one_input_of_equal(self, sizes: list[int], num_shards: int) -> None:
        tasks = cut(sizes, num_shards, splits=False)
        assert len(tasks) <= num_shards
        assert all(task.start == 0 for task in tasks)
        equal = sum(sizes) / num_shards
        if max(sizes) <= equal:
            assert len(tasks) == num_shards
            assert all(abs(task.planned_bytes - equal) <= max(sizes) for task in tasks)

    @given(st.integers(1, 100), st.integers(1, 100), st.integers(1, 1 << 40))
    def test_equal_atomic_inputs_give_shards_within_one_input(self, count: int, num_shards: int, size: int) -> None:
        tasks = cut([size] * count, num_shards, splits=False)
        inputs = [task.planned_bytes // size for task in tasks]
        assert len(tasks) == min(count, num_shards)
        assert max(inputs) - min(inputs) <= 1

    @given(sizes_of_inputs)
    def test_match_gives_one_shard_an_input(self, sizes: list[int]) -> None:
        for splits in (True, False):
            tasks = cut(sizes, 0, splits=splits)
            assert [(task.first_index, task.start, task.end) for task in tasks] == [
                (index, 0, max(0, size)) for index, size in enumerate(sizes)
            ]
            assert [task.first_offset for task in tasks] == [task.last_offset for task in tasks]

    @given(st.lists(st.tuples(st.integers(0, 3000), st.booleans()), max_size=30), st.integers(1, 40))
    @settings(max_examples=200)
    def test_mixed_input_is_covered_and_only_splittable_input_is_cut(
        self, inputs: list[tuple[int, bool]], num_shards: int
    ) -> None:
        sizes = [size for size, _ in inputs]
        names = [f"/in/{number}{'.tfrecord' if splits else '.gz'}" for number, (_, splits) in enumerate(inputs)]
        estimate = Estimate(10.0, inflation=3.0)
        found = inputs_of(sizes, names)
        total = sum(estimate.weigh(source) for _, source in found)
        tasks = list(cut_shards(found, total, num_shards, estimate.weigh, lambda source: source.name.endswith("d")))
        cuts = [(index, start) for _, index, start, _ in pieces_of(tasks, sizes) if start]
        assert all(inputs[index][1] for index, _ in cuts)
        assert sum(task.planned_bytes for task in tasks) == total
        assert len(tasks) <= max(1, num_shards)
        covered = [0] * len(sizes)
        for _, index, start, end in pieces_of(tasks, sizes):
            assert covered[index] == start
            covered[index] = end
        assert covered == sizes

    def test_nothing_plans_nothing(self) -> None:
        assert cut([], 5, splits=True) == []

    def test_streams_inputs_and_tasks(self) -> None:
        """The first shard is there before the last input was asked for."""
        asked = 0

        def endless() -> Iterator[tuple[int, Input]]:
            nonlocal asked
            for index in itertools.count():
                asked = index
                yield index * LINE, Input(index, f"/in/{index}", 100, 0)

        tasks = cut_shards(endless(), 1_000_000, 1000, lambda source: source.size, lambda _: True)
        first = next(tasks)
        assert (first.shard, first.end, asked) == (0, 100, 10)

    def test_many_inputs_cost_no_memory(self) -> None:
        count = 100_000
        inputs = ((index * LINE, Input(index, "/in/x", 100, 0)) for index in range(count))
        tracemalloc.start()
        try:
            tasks = cut_shards(inputs, count * 100, 1000, lambda source: source.size, lambda _: False)
            number = sum(1 for _ in tasks)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert number == 1000
        assert peak < 100_000


class TestSpread:
    @given(st.lists(st.integers(0, 1000), max_size=60), st.integers(1, 12))
    def test_every_shard_is_handed_out_once_in_equal_hands(self, weights: list[int], num_workers: int) -> None:
        order = spread(weights, num_workers)
        assert sorted(shard for shard in order if shard >= 0) == list(range(len(weights)))
        hands = [[shard for shard in order[worker::num_workers] if shard >= 0] for worker in range(num_workers)]
        loads = [sum(weights[shard] for shard in hand) for hand in hands]
        equal = sum(weights) / num_workers
        assert all(abs(load - equal) <= max(weights, default=0) for load in loads)
        assert all(hand == sorted(hand) for hand in hands)

    def test_one_worker_gets_them_in_order(self) -> None:
        assert spread([5, 1, 9], 1) == [0, 1, 2]

    def test_more_workers_than_shards_leave_some_without(self) -> None:
        assert sorted(spread([5, 1], 4)) == [-1, -1, 0, 1]

    def test_nothing_is_nothing(self) -> None:
        assert spread([], 3) == []

    def test_empty_shards_are_spread_by_number(self) -> None:
        order = spread([0] * 8, 4)
        assert all(len([shard for shard in order[worker::4] if shard >= 0]) == 2 for worker in range(4))


TASKS = [ShardTask(n, 10 * n, n, 3 * n, 10 * n + 5, 7 * n, 1000 + n) for n in range(20)]


class TestPlanFile:
    def test_comes_back_as_it_went_in(self, tmp_path: Path) -> None:
        path = str(tmp_path / "plan.jsonl")
        count = write_plan(path, lambda number: {"plan_id": "ü", "num_shards": number}, iter(TASKS))
        assert count == 20
        with open(path, "rb") as plan:
            assert read_header(plan) == {"gristmill_plan": 1, "plan_id": "ü", "num_shards": 20}
            lines = list(read_tasks(plan))
            assert [task for _, task in lines] == TASKS
            assert [read_task(plan, offset) for offset, _ in reversed(lines)] == TASKS[::-1]

    def test_empty_plan_has_a_header_only(self, tmp_path: Path) -> None:
        path = str(tmp_path / "plan.jsonl")
        assert write_plan(path, lambda number: {"num_shards": number}, iter([])) == 0
        with open(path, "rb") as plan:
            assert read_header(plan)["num_shards"] == 0
            assert list(read_tasks(plan)) == []

    def test_same_tasks_give_the_same_bytes(self, tmp_path: Path) -> None:
        for name in ("a", "b"):
            write_plan(str(tmp_path / name), lambda number: {"plan_id": "x"}, iter(TASKS))
        assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()

    def test_line_of_a_shard_does_not_grow_with_its_inputs(self, tmp_path: Path) -> None:
        path = tmp_path / "plan.jsonl"
        widths = []
        for count in (1, 100_000):
            write_plan(str(path), lambda number: {}, cut_one_shard(count))
            widths.append(len(path.read_bytes().splitlines()[1]))
        assert max(widths) - min(widths) < 40
        assert max(widths) < 200

    @pytest.mark.parametrize("content", [b"", b"{}\n", b"[1]\n", b"not json\n", b"\xff\n", b"null\n"])
    def test_what_is_no_plan_is_refused_and_shown(self, content: bytes) -> None:
        with pytest.raises(ValueError, match=r"is not a plan: it begins with"):
            read_header(io.BytesIO(content))

    def test_other_version_is_refused(self) -> None:
        line = json.dumps({"gristmill_plan": 99}).encode() + b"\n"
        with pytest.raises(ValueError, match="has version 99, expected 1"):
            read_header(io.BytesIO(line))


def cut_one_shard(count: int) -> Iterator[ShardTask]:
    """One shard of many inputs."""
    inputs = ((index * LINE, Input(index, "/in/x", 1000, 0)) for index in range(count))
    return cut_shards(inputs, count * 1000, 1, lambda source: source.size, lambda _: True)
