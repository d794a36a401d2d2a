"""What a step was given or returned, as bytes: of plain types only, and never by pickle. No Beam here.

A value is a tag of one byte and its content; lists and dicts hold values in turn. What comes back is equal to what
went in and of the very same types.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from transforms.steps import Drop

MAX_DEPTH = 64
"""Lists within lists: far more than an answer has, far less than Python's own stack takes."""

_LENGTH = struct.Struct("<Q")
_FLOAT = struct.Struct("<d")
_CONSTANTS = {b"N": None, b"T": True, b"F": False}


class NotPlainError(TypeError):
    """A value is, or holds, something that has no plain form; the message names its type."""


def encode(value: Any) -> bytes:
    """Returns the bytes of a value.

    Raises:
        NotPlainError: It is none of bytes, str, int, float, bool, None, Drop, protobuf messages such as
            tf.train.Example, and lists, tuples and dicts of these. Subclasses count as something else.
    """
    parts: list[bytes] = []
    _add(value, parts, 0)
    return b"".join(parts)


def _add(value: Any, parts: list[bytes], depth: int) -> None:
    kind = type(value)
    if kind in _SIMPLE:
        tag, pack = _SIMPLE[kind]
        _add_block(tag, pack(value), parts)
    elif value is None or kind is bool:
        parts.append(b"N" if value is None else b"T" if value else b"F")
    elif kind in _NESTED:
        if depth >= MAX_DEPTH:
            raise NotPlainError(f"{kind.__name__} nested more than {MAX_DEPTH} deep")
        items = [one for pair in value.items() for one in pair] if kind is dict else value
        parts += (_NESTED[kind], _LENGTH.pack(len(items)))
        for item in items:
            _add(item, parts, depth + 1)
    else:
        name, data = _from_message(value)
        _add_block(b"p", _LENGTH.pack(len(name)) + name.encode() + data, parts)


def _add_block(tag: bytes, data: bytes, parts: list[bytes]) -> None:
    parts += (tag, _LENGTH.pack(len(data)), data)


def _from_int(value: int) -> bytes:
    return value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)


def _from_text(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _from_drop(drop: Drop) -> bytes:
    if type(drop.reason) is not str:
        raise NotPlainError(f"Drop with a reason of type {type(drop.reason).__name__}")
    return _from_text(drop.reason)


def _from_message(value: Any) -> tuple[str, bytes]:
    """Returns the name and the bytes of a protobuf message whose class can be found by that name."""
    descriptor = getattr(type(value), "DESCRIPTOR", None)
    name = getattr(descriptor, "full_name", None)
    if not isinstance(name, str) or _message_class(name) is not type(value):
        raise NotPlainError(type(value).__qualname__)
    try:
        return name, value.SerializeToString(deterministic=True)
    except Exception as error:  # Of a message with required fields that are not set, as protobuf calls it.
        raise NotPlainError(f"{type(value).__qualname__}: {error}") from error


def _message_class(name: str) -> Any:
    """Returns the class of a message: ours of tf.train.Example, or one that a step has imported; None for others."""
    from google.protobuf import descriptor_pool, message_factory

    from transforms.steps.example import example_class

    if name == example_class().DESCRIPTOR.full_name:
        return example_class()
    try:
        found = descriptor_pool.Default().FindMessageTypeByName(name)
    except KeyError:
        return None
    return message_factory.GetMessageClass(found)


_SIMPLE: dict[type, tuple[bytes, Callable[[Any], bytes]]] = {
    bytes: (b"b", bytes),
    str: (b"s", _from_text),
    int: (b"i", _from_int),
    float: (b"f", _FLOAT.pack),
    Drop: (b"D", _from_drop),
}
_NESTED: dict[type, bytes] = {list: b"l", tuple: b"t", dict: b"d"}


def decode(data: bytes) -> Any:
    """Returns the value of bytes that `encode` gave.

    Raises:
        ValueError: They are damaged, or hold a message of a class that nobody has imported.
    """
    try:
        value, end = _take(data, 0)
    except (struct.error, KeyError, TypeError, IndexError) as error:
        raise ValueError(f"no value: {error}") from error
    if end != len(data):
        raise ValueError(f"{len(data) - end} bytes follow the value")
    return value


def _take(data: bytes, at: int) -> tuple[Any, int]:
    """Returns the value that begins at a position, and the position behind it."""
    tag = data[at : at + 1]
    if tag in _CONSTANTS:
        return _CONSTANTS[tag], at + 1
    (length,) = _LENGTH.unpack_from(data, at + 1)
    at += 1 + _LENGTH.size
    if tag in (b"l", b"t", b"d"):
        return _take_items(tag, data, at, length)
    block = data[at : at + length]
    if len(block) < length:
        raise ValueError("the value is cut off")
    return _TAKE[tag](block), at + length


def _take_items(tag: bytes, data: bytes, at: int, length: int) -> tuple[Any, int]:
    items = []
    for _ in range(length):
        item, at = _take(data, at)
        items.append(item)
    if tag == b"d":
        return dict(zip(items[::2], items[1::2], strict=True)), at
    return (items if tag == b"l" else tuple(items)), at


def _to_text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


def _to_message(data: bytes) -> Any:
    (length,) = _LENGTH.unpack_from(data)
    at = _LENGTH.size + length
    found = _message_class(data[_LENGTH.size : at].decode())
    if found is None:
        raise ValueError("a message of a class that is not there")
    return found.FromString(data[at:])


_TAKE: dict[bytes, Callable[[bytes], Any]] = {
    b"b": bytes,
    b"s": _to_text,
    b"i": lambda data: int.from_bytes(data, "little", signed=True),
    b"f": lambda data: _FLOAT.unpack(data)[0],
    b"D": lambda data: Drop(_to_text(data)),
    b"p": _to_message,
}
