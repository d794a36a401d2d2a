"""WriteShards: from record batches to committed shards."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import apache_beam as beam
from apache_beam.coders import registry
from apache_beam.coders.coders import FastPrimitivesCoder
from apache_beam.pvalue import PCollection

from transforms.budget import Budget, RunningTotals, call_off
from transforms.elements import JobSpec, RecordBatch, ShardInfo
from transforms.generations import open_job_store
from transforms.piece_log import PieceWriter
from transforms.pieces import delete_piece_files
from transforms.reasons import committed_info, named_reasons
from transforms.shard_writer import ShardWriter
from transforms.tries import unmark_try


class BrokenSequenceError(RuntimeError):
    """The batches of a shard did not arrive whole and in order within one bundle."""


class RecordBatchCoder(FastPrimitivesCoder):
    """Pickles batches where a runner does not fuse; says their size without pickling, for Beam's sampled metrics."""

    def estimate_size(self, value: RecordBatch) -> int:
        """Returns the bytes of the records."""
        return 256 + sum(map(len, value.records))


registry.register_coder(RecordBatch, RecordBatchCoder)


@dataclasses.dataclass
class WriteShards(beam.PTransform):
    """Writes and commits shards.

    Input: PCollection[RecordBatch], fused with the reader: the batches of a shard must arrive in one bundle, in
    order. Output: PCollection[ShardInfo], one element a shard, after its ledger was created. Exactly one attempt
    at a shard wins, whatever the runner retries; a losing or failing attempt deletes its files.

    Attributes:
        spec: The job.

    Raises:
        OutputError: The output cannot be written.
        BrokenSequenceError: A transform that regroups elements was put between reading and writing.
    """

    spec: JobSpec

    def expand(self, batches: PCollection[RecordBatch]) -> PCollection[ShardInfo]:
        return batches | "Write" >> beam.ParDo(_WriteShardsFn(self.spec, self.label))


class _WriteShardsFn(beam.DoFn):
    def __init__(self, spec: JobSpec, label: str) -> None:
        self._spec = spec
        self._label = label

    def setup(self) -> None:
        self._store = open_job_store(self._spec)
        self._totals = RunningTotals(Budget.of(self._spec))
        self._named = named_reasons(self._store, self._spec)

    def start_bundle(self) -> None:
        self._writer: ShardWriter | PieceWriter | None = None
        self._shard = -1
        self._expected = 0

    def process(self, batch: RecordBatch) -> Iterator[ShardInfo]:
        self._check_sequence(batch)
        if batch.committed:
            yield self._committed(batch)
            return
        if batch.not_run:
            self._abandon_try(batch)
            yield ShardInfo(batch.task, 0, {}, not_run=True)
            return
        if self._writer is None:
            self._writer = self._open_writer(batch)
        try:
            self._writer.add(batch)
            if not batch.last:
                return
            info = self._writer.commit()
        except BaseException:
            self._abandon()
            raise
        self._writer = None
        if self._spec.num_pieces and batch.task.piece is None:
            delete_piece_files(self._store, self._spec, batch.task.shard)
        yield self._judge(info)

    def finish_bundle(self) -> None:
        if self._writer is not None:
            self._abandon()
            raise BrokenSequenceError(self._broken(f"shard {self._shard} was not ended"))

    def teardown(self) -> None:
        if getattr(self, "_writer", None) is not None:
            self._abandon()

    def _check_sequence(self, batch: RecordBatch) -> None:
        shard = batch.task.shard
        fresh = self._expected == 0
        if batch.sequence != self._expected or (not fresh and shard != self._shard):
            self._abandon()
            raise BrokenSequenceError(self._broken(f"batch {batch.sequence} of shard {shard} came out of turn"))
        self._shard = shard
        self._expected = 0 if batch.last else batch.sequence + 1

    def _broken(self, what: str) -> str:
        return (
            f"{what} (expected batch {self._expected} of shard {self._shard}): the transform before {self._label!r} "
            "regroups elements; keep ReadRecords, ApplySteps and WriteShards next to one another"
        )

    def _open_writer(self, batch: RecordBatch) -> ShardWriter | PieceWriter:
        kind = ShardWriter if batch.task.piece is None else PieceWriter
        return kind(self._store, self._spec, batch.task)

    def _committed(self, batch: RecordBatch) -> ShardInfo:
        if batch.task.piece is not None:
            return ShardInfo(batch.task, 0, {})  # Its records are counted with its shard.
        return self._judge(committed_info(self._store, self._spec, batch.task, self._named))

    def _judge(self, info: ShardInfo) -> ShardInfo:
        """Calls the job off if the shards of this worker alone break the budget."""
        broken = self._totals.add_info(info)
        if broken is not None:
            call_off(self._store, broken)
        return info

    def _abandon_try(self, batch: RecordBatch) -> None:
        self._abandon()
        if batch.try_number:
            unmark_try(self._store, self._spec, batch.task.shard, batch.try_number, batch.task.piece)

    def _abandon(self) -> None:
        if self._writer is not None:
            self._writer.abandon()
            self._writer = None
