"""WriteShards in a pipeline: whole shards in order, or an error that names what is wrong; and the size of the graph."""

from __future__ import annotations

import base64
import bz2
import dataclasses
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.portability import common_urns
from apache_beam.portability.api import beam_runner_api_pb2
from apache_beam.testing.util import assert_that, equal_to

import jobs
from fakes import WorstStore, files_below, make_batch, make_letter, make_spec, read_array_record, toy_records
from pipelines.config import load_config
from pipelines.output import prepare_output
from pipelines.plan_job import plan_job
from transforms.convert import ConvertCorpus
from transforms.elements import JobSpec, RecordBatch, ShardInfo
from transforms.ledger import find_ledger, ledger_name
from transforms.state import CONFIG_NAME, MANIFEST_NAME
from transforms.store import OutputError
from transforms.write import BrokenSequenceError, RecordBatchCoder, WriteShards

IN_THREADS = ["--runner=FnApiRunner", "--direct_running_mode=multi_threading", "--direct_num_workers=2"]


def shard_batches(shard: int, count: int = 5) -> list[RecordBatch]:
    """The batches of a shard: two records each, and the closing one."""
    batches = [make_batch(toy_records(2, 100 * shard + 2 * n), sequence=n, shard=shard) for n in range(count)]
    return [*batches, make_batch([], sequence=count, shard=shard, last=True, source=None)]


def all_batches(_: Any, num_shards: int = 3) -> Iterator[RecordBatch]:
    for shard in range(num_shards):
        yield from shard_batches(shard)


def records_of(store: WorstStore, spec: JobSpec, shard: int) -> list[bytes]:
    """The committed records of a shard."""
    found = find_ledger(store, spec, shard)
    assert found is not None
    assert found.ledger is not None
    return [record for part in found.ledger.parts for record in read_array_record(store, part.name)]


class TestPipeline:
    def test_every_shard_is_committed_whole_and_in_order(self) -> None:
        store = WorstStore()
        spec = make_spec(store.root, num_shards=3)
        with beam.Pipeline(options=PipelineOptions(["--runner=FnApiRunner"])) as pipeline:
            infos = pipeline | beam.Create([0]) | beam.FlatMap(all_batches) | WriteShards(spec)
            facts = infos | beam.Map(lambda info: (info.task.shard, info.num_parts, info.books["records_written"]))
            assert_that(facts, equal_to([(0, 1, 10), (1, 1, 10), (2, 1, 10)]))
        for shard in range(3):
            assert records_of(store, spec, shard) == toy_records(10, 100 * shard)
        assert len(store.tree()) == 6

    def test_reshuffle_before_it_is_refused_by_name_and_leaves_nothing(self) -> None:
        store = WorstStore()
        spec = make_spec(store.root, num_shards=3)
        pipeline = beam.Pipeline(options=PipelineOptions(IN_THREADS))
        batches = pipeline | beam.Create([0]) | beam.FlatMap(all_batches) | "Mix" >> beam.Reshuffle()
        _ = batches | "WriteMyShards" >> WriteShards(spec)
        with pytest.raises(Exception, match=r"BrokenSequenceError: .*before 'WriteMyShards' regroups elements"):
            pipeline.run().wait_until_finish()
        left = [name for name in store.tree() if name.startswith("_gristmill/attempts/")]
        named = [find_ledger(store, spec, shard) for shard in range(3)]
        committed = [file.name for found in named if found and found.ledger for file in found.ledger.files()]
        assert sorted(left) == sorted(committed)

    @pytest.mark.parametrize("options", [[], ["--direct_runner_bundle_repeat=1"]], ids=["once", "twice"])
    def test_runner_that_repeats_bundles_leaves_one_copy(self, tmp_path: Path, options: list[str]) -> None:
        payloads = [jobs.payload(0, number) for number in range(300)]
        jobs.write_tfrecord(tmp_path / "in/a.tfrecord", payloads)
        out = tmp_path / "out"
        flags = ["--runner=BundleBasedDirectRunner", *options]
        assert jobs.convert("--input", tmp_path / "in", "--output", out, "--shards", "4", *flags) == 0
        assert jobs.records(out) == payloads
        assert not [name for name in jobs.tree(out) if "attempts" in name]

    @pytest.mark.parametrize("list_delay", [0, 100_000], ids=["prompt", "late"])
    def test_whole_job_runs_on_the_worst_store(self, tmp_path: Path, list_delay: int) -> None:
        payloads = [[jobs.payload(file, number) for number in range(50)] for file in range(3)]
        for number, file in enumerate(payloads):
            jobs.write_tfrecord(tmp_path / f"in/{number}.tfrecord", file)
        damaged = bytearray((tmp_path / "in/1.tfrecord").read_bytes())
        damaged[20] ^= 1
        (tmp_path / "in/1.tfrecord").write_bytes(damaged)
        store = WorstStore(list_delay=list_delay)
        keys = {"source.patterns": [str(tmp_path / "in")], "write.output": store.root, "write.shards": "4"}
        config = load_config(None, list(keys.items()))
        job = plan_job(config, limit=0, scratch=str(tmp_path))
        prepare_output(store, job)
        store.put(CONFIG_NAME, json.dumps(config.model_dump()).encode())
        with beam.Pipeline(options=PipelineOptions(["--runner=FnApiRunner"])) as pipeline:
            _ = pipeline | ConvertCorpus(dataclasses.replace(job.spec, root=store.root))
        manifest = json.loads(store.tree()[MANIFEST_NAME])
        assert [shard["name"] for shard in manifest["shards"]] == [
            f"corpus-train.array_record-{number:05d}-of-00004" for number in range(4)
        ]
        records = [record for shard in manifest["shards"] for record in read_array_record(store, shard["name"])]
        assert records == payloads[0] + payloads[1][1:] + payloads[2]
        lines = [
            data for name, data in store.tree().items() if name.startswith("_dead_letters/") and name.endswith("jsonl")
        ]
        assert [json.loads(line)["reason"] for line in lines] == ["data_checksum"]


