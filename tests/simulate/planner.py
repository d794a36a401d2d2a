"""Plans a corpus with the real planner, in a process of its own, and prints what it took as JSON.

Run by `run.py`, or alone: `python tests/simulate/planner.py --files 1000000 --bytes 10000000000000 --folder OUT`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

from pipelines.config import load_config
from pipelines.plan_job import plan_job, planned_shards
from simulate.bucket import CorpusAdapter, make_client
from simulate.corpus import Corpus
from transforms import gcs
from transforms.inputs import list_inputs
from transforms.plan_file import INPUTS_NAME, PLAN_NAME

OUTPUT = "gs://converted/corpus"


def plan(corpus: Corpus, folder: Path, shards: str = "auto") -> dict[str, Any]:
    """Lists and plans a corpus as `gristmill convert` does.

    Args:
        corpus: The corpus.
        folder: Where inputs and plan are written, under the names that they have in an output.
        shards: What `--shards` asks for.

    Returns:
        Figures by name. Seconds are CPU, without what the listing's other side takes; but for "wall_secs", all in all.
    """
    adapter = CorpusAdapter(corpus)
    gcs._process.client = make_client(adapter)  # The planner finds it as it finds the process's own.
    config = load_config(None, [("source.patterns", [corpus.url]), ("write.output", OUTPUT), ("write.shards", shards)])
    inputs, scratch = folder / INPUTS_NAME, folder / Path(PLAN_NAME).parent
    scratch.mkdir(parents=True, exist_ok=True)
    before = peak_bytes()
    started, cpu_started = time.perf_counter(), time.process_time()
    listing = list_inputs(config.source.patterns, str(inputs), OUTPUT)
    cpu_listed, service_secs = time.process_time(), adapter.cpu_secs
    job = plan_job(config, limit=0, scratch=str(scratch), listing=listing)
    cpu_ended, ended = time.process_time(), time.perf_counter()
    weights = planned_shards(job.plan_path)
    return {
        "files": listing.num_inputs,
        "bytes": listing.total_bytes,
        "list_secs": cpu_listed - cpu_started - service_secs,
        "cut_secs": cpu_ended - cpu_listed,
        "wall_secs": ended - started,
        "start_bytes": before,
        "peak_bytes": peak_bytes(),
        "inputs_bytes": inputs.stat().st_size,
        "plan_bytes": os.path.getsize(job.plan_path),
        "pages": adapter.num_pages,
        "sample_reads": adapter.num_reads,
        "shards": len(weights),
        "smallest": min(weights),
        "largest": max(weights),
        "output_bytes": job.estimated_output_bytes,
        "record_bytes": job.estimated_bytes / job.estimated_records,
        "notes": job.header["notes"],
    }


def peak_bytes() -> int:
    """Returns the most memory that this process has had resident.

    It is what `ru_maxrss` says, but for one thing: that counts the parent's as well, as it was at the fork.
    """
    with open("/proc/self/status", encoding="ascii") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


def plan_apart(corpus: Corpus, folder: Path, shards: str = "auto") -> dict[str, Any]:
    """Plans in a process of its own, so that its memory is the planner's alone; see `plan`.

    Raises:
        subprocess.CalledProcessError: The planner failed.
    """
    flags = {"files": corpus.files, "bytes": corpus.num_bytes, "seed": corpus.seed, "gzip": corpus.gzip}
    command = [sys.executable, __file__, "--folder", str(folder), "--shards", shards]
    command += [f"--{name}={value}" for name, value in flags.items()]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    return dict(json.loads(done.stdout))


def main() -> None:
    """Plans what the flags say."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    for name in ("files", "bytes"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--gzip", type=int, default=0)
    parser.add_argument("--shards", default="auto")
    parser.add_argument("--folder", type=Path, required=True)
    args = parser.parse_args()
    json.dump(plan(Corpus(args.files, args.bytes, args.seed, args.gzip), args.folder, args.shards), sys.stdout)


if __name__ == "__main__":
    main()
