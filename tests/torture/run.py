"""Tortures the converter and holds what comes out against oracles that know what was done; prints a table.

Four kinds of cases run side by side: damaged corpora, jobs whose steps misbehave, jobs whose processes are killed, and
jobs that are suspended until another takes their output over.
A seed, a kind and a number make a case again (of kills and suspensions the choices, not the timing). Exit status 1
means that a law does not hold, that a case did not come to an end, or that there was not time for as many cases as were
asked for.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import itertools
import multiprocessing
import os
import shutil
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

if __name__ in ("__main__", "__mp_main__"):
    sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

import psutil

from torture import damaged, kills, misfortunes, owners, quick_beam
from torture.oracle import DiscrepancyError
from torture.tally import Case, Tally

HARD_LIMIT_SECS = 590
"""When whatever still runs is ended, so that a hang is found as well."""

_TELL_SECS = 30
_LOOK_SECS = 0.2
_HANG_SECS = 240
_KILLS_A_JOB = 5
_FLAGS = {"damage": "corpora", "steps": "steps", "kill": "kills", "owners": "owners"}
_RUNNERS: dict[str, Callable[[Case, Path], Tally]] = {
    "damage": damaged.run_case,
    "steps": misfortunes.run_case,
    "kill": kills.run_case,
    "owners": owners.run_case,
}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Returns the flags."""
    parser = argparse.ArgumentParser(
        prog="make torture",
        description=(__doc__ or "").split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--seed", type=int, default=1, help="makes corpora, damage and choices")
    parser.add_argument("--seconds", type=float, default=500, help="no case is started after that")
    parser.add_argument("--corpora", type=int, default=210, help="damaged corpora to convert")
    parser.add_argument("--kills", type=int, default=52, help="processes to kill")
    parser.add_argument("--steps", type=int, default=10, help="jobs with misbehaving steps to run")
    parser.add_argument("--owners", type=int, default=8, help="jobs to suspend until another has taken over")
    parser.add_argument("--only", metavar="KIND:NUMBER", help="one case: damage:17, steps:3, kill:5, owners:2")
    parser.add_argument("--folder", type=Path, help="where to work; default: a temporary folder")
    return parser.parse_args(argv)


def run_apart(case: Case, folder: Path) -> Tally | str:
    """Runs a case in a process that runs many; what it prints goes to a file.

    Returns:
        What was done, or the text of what went wrong.
    """
    with (folder / "log").open("wb") as log:
        for number in (1, 2):
            os.dup2(log.fileno(), number)
    return run_caught(case, folder)


def run_caught(case: Case, folder: Path) -> Tally | str:
    """Runs a case; returns what was done, or the text of what went wrong."""
    try:
        return _RUNNERS[case.kind](case, folder)
    except DiscrepancyError as error:
        return str(error)
    except Exception:
        return traceback.format_exc()


class Campaign:
    """Runs cases in several lanes until enough was done, or something went wrong.

    Args:
        args: The flags.
        folder: Where each case has a folder of its own, kept if something went wrong.

    Attributes:
        tally: What was done.
        discrepancies: Text by case.
    """

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self._args = args
        self._folder = folder
        self._started = time.monotonic()
        self._numbers = {kind: itertools.count() for kind in _FLAGS}
        self._lanes = {"damage": max(1, min(3, args.corpora // 20)), "steps": 1, "kill": 4, "owners": 1}
        self._running: dict[Case, float] = {}
        self._pool = concurrent.futures.ProcessPoolExecutor(
            self._lanes["damage"], multiprocessing.get_context("spawn"), quick_beam.remember
        )
        self._lock = threading.Lock()
        self.tally = Tally()
        self.discrepancies: dict[Case, str] = {}

    @property
    def seconds(self) -> float:
        """How long this takes so far."""
        return time.monotonic() - self._started

    def run(self) -> None:
        """Runs all lanes to their ends, but not for longer than the hard limit."""
        lanes = [
            threading.Thread(target=self._run_lane, args=(kind,), daemon=True)
            for kind, lanes in self._lanes.items()
            for _ in range(lanes)
        ]
        for lane in lanes:
            lane.start()
        next_words = _TELL_SECS
        while any(lane.is_alive() for lane in lanes) and self.seconds < HARD_LIMIT_SECS:
            time.sleep(0.1)
            if self.seconds > next_words:
                next_words += _TELL_SECS
                self._tell()
        self._end()

    def _run_lane(self, kind: str) -> None:
        while self.seconds < self._args.seconds and not self.discrepancies:
            with self._lock:
                if self._is_enough(kind):
                    return
                case = None
                if not self._will_be_enough(kind):
                    case = Case(self._args.seed, kind, next(self._numbers[kind]))
                    self._running[case] = self.seconds
            if case is None:
                time.sleep(_LOOK_SECS)
                continue
            outcome = self._run_case(case)
            with self._lock:
                del self._running[case]
                if isinstance(outcome, str):
                    self.discrepancies[case] = outcome
                else:
                    self.tally.add(outcome)

    def _is_enough(self, kind: str) -> bool:
        return _done(self.tally, kind) >= getattr(self._args, _FLAGS[kind])

    def _will_be_enough(self, kind: str) -> bool:
        """Whether the cases that run are likely to be the last ones."""
        running = sum(case.kind == kind for case in self._running)
        each = _KILLS_A_JOB if kind == "kill" else 1
        return running > 0 and _done(self.tally, kind) + each * running >= getattr(self._args, _FLAGS[kind])

    def _run_case(self, case: Case) -> Tally | str:
        folder = self._folder / f"{case.kind}-{case.number}"
        folder.mkdir(parents=True)
        if case.kind != "damage":
            outcome = run_caught(case, folder)
        else:
            try:
                outcome = self._pool.submit(run_apart, case, folder).result()
            except concurrent.futures.BrokenExecutor as error:
                outcome = f"the process that ran the case died: {error}"
        if not isinstance(outcome, str):
            shutil.rmtree(folder)
        return outcome

    def _tell(self) -> None:
        counts = self.tally.counts
        done = f"{counts['corpora']} corpora, {self.tally.kills.total()} kills, {self.tally.misfortunes.total()} steps"
        print(f"  {self.seconds:4.0f} s: {done}", flush=True)

    def _end(self) -> None:
        """Ends what still runs, which should be nothing."""
        with self._lock:
            for case, begun in self._running.items():
                if self.seconds - begun > _HANG_SECS:
                    self.discrepancies[case] = "it did not come to an end"
        self._pool.shutdown(wait=not self._running)
        for process in psutil.Process().children(recursive=True) if self._running else []:
            with contextlib.suppress(psutil.Error):
                process.kill()


def shortfalls(tally: Tally, args: argparse.Namespace) -> list[str]:
    """Says what there was no time for."""
    wanted = {name: (_done(tally, kind), getattr(args, name)) for kind, name in _FLAGS.items()}
    return [f"only {done} of {asked} {name}" for name, (done, asked) in wanted.items() if done < asked]


def _done(tally: Tally, kind: str) -> int:
    """Returns how much of what was asked for is done."""
    if kind == "kill":
        return tally.kills.total()
    if kind == "owners":
        return tally.owners.total()
    return tally.counts["corpora" if kind == "damage" else "jobs with misbehaving steps"]


def run_one(args: argparse.Namespace, folder: Path) -> int:
    """Runs one case in this process."""
    kind, _, number = args.only.partition(":")
    case = Case(args.seed, kind, int(number))
    (folder / f"{kind}-{number}").mkdir(parents=True)
    outcome = run_caught(case, folder / f"{kind}-{number}")
    text = outcome if isinstance(outcome, str) else "\n".join(outcome.lines())
    print(f"{case}, seed {case.seed}, in {folder}:\n{text}")
    return int(isinstance(outcome, str))


def run_many(args: argparse.Namespace, folder: Path) -> int:
    """Runs all cases, prints what was done, and returns the exit status."""
    campaign = Campaign(args, folder)
    print(f"torture: seed {args.seed}, in {folder}", flush=True)
    campaign.run()
    seconds = campaign.seconds
    print("\n".join(campaign.tally.lines()))
    print(f"  discrepancies: {len(campaign.discrepancies)}; {seconds:.0f} s; seed {args.seed}")
    for case, text in campaign.discrepancies.items():
        print(f"\n{case}, kept in {folder}/{case.kind}-{case.number}; again: {case.command}\n{text}")
    missing = [] if campaign.discrepancies else shortfalls(campaign.tally, args)
    for text in missing:
        print(f"there was no time for all: {text} in {seconds:.0f} s")
    if not campaign.discrepancies:
        shutil.rmtree(folder)
    return int(bool(campaign.discrepancies or missing))


def main(argv: list[str] | None = None) -> int:
    """Runs the torture and returns the exit status."""
    args = parse_args(argv)
    folder = args.folder or Path(tempfile.mkdtemp(prefix="gristmill-torture-"))
    return run_one(args, folder) if args.only else run_many(args, folder)


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # A case that hangs must not keep the rest.
