"""Looks into a submitted graph: the pipeline's proto."""

from __future__ import annotations

import base64
import binascii
import bz2
from collections.abc import Iterator

from apache_beam.portability import common_urns
from apache_beam.portability.api import beam_runner_api_pb2

Pipeline = beam_runner_api_pb2.Pipeline
_PAR_DO = common_urns.primitives.PAR_DO.urn
_COMBINE = {urn.urn for urn in (common_urns.composites.COMBINE_PER_KEY, common_urns.composites.COMBINE_GLOBALLY)}


def grouped(pipeline: Pipeline) -> dict[str, str]:
    """Returns the coder of what goes into each GroupByKey, by the name of the transform around it."""
    found = {}
    for transform in pipeline.components.transforms.values():
        if transform.spec.urn == common_urns.primitives.GROUP_BY_KEY.urn:
            [taken] = transform.inputs.values()
            coder = pipeline.components.pcollections[taken].coder_id
            found[transform.unique_name] = describe_coder(pipeline, coder)
    return found


def describe_coder(pipeline: Pipeline, coder_id: str) -> str:
    """Returns a coder with its components, as `kv(varint,pickled)`."""
    coder = pipeline.components.coders[coder_id]
    inner = ",".join(describe_coder(pipeline, component) for component in coder.component_coder_ids)
    name = coder.spec.urn.removeprefix("beam:coder:").rpartition(":")[0]
    return f"{name}({inner})" if inner else name


def pickles(pipeline: Pipeline) -> Iterator[bytes]:
    """Yields everything that is pickled in the graph: functions, transforms, coders."""
    for transform in pipeline.components.transforms.values():
        yield from _unpack(transform.spec.payload)
        if transform.spec.urn == _PAR_DO:
            yield from _unpack(beam_runner_api_pb2.ParDoPayload.FromString(transform.spec.payload).do_fn.payload)
        elif transform.spec.urn in _COMBINE:
            combine = beam_runner_api_pb2.CombinePayload.FromString(transform.spec.payload)
            yield from _unpack(combine.combine_fn.payload)
    for coder in pipeline.components.coders.values():
        yield from _unpack(coder.spec.payload)
    for strategy in pipeline.components.windowing_strategies.values():
        yield from _unpack(strategy.window_fn.payload)


def _unpack(payload: bytes) -> Iterator[bytes]:
    """Yields a payload's pickle, if it is one: Beam compresses it and makes text of it."""
    try:
        yield bz2.decompress(base64.b64decode(payload, validate=True))
    except (binascii.Error, OSError, ValueError, EOFError):
        return


def staged_names(pipeline: Pipeline) -> dict[str, tuple[str, str]]:
    """Returns what goes with the graph: (URL, sha256) by the name that the worker sees."""
    found = {}
    for environment in pipeline.components.environments.values():
        for artifact in environment.dependencies:
            staged = beam_runner_api_pb2.ArtifactUrlPayload.FromString(artifact.type_payload)
            role = beam_runner_api_pb2.ArtifactStagingToRolePayload.FromString(artifact.role_payload)
            found[role.staged_name] = (staged.url, staged.sha256)
    return found
