"""Phases of one process that go through all shards: on gs:// their requests overlap, and there are few of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import jobs
from gcs_emulator import Emulator
from gcs_files import upload
from pipelines import verify as verify_command
from pipelines.output import _delete_stray_attempts, is_published
from pipelines.progress import JobWatch
from transforms.elements import JobSpec
from transforms.finish import delete_all
from transforms.gcs_store import GcsStore
from transforms.ledger import ATTEMPTS
from transforms.publish import _GiveNamesFn, number_parts
from transforms.report import committed_shards, load_spec
from transforms.store import Store
from transforms.whole import build_whole

NUM_SHARDS = 24
OVERLAP = 8
"""How many requests must be open at a time. There may be more; a busy machine begins them one by one."""


@pytest.fixture
def job(emulator: Emulator, tmp_path: Path) -> tuple[Store, JobSpec]:
    """A job of many small shards, each with a dead letter, that is done."""
    for file in range(NUM_SHARDS):
        good = jobs.write_tfrecord(tmp_path / f"in/f{file:02d}", [jobs.payload(file, i) for i in range(20)])
        good.write_bytes(good.read_bytes()[:-1])
    raw = emulator.new_bucket() + "/raw"
    upload(tmp_path / "in", raw)
    out = raw.removesuffix("raw") + "out"
    options = ["--shards", "match", "--set", "dead_letters.max_fraction=1"]
    assert jobs.convert("--input", f"{raw}/*", "--output", out, *options) == 0
    store = GcsStore(out)
    spec, _ = load_spec(store)
    assert spec.num_shards == NUM_SHARDS
    return store, spec


def look_whether_done(store: Store, spec: JobSpec) -> None:
    assert is_published(store, spec)


def rebuild_report(store: Store, _: JobSpec) -> None:
    assert build_whole(store)["records_dead"] == NUM_SHARDS


def verify(store: Store, _: JobSpec) -> None:
    assert verify_command.run(store.root) == 0


def watch(store: Store, spec: JobSpec) -> None:
    look = JobWatch(store, spec)
    look.look()
    assert look.num_committed == NUM_SHARDS


def delete(store: Store, spec: JobSpec) -> None:
    names = [name for name, _ in store.list("_dead_letters/")]
    assert len(names) == NUM_SHARDS
    delete_all(store, names)
    assert list(store.list("_dead_letters/")) == []


def tidy_up(store: Store, spec: JobSpec) -> None:
    for shard in range(NUM_SHARDS):
        GcsStore(store.root).put(f"{ATTEMPTS}{spec.shard_key(shard)}-dead/part", b"x")
    _delete_stray_attempts(store, spec)
    assert list(store.list(ATTEMPTS)) == []


def give_names(store: Store, spec: JobSpec) -> None:
    infos = [info for info, _ in committed_shards(store, spec)]
    worker = _GiveNamesFn(spec)
    worker.setup()
    assert list(worker.process((0, list(number_parts(infos, spec))))) == [NUM_SHARDS]


PHASES: dict[Callable[[Store, JobSpec], None], int] = {
    look_whether_done: 2,
    rebuild_report: 2,
    watch: 1,
    tidy_up: 8,  # Put by the test, ledger, its files and their final names, deleted.
    give_names: 15,
    verify: 16,
    delete: 1,
}
"""Requests a shard."""


def test_requests_of_many_shards_overlap_and_are_few(emulator: Emulator, job: tuple[Store, JobSpec]) -> None:
    found = {}
    for phase, requests in PHASES.items():
        emulator.be_well()
        emulator.delay_secs = 0.1
        phase(*job)
        few = len(emulator.seen) <= requests * NUM_SHARDS + 20  # Plans, inputs, listings and reports are read whole.
        found[phase.__name__] = (emulator.most_open >= OVERLAP, few or len(emulator.seen))
    assert found == dict.fromkeys(found, (True, True))