@pytest.fixture
def store() -> WorstStore:
    return WorstStore()


@pytest.fixture
def spec(store: WorstStore) -> JobSpec:
    return make_spec(store.root, num_shards=3)


def make_fn(spec: JobSpec, label: str = "WriteShards") -> Any:
    """The DoFn that the transform applies, in a started bundle."""
    pipeline = beam.Pipeline()
    batches = pipeline | beam.Create([0]) | beam.FlatMap(all_batches)
    applied = batches | label >> WriteShards(spec)
    fn = applied.producer.transform.fn
    fn.setup()
    fn.start_bundle()
    return fn


def process(fn: Any, batches: list[RecordBatch]) -> list[ShardInfo]:
    return [info for batch in batches for info in fn.process(batch)]


class TestBrokenSequence:
    @pytest.mark.parametrize(
        "order",
        [
            [(0, 1)],
            [(0, 0), (0, 2)],
            [(0, 0), (0, 1), (0, 1)],
            [(0, 0), (0, 0)],
            [(0, 0), (1, 0)],
            [(0, 0), (1, 1)],
            [(0, 0), (0, 1), (1, 2)],
            [(0, 5)],
            [(0, 0), (0, 1), (0, 2), (0, 3), (0, 4), (0, 5), (1, 1)],
            [(0, 0), (0, 1), (0, 2), (0, 3), (0, 4), (0, 5), (0, 5)],
        ],
    )
    def test_batch_out_of_turn_is_refused_and_leaves_nothing_of_its_shard(
        self, store: WorstStore, spec: JobSpec, order: list[tuple[int, int]]
    ) -> None:
        fn = make_fn(spec, "Write to the bucket")
        batches = [shard_batches(shard)[number] for shard, number in order]
        infos = process(fn, batches[:-1])
        shard, number = order[-1]
        with pytest.raises(BrokenSequenceError) as refused:
            process(fn, batches[-1:])
        assert f"batch {number} of shard {shard}" in str(refused.value)
        assert "'Write to the bucket'" in str(refused.value)
        assert [info.task.shard for info in infos] == ([0] if len(order) > 6 else [])
        assert len(store.tree()) == (2 if infos else 0)

    def test_shard_that_is_not_ended_in_its_bundle_is_refused_and_leaves_nothing(self, tmp_path: Path) -> None:
        fn = make_fn(make_spec(str(tmp_path), num_shards=3))
        infos = process(fn, [*shard_batches(0), *shard_batches(1)[:3]])
        assert [info.task.shard for info in infos] == [0]
        with pytest.raises(BrokenSequenceError, match="shard 1 was not ended"):
            fn.finish_bundle()
        [part, ledger] = files_below(tmp_path)
        assert part.startswith("_gristmill/attempts/00000-")
        assert ledger == "_gristmill/shards/00000.json"

    def test_next_bundle_begins_afresh(self, store: WorstStore, spec: JobSpec) -> None:
        fn = make_fn(spec)
        process(fn, shard_batches(0)[:3])
        with pytest.raises(BrokenSequenceError):
            fn.finish_bundle()
        fn.start_bundle()
        assert [info.task.shard for info in process(fn, shard_batches(0))] == [0]
        fn.finish_bundle()
        fn.teardown()
        assert records_of(store, spec, 0) == toy_records(10)

    def test_bundle_without_elements_is_fine(self, store: WorstStore, spec: JobSpec) -> None:
        fn = make_fn(spec)
        fn.finish_bundle()
        fn.teardown()
        assert store.tree() == {}


