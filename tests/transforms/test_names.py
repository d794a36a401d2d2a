"""File names: templates, numbers, and the pattern that finds an older set again."""

from __future__ import annotations

import importlib
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes import make_spec
from transforms.names import (
    DEFAULT_TEMPLATE,
    check_template,
    dead_letter_names,
    shard_file_name,
    shard_file_pattern,
)

TEMPLATES = [
    DEFAULT_TEMPLATE,
    "{SHARD_INDEX}.array_record",
    "data/{SPLIT}/{DATASET}-{SHARD_X_OF_Y}.arrayrecord",
    "{DATASET}.{FILEFORMAT}@{SHARD_INDEX}of{NUM_SHARDS}",
    "a+b(c)[d]-{SHARD_INDEX}",
    "{{braces}}-{SHARD_INDEX}",
]


class TestCheckTemplate:
    @pytest.mark.parametrize("template", TEMPLATES)
    def test_takes_the_variables_of_tfds(self, template: str) -> None:
        check_template(template)

    @pytest.mark.parametrize(
        ("template", "hint"),
        [
            ("{DATASET}-{SHARD}", "unknown {SHARD}; known are {DATASET}"),
            ("{}-{SHARD_INDEX}", "unknown {}"),
            ("{0}-{SHARD_INDEX}", "unknown {0}"),
            ("{DATASET.__class__}-{SHARD_INDEX}", "unknown"),
            ("{DATASET}-{SPLIT}", "gives every shard the same name; add {SHARD_X_OF_Y}"),
            ("{DATASET}-of-{NUM_SHARDS}", "gives every shard the same name"),
            ("", "gives every shard the same name"),
            ("{SHARD_INDEX", "is malformed"),
            ("SHARD_INDEX}", "is malformed"),
            ("/data/{SHARD_INDEX}", "below the output folder"),
            ("../{SHARD_INDEX}", "below the output folder"),
            ("a/../../{SHARD_INDEX}", "below the output folder"),
            ("_data/{SHARD_INDEX}", "not hidden or `_` ones"),
            ("_gristmill/shards/{SHARD_INDEX}.json", "not hidden or `_` ones"),
            (".{SHARD_INDEX}", "not hidden or `_` ones"),
            ("a/_b/{SHARD_INDEX}", "not hidden or `_` ones"),
            ("a/.b/{SHARD_INDEX}", "not hidden or `_` ones"),
            ("a/{SHARD_INDEX}/", "below the output folder"),
            ("a//{SHARD_INDEX}", "below the output folder"),
            ("a\n{SHARD_INDEX}", "cannot be printed"),
            ("a\udcff{SHARD_INDEX}", "cannot be printed"),
            ("a,{SHARD_INDEX}", "separator or pattern"),
            ("*{SHARD_INDEX}", "separator or pattern"),
        ],
    )
    def test_refuses_the_rest_and_says_why(self, template: str, hint: str) -> None:
        with pytest.raises(ValueError, match=re.escape(repr(template))) as refused:
            check_template(template)
        assert hint in str(refused.value)

    @pytest.mark.parametrize("template", ["x-{SHARD_INDEX:03d}", "x-{SHARD_INDEX!r}", "x-{SHARD_X_OF_Y:>30}"])
    def test_refuses_formats_that_fail_or_change_the_name_when_the_job_is_published(self, template: str) -> None:
        with pytest.raises(ValueError, match=re.escape(repr(template))):
            check_template(template)


class TestShardFileName:
    def test_is_tfds_form(self) -> None:
        spec = make_spec("/out", name="c4", split="validation")
        assert shard_file_name(spec, 3, 128) == "c4-validation.array_record-00003-of-00128"

    @pytest.mark.parametrize(
        ("number", "total", "expected"),
        [
            (0, 1, "00000-of-00001"),
            (99_999, 100_000, "99999-of-100000"),
            (0, 100_001, "000000-of-100001"),
            (100_000, 100_001, "100000-of-100001"),
        ],
    )
    def test_numbers_grow_beyond_five_digits(self, number: int, total: int, expected: str) -> None:
        assert shard_file_name(make_spec("/out", template="{SHARD_X_OF_Y}"), number, total) == expected

    def test_names_sort_as_they_count(self) -> None:
        spec = make_spec("/out")
        names = [shard_file_name(spec, number, 100_002) for number in (0, 1, 99_999, 100_000, 100_001)]
        assert names == sorted(names)

    @pytest.mark.parametrize("template", TEMPLATES)
    def test_every_variable_is_filled_in(self, template: str) -> None:
        spec = make_spec("/out", name="c4", split="test", template=template)
        names = {shard_file_name(spec, number, 9) for number in range(9)}
        assert len(names) == 9
        assert not any("SHARD" in name or "DATASET" in name for name in names)


class TestShardFilePattern:
    @given(st.sampled_from(TEMPLATES), st.integers(0, 10**7), st.integers(1, 10**7))
    def test_matches_every_name_whatever_the_count(self, template: str, number: int, total: int) -> None:
        spec = make_spec("/out", name="c.4+x", split="train", template=template)
        assert shard_file_pattern(spec).fullmatch(shard_file_name(spec, number % total, total))

    @pytest.mark.parametrize(
        "name",
        [
            "c4-test.array_record-00000-of-00001",
            "c4x-train.array_record-00000-of-00001",
            "c4-train_g001.array_record-00000-of-00001",
            "c4-train.tfrecord-00000-of-00001",
            "c4-train.array_record-0000-of-00001",
            "c4-train.array_record-00000-of-00001.bak",
            "sub/c4-train.array_record-00000-of-00001",
            "c4-trainXarray_record-00000-of-00001",
            "c4-train.array_record-00000-of-00001\n",
            "manifest.json",
        ],
    )
    def test_leaves_files_of_others(self, name: str) -> None:
        assert not shard_file_pattern(make_spec("/out", name="c4", split="train")).fullmatch(name)


class TestDeadLetterNames:
    def test_stand_by_planned_shard(self) -> None:
        spec = make_spec("/out", name="c4", split="train", num_shards=8)
        assert dead_letter_names(spec, 3) == (
            "_dead_letters/c4-train-00003.jsonl",
            "_dead_letters/c4-train-00003.payloads",
        )

    def test_path_is_configurable_and_numbers_grow(self) -> None:
        spec = make_spec("/out", num_shards=1_000_001, dead_letter_path="_bad")
        assert dead_letter_names(spec, 42)[0] == "_bad/corpus-train-0000042.jsonl"


@pytest.fixture
def tfds_naming() -> Any:
    """TFDS's parser of file names, which takes seconds to load."""
    return importlib.import_module("tensorflow_datasets.core.naming")


@pytest.mark.slow
@pytest.mark.parametrize("split", ["train", "train_g001"])
def test_tfds_parses_our_names(tfds_naming: Any, split: str) -> None:
    spec = make_spec("/out", name="c4", split=split)
    parsed = tfds_naming.FilenameInfo.from_str(shard_file_name(spec, 3, 128))
    assert (parsed.dataset_name, parsed.split) == ("c4", split)
    assert (parsed.filetype_suffix, parsed.shard_index, parsed.num_shards) == ("array_record", 3, 128)
