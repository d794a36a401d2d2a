"""Runs a job that was captured on its way to Dataflow, with Beam's local runner and workers in containers.

Runs in the base environment, so nothing of the pipeline's own code is at hand but what the job brings along.

    run_job.py JOB.json FOLDER WORKERS SECS
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from apache_beam.io.filesystem import CompressionTypes
from apache_beam.io.filesystems import FileSystems
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.portability import common_urns
from apache_beam.portability.api import beam_provision_api_pb2, beam_runner_api_pb2
from apache_beam.runners.portability.fn_api_runner import fn_runner
from google.protobuf import json_format, struct_pb2
from watch import watch


def run(request: dict[str, Any], folder: Path, num_workers: int) -> list[tuple[str, str, str, int]]:
    """Runs a job and returns its counters: step, namespace, name, value.

    Args:
        request: What was posted to the service.
        folder: For the staged files.
        num_workers: Containers to run it in.
    """
    described = request["environment"]["sdkPipelineOptions"]
    data = _read(described["options"]["pipelineUrl"], described["options"]["pipelineProtoHash"])
    pipeline = beam_runner_api_pb2.Pipeline.FromString(data)
    for environment in pipeline.components.environments.values():
        assert environment.urn == common_urns.environments.DOCKER.urn, environment
        for artifact in environment.dependencies:
            _bring(artifact, folder)
    options = json_format.ParseDict(described, struct_pb2.Struct())
    info = beam_provision_api_pb2.ProvisionInfo(pipeline_options=options, retrieval_token="none")
    runner = fn_runner.FnApiRunner(
        provision_info=fn_runner.ExtendedProvisionInfo(info, str(folder), job_name=request["name"])
    )
    runner._num_workers = num_workers
    result = runner.run_via_runner_api(pipeline, PipelineOptions([]))
    counters = result.metrics().query()["counters"]
    return [(c.key.step, c.key.metric.namespace, c.key.metric.name, c.committed or c.attempted) for c in counters]


def _read(url: str, sha256: str) -> bytes:
    with FileSystems.open(url, compression_type=CompressionTypes.UNCOMPRESSED) as file:
        data = bytes(file.read())
    found = hashlib.sha256(data).hexdigest()
    if found != sha256:
        raise ValueError(f"{url}: sha256 is {found} and should be {sha256}")
    return data


def _bring(artifact: Any, folder: Path) -> None:
    """Makes a local file of a staged one: Beam's artifact service in Python cannot read gs://."""
    assert artifact.type_urn == common_urns.artifact_types.URL.urn, artifact
    staged = beam_runner_api_pb2.ArtifactUrlPayload.FromString(artifact.type_payload)
    path = folder / staged.url.rpartition("/")[2]
    path.write_bytes(_read(staged.url, staged.sha256))
    artifact.type_urn = common_urns.artifact_types.FILE.urn
    payload = beam_runner_api_pb2.ArtifactFilePayload(path=str(path), sha256=staged.sha256)
    artifact.type_payload = payload.SerializeToString()


def main(job: str, folder: str, num_workers: str, secs: str) -> None:
    """Runs the job, writes its counters to FOLDER/counters.json, and ends at once, whatever the runner's threads do."""
    watch(float(secs))
    try:
        counters = run(json.loads(Path(job).read_text()), Path(folder), int(num_workers))
        Path(folder, "counters.json").write_text(json.dumps(counters))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
