"""Ranges of damaged TFRecord files, each read on its own, against an oracle that looks for the records' bytes."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter

import pytest

import corpora
from corpora import RangeResult, frame, frame_all
from transforms.elements import Span
from transforms.formats import tfrecord

CASES_PER_TEST = 250
SEEDS = range(0, 5_000, CASES_PER_TEST)
SIZES = [size for size in range(201) if size != 8]  # Eight bytes are a case of their own: see the labels below.
SMALL_BLOCKS = {
    "_FIRST_SEARCH_BYTES": 40,
    "_SEARCH_BYTES": 64,
    "BATCH_MAX_BYTES": 100,
    "BATCH_MAX_RECORDS": 3,
    "_KNOWN_LENGTHS": 4,
}


@dataclasses.dataclass
class Case:
    """A damaged file and the ranges it is read in."""

    seed: int
    payloads: list[bytes]
    data: bytes
    damage: list[str]
    ranges: list[tuple[int, int]]

    def __str__(self) -> str:
        return f"seed {self.seed}: {self.damage} in {len(self.data)} bytes read as {self.ranges}"


def make_case(seed: int) -> Case:
    """Records of 0 to 200 bytes, up to five ranges, one to three damages near the cuts between them."""
    rng = random.Random(seed)
    kind = rng.choice(list(corpora.PAYLOADS))
    sizes = rng.choice([[rng.randint(9, 200)], [0, 1, 2, 3], [0, 7, 16, 200], SIZES])
    payloads = [corpora.PAYLOADS[kind](index, rng.choice(sizes)) for index in range(rng.randint(1, 25))]
    data = frame_all(payloads)
    starts = corpora.frame_starts(payloads)
    near_a_record = [max(1, start + rng.randint(-13, 13)) for start in rng.choices(starts, k=2)]
    cuts = rng.sample(near_a_record + [rng.randint(1, len(data)) for _ in range(4)], rng.randint(0, 4))
    damage = []
    for _ in range(rng.choice([1, 1, 2, 3])):
        name, data = corpora.damage_near(rng, data, cuts or [rng.randrange(len(data))])
        damage.append(name)
    return Case(seed, payloads, data, damage, corpora.cut_ranges(len(data), cuts))


def read_case(case: Case) -> tuple[list[RangeResult], bool]:
    return corpora.read_until_they_meet(tfrecord.read_range, case.data, case.ranges)


def read_slice(data: bytes, start: int, end: int) -> RangeResult:
    return corpora.read_bytes(tfrecord.read_range, data, start, end)


def shadowed(case: Case, position: int, results: list[RangeResult]) -> bool:
    """Whether an intact record lies inside one whose own header is right and which ends at a header or the end.

    Such a record is a payload's content as far as the framing tells, and stands in the outer one's dead letter.
    """
    for letter in (letter for result in results for letter in result.dead):
        end = letter.position + letter.length
        if letter.position < position < end:
            outer = int.from_bytes(case.data[letter.position : letter.position + 8], "little")
            ends_well = end == len(case.data) or corpora.is_valid_header(case.data, end)
            return (
                letter.reason == "data_checksum"
                and corpora.is_valid_header(case.data, letter.position)
                and letter.length == outer + corpora.FRAME_BYTES
                and ends_well
                and letter.payload == case.data[letter.position + 12 : end - 4]
            )
    return False


def check(case: Case) -> Counter[str]:
    """Holds one case against the oracle; returns what occurred."""
    results, ever_apart = read_case(case)
    corpora.assert_every_byte_is_named_once(results, len(case.data), case)
    found = [pair for result in results for pair in zip(result.positions, result.records, strict=True)]
    standing = corpora.whole_frames(case.data, case.payloads)
    missing = sorted(set(standing) - set(found))
    assert found == [pair for pair in standing if pair not in missing], case
    assert all(shadowed(case, position, results) for position, _ in missing), (missing, case)
    books = corpora.add_up_ranges(results, len(case.data)).totals
    dead = [letter for result in results for letter in result.dead]
    assert books["records_read"] == books["records_written"] + books["records_dead"] == len(found) + len(dead), case
    assert books["bytes_read"] == len(case.data), case
    assert books["bytes_dead"] == sum(letter.length for letter in dead), case
    assert sum(books[name] for name in ("files_read", "files_dead", "files_empty")) == 1, case
    return Counter(apart=ever_apart, shadowed=len(missing), dead=len(dead), records=len(found))


@pytest.mark.parametrize("first_seed", SEEDS)
def test_random_damage_near_range_boundaries_balances(first_seed: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(first_seed, first_seed + CASES_PER_TEST):
        seen += check(make_case(seed))
    assert seen["records"] > 5 * CASES_PER_TEST
    assert seen["dead"] > CASES_PER_TEST / 2
    assert seen["shadowed"] < CASES_PER_TEST / 25
    assert seen["apart"] < CASES_PER_TEST / 25


@pytest.mark.parametrize("first_seed", SEEDS[::4])
def test_random_damage_balances_when_every_block_is_small(first_seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of a few KB never cross the reader's large blocks; blocks of some bytes are crossed all the time."""
    for name, value in SMALL_BLOCKS.items():
        monkeypatch.setattr(tfrecord, name, value)
    for seed in range(first_seed, first_seed + CASES_PER_TEST):
        check(make_case(1_000_000 + seed))


