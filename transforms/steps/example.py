"""Steps on serialized `tf.train.Example`s, without importing TensorFlow.

The message is built from its published field numbers (tensorflow/core/example/{example,feature}.proto) in a
descriptor pool of its own, so it cannot collide with TensorFlow's in the same process.
"""

from __future__ import annotations

import functools
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from transforms.dead_letters import BadRecordError

_Type: Any = descriptor_pb2.FieldDescriptorProto


def _field(name: str, number: int, kind: int, label: int, type_name: str | None = None) -> Any:
    return _Type(name=name, number=number, type=kind, label=label, type_name=type_name)


def _list_message(name: str, kind: int) -> descriptor_pb2.DescriptorProto:
    message = descriptor_pb2.DescriptorProto(name=name)
    message.field.append(_field("value", 1, kind, _Type.LABEL_REPEATED))
    return message


def _feature_message() -> descriptor_pb2.DescriptorProto:
    feature = descriptor_pb2.DescriptorProto(name="Feature")
    feature.oneof_decl.add(name="kind")
    for number, name in enumerate(("BytesList", "FloatList", "Int64List"), 1):
        field_name = name.replace("List", "_list").lower()
        field = _field(field_name, number, _Type.TYPE_MESSAGE, _Type.LABEL_OPTIONAL, f".gristmill.{name}")
        field.oneof_index = 0
        feature.field.append(field)
    return feature


def _features_message() -> descriptor_pb2.DescriptorProto:
    features = descriptor_pb2.DescriptorProto(name="Features")
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    entry.field.append(_field("key", 1, _Type.TYPE_STRING, _Type.LABEL_OPTIONAL))
    entry.field.append(_field("value", 2, _Type.TYPE_MESSAGE, _Type.LABEL_OPTIONAL, ".gristmill.Feature"))
    type_name = ".gristmill.Features.FeatureEntry"
    features.field.append(_field("feature", 1, _Type.TYPE_MESSAGE, _Type.LABEL_REPEATED, type_name))
    return features


@functools.cache
def example_class() -> Any:
    """Returns the message class of `tf.train.Example`."""
    file = descriptor_pb2.FileDescriptorProto(name="gristmill/example.proto", package="gristmill", syntax="proto3")
    file.message_type.append(_list_message("BytesList", _Type.TYPE_BYTES))
    file.message_type.append(_list_message("FloatList", _Type.TYPE_FLOAT))
    file.message_type.append(_list_message("Int64List", _Type.TYPE_INT64))
    file.message_type.append(_feature_message())
    file.message_type.append(_features_message())
    example = file.message_type.add(name="Example")
    example.field.append(_field("features", 1, _Type.TYPE_MESSAGE, _Type.LABEL_OPTIONAL, ".gristmill.Features"))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("gristmill.Example"))


def parse_example(record: bytes) -> Any:
    """Returns the parsed message.

    Raises:
        BadRecordError: The record is not a serialized Example, or one of a message with more in it.
    """
    try:
        example = example_class().FromString(record)
    except DecodeError as error:
        raise BadRecordError("not_example", f"the record does not parse as tf.train.Example: {error}") from error
    unknown: Any = UnknownFieldSet(example)
    if len(unknown):
        numbers = sorted({field.field_number for field in unknown})
        if numbers == [2]:
            text = "the record is a tf.train.SequenceExample: its feature lists would be lost"
            raise BadRecordError("sequence_example", text)
        raise BadRecordError("not_example", f"the record has fields {numbers} that tf.train.Example does not have")
    return example


def check(record: bytes) -> bytes:
    """Passes the bytes unchanged if they parse as `tf.train.Example`.

    Raises:
        BadRecordError: With reason `not_example` or `sequence_example`.
    """
    parse_example(record)
    return record
