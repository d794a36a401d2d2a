"""Entry point of the Dataflow Flex template: the template's parameters become a command line of `gristmill convert`.

Dataflow starts the image as a launcher, which runs this with the parameters and the options of the job as flags:
`--input=... --output=... --project=... --template_location=...`. Listing, sampling and planning happen here, then one
job is handed over and nothing waits for it. pipelines/flex_template.json describes the parameters to Dataflow, which
refuses any other.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Callable, Sequence

from pipelines import cli
from pipelines.errors import USAGE, UsageError
from transforms.billing import pay_by
from transforms.scratch import scratch_folder

LISTS = ("input", "step", "set")
"""Parameters that may be given as a JSON list of texts."""
SWITCHES = ("append", "overwrite", "resume_anyway")
TEXTS = ("output", "config", "format", "name", "split", "shards", "limit", "billing_project")
BEAM_OPTIONS = ("sdk_container_image", "disk_size_gb", "number_of_worker_harness_threads")
"""Parameters that are Beam options, which the launcher has no flags for."""
REQUIRED = ("input", "output", "sdk_container_image")

Fetch = Callable[[str], str]


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the template's parameters."""
    parser = argparse.ArgumentParser("gristmill template", allow_abbrev=False)
    for name in LISTS:
        parser.add_argument(f"--{name}", type=_to_list, default=[])
    for name in SWITCHES:
        parser.add_argument(f"--{name}", choices=("", "false", "true"))
    for name in (*TEXTS, *BEAM_OPTIONS):
        parser.add_argument(f"--{name}", default="")
    return parser


def _to_list(text: str) -> list[str]:
    if not text.startswith("["):
        return [text] if text else []
    try:
        values = json.loads(text)
    except ValueError:
        values = [None]
    if not all(isinstance(value, str) for value in values):
        raise argparse.ArgumentTypeError(f"expected one text or a JSON list of texts, got {text!r}")
    return list(values)


def to_arguments(flags: Sequence[str], fetch: Fetch) -> list[str]:
    """Returns the command line of `gristmill` that the launcher's flags stand for.

    Args:
        flags: Parameters of the template and options of the job, `--name=value` each. Empty parameters count as absent.
        fetch: Copies an object of Cloud Storage to a local file and returns its path: for the config and for lists of
            inputs, which are files wherever else `convert` runs.

    Raises:
        SystemExit: A parameter is missing or has an impossible value; the message is printed, the status is 2.
        UsageError: An object cannot be fetched.
    """
    parser = make_parser()
    parameters, rest = parser.parse_known_args(flags)
    given = vars(parameters)
    missing = [name for name in REQUIRED if not given[name]]
    if missing:
        parser.error(f"parameters are missing: {', '.join(missing)}")
    pay_by(given["billing_project"])  # For what is fetched here as well.
    arguments = ["convert"]
    for name in LISTS:
        arguments += [f"--{name}={_fetch_list(value, fetch)}" for value in given[name]]
    for name in filter(given.get, TEXTS):
        value = given[name]
        is_remote = name == "config" and value.startswith("gs://")
        arguments.append(f"--{name.replace('_', '-')}={fetch(value) if is_remote else value}")
    arguments += [f"--{name.replace('_', '-')}" for name in SWITCHES if given[name] == "true"]
    arguments += [f"--{name}={given[name]}" for name in BEAM_OPTIONS if given[name]]
    return [*arguments, *_options_of_job(rest), "--detach"]


def _fetch_list(value: str, fetch: Fetch) -> str:
    return "@" + fetch(value[1:]) if value.startswith("@gs://") else value


def _options_of_job(flags: list[str]) -> list[str]:
    """Returns the launcher's own flags, with the runner if it is not among them.

    A flag that Beam does not know is left out with a message and not refused as `convert` does: Dataflow has checked
    the parameters by their names, so it is no mistake of the user but comes from a launcher of another version.
    """
    from pipelines.beam_options import beam_option_names

    known = beam_option_names()
    kept = [flag for flag in flags if flag.removeprefix("--").partition("=")[0] in known]
    for flag in flags:
        if flag not in kept:
            print(f"gristmill template: left out {flag!r}, which is no option of Apache Beam", file=sys.stderr)
    has_runner = any(flag.startswith("--runner=") for flag in kept)
    return kept if has_runner else ["--runner=DataflowRunner", *kept]


def fetch_object(url: str, folder: str) -> str:
    """Copies an object into a folder and returns the path of the copy.

    Raises:
        UsageError: It cannot be read.
    """
    from transforms import gcs

    path = os.path.join(folder, f"{len(os.listdir(folder))}-{os.path.basename(url)[-50:]}")
    try:
        bucket, name = gcs.split_url(url)
        gcs.bucket(bucket).blob(name).download_to_filename(path, timeout=gcs.TIMEOUT_SECS, retry=gcs.retry_policy())
    except Exception as error:
        problem = gcs.reading_error(error, url)
        raise UsageError(problem.strerror or str(problem)) from error
    return path


def main(flags: Sequence[str] | None = None) -> int:
    """Plans a job and hands it to Dataflow.

    Args:
        flags: What the launcher passes; None for those of this process.

    Returns:
        The exit status of `gristmill convert`; the launcher takes any but 0 for a failed launch.
    """
    with scratch_folder("template-") as folder:
        try:
            arguments = to_arguments(sys.argv[1:] if flags is None else flags, lambda url: fetch_object(url, folder))
        except UsageError as error:
            print(f"gristmill template: {error}", file=sys.stderr)
            return USAGE
        print(shlex.join(["gristmill", *arguments]), flush=True)
        return cli.main(arguments)
