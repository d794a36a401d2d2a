"""The value types that travel through the flow, in the order a record meets them.

`JobSpec` is what every worker knows about the job. A `ShardTask` is one planned shard: an interval of
inputs.jsonl. Readers turn it into `RecordBatch`es (bytes), and the writer into a `ShardInfo` (numbers only).
Nothing here imports Beam.
"""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Mapping
from typing import Any

BATCH_MAX_BYTES = 512 << 10
"""A batch is handed on when it holds this much: large enough that Beam's per-element cost (about 10 us a DoFn)
vanishes beside its compression, small enough that it is still in the CPU's cache when it is written."""

BATCH_MAX_RECORDS = 1024


@dataclasses.dataclass(frozen=True)
class Input:
    """One line of inputs.jsonl: a file to read, or the reason why a listed file cannot be used.

    Attributes:
        index: Position of the line in inputs.jsonl, from 0.
        name: Absolute path or URL. Bytes that are not UTF-8 stand as surrogate escapes, as `os.fsdecode` gives.
        size: Bytes when it was listed.
        mtime_ns: Modification time when it was listed; a store's generation for objects.
        error: None, or (reason code, text) when the listing already failed for this name.
        crc32c: Checksum of its bytes where the listing tells it, in hex digits; "" elsewhere.
    """

    index: int
    name: str
    size: int
    mtime_ns: int
    error: tuple[str, str] | None = None
    crc32c: str = ""


@dataclasses.dataclass(frozen=True)
class ShardTask:
    """One planned shard: an interval of the inputs. Its size does not grow with the number of inputs.

    Attributes:
        shard: Number in plan order, from 0.
        first_offset: Byte offset in inputs.jsonl of the first input's line.
        first_index: Index of that input.
        start: Position in the first input at which the interval starts.
        last_offset: Byte offset of the last input's line (the interval includes this line).
        end: Position in the last input at which the interval ends.
        planned_bytes: Estimated work in payload bytes, for spreading shards over workers.
        start_at: None, or the boundary at which the previous shard really ended: set when a range is read
            again because the two did not meet.
        round: How often it was decided to read the range again.
        piece: Number of the piece of the shard that this is, see `transforms.pieces`; None for the shard itself.
    """

    shard: int
    first_offset: int
    first_index: int
    start: int
    last_offset: int
    end: int
    planned_bytes: int
    start_at: int | None = None
    round: int = 0
    piece: int | None = None


@dataclasses.dataclass(frozen=True)
class JobSpec:
    """What every worker knows about the job: constant size, whatever the corpus.

    Attributes:
        root: Output directory.
        plan_id: Fingerprint of the plan; a ledger of another plan never counts.
        num_shards: Planned shards.
        format: Name of the source format, see `transforms.formats`.
        compression: "auto", or the compression every input is taken to have.
        max_record_bytes: A longer record is a dead letter and is never allocated.
        steps: The chain, as in the config: one dict a step.
        import_paths: Folders in which modules of `call` steps are looked for, after everything installed.
        name: Corpus name in file names.
        split: Split name in file names.
        template: File name template in TFDS's variables.
        writer_options: Options string of ArrayRecordWriter.
        part_max_records: A part is full at this many records; 0 means no bound.
        part_max_bytes: A part is full at this many payload bytes; 0 means no bound.
        roll_factor: A shard of splittable input starts a new part at this many times the bounds; 0 for never.
            Shards of input that cannot be split always roll over at the bounds themselves.
        max_payload_bytes: Longer dead-letter payloads are cut.
        dead_letter_path: Folder of dead letters under `root`.
        max_fraction: Budget: largest fraction of dead records, bytes or files.
        max_count: Budget: largest number of dead letters; None for no bound.
        max_count_by_reason: Budget: largest number of dead letters of a reason.
        planned_bytes: Decompressed bytes that the plan expects to read.
        planned_files: Files that the plan reads.
        record_bytes: Mean bytes of a record as the plan took it, from which the records in a damaged region are
            estimated: the same for every cut and runner. 0 where it is not known.
        limit: Read at most this many records of the shard; 0 for all.
        rate_share: Part of every step's `max_per_sec` that is this machine's, where several share it.
        started_at: Unix time at which this run began, for the report.
        lock_token: Holder of the output's lock that the workers renew, where the job outlives its driver; "" elsewhere.
        run_token: Holder of the output's lock; whatever changes the output checks that it still is. "" for no check.
        earlier_plans: Plans whose committed shards count as well, see `pipelines.resume`.
        generation: "" for the set that `convert` made; "g001" and so on for what `--append` and `replay` add to it.
        billing_project: Project that pays for requests to gs://, "" for the owners of the buckets.
        replay: In a replay, which dead letters it takes, see `transforms.letters.Selection`; None otherwise.
        num_pieces: Pieces that shards are worked on in, see `transforms.pieces`; 0 where each is worked on whole.
    """

    root: str
    plan_id: str
    num_shards: int
    format: str
    compression: str = "auto"
    max_record_bytes: int = 1 << 30
    steps: tuple[dict[str, Any], ...] = ()
    import_paths: tuple[str, ...] = ()
    name: str = "corpus"
    split: str = "train"
    template: str = "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}"
    writer_options: str = "group_size:1,zstd:3"
    part_max_records: int = 0
    part_max_bytes: int = 0
    roll_factor: int = 0
    max_payload_bytes: int = 16 << 20
    dead_letter_path: str = "_dead_letters"
    max_fraction: float = 0.1
    max_count: int | None = None
    max_count_by_reason: dict[str, int] = dataclasses.field(default_factory=dict)
    planned_bytes: int = 0
    planned_files: int = 0
    record_bytes: float = 0.0
    limit: int = 0
    rate_share: float = 1.0
    started_at: float = 0.0
    lock_token: str = ""
    run_token: str = ""
    earlier_plans: tuple[str, ...] = ()
    generation: str = ""
    billing_project: str = ""
    replay: dict[str, list[str]] | None = None
    num_pieces: int = 0

    def accepts(self, plan_id: str) -> bool:
        """Whether a ledger of that plan counts for this job."""
        return plan_id == self.plan_id or plan_id in self.earlier_plans

    def shard_key(self, shard: int) -> str:
        """The shard's number as it stands in file names: at least five digits, sorting as it counts."""
        return f"{shard:0{max(5, len(str(max(self.num_shards - 1, 0))))}d}"

    def piece_key(self, shard: int, piece: int | None) -> str:
        """The same for a piece of a shard, whose number stands behind the shard's; None for the shard itself."""
        key = self.shard_key(shard)
        return key if piece is None else f"{key}-{piece:05d}"


