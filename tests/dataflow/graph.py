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
    """Returns which transform makes the elements of each GroupByKey, by names.

    The coders do not tell: every element of ours is pickled.
    """
    makers = {
        made: transform.unique_name
        for transform in pipeline.components.transforms.values()
        if not transform.subtransforms
        for made in transform.outputs.values()
    }
    return {
        transform.unique_name: makers[taken]
        for transform in pipeline.components.transforms.values()
        if transform.spec.urn == common_urns.primitives.GROUP_BY_KEY.urn
        for taken in transform.inputs.values()
    }


def consumers(pipeline: Pipeline, maker: str) -> list[str]:
    """Returns the names of the transforms that take the elements of another one."""
    [made] = [
        output
        for transform in pipeline.components.transforms.values()
        if transform.unique_name == maker
        for output in transform.outputs.values()
    ]
    return [
        transform.unique_name
        for transform in pipeline.components.transforms.values()
        if made in transform.inputs.values() and not transform.subtransforms
    ]


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