@pytest.mark.parametrize("kind", corpora.PAYLOADS)
def test_every_cut_of_an_undamaged_file_gives_every_record_once(kind: str) -> None:
    payloads = corpora.make_payloads(12, 40, kind=kind, seed=3)
    data = frame_all(payloads)
    for cut in range(1, len(data)):
        left, right = read_slice(data, 0, cut), read_slice(data, cut, len(data))
        assert left.records + right.records == payloads
        assert left.positions + right.positions == corpora.frame_starts(payloads)[:-1]
        assert left.dead + right.dead == []
        assert all(position < cut for position in left.positions)
        assert all(position >= cut for position in right.positions)


def test_ranges_of_one_byte_give_every_record_once() -> None:
    payloads = [corpora.text_payload(index, index) for index in range(8)]
    data = frame_all(payloads)
    results = [read_slice(data, at, at + 1) for at in range(len(data))]
    assert [record for result in results for record in result.records] == payloads
    assert [at for at, result in enumerate(results) if result.records] == corpora.frame_starts(payloads)[:-1]
    assert [at for at, result in enumerate(results) if result.span.start is not None] == corpora.frame_starts(payloads)[
        :-1
    ]
    assert corpora.add_up_ranges(results, len(data)).apart == []


@pytest.mark.parametrize("bit", range(8))
def test_every_flipped_byte_costs_one_record_whatever_the_cut(bit: int) -> None:
    payloads = [corpora.text_payload(index, 7 + index) for index in range(5)]
    data = frame_all(payloads)
    starts = corpora.frame_starts(payloads)
    for at in range(len(data)):
        case = Case(at, payloads, corpora.flip_bit(data, at, bit), ["flip"], corpora.cut_ranges(len(data), [at, 60]))
        results, ever_apart = read_case(case)
        corpora.assert_every_byte_is_named_once(results, len(case.data), case)
        hit = max(number for number, start in enumerate(starts) if start <= at)
        assert not ever_apart
        assert [record for result in results for record in result.records] == payloads[:hit] + payloads[hit + 1 :]
        [letter] = [letter for result in results for letter in result.dead]
        assert (letter.position, letter.length) == (starts[hit], starts[hit + 1] - starts[hit])


def test_a_record_larger_than_many_ranges_belongs_to_the_first_of_them() -> None:
    payloads = [b"before", corpora.text_payload(1, 5000), b"after"]
    data = frame_all(payloads)
    results = [read_slice(data, *pair) for pair in corpora.cut_ranges(len(data), range(10, len(data), 100))]
    assert [record for result in results for record in result.records] == payloads
    assert corpora.add_up_ranges(results, len(data)).apart == []
    assert (
        sum(result.span == Span(result.span.asked_start, result.span.asked_end, None, None) for result in results) > 45
    )