@dataclasses.dataclass(slots=True)
class DeadLetter:
    """One source record, damaged region or unreadable file that could not be converted.

    Attributes:
        source: Name of the input.
        position: Byte offset in the decompressed stream; 0 for a whole file.
        length: Bytes of the record (with its framing) or of the damaged region.
        step: "read" for the reader, else the step's name.
        reason: Short snake_case code.
        error_type: Class of the exception, or "".
        error: What happened, in words.
        traceback: Frames of the exception, or "".
        payload: Source bytes, or None when there are none to keep.
        whole_file: Whether nothing of the file could be read.
        extra: Further positions where they exist: row, line, member.
        attempts: How often it was tried: 1, and one more for each replay.
        carried: In a replay, the line of a letter that stays as it is but for its attempts; None otherwise.
        records_estimate: About how many records a damaged region or unreadable file held; None for a single record and
            where nothing is known of their size.
    """

    source: str
    position: int
    length: int
    step: str
    reason: str
    error_type: str = ""
    error: str = ""
    traceback: str = ""
    payload: bytes | None = None
    whole_file: bool = False
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)
    attempts: int = 1
    carried: dict[str, Any] | None = None
    records_estimate: int | None = None

    @property
    def hidden(self) -> int:
        """Records that it probably stands for, beyond the one that it counts as."""
        return max(0, (self.records_estimate or 1) - 1)


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """What a reader covered of one input. Spans of neighbouring ranges must meet.

    Attributes:
        asked_start: Start of the range that was asked for.
        asked_end: Its end.
        start: The boundary at which reading began; None when no record begins inside the range.
        end: The boundary at or after `asked_end` at which reading ended; None like `start`.
        crc: CRC-32C of the bytes [asked_start, asked_end) of the file; None where it is not known, see
            `transforms.checksums`.
    """

    asked_start: int
    asked_end: int
    start: int | None
    end: int | None
    crc: int | None = dataclasses.field(default=None, compare=False)


@dataclasses.dataclass(slots=True)
class Chunk:
    """What a reader yields: up to a batch of records of one input.

    Attributes:
        records: Payloads.
        positions: Position of each record, same length.
        dead: Dead letters met since the last chunk.
        num_bytes: Bytes of the decompressed stream consumed, framing and damage included.
        span: Set on the last chunk of a range.
        rolls: Whether the input cannot be split, so that the writer rolls over at the bounds.
        origins: In a replay, the dead letter that each record comes from; None otherwise.
        reached: Position in the stream after this chunk; None for formats without byte positions.
    """

    records: list[bytes] = dataclasses.field(default_factory=list)
    positions: list[int] = dataclasses.field(default_factory=list)
    dead: list[DeadLetter] = dataclasses.field(default_factory=list)
    num_bytes: int = 0
    span: Span | None = None
    rolls: bool = False
    origins: list[DeadLetter] | None = None
    reached: int | None = None


