"""What starts in a container in the place of Beam's boot program: installs what was staged, and becomes the worker.

Runs in the base environment, which stands for the container image. The worker gets an environment of its own on top of
it, as in a container: pip installs the staged packages there with all that they depend on.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import grpc
from apache_beam.portability import common_urns
from apache_beam.portability.api import (
    beam_artifact_api_pb2,
    beam_artifact_api_pb2_grpc,
    beam_provision_api_pb2,
    beam_provision_api_pb2_grpc,
    beam_runner_api_pb2,
    endpoints_pb2,
)
from google.protobuf import json_format, text_format

_PIP_SECS = 400
_REQUEST_SECS = 60
_UNLIMITED = [("grpc.max_receive_message_length", -1)]


def main() -> None:
    """Gets the container ready and turns this process into the worker."""
    parser = argparse.ArgumentParser()
    for name in ("id", "logging_endpoint", "control_endpoint", "artifact_endpoint", "provision_endpoint"):
        parser.add_argument(f"--{name}", required=True)
    args = parser.parse_args()
    about = [("worker_id", args.id)]
    with grpc.insecure_channel(args.provision_endpoint) as channel:
        stub = beam_provision_api_pb2_grpc.ProvisionServiceStub(channel)
        asked = beam_provision_api_pb2.GetProvisionInfoRequest()
        info = stub.GetProvisionInfo(asked, metadata=about, timeout=_REQUEST_SECS).info
    names = _fetch(args.artifact_endpoint, info.dependencies, about, Path("staged"))
    python = _make_environment(Path("venv"))
    for options in _packages(names, Path("staged")):
        print("pip install", *options, flush=True)
        subprocess.run([python, "-m", "pip", "install", "--no-cache-dir", *options], check=True, timeout=_PIP_SECS)
    variables = {
        "WORKER_ID": args.id,
        "PIPELINE_OPTIONS": json.dumps(_whole(json_format.MessageToDict(info.pipeline_options))),
        "SEMI_PERSISTENT_DIRECTORY": os.getcwd(),
        "LOGGING_API_SERVICE_DESCRIPTOR": _descriptor(args.logging_endpoint),
        "CONTROL_API_SERVICE_DESCRIPTOR": _descriptor(args.control_endpoint),
        "RUNNER_CAPABILITIES": " ".join(info.runner_capabilities),
    }
    worker = [python, "-m", "apache_beam.runners.worker.sdk_worker_main"]
    os.execve(python, worker, {**os.environ, **variables})


def _fetch(endpoint: str, dependencies: Any, about: list[tuple[str, str]], folder: Path) -> list[str]:
    """Fetches the staged files into a folder and returns their names."""
    folder.mkdir()
    names = []
    with grpc.insecure_channel(endpoint, options=_UNLIMITED) as channel:
        stub = beam_artifact_api_pb2_grpc.ArtifactRetrievalServiceStub(channel)
        asked = beam_artifact_api_pb2.ResolveArtifactsRequest(artifacts=dependencies)
        for artifact in stub.ResolveArtifacts(asked, metadata=about, timeout=_REQUEST_SECS).replacements:
            assert artifact.role_urn == common_urns.artifact_roles.STAGING_TO.urn, artifact
            role = beam_runner_api_pb2.ArtifactStagingToRolePayload.FromString(artifact.role_payload)
            request = beam_artifact_api_pb2.GetArtifactRequest(artifact=artifact)
            with (folder / role.staged_name).open("wb") as file:
                for piece in stub.GetArtifact(request, metadata=about, timeout=_REQUEST_SECS):
                    file.write(piece.data)
            names.append(role.staged_name)
    return names


def _make_environment(folder: Path) -> str:
    """Makes an environment that sees the packages of this one, and returns its python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    [packages] = folder.glob("lib/python*/site-packages")
    (packages / "base.pth").write_text(f"{sysconfig.get_paths()['purelib']}\n")
    return str(folder.absolute() / "bin/python")


def _packages(names: list[str], staged: Path) -> list[list[str]]:
    """Returns what pip is to install, in Beam's order: requirements, further packages, the pipeline's own."""
    found = []
    if "requirements.txt" in names:
        found.append(["-r", f"{staged}/requirements.txt", "--find-links", str(staged)])
    if "extra_packages.txt" in names:
        found += [[f"{staged}/{name}"] for name in (staged / "extra_packages.txt").read_text().split()]
    if "workflow.tar.gz" in names:
        found.append([f"{staged}/workflow.tar.gz"])
    return found


def _whole(value: Any) -> Any:
    """Makes whole numbers of the doubles that a protobuf Struct makes of them."""
    if isinstance(value, dict):
        return {key: _whole(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_whole(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _descriptor(url: str) -> str:
    return text_format.MessageToString(endpoints_pb2.ApiServiceDescriptor(url=url))


if __name__ == "__main__":
    main()
