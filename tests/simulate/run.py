"""Plans ten million files and 100 TB with the real planner, and works out what converting them would take and cost.

No file exists and no service is asked: the listing is answered in the process, a fleet of workers is simulated, and
requests are counted as the code makes them. What no plan tells (speeds, waits, prices) is a flag.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

import apache_beam as beam

from simulate import report
from simulate.bottlenecks import find_bottlenecks, measure_gathering
from simulate.corpus import Corpus
from simulate.events import Outcome, Trouble, make_fleet, simulate
from simulate.flags import add_flags, from_flags
from simulate.operations import count_operations, describe_job, phase_costs
from simulate.planner import OUTPUT, plan_apart
from simulate.rates import Rates
from simulate.work import Shard, read_shards, shard_secs
from transforms.convert import ConvertCorpus
from transforms.elements import JobSpec
from transforms.plan import parse_size
from transforms.plan_file import PLAN_NAME, read_header
from transforms.read import list_shards
from transforms.report import spec_from_header

_SMALLER = (100, 10)  # The same corpus with fewer files, to see what grows with them.


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Returns the flags."""
    parser = argparse.ArgumentParser(
        prog="make simulate",
        description=(__doc__ or "").split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--files", type=int, default=10_000_000, help="files of the corpus")
    add("--bytes", type=parse_size, default="100TB", help="bytes of all of them")
    add("--workers", type=int, default=1_000, help="workers, of one core each")
    add("--seed", type=int, default=1, help="decides sizes and fleet")
    add("--gzip", type=int, default=0, help="how many of 100 files are compressed, so that nothing splits them")
    add("--shards", default="auto", help="as for gristmill convert")
    add("--work", type=Path, help="where to plan; default: a temporary folder, which takes 1.2 GB for 10 million files")
    add_flags(parser, Trouble)
    add_flags(parser, Rates)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Plans, simulates and prints; returns the exit status."""
    args = parse_args(argv)
    corpus = Corpus(args.files, args.bytes, args.seed, args.gzip)
    with tempfile.TemporaryDirectory(prefix="gristmill-simulate-", dir=args.work) as folder:
        all_facts = plan_all(corpus, Path(folder), args)
        show(args, corpus, all_facts, Path(folder) / str(corpus.files))
    return 0


def plan_all(corpus: Corpus, folder: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Plans smaller corpora and the whole one, each in a process of its own; the whole one's plan stays."""
    found = []
    for factor in (*_SMALLER, 1):
        smaller = dataclasses.replace(corpus, files=corpus.files // factor, num_bytes=corpus.num_bytes // factor)
        print(f"planning {smaller.files:,} files", file=sys.stderr, flush=True)
        place = folder / str(smaller.files)
        facts = plan_apart(smaller, place, args.shards)
        facts["graph_bytes"] = graph_bytes(read_spec(place), args.workers)
        found.append(facts)
    return found


def read_spec(folder: Path, root: str = OUTPUT) -> JobSpec:
    """Returns the job of a plan."""
    with (folder / PLAN_NAME).open("rb") as plan:
        return spec_from_header(read_header(plan), root)


def graph_bytes(spec: JobSpec, workers: int) -> int:
    """Returns the size of the pipeline's graph, as a runner gets it."""
    pipeline = beam.Pipeline()
    _ = pipeline | "ConvertCorpus" >> ConvertCorpus(spec, workers)
    return len(pipeline.to_runner_api().SerializeToString())


def run_fleets(shards: list[Shard], orders: dict[int, list[int]], args: argparse.Namespace) -> dict[str, Outcome]:
    """Simulates the plan on fleets that suffer more and more; orders by the workers that they are for."""
    rates = from_flags(args, Rates)
    secs = shard_secs(shards, rates)
    within = sum(secs) / args.workers
    all_of_it = from_flags(args, Trouble)
    change = dataclasses.replace
    troubles = {
        "all alike": change(all_of_it, spread=0, stragglers=0, lost=0),
        "speeds differ": change(all_of_it, stragglers=0, lost=0),
        "and stragglers": change(all_of_it, lost=0),
        "and lost workers": all_of_it,
    }
    outcomes = {}
    for name, trouble in troubles.items():
        fleet = make_fleet(args.workers, trouble, within, args.seed)
        outcomes[name] = simulate(secs, orders[1], fleet, rates.detect_secs, dealt=False)
    fleet = make_fleet(args.workers, all_of_it, within, args.seed)
    outcomes["the same, dealt at the start"] = simulate(secs, orders[0], fleet, rates.detect_secs, dealt=True)
    return outcomes


def show(args: argparse.Namespace, corpus: Corpus, all_facts: list[dict[str, Any]], folder: Path) -> None:
    """Prints everything."""
    rates, facts, sizes = from_flags(args, Rates), all_facts[-1], corpus.sizes()
    spec = read_spec(folder)
    shards = list(read_shards(folder, corpus.files))
    orders, hand_out_secs = hand_out(dataclasses.replace(spec, root=str(folder)), args.workers)
    outcomes = run_fleets(shards, orders, args)
    run_secs = outcomes["and lost workers"].makespan
    run = {"run_secs": run_secs, "workers": args.workers, "list_secs": rates.list_secs}
    job = describe_job(folder, shards, sizes, facts, **run)
    costs = phase_costs(count_operations(job), rates)
    gathering = measure_gathering(shards, spec, sizes, facts["record_bytes"])
    found = find_bottlenecks(job, facts, gathering, hand_out_secs, rates)
    terabytes = facts["bytes"] / 1e12
    print("CORPUS", report.describe_corpus(corpus, sizes), sep="\n")
    print("\nPLANNING", report.planning(all_facts), report.shards_line(facts, shards), *facts["notes"], sep="\n")
    print(f"\nBALANCE over {args.workers:,} workers", report.balance(outcomes), sep="\n")
    print("\nOPERATIONS", report.operations(costs, rates), sep="\n")
    print("\nALONE", report.bottlenecks(found), report.gathering_lines(gathering, len(shards)), sep="\n")
    per_tb = (corpus.files / terabytes, len(shards) / terabytes, costs["all"]["$"] / terabytes)
    print("\nCOST at list prices, which are flags", report.cost_per_tb(rates, *per_tb), sep="\n")
    print(fleet_cost(args.workers, run_secs, rates, terabytes))


def hand_out(spec: JobSpec, workers: int) -> tuple[dict[int, list[int]], float]:
    """Returns the orders of shards for runners that balance (1) and that deal (0), and the CPU of the latter."""
    orders = {1: [shard for shard, _ in list_shards(spec, 1)]}
    started = time.process_time()
    orders[0] = [shard for shard, _ in list_shards(spec, workers)]
    return orders, time.process_time() - started


def fleet_cost(workers: int, run_secs: float, rates: Rates, terabytes: float) -> str:
    """Returns what the simulated fleet costs, idle workers included."""
    cost = workers * run_secs / 3600 * rates.worker_hour
    return (
        f"The fleet: {workers:,} workers x {report.span(run_secs)} x ${rates.worker_hour:.4f} = ${cost:,.0f}, "
        f"${cost / terabytes:.2f} a TB"
    )


if __name__ == "__main__":
    sys.exit(main())