@dataclasses.dataclass(slots=True)
class RecordBatch:
    """The element between DoFns: about half a MiB of one input and one shard.

    Attributes:
        task: The planned shard.
        sequence: Number of the batch within its shard, from 0 without gaps.
        last: Whether this batch ends the shard.
        source: The input, or None for the closing batch.
        records: Payloads (after the steps: what is to be written).
        positions: Position of each source record (only until the steps have run).
        dead: Dead letters, which become durable together with the shard.
        records_read: Source records in this batch, dead letters of the reader included.
        num_bytes: Bytes of the decompressed stream consumed.
        span: Set on the last batch of an input range.
        records_added: Outputs beyond the first of each source record.
        dropped: Dropped records by reason.
        rolls: Whether these records come from input that cannot be split, so that the writer rolls over.
        committed: Whether the shard was already committed; nothing was read.
        not_run: Whether the job is being called off; what was read of the shard does not count.
        try_number: Which try of the shard this is, from 1, see `transforms.tries`; 0 when tries are not counted.
        isolated: Whether every step must run in a child process, because a worker died on this shard before.
        origins: In a replay, the dead letter that each record comes from; None otherwise.
        kept: In a replay, dead letters that it does not take: they go to the new file and stand in no books of it.
        journalled: Whether the shard has a journal, which is deleted once it is committed.
        applied: Whether the steps have run: these are what an earlier stage made of a piece.
    """

    task: ShardTask
    sequence: int
    last: bool = False
    source: Input | None = None
    records: list[bytes] = dataclasses.field(default_factory=list)
    positions: list[int] = dataclasses.field(default_factory=list)
    dead: list[DeadLetter] = dataclasses.field(default_factory=list)
    records_read: int = 0
    num_bytes: int = 0
    span: Span | None = None
    records_added: int = 0
    dropped: dict[str, int] = dataclasses.field(default_factory=dict)
    rolls: bool = False
    committed: bool = False
    not_run: bool = False
    try_number: int = 0
    isolated: bool = False
    origins: list[DeadLetter] | None = None
    kept: list[DeadLetter] = dataclasses.field(default_factory=list)
    journalled: bool = False
    applied: bool = False

    @classmethod
    def of_chunk(cls, task: ShardTask, source: Input, chunk: Chunk) -> RecordBatch:
        """Returns a batch, not yet numbered, of what a reader gave."""
        return cls(
            task,
            0,
            source=source,
            records=chunk.records,
            positions=chunk.positions,
            dead=chunk.dead,
            records_read=len(chunk.records) + len(chunk.dead),
            num_bytes=chunk.num_bytes,
            span=chunk.span,
            rolls=chunk.rolls,
            origins=chunk.origins,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Edge:
    """Where a shard begins or ends inside an input that it shares with its neighbour.

    Attributes:
        index: Index of the input.
        span: What the shard covered of it.
        read: Source records the shard read of it.
        dead: Dead letters among them.
    """

    index: int
    span: Span
    read: int
    dead: int


@dataclasses.dataclass(frozen=True, slots=True)
class ShardInfo:
    """The metadata of one committed shard, the only thing that leaves `ConvertShards`.

    Attributes:
        task: The planned shard, so that it can be read again when its edges do not meet.
        num_parts: Files with records.
        books: Totals by name, see `transforms.books`.
        first: Edge at the shard's start, None when it starts with a fresh input.
        last: Edge at the shard's end.
        dead_by_reason: Dead letters by reason, of those reasons that the budget names.
        not_run: Whether the job was called off before the shard was done; then there are no books.
    """

    task: ShardTask
    num_parts: int
    books: dict[str, int]
    first: Edge | None = None
    last: Edge | None = None
    dead_by_reason: dict[str, int] = dataclasses.field(default_factory=dict)
    not_run: bool = False


def display_name(name: str) -> str:
    r"""The name as valid UTF-8: bytes that are not stand as `\xNN`."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def printable(text: str) -> str:
    """Returns text as one line that moves no cursor: with escapes, where it has signs that cannot be printed."""
    return text if text.isprintable() else repr(text)[1:-1]


def to_json(fields: Mapping[str, Any], indent: int | None = None) -> bytes:
    """Returns a line, or with `indent` a page, of UTF-8 JSON; what UTF-8 cannot hold becomes JSON's own escape."""
    return json.dumps(fields, indent=indent, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"


def name_fields(key: str, name: str) -> dict[str, str]:
    """JSON fields for a file name: `key`, and `key_base64` with the exact bytes where they are not UTF-8."""
    shown = display_name(name)
    if shown == name:
        return {key: name}
    exact = base64.b64encode(name.encode("utf-8", "surrogateescape")).decode("ascii")
    return {key: shown, f"{key}_base64": exact}


def name_from_fields(key: str, fields: dict[str, Any]) -> str:
    """The exact name, the inverse of `name_fields`."""
    exact = fields.get(f"{key}_base64")
    if exact is None:
        return str(fields[key])
    return base64.b64decode(exact).decode("utf-8", "surrogateescape")