def nested_file() -> tuple[bytes, list[bytes]]:
    inner = frame_all([b"not a record of the file %d" % index for index in range(20)])
    payloads = [b"first", inner, b"second", inner + b"tail", b"third"]
    return frame_all(payloads), payloads


def test_framing_inside_payloads_is_named_apart_and_exact_when_read_again() -> None:
    data, payloads = nested_file()
    num_apart = 0
    for cut in range(1, len(data)):
        case = Case(cut, payloads, data, ["nested"], corpora.cut_ranges(len(data), [cut]))
        results, ever_apart = read_case(case)
        num_apart += ever_apart
        assert [record for result in results for record in result.records] == payloads
        assert [letter for result in results for letter in result.dead] == []
    assert num_apart > 500


@pytest.mark.parametrize("seed", range(40))
def test_many_cuts_inside_nested_framing_are_exact_after_reading_again(seed: int) -> None:
    data, payloads = nested_file()
    cuts = random.Random(seed).sample(range(1, len(data)), 6)
    results, _ = read_case(Case(seed, payloads, data, ["nested"], corpora.cut_ranges(len(data), cuts)))
    assert [record for result in results for record in result.records] == payloads
    assert [letter for result in results for letter in result.dead] == []


LABELS = [b"%c" % (4 + 8 * (index % 30)) + bytes(7) for index in range(400)]
"""int64 labels. Eight bytes and their checksum *are* a header, of that length: one stands inside every record."""


@pytest.mark.parametrize("label", range(10))
def test_a_damaged_header_among_int64_labels_costs_one_record(label: int) -> None:
    data = frame_all(LABELS)
    hit = 60 + label
    case = Case(label, LABELS, corpora.flip_bit(data, 24 * hit, 6), ["flip"], [(0, len(data))])
    results, _ = read_case(case)
    corpora.assert_every_byte_is_named_once(results, len(case.data), case)
    assert results[0].regions == [(24 * hit, 24, "length_checksum")]
    assert results[0].records == LABELS[:hit] + LABELS[hit + 1 :]


def test_every_cut_among_int64_labels_is_exact_after_reading_again() -> None:
    data = frame_all(LABELS[:60])
    for cut in range(1, len(data)):
        case = Case(cut, LABELS[:60], data, ["labels"], corpora.cut_ranges(len(data), [cut]))
        results, _ = read_case(case)
        assert [record for result in results for record in result.records] == LABELS[:60]
        assert [letter for result in results for letter in result.dead] == []


def test_a_valid_record_at_the_first_byte_of_a_range_is_not_read_by_the_range_before() -> None:
    data = frame(b"a") + frame(b"b")
    left, right = read_slice(data, 0, 17), read_slice(data, 17, 34)
    assert (left.records, right.records) == ([b"a"], [b"b"])
    assert (left.span, right.span) == (Span(0, 17, 0, 17), Span(17, 34, 17, 34))


def test_bad_payload_right_behind_a_cut_is_told_as_one_and_kept() -> None:
    """The range before the cut has to name it, and must not call it a damaged length."""
    payloads = [b"%03d" % index * 10 for index in range(30)]
    size = len(payloads[0]) + 16
    data = corpora.flip_bit(corpora.frame_all(payloads), 10 * size + 20)
    results = [read_slice(data, start, end) for start, end in corpora.cut_ranges(len(data), [9 * size + 5])]
    assert [record for result in results for record in result.records] == payloads[:10] + payloads[11:]
    [letter] = [letter for result in results for letter in result.dead]
    assert (letter.position, letter.length, letter.reason) == (10 * size, size, "data_checksum")
    assert letter.payload is not None
    assert len(letter.payload) == size - 16
