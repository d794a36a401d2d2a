"""The lock: one writer an output directory, and nobody waits for the dead."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fakes import WorstStore
from transforms import folder_lock
from transforms.job_lock import (
    LOCK_NAME,
    JobLock,
    LockedError,
    LostLockError,
    describe,
    is_stale,
    keep_lock,
    read_lock,
    release_detached,
    where_processes_are,
)
from transforms.store import LocalStore, OutputError, Store


@pytest.fixture(params=["local", "worst"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return LocalStore(str(tmp_path / "out")) if request.param == "local" else WorstStore()


def holder_of(store: Store) -> dict[str, Any]:
    """The entry of the lock, which must be held."""
    found = read_lock(store)
    assert found is not None
    return found[0]


def entry(**changes: Any) -> dict[str, Any]:
    """The entry of a process of another host that has just renewed it."""
    fields = {"host": "elsewhere", "pid": 1, "pid_started": "1", "token": "other", "heartbeat": time.time()}
    return {**fields, **changes}


def start_of(pid: int) -> str:
    """When a process began, as /proc says."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


def wait_until(holds: Callable[[], bool]) -> None:
    """Waits up to ten seconds."""
    deadline = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < deadline, "it never came to hold"
        time.sleep(0.005)


class TestHolding:
    def test_lock_says_who_holds_it_and_is_gone_afterwards(self, store: Store) -> None:
        with JobLock(store):
            holder = holder_of(store)
            assert (holder["host"], holder["pid"]) == (socket.gethostname(), os.getpid())
            assert holder["pid_started"] == start_of(os.getpid())
            assert abs(holder["heartbeat"] - time.time()) < 10
        assert list(store.list("")) == []

    def test_lock_is_released_when_the_job_fails(self, store: Store) -> None:
        with pytest.raises(KeyboardInterrupt), JobLock(store):
            raise KeyboardInterrupt
        assert list(store.list("")) == []

    def test_second_holder_is_refused_and_told_who_holds_it(self, store: Store) -> None:
        with JobLock(store):
            before = holder_of(store)
            with pytest.raises(LockedError, match=f"process {os.getpid()} on {socket.gethostname()}"), JobLock(store):
                pytest.fail("two hold the lock")
            assert holder_of(store) == before
        with JobLock(store):
            pass

    def test_one_of_sixteen_threads_gets_it(self, store: Store) -> None:
        entered: list[int] = []
        refused: list[int] = []
        barrier = threading.Barrier(16)
        done = threading.Event()

        def attempt(number: int) -> None:
            barrier.wait()
            try:
                with JobLock(store):
                    entered.append(number)
                    done.wait(20)
            except LockedError:
                refused.append(number)
                if len(refused) == 15:
                    done.set()

        threads = [threading.Thread(target=attempt, args=(number,)) for number in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (len(entered), len(refused)) == (1, 15)
        assert list(store.list("")) == []

    def test_no_thread_is_left_behind(self, store: Store) -> None:
        before = threading.active_count()
        for _ in range(3):
            with JobLock(store, heartbeat_secs=0.01):
                pass
        assert threading.active_count() == before


class TestHeartbeat:
    def test_lock_is_renewed(self, store: Store) -> None:
        with JobLock(store, heartbeat_secs=0.01):
            first = holder_of(store)
            wait_until(lambda: holder_of(store)["heartbeat"] > first["heartbeat"])
            assert {**holder_of(store), "heartbeat": 0} == {**first, "heartbeat": 0}

    @pytest.mark.parametrize("error", [OutputError("disk full"), OSError("stale handle")])
    def test_beat_that_fails_is_followed_by_the_next(self, error: Exception) -> None:
        store = WorstStore()
        with JobLock(store, heartbeat_secs=0.02):
            first = holder_of(store)
            for number in range(1, 6):
                store.fail_at(number, error)
            time.sleep(0.2)
            store.restart()
            wait_until(lambda: holder_of(store)["heartbeat"] > first["heartbeat"] + 0.1)

    def test_holder_that_was_taken_over_does_not_take_the_lock_back(self, store: Store) -> None:
        """It was suspended for so long that another host took it for dead, and now it wakes up."""
        with JobLock(store, heartbeat_secs=0.02):
            store.put(LOCK_NAME, json.dumps(entry()).encode())
            time.sleep(0.2)
            assert holder_of(store)["token"] == "other"
        assert holder_of(store)["token"] == "other"


class TestChangesAreBoundToWhatWasRead:
    """Between reading the lock and writing it the writer may be suspended, and another host takes it over."""

    @pytest.fixture
    def store(self) -> WorstStore:
        return WorstStore()

    def taken_over(self, store: WorstStore) -> None:
        store.forget(LOCK_NAME)
        assert store.put_if_absent(LOCK_NAME, json.dumps(entry()).encode())

    def test_heartbeat_that_comes_late_does_not_overwrite_the_next_holder(self, store: WorstStore) -> None:
        with JobLock(store, heartbeat_secs=0.02):
            wait_until(lambda: store.calls[-1].startswith("put_if_version"))
            store.suspend_before("put_if_version", lambda: self.taken_over(store))
            wait_until(lambda: holder_of(store)["token"] == "other")
            time.sleep(0.1)
            assert {**holder_of(store), "heartbeat": 0} == entry(heartbeat=0)
        assert holder_of(store)["token"] == "other"

    def test_worker_that_renews_late_does_not_overwrite_the_next_holder(self, store: WorstStore) -> None:
        store.put(LOCK_NAME, json.dumps(entry(token="ours", job=JOB, heartbeat=1)).encode())
        store.suspend_before("put_if_version", lambda: self.taken_over(store))
        with keep_lock(store, "ours", look_secs=0.01):
            wait_until(lambda: holder_of(store)["token"] == "other")
            time.sleep(0.1)
        assert {**holder_of(store), "heartbeat": 0} == entry(heartbeat=0)

    def test_lock_that_somebody_else_has_by_now_cannot_be_handed_over(self, store: WorstStore) -> None:
        with JobLock(store) as lock:
            store.suspend_before("put_if_version", lambda: self.taken_over(store))
            with pytest.raises(LostLockError, match="now process 1 on elsewhere"):
                lock.hand_over(JOB)
        assert holder_of(store)["token"] == "other"

    def test_lock_that_changes_hands_while_it_is_handed_over_by_a_worker_of_ours_is_handed_over(
        self, store: WorstStore
    ) -> None:
        with JobLock(store) as lock:
            renewed = {**holder_of(store), "heartbeat": 5}
            store.suspend_before("put_if_version", lambda: store.put(LOCK_NAME, json.dumps(renewed).encode()))
            lock.hand_over(JOB)
            assert (holder_of(store)["job"], holder_of(store)["token"]) == (JOB, lock.token)

    def test_holder_that_comes_back_while_it_is_taken_for_dead_keeps_the_lock(self, store: WorstStore) -> None:
        store.put(LOCK_NAME, json.dumps(entry(heartbeat=1)).encode())
        back = json.dumps(entry(heartbeat=time.time())).encode()
        lock = JobLock(store, heartbeat_secs=0.02)
        store.suspend_before("put_if_version", lambda: store.put(LOCK_NAME, back))
        with pytest.raises(LockedError, match="process 1 on elsewhere"), lock:
            pytest.fail("two hold the lock")
        assert holder_of(store)["token"] == "other"

    def test_release_leaves_the_next_holders_lock(self, store: WorstStore) -> None:
        with JobLock(store):
            store.suspend_before("delete", lambda: self.taken_over(store))
        assert holder_of(store)["token"] == "other"

    def test_holder_says_once_that_it_has_lost_its_lock(
        self, store: WorstStore, caplog: pytest.LogCaptureFixture
    ) -> None:
        with JobLock(store, heartbeat_secs=0.02) as lock:
            self.taken_over(store)
            wait_until(lambda: "lost its lock" in caplog.text)
            with pytest.raises(LostLockError, match=r"has lost its lock of worst://.* now process 1 on elsewhere"):
                lock.check()
            store.forget(LOCK_NAME)
            with pytest.raises(LostLockError, match="whoever took it has ended since"):
                lock.check()
        assert caplog.text.count("lost its lock") == 1


class TestTakeover:
    def take_over(self, store: Store, holder: dict[str, Any] | bytes) -> None:
        """Enters a directory that is locked by `holder`."""
        store.put(LOCK_NAME, holder if isinstance(holder, bytes) else json.dumps(holder).encode())
        with JobLock(store, heartbeat_secs=0.02):
            assert holder_of(store)["pid"] == os.getpid()
        assert list(store.list("")) == []

    def test_lock_of_a_process_that_was_killed(self, tmp_path: Path) -> None:
        store = LocalStore(str(tmp_path))
        program = (
            "import os, signal, sys; from transforms.store import LocalStore; from transforms.job_lock import JobLock\n"
            "JobLock(LocalStore(sys.argv[1])).__enter__(); os.kill(os.getpid(), signal.SIGKILL)"
        )
        subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False)
        assert holder_of(store)["host"] == socket.gethostname()
        with JobLock(store):
            assert holder_of(store)["pid"] == os.getpid()

    def test_lock_of_a_number_that_another_process_has_now(self, store: Store) -> None:
        self.take_over(store, entry(**where_processes_are(), pid=os.getppid(), pid_started="1"))

    @pytest.mark.parametrize("differs", ["host", "boot", "pid_namespace"])
    def test_number_of_a_process_counts_only_where_it_was_given(self, store: Store, differs: str) -> None:
        """Here no process has that number; where it was given one may well have."""
        elsewhere = {**where_processes_are(), differs: "another"}
        store.put(LOCK_NAME, json.dumps(entry(**elsewhere, pid=1 << 22)).encode())
        with pytest.raises(LockedError, match="process 4194304 on "), JobLock(store, heartbeat_secs=0.02):
            pytest.fail("two hold the lock")
        self.take_over(store, entry(**elsewhere, pid=os.getpid(), heartbeat=time.time() - 1000))

    def test_lock_of_an_older_version_counts_by_its_heartbeat(self, store: Store) -> None:
        """It says neither boot nor PID namespace, so that its number may be one of another container."""
        old = {
            "host": socket.gethostname(),
            "pid": 1 << 22,
            "pid_started": "1",
            "token": "other",
            "since": 1.0,
            "job": None,
        }
        store.put(LOCK_NAME, json.dumps({**old, "heartbeat": time.time()}).encode())
        with pytest.raises(LockedError, match="process 4194304 on "), JobLock(store, heartbeat_secs=0.02):
            pytest.fail("two hold the lock")
        self.take_over(store, {**old, "heartbeat": time.time() - 1000})

    def test_lock_of_a_clock_far_ahead_is_listened_to_and_then_taken(self, store: Store) -> None:
        self.take_over(store, entry(heartbeat=time.time() + 3600))

    def test_who_stands_still_in_the_middle_of_a_change_keeps_the_lock(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(folder_lock.folder_lock.__wrapped__, "__kwdefaults__", {"shared": False, "wait_secs": 0.05})
        store = LocalStore(str(tmp_path))
        store.put(LOCK_NAME, json.dumps(entry(heartbeat=1)).encode())

        def try_to_take() -> None:
            with pytest.raises(LockedError, match=r"process 1 on elsewhere .* stands still in the middle of a change"):
                JobLock(store, heartbeat_secs=0.02).__enter__()

        store.guarded(try_to_take).put("manifest.json", b"x")
        assert holder_of(store)["token"] == "other"

    def test_lock_of_another_host_whose_heartbeat_stopped(self, store: Store) -> None:
        self.take_over(store, entry(heartbeat=time.time() - 1000))

    def test_lock_that_beats_is_held_however_old_its_clock_says_it_is(self, store: Store) -> None:
        store.put(LOCK_NAME, json.dumps(entry(heartbeat=1)).encode())
        beats = threading.Timer(0.03, store.put, [LOCK_NAME, json.dumps(entry(heartbeat=2)).encode()])
        beats.start()
        with pytest.raises(LockedError, match="process 1 on elsewhere"), JobLock(store, heartbeat_secs=0.5):
            pass
        assert holder_of(store)["heartbeat"] == 2

    @pytest.mark.parametrize(
        "content", [b"", b"{", b"{}", b"null", b"[1]", b"\xff", b'{"heartbeat": "x"}', b'{"pid": "x"}']
    )
    def test_lock_that_nobody_can_read(self, store: Store, content: bytes) -> None:
        self.take_over(store, content)

    def test_two_that_take_over_at_once_have_one_winner(self, store: Store) -> None:
        for _ in range(20):
            store.put(LOCK_NAME, json.dumps(entry(heartbeat=0)).encode())
            inside: list[int] = []
            most: list[int] = []
            barrier = threading.Barrier(4)

            def attempt(inside: list[int] = inside, most: list[int] = most, barrier: Any = barrier) -> None:
                barrier.wait()
                try:
                    with JobLock(store, heartbeat_secs=0.02):
                        inside.append(1)
                        most.append(len(inside))
                        time.sleep(0.005)
                        inside.pop()
                except LockedError:
                    pass

            threads = [threading.Thread(target=attempt) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert most
            assert max(most) == 1


JOB: dict[str, Any] = {"runner": "DataflowRunner", "name": "gristmill-x", "project": "p", "region": "r"}


class TestHandingOver:
    """A job that runs elsewhere holds the lock on, whatever becomes of the process that started it."""

    def test_lock_stays_with_the_job_when_its_driver_is_gone(self, store: Store) -> None:
        with JobLock(store) as lock:
            lock.hand_over(JOB)
        assert (holder_of(store)["job"], holder_of(store)["token"]) == (JOB, lock.token)
        with pytest.raises(LockedError, match="the DataflowRunner job gristmill-x "), JobLock(store, 0.02):
            pass

    def test_lock_that_was_taken_back_goes_with_its_driver(self, store: Store) -> None:
        with JobLock(store) as lock:
            lock.hand_over(JOB)
            lock.hand_over(None)
        assert list(store.list("")) == []

    @pytest.mark.parametrize(
        ("answer", "age", "held"), [(True, 9999, True), (False, 0, False), (None, 800, True), (None, 1000, False)]
    )
    def test_the_service_is_asked_and_where_it_cannot_be_the_heartbeat_decides(
        self, store: Store, answer: bool | None, age: float, held: bool
    ) -> None:
        store.put(LOCK_NAME, json.dumps(entry(job=JOB, heartbeat=time.time() - age)).encode())
        asked: list[dict[str, Any]] = []

        def is_running(job: dict[str, Any]) -> bool | None:
            asked.append(job)
            return answer

        lock = JobLock(store, 0.02, is_running)
        if held:
            with pytest.raises(LockedError, match="gristmill-x"), lock:
                pass
        else:
            with lock:
                assert holder_of(store)["token"] == lock.token
        assert asked == [JOB]

    def test_a_driver_that_died_before_it_could_note_the_jobs_number_leaves_the_lock_to_the_job(
        self, store: Store
    ) -> None:
        store.put(LOCK_NAME, json.dumps(entry(host=socket.gethostname(), pid=2**30, job=JOB)).encode())
        with pytest.raises(LockedError), JobLock(store, 0.02):
            pass

    def test_workers_renew_the_lock(self, store: Store) -> None:
        store.put(LOCK_NAME, json.dumps(entry(job=JOB, heartbeat=1)).encode())
        with keep_lock(store, "other", look_secs=0.01):
            wait_until(lambda: holder_of(store)["heartbeat"] > time.time() - 5)
        assert {**holder_of(store), "heartbeat": 1} == entry(job=JOB, heartbeat=1)

    def test_workers_of_a_job_whose_lock_was_taken_over_leave_it_alone(self, store: Store) -> None:
        before = threading.active_count()
        store.put(LOCK_NAME, json.dumps(entry(heartbeat=1)).encode())
        with keep_lock(store, "another", look_secs=0.01):
            wait_until(lambda: threading.active_count() == before)
        assert holder_of(store) == entry(heartbeat=1)

    def test_many_workers_do_not_all_renew_a_lock_that_is_fresh(self, store: Store) -> None:
        store.put(LOCK_NAME, json.dumps(entry(job=JOB)).encode())
        written = holder_of(store)
        with keep_lock(store, "other", look_secs=0.05), keep_lock(store, "other", look_secs=0.05):
            time.sleep(0.03)
            assert holder_of(store) == written

    @pytest.mark.parametrize(("detached", "left"), [(True, []), (False, [LOCK_NAME])])
    def test_the_end_of_a_job_releases_the_lock_that_nobody_waits_for(
        self, store: Store, detached: bool, left: list[str]
    ) -> None:
        store.put(LOCK_NAME, json.dumps(entry(job={**JOB, "detached": detached})).encode())
        release_detached(store, "")
        release_detached(store, "another")
        assert [name for name, _ in store.list("")] == [LOCK_NAME]
        release_detached(store, "other")
        assert [name for name, _ in store.list("")] == left


class TestIsStale:
    def test_running_process_of_this_host_is_not_stale_whatever_its_heartbeat(self) -> None:
        pid = os.getppid()
        assert not is_stale(entry(**where_processes_are(), pid=pid, pid_started=start_of(pid), heartbeat=0))

    @pytest.mark.parametrize(("age", "stale"), [(0, False), (100, False), (130, True)])
    def test_other_hosts_are_judged_by_their_heartbeat(self, age: float, stale: bool) -> None:
        assert is_stale(entry(heartbeat=time.time() - age)) is stale

    def test_clock_ahead_of_ours_is_not_stale(self) -> None:
        assert not is_stale(entry(heartbeat=time.time() + 3600))

    def test_process_name_with_brackets_and_spaces_has_a_start(self, tmp_path: Path) -> None:
        program = tmp_path / "a) b (c"
        program.symlink_to("/bin/sleep")
        with subprocess.Popen([str(program), "20"]) as process:
            try:
                holder = entry(**where_processes_are(), pid=process.pid, pid_started=start_of(process.pid))
                assert not is_stale(holder)
            finally:
                process.kill()
        assert is_stale(holder)


def test_describe_names_process_host_and_age() -> None:
    assert describe(entry(heartbeat=time.time() - 42)) == "process 1 on elsewhere (last heartbeat 42 s ago)"


def test_describe_names_the_job_and_its_number() -> None:
    job = {"runner": "DataflowRunner", "name": "gristmill-x", "id": "2026-1"}
    found = describe(entry(job=job, heartbeat=time.time() - 42))
    assert found == "the DataflowRunner job gristmill-x (2026-1) (last heartbeat 42 s ago)"