class TestCleanUp:
    def test_teardown_in_the_middle_leaves_nothing(self, tmp_path: Path) -> None:
        fn = make_fn(make_spec(str(tmp_path)))
        process(fn, shard_batches(0)[:3])
        assert files_below(tmp_path)
        fn.teardown()
        assert files_below(tmp_path) == {}

    @pytest.mark.parametrize("number", range(1, 7))
    def test_call_that_fails_ends_the_bundle_and_leaves_nothing(
        self, store: WorstStore, spec: JobSpec, number: int
    ) -> None:
        fn = make_fn(spec)
        batches = shard_batches(0)
        batches[1].dead.append(make_letter(0))
        store.fail_at(number)
        with pytest.raises(OutputError, match="quota exceeded"):
            process(fn, batches)
        assert store.tree() == {}


class TestCommitted:
    def test_committed_batch_gives_the_ledger_of_the_shard(self, store: WorstStore, spec: JobSpec) -> None:
        fn = make_fn(spec)
        [info] = process(fn, shard_batches(1))
        before = store.tree()
        again = make_batch([], shard=1, last=True, source=None, committed=True)
        task = dataclasses.replace(again.task, round=1)
        assert process(fn, [*shard_batches(0), dataclasses.replace(again, task=task)])[1] == dataclasses.replace(
            info, task=task
        )
        assert before.items() <= store.tree().items()
        fn.finish_bundle()

    def test_committed_shard_whose_files_vanished_is_an_output_error(self, store: WorstStore, spec: JobSpec) -> None:
        fn = make_fn(spec)
        process(fn, shard_batches(0))
        store.delete(next(name for name in store.tree() if name != ledger_name(spec, 0)))
        with pytest.raises(OutputError, match="files of shard 0 vanished"):
            process(fn, [make_batch([], last=True, source=None, committed=True)])


class TestCoder:
    def test_batch_comes_back_as_it_went_in(self) -> None:
        batch = make_batch(toy_records(5), dead=[make_letter(0)], dropped={"short": 2}, rolls=True)
        coder = RecordBatchCoder()
        assert coder.decode(coder.encode(batch)) == batch

    def test_size_is_told_without_pickling(self) -> None:
        assert RecordBatchCoder().estimate_size(make_batch([b"x" * 1000] * 3)) in range(3000, 4000)


def graph_of(spec: JobSpec) -> Any:
    """The pipeline as a runner gets it."""
    pipeline = beam.Pipeline()
    _ = pipeline | "ConvertCorpus" >> ConvertCorpus(spec, 4)
    return pipeline.to_runner_api()


