"""example.check, against messages that were built by hand and by TensorFlow."""

from __future__ import annotations

import importlib
import random
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transforms.dead_letters import BadRecordError
from transforms.steps.example import check, example_class, parse_example


def field(number: int, content: bytes) -> bytes:
    """A length-delimited field of a protobuf message."""
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out += bytes([value & 127 | 128])
        value >>= 7
    return out + bytes([value])


def feature_map(**features: bytes) -> bytes:
    """A Features message: one map entry a feature."""
    return b"".join(field(1, field(1, name.encode()) + field(2, feature)) for name, feature in features.items())


BYTES_FEATURE = field(1, field(1, b"a text") + field(1, b""))
FLOAT_FEATURE = field(2, field(1, b"\x00\x00\x80\x3f\x00\x00\x00\x40"))  # Packed 1.0 and 2.0.
INT_FEATURE = field(3, field(1, _varint(7) + _varint(300)))
EXAMPLE = field(1, feature_map(text=BYTES_FEATURE, weights=FLOAT_FEATURE, ids=INT_FEATURE))
SEQUENCE_EXAMPLE = EXAMPLE + field(2, field(1, field(1, b"frames") + field(2, field(1, INT_FEATURE))))


class TestByHand:
    @pytest.mark.parametrize(
        "record",
        [EXAMPLE, b"", field(1, b""), field(1, feature_map(empty=b"")), field(1, feature_map(x=field(1, b"")))],
        ids=["all kinds", "no bytes", "no features", "feature without kind", "no values"],
    )
    def test_example_passes_unchanged(self, record: bytes) -> None:
        assert check(record) is record

    def test_values_are_read_from_their_fields(self) -> None:
        features = parse_example(EXAMPLE).features.feature
        assert list(features["text"].bytes_list.value) == [b"a text", b""]
        assert list(features["weights"].float_list.value) == [1.0, 2.0]
        assert list(features["ids"].int64_list.value) == [7, 300]

    def test_unpacked_numbers_are_read_too(self) -> None:
        record = field(1, feature_map(ids=field(3, b"\x08\x07\x08\x08")))
        assert list(parse_example(record).features.feature["ids"].int64_list.value) == [7, 8]

    @pytest.mark.parametrize("cut", range(1, len(EXAMPLE)))
    def test_cut_example_is_refused(self, cut: int) -> None:
        with pytest.raises(BadRecordError) as refused:
            check(EXAMPLE[:cut])
        assert refused.value.reason == "not_example"

    @pytest.mark.parametrize(
        "record",
        [
            b"plain text of a corpus",
            b"{}",
            b'{"text": "json"}',
            b"\xff\xd8\xff\xe0 a picture",
            b"\x00",
            bytes(100),
            b"\x0a\xff",
        ],
    )
    def test_what_is_no_message_is_refused(self, record: bytes) -> None:
        with pytest.raises(BadRecordError) as refused:
            check(record)
        assert refused.value.reason == "not_example"

    @pytest.mark.parametrize("number", [3, 4, 15, 16, 1000])
    def test_message_with_more_fields_is_refused_with_their_numbers(self, number: int) -> None:
        with pytest.raises(BadRecordError, match=rf"\[{number}\]") as refused:
            check(EXAMPLE + field(number, b"more"))
        assert refused.value.reason == "not_example"

    def test_key_that_is_not_utf8_is_refused(self) -> None:
        with pytest.raises(BadRecordError) as refused:
            check(field(1, field(1, field(1, b"\xff") + field(2, BYTES_FEATURE))))
        assert refused.value.reason == "not_example"

    @pytest.mark.parametrize(
        "record",
        [SEQUENCE_EXAMPLE, field(2, b""), SEQUENCE_EXAMPLE[len(EXAMPLE) :]],
        ids=["both", "empty lists", "lists"],
    )
    def test_sequence_example_is_refused_by_name(self, record: bytes) -> None:
        with pytest.raises(BadRecordError, match="SequenceExample") as refused:
            check(record)
        assert refused.value.reason == "sequence_example"

    @given(st.binary(max_size=200))
    def test_any_bytes_pass_or_are_refused_with_a_reason(self, record: bytes) -> None:
        try:
            reason, passed = "", check(record)
        except BadRecordError as error:
            reason, passed = error.reason, record
        assert passed is record
        assert reason in ("", "not_example", "sequence_example")

    @given(st.dictionaries(st.text(max_size=10), st.lists(st.binary(max_size=20), max_size=4), max_size=5))
    def test_own_messages_pass(self, features: dict[str, list[bytes]]) -> None:
        example = example_class()()
        for name, values in features.items():
            example.features.feature[name].bytes_list.value.extend(values)
        record = example.SerializeToString(deterministic=True)
        assert check(record) is record


@pytest.fixture(scope="module")
def tf() -> Any:
    """TensorFlow, which takes three seconds to load."""
    return importlib.import_module("tensorflow")


@pytest.mark.slow
class TestTensorFlow:
    def test_its_examples_pass_and_read_the_same(self, tf: Any) -> None:
        chance = random.Random(7)
        for number in range(50):
            example = tf.train.Example()
            example.features.feature["text"].bytes_list.value.append(b"text-%06d" % number)
            example.features.feature["ids"].int64_list.value.extend(
                chance.randrange(-(1 << 63), 1 << 63) for _ in range(5)
            )
            example.features.feature["weights"].float_list.value.extend(chance.random() for _ in range(3))
            record = example.SerializeToString()
            assert check(record) is record
            ours = parse_example(record).features.feature
            for name, feature in example.features.feature.items():
                kind = feature.WhichOneof("kind")
                assert list(getattr(ours[name], kind).value) == list(getattr(feature, kind).value)

    def test_its_sequence_examples_are_refused(self, tf: Any) -> None:
        example = tf.train.SequenceExample()
        example.context.feature["id"].int64_list.value.append(1)
        example.feature_lists.feature_list["frames"].feature.add().bytes_list.value.append(b"frame")
        with pytest.raises(BadRecordError) as refused:
            check(example.SerializeToString())
        assert refused.value.reason == "sequence_example"

    def test_it_may_be_loaded_before_us(self) -> None:  # In this process it was loaded after us.
        program = """
import tensorflow as tf
from transforms.steps.example import check
example = tf.train.Example()
example.features.feature["x"].int64_list.value.append(1)
print(check(example.SerializeToString()) == example.SerializeToString())
"""
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
        assert done.stdout == "True\n", done.stderr


def test_check_does_not_import_tensorflow() -> None:
    program = "import sys; from transforms.steps.example import check; check(b''); print('tensorflow' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
