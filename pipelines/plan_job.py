"""Plans a job: list, sample, cut. Writes into a scratch folder; the output is not touched."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import os
from collections.abc import Iterable, Iterator
from typing import Any

from pipelines.config import JobConfig
from pipelines.errors import UsageError
from pipelines.tell_format import tell_format
from transforms.cut_pieces import can_split
from transforms.elements import Input, JobSpec, ShardTask, display_name, printable
from transforms.generations import name_generation
from transforms.inputs import InputPatternError, Listing, list_inputs, read_inputs, sample_inputs
from transforms.plan import (
    Estimate,
    Layout,
    ShardsRequest,
    choose_layout,
    cut_shards,
    read_cost_us,
)
from transforms.plan_file import read_tasks, write_plan
from transforms.report import spec_to_header, versions
from transforms.sample import SAMPLED_INPUTS, Sample, choose_compression, take_sample
from transforms.steps.load import source_digest
from transforms.timing import Timing

_NAMED = 3  # Inputs that a message names where none can be read.


@dataclasses.dataclass(frozen=True)
class PlannedJob:
    """A plan in a scratch folder.

    Attributes:
        spec: The job.
        header: Header of the plan.
        inputs_path: Where inputs.jsonl was written.
        plan_path: Where plan.jsonl was written.
        estimated_bytes: Estimated decompressed bytes.
        estimated_records: Estimated records.
        estimated_output_bytes: Estimated bytes of all shards, if the steps change nothing.
        sampled: Payloads that were looked at.
        state: Further files of the job's state: local paths by name.
        all_compressed: Whether all inputs are taken to be compressed, whatever their names.
        timing: What the steps take, None where that is not known, see `pipelines.plan_pieces`.
    """

    spec: JobSpec
    header: dict[str, Any]
    inputs_path: str
    plan_path: str
    estimated_bytes: int
    estimated_records: int
    estimated_output_bytes: int
    sampled: list[bytes]
    state: dict[str, str] = dataclasses.field(default_factory=dict)
    all_compressed: bool = False
    timing: Timing | None = None


def plan_job(
    config: JobConfig, *, limit: int, scratch: str, generation: str = "", listing: Listing | None = None
) -> PlannedJob:
    """Lists the inputs and plans the shards.

    Args:
        config: The checked config.
        limit: Convert only so many records; 0 for all.
        scratch: Folder for the plan's files.
        generation: Generation that the job is, "" for the base.
        listing: What was listed already, into inputs.jsonl in the scratch folder; None to list now.

    Returns:
        The plan.

    Raises:
        UsageError: An input pattern is wrong, or the format cannot be told.
    """
    inputs_path = os.path.join(scratch, "inputs.jsonl")
    plan_path = os.path.join(scratch, "plan.jsonl")
    if listing is None:
        listing = _list(config, inputs_path)
    if not listing.num_inputs:
        raise UsageError("; ".join(("no input: nothing was found that is taken", *listing.notes)))
    chosen = sample_inputs(inputs_path, SAMPLED_INPUTS)
    format_name: str = config.source.format
    format_notes: list[str] = []
    if format_name == "auto":
        format_name, format_notes = tell_format(inputs_path, chosen or _first_inputs(inputs_path))
    spec = _base_spec(config, format_name, limit)
    if generation:
        spec = name_generation(spec, generation)
    sample = take_sample(chosen, spec)
    estimate = _estimate(sample, spec, listing)
    compressed = listing.total_bytes if estimate.all_compressed else listing.compressed_bytes
    total = listing.total_bytes + int(compressed * (estimate.inflation - 1))
    num_records = int(total / estimate.record_bytes)
    layout = choose_layout(ShardsRequest.parse(config.write.shards), total, estimate.record_bytes)
    fingerprint = _fingerprint(config, listing, spec, limit)
    if generation:
        fingerprint["generation"] = generation
    spec = dataclasses.replace(
        spec,
        plan_id=digest(fingerprint),
        planned_bytes=total,
        planned_files=listing.num_inputs,
        record_bytes=estimate.record_bytes if sample.num_records else 0.0,
        writer_options=f"group_size:{config.write.group_size},{_choose_compression(config, sample)}",
        part_max_records=layout.part_max_records,
        part_max_bytes=layout.part_max_bytes,
        roll_factor=layout.roll_factor,
    )
    header: dict[str, Any] = {}

    def make_header(num_shards: int) -> dict[str, Any]:
        nonlocal spec
        spec = dataclasses.replace(spec, num_shards=num_shards)
        notes = [*format_notes, *_notes(config, layout, spec, sample, num_records), *listing.notes]
        header.update(_header(spec, listing, fingerprint, notes))
        return header

    with open(inputs_path, "rb") as lines:
        write_plan(plan_path, make_header, _cut(spec, read_inputs(lines), total, layout, estimate))
    output_bytes = _estimate_output(spec, sample, total)
    return PlannedJob(
        spec,
        header,
        inputs_path,
        plan_path,
        total,
        num_records,
        output_bytes,
        sample.payloads,
        all_compressed=estimate.all_compressed,
    )


def _estimate(sample: Sample, spec: JobSpec, listing: Listing) -> Estimate:
    estimate = sample.estimate()
    if spec.format != "files":
        return estimate
    return dataclasses.replace(estimate, record_bytes=max(1.0, listing.total_bytes / listing.num_inputs))


def _estimate_output(spec: JobSpec, sample: Sample, total: int) -> int:
    if spec.format == "array_record":
        return total  # Planned in bytes of files that are compressed already.
    saving = 0.0 if "uncompressed" in spec.writer_options else max(0.0, sample.saving)
    return int(total * (1 - saving))


def _list(config: JobConfig, inputs_path: str) -> Listing:
    try:
        return list_inputs(config.source.patterns, inputs_path, config.write.output)
    except InputPatternError as error:
        raise UsageError(str(error)) from error


def _choose_compression(config: JobConfig, sample: Sample) -> str:
    return choose_compression(sample) if config.write.compression == "auto" else config.write.compression


def _base_spec(config: JobConfig, format_name: str, limit: int) -> JobSpec:
    return JobSpec(
        root=config.write.output,
        plan_id="",
        num_shards=0,
        format=format_name,
        compression=config.source.compression,
        max_record_bytes=config.source.max_record_bytes,
        steps=tuple(config.steps),
        import_paths=(os.getcwd(),),
        name=config.write.name,
        split=config.write.split,
        template=config.write.template,
        max_payload_bytes=config.dead_letters.max_payload_bytes,
        dead_letter_path=config.dead_letters.path,
        max_fraction=config.dead_letters.max_fraction,
        max_count=config.dead_letters.max_count,
        max_count_by_reason=config.dead_letters.max_count_by_reason,
        limit=limit,
        billing_project=config.source.billing_project,
    )


def _first_inputs(inputs_path: str) -> list[Input]:
    with open(inputs_path, "rb") as lines:
        return [source for _, source in itertools.islice(read_inputs(lines), _NAMED)]


def _cut(
    spec: JobSpec, inputs: Iterable[tuple[int, Input]], total: int, layout: Layout, estimate: Estimate
) -> Iterator[ShardTask]:
    # A trial run reads the first records only, in one shard, so that "the first" has one meaning.
    num_shards = 1 if spec.limit else layout.num_shards
    return cut_shards(inputs, total, num_shards, estimate.weigh, can_split(spec, estimate))


def _fingerprint(config: JobConfig, listing: Listing, spec: JobSpec, limit: int) -> dict[str, Any]:
    """Returns what decides the bytes of the output; budgets, workers, Beam and log options are not in it."""
    write = config.write.model_dump(exclude={"output", "check_space", "secs_per_record"})
    source = {**config.source.model_dump(exclude={"patterns", "billing_project"}), "format": spec.format}
    found = versions()
    return {
        "inputs": listing.digest,
        "source": source,
        # Whether answers are kept while the job runs decides no byte of it.
        "steps": [{key: value for key, value in step.items() if key != "journal"} for step in config.steps],
        "code of steps": source_digest(config.steps),
        "write": write,
        "dead letters": [config.dead_letters.path, config.dead_letters.max_payload_bytes],
        "limit": limit,
        "library versions": {name: found[name] for name in ("gristmill", "array-record")},
    }


def digest(fields: dict[str, Any]) -> str:
    """Returns the plan id of a fingerprint."""
    text = json.dumps(fields, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()


def _header(spec: JobSpec, listing: Listing, fingerprint: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    return {
        "plan_id": spec.plan_id,
        "num_shards": spec.num_shards,
        "num_inputs": listing.num_inputs,
        "total_bytes": listing.total_bytes,
        "num_skipped": listing.num_skipped,
        "num_duplicates": listing.num_duplicates,
        "notes": notes,
        "fingerprint": json.loads(json.dumps(fingerprint, default=str)),
        "spec": spec_to_header(spec),
    }


def _notes(config: JobConfig, layout: Layout, spec: JobSpec, sample: Sample, num_records: int) -> list[str]:
    """Returns what a person should know of the choices that were made."""
    per_shard = num_records / max(1, spec.num_shards)
    cost = read_cost_us(per_shard)
    notes = [f"about {per_shard:,.0f} records a shard: one random read will take about {cost:,.0f} us"]
    if config.write.compression == "auto":
        saving = max(0.0, sample.saving)
        chosen = spec.writer_options.split(",", 1)[1]
        notes.append(f"compression {chosen}: zstd:3 saves {saving:.0%} on {len(sample.payloads)} sampled payloads")
    if sample.uneven is not None:
        name = printable(display_name(sample.uneven))
        notes.append(f"records differ much in size within {name}: shards are planned by bytes, not by records")
    if sample.unnamed_compressed_bytes:
        share = sample.unnamed_compressed_bytes / sample.plain_name_bytes
        notes.append(f"{share:.0%} of the sampled bytes are compressed though their names do not say so")
    if config.write.group_size > 1:
        notes.append(
            f"write.group_size {config.write.group_size}: Grain expects 1, and reads a whole group for each record"
        )
    if num_records and spec.num_shards > num_records and not spec.limit and spec.format != "files":
        notes.append(f"{spec.num_shards:,} shards for about {num_records:,} records: empty ones are left out")
    if layout.num_shards and spec.num_shards != layout.num_shards and config.write.shards.isdigit() and not spec.limit:
        notes.append(
            f"{layout.num_shards} shards were asked for, {spec.num_shards} planned: the input cannot be split "
            f"everywhere; compressed files start a new shard each {layout.part_max_bytes:,} bytes"
        )
    return notes


def planned_shards(plan_path: str) -> list[int]:
    """Returns the planned bytes of every shard."""
    with open(plan_path, "rb") as plan:
        return [task.planned_bytes for _, task in read_tasks(plan)]
