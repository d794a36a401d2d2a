"""A run that was suspended, lost its lock and goes on: what the next owner made stands, and it ends with 1.

A whole run is tried: it is suspended before a call to the store, another run takes the lock over and comes to its end,
and then it goes on with that very call.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

import gcs_files
import jobs
from fakes import Killed, WorstStore, files_below
from gcs_emulator import Emulator, before
from pipelines import local_runner
from transforms import gcs
from transforms import store as store_module
from transforms.job_lock import LOCK_NAME
from transforms.store import LocalStore


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three inputs, two of them damaged, and a runner that makes its calls one after the other."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(local_runner, "run_pipeline", jobs.run_plainly)
    for file in range(3):
        path = tmp_path / f"in/f{file}.tfrecord"
        jobs.write_tfrecord(path, [jobs.payload(file, number) for number in range(4)])
        if file:
            data = bytearray(path.read_bytes())
            data[14] ^= 1
            path.write_bytes(data)
    return tmp_path


def convert(pattern: str, shards: int, *flags: str) -> Callable[[str], int]:
    budget = ["--set", "dead_letters.max_fraction=1"]
    return lambda out: jobs.convert(
        "--input", pattern, "--output", out, "--shards", str(shards), "--name", "c", *budget, *flags
    )


def replay(out: str) -> int:
    return jobs.replay(out, "--set", "dead_letters.max_fraction=1")


def nothing(_out: str) -> int:
    return 0


@dataclasses.dataclass(frozen=True)
class Two:
    """Two commands on one output.

    Attributes:
        before: What was done there before.
        first: The command that is suspended.
        second: The one that takes over meanwhile.
    """

    before: Callable[[str], int]
    first: Callable[[str], int]
    second: Callable[[str], int]


SET = convert("in/f[01]*", 3)
SMALLER = convert("in/f0*", 2, "--overwrite")
CASES = {
    "another_set_replaces_it": Two(nothing, SET, SMALLER),
    "the_same_job_goes_on": Two(nothing, SET, SET),
    "both_replace_an_older_set": Two(convert("in/*", 4), convert("in/f[01]*", 3, "--overwrite"), SMALLER),
    "an_append_is_gone_on_with": Two(SET, convert("in/*", 3, "--append"), convert("in/*", 3, "--append")),
    "the_set_is_replaced_during_an_append": Two(SET, convert("in/*", 3, "--append"), SMALLER),
    "a_replay_is_gone_on_with": Two(SET, replay, replay),
    "the_set_is_replaced_during_a_replay": Two(SET, replay, SMALLER),
}


def lasting(store: WorstStore) -> dict[str, Any]:
    """Everything that stands, without what differs from run to run: names of attempts and times."""
    return {name: _lasting(name, data) for name, data in store.tree().items()}


def _lasting(name: str, data: bytes) -> object:
    if name.endswith((".html", "job.log", "config.json")):
        return "of that run"
    if "/published/" in name:
        return sorted(json.loads(data).values())
    if name.endswith(".jsonl") and name.startswith("_dead_letters"):
        return [{**json.loads(line), "traceback": ""} for line in data.splitlines()]
    if name.endswith("plan.jsonl"):
        return json.loads(data.split(b"\n")[0])["plan_id"]
    if "/shards/" in name:
        fields = json.loads(data)
        return fields["plan_id"], fields["books"]
    if name.endswith("report.json"):
        fields = json.loads(data)
        return {key: value for key, value in fields.items() if key not in ("seconds", "config", "notes")}
    return data


def make(*commands: Callable[[str], int]) -> WorstStore:
    """Returns the output of commands that nobody disturbs."""
    store = WorstStore()
    for command in commands:
        assert command(store.root) == 0
    return store


class Suspended:
    """A first command that loses its lock while it is suspended before a call.

    Args:
        two: The commands.
        before: What stands there at the beginning.
        number: The call.

    Attributes:
        store: The output.
        status: Of the first command.
        taken: Whether the first command came to that call at all, and the second command ran.
        held: Whether the first command had the lock when it was suspended.
        left: Calls that it made after that.
    """

    def __init__(self, two: Two, before: WorstStore, number: int) -> None:
        self._two = two
        self.store = before.copy_of_tree()
        self.taken = self.held = False
        self._resumed_at = 0
        self.store.suspend_at(number, self._take_over)
        self.status = two.first(self.store.root)
        self.left = len(self.store.calls) - self._resumed_at

    def _take_over(self) -> None:
        self.taken, self.held = True, self.store.forget(LOCK_NAME)
        assert self._two.second(self.store.root) == 0
        self._resumed_at = len(self.store.calls)


def killed(two: Two, before: WorstStore, number: int) -> dict[str, Any]:
    """What the second command makes of the output when the first was killed before a call."""
    store = before.copy_of_tree()
    store.stop_at(number)
    with contextlib.suppress(Killed):
        two.first(store.root)
    store.restart()
    store.forget(LOCK_NAME)
    assert two.second(store.root) == 0
    return lasting(store)


def attack(name: str, numbers: Iterable[int], capsys: pytest.CaptureFixture[str]) -> int:
    """Suspends the first command of a case before calls, checks each end, and returns how often it had the lock."""
    two = CASES[name]
    before = make(two.before)
    undisturbed = lasting(make(two.before, two.second))
    count = 0
    for number in numbers:
        found = Suspended(two, before, number)
        said = capsys.readouterr().err
        if not found.taken:
            break
        if found.held and found.status == 0:
            # All was done; it was only to say so, and to release the lock.
            assert found.left <= 6
        elif found.held:
            count += 1
            where = f"suspended before call {number} of {name}"
            assert (found.status, "lost its lock" in said) == (1, True), where
            stands = lasting(found.store)
            assert stands == undisturbed or stands == killed(two, before, number), where
    return count


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("name", ["another_set_replaces_it", "the_same_job_goes_on"])
def test_what_the_next_owner_made_stands_wherever_the_first_was_suspended(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert attack(name, range(5, 1000, 11), capsys) >= 10


@pytest.mark.slow
@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("name", CASES)
def test_what_the_next_owner_made_stands_wherever_a_command_of_any_kind_was_suspended(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert attack(name, range(1 + len(name) % 17, 1000, 17), capsys) >= 5


class PausingStore(LocalStore):
    """A folder before whose nth change something else happens, as if the process were suspended just there."""

    left: ClassVar[list[int]] = []
    meanwhile: ClassVar[list[Callable[[], object]]] = []

    @contextlib.contextmanager
    def _guard(self) -> Iterator[None]:
        if self._check is not None and self.left:
            self.left[0] -= 1
            if not self.left[0]:
                self.left.clear()
                self.meanwhile[0]()
        with super()._guard():
            yield

    def guarded(self, check: Callable[[], object]) -> LocalStore:
        return PausingStore(self.root, check)


def files(out: Path) -> dict[str, Any]:
    return {name: _lasting(name, data) for name, data in files_below(out).items()}


@pytest.mark.parametrize("number", range(1, 42, 4))
def test_on_a_local_folder_no_change_comes_after_the_lock_is_lost(
    place: Path, number: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert SMALLER("expected") == 0
    monkeypatch.setattr(store_module, "LocalStore", PausingStore)
    out = place / "out"

    def take_over() -> None:
        (out / LOCK_NAME).unlink()
        assert SMALLER("out") == 0

    PausingStore.left[:], PausingStore.meanwhile[:] = [number], [take_over]
    status = SET("out")
    if PausingStore.left:
        PausingStore.left.clear()
        assert (status, number > 30) == (0, True)  # It makes fewer changes.
        return
    assert (status, "lost its lock" in capsys.readouterr().err) == (1, True)
    assert files(out) == files(place / "expected")
    assert jobs.verify(out) == 0


def test_in_a_bucket_what_the_next_owner_made_stands(
    place: Path, emulator: Emulator, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first run is suspended when a request of its is on its way: just when it counts."""
    url = emulator.new_bucket()
    assert SMALLER(f"{url}/expected") == 0
    expected = gcs_files.download(f"{url}/expected", place / "expected")
    moments = [
        r"POST .*plan\.jsonl",
        r"POST .*/shards/00001\.json",
        r"rewriteTo.*array_record-00001-of-00003",
        r"POST .*published/00002\.json",
        r"POST .*manifest\.json",
        r"DELETE .*attempts",
    ]
    for number, moment in enumerate(moments):
        out = f"{url}/out-{number}"

        def take_over(out: str = out) -> None:
            gcs.bucket(url.removeprefix("gs://")).blob(f"{out.rpartition('/')[2]}/{LOCK_NAME}").delete()
            assert SMALLER(out) == 0

        emulator.fail(moment, before(take_over))
        assert (SET(out), "lost its lock" in capsys.readouterr().err) == (1, True), moment
        assert emulator.left() == 0
        assert files(gcs_files.download(out, place / f"out-{number}")) == files(expected), moment
        assert jobs.verify(out) == 0
