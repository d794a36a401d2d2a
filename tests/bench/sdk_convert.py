"""Runs the ArrayRecord Beam SDK's own conversion, with the Python of its own environment.

The package `array-record-beam-sdk` pins an array-record older than the one measured beside it,
so the benchmark starts this script with another interpreter. It takes `--input`, `--output` (a
folder) and `--num-shards`; anything else is passed on to Beam.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from types import ModuleType

# The package of the SDK's name first, then the module that later array-record releases ship.
PIPELINES = ("array_record_beam_sdk.pipelines", "array_record.beam.pipelines")


def load_pipelines(argv: list[str]) -> ModuleType:
    """Returns the SDK's pipelines, which read the command line while they are imported."""
    sys.argv[1:] = argv
    for name in PIPELINES:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if not name.startswith(error.name or "?"):
                raise
    raise SystemExit(f"neither {' nor '.join(PIPELINES)} is installed beside {sys.executable}")


def main() -> None:
    """Converts TFRecord files and waits for the pipeline to end."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--input", required=True, help="glob of TFRecord files")
    parser.add_argument("--output", required=True, help="folder for the ArrayRecord files")
    parser.add_argument("--num-shards", type=int, default=50, help="how many files to write")
    args, beam_args = parser.parse_known_args()
    prefix = os.path.join(args.output, "records")
    pipelines = load_pipelines(["--input", args.input, "--output", prefix, *beam_args])
    made = pipelines.convert_tf_to_arrayrecord_disk(num_shards=args.num_shards)
    # The SDK's package returns the pipeline and its first step, later releases the pipeline.
    pipeline = made[0] if isinstance(made, tuple) else made
    pipeline.run().wait_until_finish()


if __name__ == "__main__":
    main()
