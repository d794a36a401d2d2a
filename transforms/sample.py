"""Looks at a small part of the corpus before the plan.

It tells the sizes of records, how far compressed input inflates, and whether compressing the output pays.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator

import zstandard

from transforms.child_call import ChildCall
from transforms.elements import Input, JobSpec
from transforms.formats import load_format
from transforms.formats.tfrecord import FRAMING_BYTES, measure_inflation, peek_record
from transforms.plan import AUTO_SHARD_BYTES, AUTO_SHARD_RECORDS, COMPRESSED_SUFFIXES, Estimate
from transforms.sources import RandomAccessFile, local_path, open_input

SAMPLED_INPUTS = 16
_BYTES_PER_INPUT = 512 << 10
_PLACES = (0.5, 0.875)
"""Further places in a large input to look at: records may have another size there than at its beginning."""

_PLACE_BYTES = 64 << 10
_LARGE_INPUT_BYTES = 32 << 20  # Smaller ones are an eighth of a shard: what is not seen of them changes little.
_MAX_SPREAD = 100
"""Where mean sizes of one input differ by more, no place tells of the others: then bytes alone fill its shards."""

_MAX_COPIED_BYTES = 256 << 20
_MIN_SAVING = 0.03
"""Compression that saves less than this costs four times the CPU for nothing (measured on JPEG-like payloads)."""

_DEFAULT_RECORD_BYTES = 1024.0
_DEFAULT_INFLATION = 4.0


@dataclasses.dataclass
class Sample:
    """What was seen.

    Attributes:
        payloads: Some payloads, or their beginnings, a few MiB at most.
        stream_bytes: Estimated decompressed bytes of the inputs that could be looked at, framing included.
        num_records: Estimated records of these inputs.
        inflated_bytes: Decompressed bytes of compressed inputs.
        compressed_bytes: Compressed bytes these took.
        plain_name_bytes: Bytes of inputs whose name does not say that they are compressed.
        unnamed_compressed_bytes: Bytes of those of them that are.
        uneven: Name of the first input whose records differ much in size; None where none does.
    """

    payloads: list[bytes] = dataclasses.field(default_factory=list)
    stream_bytes: float = 0
    num_records: float = 0
    inflated_bytes: int = 0
    compressed_bytes: int = 0
    plain_name_bytes: int = 0
    unnamed_compressed_bytes: int = 0
    uneven: str | None = None

    def add(self, stream_bytes: float, num_records: float) -> None:
        """Counts an input as large as it is: one huge record in a file tells much of bytes and little of records."""
        self.stream_bytes += stream_bytes
        self.num_records += num_records

    def estimate(self) -> Estimate:
        """Returns what the planner needs, with defaults where nothing could be read."""
        record = self.stream_bytes / self.num_records if self.num_records else _DEFAULT_RECORD_BYTES
        inflation = self.inflated_bytes / self.compressed_bytes if self.compressed_bytes else _DEFAULT_INFLATION
        all_compressed = 2 * self.unnamed_compressed_bytes > self.plain_name_bytes
        return Estimate(record_bytes=max(1.0, record), inflation=inflation, all_compressed=all_compressed)

    @functools.cached_property
    def saving(self) -> float:
        """The fraction of bytes that zstd:3 saves on the payloads, each compressed by itself; computed once."""
        before = sum(map(len, self.payloads))
        if not before:
            return 0.0
        compressor = zstandard.ZstdCompressor(level=3)
        return 1 - sum(len(compressor.compress(payload)) for payload in self.payloads) / before


def choose_compression(sample: Sample) -> str:
    """Returns "zstd:3", or "uncompressed" where that saves less than 3 %."""
    return "zstd:3" if sample.saving >= _MIN_SAVING else "uncompressed"


def take_sample(inputs: list[Input], spec: JobSpec) -> Sample:
    """Reads the first half MiB of each input; what cannot be read is left to the job, which reports it.

    Formats whose readers are native code are sampled in a child process: if it dies, nothing is known of the input.
    """
    if spec.format == "array_record":
        inputs = _affordable(inputs)
    if not load_format(spec.format).NATIVE:
        return next(iter_sample(inputs, spec))
    return next(ChildCall("transforms.sample:iter_sample", inputs=inputs, spec=spec).items(), Sample())


def _affordable(inputs: list[Input]) -> list[Input]:
    """Leaves out of inputs with URLs, which are copied whole to be read, all but a few small ones."""
    remote = sorted((one for one in inputs if "://" in one.name), key=lambda one: one.size)
    sizes = itertools.accumulate(one.size for one in remote)
    few = [one for one, size in zip(remote, sizes, strict=True) if size <= _MAX_COPIED_BYTES]
    return [one for one in inputs if "://" not in one.name] + (few or remote[:1])


def iter_sample(inputs: list[Input], spec: JobSpec) -> Iterator[Sample]:
    """Yields the one sample of the inputs."""
    sample = Sample()
    for source in inputs:
        try:
            file = open_input(source)
        except OSError:
            continue
        try:
            _look(file, source, spec, sample)
        except OSError:
            continue
        finally:
            file.close()
    yield sample


def _look(file: RandomAccessFile, source: Input, spec: JobSpec, sample: Sample) -> None:
    if spec.format == "files":
        sample.payloads.append(file.read_at(0, _BYTES_PER_INPUT))  # The listing tells sizes and number of records.
    elif spec.format == "array_record":
        _look_at_array_record(file, source, spec, sample)
    else:
        _look_at_tfrecord(file, source, spec, sample)


def _look_at_array_record(file: RandomAccessFile, source: Input, spec: JobSpec, sample: Sample) -> None:
    """ArrayRecord is planned in bytes of its file, where its records are compressed already."""
    from transforms.formats.array_record import count_records

    with local_path(file, source) as path:
        _read_payloads(file, dataclasses.replace(source, name=path), spec, sample)
        sample.add(source.size, count_records(path))


def _look_at_tfrecord(file: RandomAccessFile, source: Input, spec: JobSpec, sample: Sample) -> None:
    head = _Head(file, min(source.size, _BYTES_PER_INPUT))
    ratio = _inflation(head, source, spec, sample)
    num_records, num_bytes = _read_payloads(head, source, spec, sample)
    if not num_records:  # Perhaps because the first record is longer than what is looked at.
        beginning, num_bytes = peek_record(head, _BYTES_PER_INPUT)
        num_records = 1 if num_bytes else 0
        sample.payloads += [beginning] if beginning else []
    if not num_records:
        return
    stream_bytes = source.size * ratio
    estimate = max(1.0, stream_bytes * num_records / num_bytes)
    if ratio == 1.0 and source.size > _LARGE_INPUT_BYTES and _is_uneven(file, source, spec, num_bytes / num_records):
        sample.uneven = sample.uneven or source.name
        estimate = max(1.0, min(estimate, stream_bytes * AUTO_SHARD_RECORDS / AUTO_SHARD_BYTES))
    sample.add(stream_bytes, estimate)


def _inflation(head: _Head, source: Input, spec: JobSpec, sample: Sample) -> float:
    """Returns the decompressed bytes for each byte of an input, by its content: 1 for a plain one."""
    inflated, compressed = (0, 0) if spec.compression == "none" else measure_inflation(head)
    sample.inflated_bytes += inflated
    sample.compressed_bytes += compressed
    if not source.name.lower().endswith(COMPRESSED_SUFFIXES):
        sample.plain_name_bytes += source.size
        sample.unnamed_compressed_bytes += source.size if compressed else 0
    return inflated / compressed if compressed else 1.0


def _is_uneven(file: RandomAccessFile, source: Input, spec: JobSpec, mean_bytes: float) -> bool:
    """Whether records further on in a plain input have quite another size than those at its beginning."""
    means = [mean_bytes]
    for place in _PLACES:
        start = int(source.size * place)
        window = _Head(file, start + _PLACE_BYTES)
        chunks = load_format(spec.format).read_range(window, source, start, window.size, spec)
        found = [record for chunk in chunks for record in chunk.records]
        # None: one is longer than the window, or there is damage, of which nothing is known.
        means.append(sum(map(len, found)) / len(found) + FRAMING_BYTES if found else max(mean_bytes, _PLACE_BYTES))
    return max(means) > _MAX_SPREAD * min(means)


def _read_payloads(file: RandomAccessFile, source: Input, spec: JobSpec, sample: Sample) -> tuple[int, int]:
    """Keeps about half a MiB of payloads; returns how many records these are, and their bytes in the stream."""
    num_records = num_bytes = 0
    for chunk in load_format(spec.format).read_range(file, source, 0, min(source.size, _BYTES_PER_INPUT), spec):
        sample.payloads += chunk.records
        num_records += len(chunk.records)
        num_bytes += chunk.num_bytes if chunk.records else 0
        if num_bytes >= _BYTES_PER_INPUT:
            break
    return num_records, num_bytes


class _Head:
    """The first bytes of a file, as if it ended there: looking for records in damage must not read on for ever."""

    def __init__(self, file: RandomAccessFile, size: int) -> None:
        self._file = file
        self.size = size

    def read_at(self, position: int, num_bytes: int) -> bytes:
        """Reads on behalf of the format."""
        return self._file.read_at(position, max(0, min(num_bytes, self.size - position)))

    def close(self) -> None:
        """The file belongs to the caller."""
