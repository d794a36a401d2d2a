"""Runs a chain of steps over batches. No Beam here."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from typing import Any

from transforms.dead_letters import BadRecordError, JobInterrupted, from_exception, reason_code
from transforms.elements import BATCH_MAX_BYTES, BATCH_MAX_RECORDS, JobSpec, RecordBatch
from transforms.steps import Drop
from transforms.steps.load import Step, load_steps


class StepChain:
    """A chain of steps; source records are atomic.

    Args:
        steps: In order.
        max_record_bytes: Bound of all outputs of one source record together, which must stand in memory until the
            last of them is known to be good.
    """

    def __init__(self, steps: list[Step], max_record_bytes: int) -> None:
        self._steps = steps
        self._calls = [step.call for step in steps]
        self._max_record_bytes = max_record_bytes
        self._at = 0  # The step that is running, for the dead letter.
        self._num_bytes = 0

    def apply(self, batch: RecordBatch) -> Iterator[RecordBatch]:
        """Yields the batch with every record put through the chain, cut where it grows.

        The yielded batches together carry the books of the batch once; their sequence numbers are the caller's.
        """
        if not self._steps or not batch.records:
            yield batch
            return
        source = batch.source
        assert source is not None
        out = _continued(batch)
        out_bytes = 0
        for record, position in zip(batch.records, batch.positions, strict=True):
            out.records_read += 1
            outputs: list[bytes] = []
            drops: Counter[str] = Counter()
            self._num_bytes = 0
            try:
                self._run(record, 0, outputs, drops)
            except JobInterrupted:
                raise
            except BaseException as error:  # Any class at all costs this record alone, SystemExit included.
                out.dead.append(from_exception(error, source.name, position, record, self._name_at()))
                continue
            out.records_added += len(outputs) + drops.total() - 1
            for reason, count in drops.items():
                out.dropped[reason] = out.dropped.get(reason, 0) + count
            out.records += outputs
            out_bytes += self._num_bytes
            if out_bytes > BATCH_MAX_BYTES or len(out.records) > BATCH_MAX_RECORDS:
                yield out
                out, out_bytes = _continued(batch), 0
        out.dead += batch.dead
        out.records_read += len(batch.dead)
        out.num_bytes, out.span = batch.num_bytes, batch.span
        yield out

    def _run(self, value: Any, first: int, outputs: list[bytes], drops: Counter[str]) -> None:
        """Puts one value through the steps from `first` on, depth first."""
        for number in range(first, len(self._calls)):
            self._at = number
            value = self._calls[number](value)
            if value is None or isinstance(value, Drop):
                drops[_drop_reason(value)] += 1
                return
            if isinstance(value, Iterator):
                self._fan_out(value, number, outputs, drops)
                return
        if type(value) is not bytes:
            raise BadRecordError("not_bytes", f"the last step must return bytes, got {type(value).__name__}")
        self._num_bytes += len(value)
        if self._num_bytes > self._max_record_bytes:
            limit = f"source.max_record_bytes allows {self._max_record_bytes} bytes for all outputs of a record"
            raise BadRecordError("output_too_large", limit)
        outputs.append(value)

    def _fan_out(self, values: Iterator[Any], number: int, outputs: list[bytes], drops: Counter[str]) -> None:
        """Goes on with every item of an iterator; an item counts as if the step had returned it."""
        count = 0
        for value in values:
            count += 1
            if value is None or isinstance(value, Drop):
                drops[_drop_reason(value)] += 1
            else:
                self._run(value, number + 1, outputs, drops)
            self._at = number
        if not count:
            drops["no_outputs"] += 1

    def _name_at(self) -> str:
        return self._steps[self._at].name


def _drop_reason(value: Drop | None) -> str:
    return "returned_none" if value is None else reason_code(value.reason)


def load_chain(spec: JobSpec) -> StepChain:
    """Returns the chain of a job's steps."""
    return StepChain(load_steps(spec.steps, spec.import_paths), spec.max_record_bytes)


def _continued(batch: RecordBatch) -> RecordBatch:
    return dataclasses.replace(
        batch, records=[], positions=[], dead=[], records_read=0, num_bytes=0, span=None, dropped={}, records_added=0
    )
