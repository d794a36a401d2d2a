"""One corpus whose records say what the step is to do with them, and what must come of each."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from pathlib import Path

import corpora
import jobs
from torture.make_files import read_payloads
from torture.oracle import require
from torture.tally import Case, Tally

TIMEOUT_SECS = 240


@dataclasses.dataclass(frozen=True)
class Fate:
    """What becomes of a record.

    Attributes:
        outputs: What is added to the record in each output that is written.
        drops: Reasons of outputs that are left out.
        reason: Reason of its dead letter, None when there is none.
    """

    outputs: tuple[bytes, ...] = ()
    drops: tuple[str, ...] = ()
    reason: str | None = None


FATES = {
    "keep": Fate((b"",)),
    "drop": Fate(drops=("unwanted",)),
    "none": Fate(drops=("returned_none",)),
    "items": Fate((b" first", b" last"), ("unwanted_item",)),
    "nothing": Fate(drops=("no_outputs",)),
    "fail": Fate(reason="exception"),
    "bad": Fate(reason="my_reason"),
    "unprintable": Fate(reason="exception"),
    "failing_items": Fate(reason="exception"),
}
CRASHES = {name: Fate(reason="process_died") for name in ("segfault", "abort", "exit", "kill")}
STALLS = {"hang": Fate(reason="timeout"), "memory": Fate(reason="memory")}
_ALL = {**FATES, **CRASHES, **STALLS}
_ISOLATION = ",timeout_secs=3,max_memory_bytes=2GiB"


def run_case(case: Case, folder: Path) -> Tally:
    """Runs one case in an empty folder.

    Half of the jobs isolate their step. The others do not, so that a crash takes the worker with it, and the job must
    find the record by itself.

    Raises:
        DiscrepancyError: A law does not hold.
    """
    rng = random.Random(f"{case.seed}/{case}")
    is_isolated = case.number % 2 == 0
    actions = _choose_actions(rng, is_isolated)
    records = [b"%06d %s %s" % (at, action.encode(), b"x" * rng.randint(0, 50)) for at, action in enumerate(actions)]
    half = rng.randrange(len(records))
    for number, part in enumerate((records[:half], records[half:])):
        jobs.write_tfrecord(folder / f"in/f{number}.tfrecord", part)
    step = "torture.acts:act" + (_ISOLATION if is_isolated else "")
    workers = rng.choice(["0", "2"] if is_isolated else ["auto", "2"])
    arguments = ["--shards", rng.choice(["1", "2", "3"]), "--workers", workers, "--step", step]
    command = ["convert", "--input", "in/*", "--output", "out", *arguments, "--set", "dead_letters.max_fraction=1"]
    done = jobs.spawn(command, folder, env=with_tests(), timeout_secs=TIMEOUT_SECS)
    require(done.returncode == 0, f"the job ended with {done.returncode}: {done.stderr[-2000:]}")
    check_outcome(folder, records, actions, half)
    tally = Tally(misfortunes=Counter(action for action in actions if action != "keep"))
    tally.counts["jobs with misbehaving steps"] += 1
    return tally


def with_tests() -> dict[str, str]:
    """Returns the environment in which a job finds the steps of this package."""
    root = Path(__file__).parents[2]
    return {"PYTHONPATH": f"{root}:{root / 'tests'}"}


def _choose_actions(rng: random.Random, is_isolated: bool) -> list[str]:
    actions = ["keep"] * rng.randint(20, 300)
    actions += rng.choices(list(FATES), k=rng.randint(5, 40))
    crashes = rng.randint(3, 10) if is_isolated else rng.randint(1, 3)  # Each of these takes a worker with it.
    actions += rng.choices(list(CRASHES), k=crashes)
    if is_isolated:
        actions += rng.choices(list(STALLS), k=rng.randint(1, 2))
    rng.shuffle(actions)
    return actions


def check_outcome(folder: Path, records: list[bytes], actions: list[str], half: int) -> None:
    """Every record has its fate, in order, and the books say so."""
    fates = [_ALL[action] for action in actions]
    out = folder / "out"
    outputs = [record + end for record, fate in zip(records, fates, strict=True) for end in fate.outputs]
    require(jobs.records(out) == outputs, "the records written are not those that the steps returned")
    starts = [*corpora.frame_starts(records[:half])[:-1], *corpora.frame_starts(records[half:])[:-1]]
    died = zip(starts, records, fates, strict=True)
    expected = [(at, len(record), fate.reason, record) for at, record, fate in died if fate.reason]
    letters = jobs.dead_letters(out)
    keys = ("position", "length", "reason")
    found = [
        (*(letter[key] for key in keys), payload)
        for letter, payload in zip(letters, read_payloads(out, letters), strict=True)
    ]
    require(found == expected, f"dead letters {found} instead of {expected}")
    require({letter["step"] for letter in letters} <= {"torture.acts:act"}, f"steps of {letters}")
    check_books(out, fates)
    done = jobs.spawn(["verify", "out"], folder, timeout_secs=TIMEOUT_SECS)
    published = jobs.report(out)["status"] == "done"
    require(done.returncode == (0 if published else 3), f"verify: {done.stdout}")
    left = [name for name in jobs.tree(out) if "attempts" in name or "lock" in name or "tries" in name]
    require(left == [], f"left behind: {left}")


def check_books(out: Path, fates: list[Fate]) -> None:
    """The report counts what became of the records."""
    report = jobs.report(out)
    drops = Counter(reason for fate in fates for reason in fate.drops)
    expected = {
        "records_read": len(fates),
        "records_written": sum(len(fate.outputs) for fate in fates),
        "records_added": sum(max(0, len(fate.outputs) + len(fate.drops) - 1) for fate in fates),
        "records_dropped": drops.total(),
        "dropped_by_reason": dict(drops),
        "dead_by_reason": dict(Counter(fate.reason for fate in fates if fate.reason)),
    }
    for key, value in expected.items():
        require(report[key] == value, f"report.json says {key} {report[key]}, the oracle {value}")