def leaves_of(graph: Any) -> list[Any]:
    """The transforms that do the work."""
    return [transform for transform in graph.components.transforms.values() if not transform.subtransforms]


def coders_of(graph: Any, pcollection_id: str) -> str:
    """Names of the coder of a PCollection and of its components."""
    found, waiting = "", [graph.components.pcollections[pcollection_id].coder_id]
    while waiting:
        coder = graph.components.coders[waiting.pop()]
        waiting += coder.component_coder_ids
        found += f"{coder.spec.urn} {coder.spec.payload!r}\n"
    return found


GROUPING = (common_urns.primitives.GROUP_BY_KEY.urn, common_urns.composites.RESHUFFLE.urn)


def functions_of(graph: Any) -> list[bytes]:
    """The pickled functions of every ParDo of a graph."""
    found = []
    for leaf in leaves_of(graph):
        if leaf.spec.urn == common_urns.primitives.PAR_DO.urn:
            payload = beam_runner_api_pb2.ParDoPayload.FromString(leaf.spec.payload)
            if payload.do_fn.payload:  # Beam's own simple ones go by name.
                found.append(payload.do_fn.payload)
    return found


def unpacked(payload: bytes) -> bytes:
    """A pickle without Beam's base64 and compression."""
    data = base64.b64decode(payload)
    return bz2.decompress(data) if data.startswith(b"BZh") else zlib.decompress(data)


class TestGraph:
    def test_is_under_100_kb_however_large_the_job(self) -> None:
        steps = tuple({"call": f"toy:step_{number}", "parameter": "x" * 100} for number in range(20))
        small = len(graph_of(make_spec("/out")).SerializeToString())
        large = len(graph_of(make_spec("/out", num_shards=10**7, steps=steps)).SerializeToString())
        assert small < 100_000
        assert large < 200_000

    def test_between_reading_and_writing_there_are_functions_only(self) -> None:
        leaves = leaves_of(graph_of(make_spec("/out")))
        names = []
        waiting = [
            output
            for leaf in leaves
            if leaf.unique_name.endswith("/ReadRecords/Read")
            for output in leaf.outputs.values()
        ]
        assert waiting
        while waiting:
            pcollection = waiting.pop()
            for leaf in leaves:
                if pcollection in leaf.inputs.values():
                    assert leaf.spec.urn == common_urns.primitives.PAR_DO.urn, leaf.unique_name
                    names.append(leaf.unique_name.partition("ConvertShards/")[2])
                    if not leaf.unique_name.endswith("/WriteShards/Write"):
                        waiting += leaf.outputs.values()
        assert names == ["ApplySteps/Apply", "WriteShards/Write"]

    def test_record_batches_have_their_own_coder_before_writing(self) -> None:
        graph = graph_of(make_spec("/out"))
        for end in ("/ReadRecords/Read", "/ApplySteps/Apply"):
            [leaf] = [leaf for leaf in leaves_of(graph) if leaf.unique_name.endswith(end)]
            [output] = leaf.outputs.values()
            assert "RecordBatchCoder" in coders_of(graph, output)

    def test_nothing_refers_to_the_main_module(self) -> None:
        """Workers have another `__main__`; what stands in it by name is not there."""
        payloads = [unpacked(payload) for payload in functions_of(graph_of(make_spec("/out")))]
        assert len(payloads) >= 10
        assert any(b"transforms.write" in payload for payload in payloads)
        assert not [payload for payload in payloads if b"__main__" in payload]

    def test_no_record_batch_goes_through_a_shuffle(self) -> None:
        graph = graph_of(make_spec("/out"))
        grouping = [transform for transform in graph.components.transforms.values() if transform.spec.urn in GROUPING]
        assert len(grouping) >= 3
        for transform in grouping:
            for pcollection in (*transform.inputs.values(), *transform.outputs.values()):
                assert "RecordBatchCoder" not in coders_of(graph, pcollection), transform.unique_name
