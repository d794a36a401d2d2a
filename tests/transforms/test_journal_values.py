"""Values as bytes and back: equal, of the same types, and never more than was asked for."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transforms.journal_values import MAX_DEPTH, NotPlainError, decode, encode
from transforms.steps import Drop
from transforms.steps.example import example_class, parse_example

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.binary(max_size=30)
    | st.text(st.characters(), max_size=30)
    | st.builds(Drop, st.text(max_size=10)),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=5) | st.integers() | st.binary(max_size=3), inner, max_size=4)
    ),
    max_leaves=20,
)


def shape(value: Any) -> Any:
    """The value with the types of all that is in it."""
    if isinstance(value, list | tuple):
        return type(value), [shape(item) for item in value]
    if isinstance(value, dict):
        return dict, [(shape(key), shape(item)) for key, item in value.items()]
    return type(value), repr(value)


@given(PLAIN)
def test_plain_values_come_back_with_their_types_and_order(value: Any) -> None:
    assert shape(decode(encode(value))) == shape(value)


@pytest.mark.parametrize("value", [-0.0, math.inf, 10**40, -(10**40), -128, "half \ud83d", b"", {}, [], ()])
def test_odd_values_come_back(value: Any) -> None:
    assert shape(decode(encode(value))) == shape(value)


def test_a_number_that_is_none_comes_back() -> None:
    assert math.isnan(decode(encode(math.nan)))


def test_examples_come_back_as_messages() -> None:
    example = example_class()()
    for name in ("text", "caption", "a", "z"):
        example.features.feature[name].bytes_list.value.append(name.encode())
    found = decode(encode(example))
    assert type(found) is example_class()
    assert found == example
    assert parse_example(found.SerializeToString()) == example


def test_messages_of_classes_that_a_step_has_imported_come_back() -> None:
    from google.protobuf import struct_pb2

    value = struct_pb2.Value(string_value="text")
    found = decode(encode([value]))
    assert (type(found[0]), found) == (struct_pb2.Value, [value])


class Text(str):
    pass


NESTED: list[Any] = []
NESTED.append(NESTED)


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (object(), "object"),
        ({1}, "set"),
        (np.zeros(2), "ndarray"),
        (np.bytes_(b"x"), "bytes_"),
        ([Text("x")], "Text"),
        (Drop(3), "Drop with a reason of type int"),  # type: ignore[arg-type]
        (NESTED, f"list nested more than {MAX_DEPTH} deep"),
        (bytearray(b"x"), "bytearray"),
    ],
)
def test_whatever_else_is_named(value: Any, named: str) -> None:
    with pytest.raises(NotPlainError) as caught:
        encode(value)
    assert str(caught.value) == named


@given(PLAIN, st.data())
def test_damaged_bytes_are_no_value_or_another_but_never_an_error_of_another_kind(value: Any, data: Any) -> None:
    whole = bytearray(encode(value))
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at] ^= 1 << data.draw(st.integers(0, 7))
    for damaged in (bytes(whole), bytes(whole[:at]), bytes(whole) + b"x"):
        with contextlib.suppress(ValueError):
            decode(damaged)
