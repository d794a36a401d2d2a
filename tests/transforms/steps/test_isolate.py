"""Whatever an isolated step does costs that record alone, and no record runs twice."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import jobs
from fakes import make_batch
from isolation import MODULE, Steps, check_books, letters, outputs, wait_until
from transforms.dead_letters import JobInterrupted
from transforms.steps import isolate
from transforms.steps.load import StepError


@pytest.fixture
def steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Steps]:
    (tmp_path / "odd_steps.py").write_text(MODULE)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield Steps(tmp_path)
    sys.modules.pop("odd_steps", None)


ISOLATED: dict[str, Any] = {"isolate": True}
TIMED: dict[str, Any] = {"timeout_secs": 0.3}
BOUNDED: dict[str, Any] = {"max_memory_bytes": 1 << 29}

FATES = {
    "segv": (ISOLATED, "process_died", "SIGSEGV"),
    "abort": (ISOLATED, "process_died", "SIGABRT"),
    "bad_alloc": (ISOLATED, "memory", "SIGABRT"),
    "exit0": (ISOLATED, "process_died", "exit status 0"),
    "exit9": (ISOLATED, "process_died", "exit status 9"),
    "kill": (ISOLATED, "process_died", "SIGKILL"),
    "thread_dies": (ISOLATED, "process_died", "SIGSEGV"),
    "dying_text": (ISOLATED, "process_died", "exit status 3"),
    "hang": (TIMED, "timeout", "TimeoutError"),
    "hang_c": (TIMED, "timeout", "TimeoutError"),
    "spin": (TIMED, "timeout", "TimeoutError"),
    "stubborn": (TIMED, "timeout", "TimeoutError"),
    "hanging_text": (TIMED, "timeout", "TimeoutError"),
    "memory": (BOUNDED, "memory", "MemoryError"),
    "memory_slowly": (BOUNDED, "memory", "MemoryError"),
    "unprintable": (ISOLATED, "exception", "Unprintable"),
    "undecodable": (ISOLATED, "exception", "UnicodeDecodeError"),
    "surrogate": (ISOLATED, "exception", "ValueError"),
    "long_text": (ISOLATED, "exception", "ValueError"),
    "bytes_text": (ISOLATED, "exception", "ValueError"),
    "sys_exit": (ISOLATED, "exception", "SystemExit"),
    "interrupt": (ISOLATED, "exception", "KeyboardInterrupt"),
    "recursion": (ISOLATED, "exception", "RecursionError"),
    "bad_record": (ISOLATED, "my_reason", "BadRecordError"),
}


class TestOneRecord:
    @pytest.mark.parametrize("action", FATES)
    def test_costs_itself_alone(self, action: str, steps: Steps) -> None:
        options, reason, error_type = FATES[action]
        culprit = action.encode()
        batches = steps.run([b"a", b"b", culprit, b"c", b"d"], steps.act(**options))
        assert outputs(batches) == [b"a!", b"b!", b"c!", b"d!"]
        [letter] = letters(batches)
        assert (letter.step, letter.reason, letter.error_type) == ("odd_steps:Act", reason, error_type)
        assert (letter.payload, letter.position) == (culprit, 2)
        assert len(letter.error) <= 2000
        assert len(letter.traceback) <= 8000
        assert (letter.error + letter.traceback).encode()
        check_books(batches, 5)
        assert steps.calls() == [b"a", b"b", culprit, b"c", b"d"]

    @pytest.mark.parametrize("action", ["print", "print_stderr", "close_stdout", "flood", "stray", "close_files"])
    def test_odd_things_that_are_no_failure_cost_nothing(self, action: str, steps: Steps) -> None:
        records = [b"a", action.encode(), b"b"]
        with steps.chain() as chain:
            for _ in range(2):
                batches = list(chain.apply(make_batch(records)))
                assert outputs(batches) == [b"a!", action.encode() + b"!", b"b!"]
                assert letters(batches) == []
        assert steps.calls() == records * 2

    def test_what_the_process_said_and_where_it_was_stand_in_the_letter(self, steps: Steps) -> None:
        [died, hung] = letters(steps.run([b"bad_alloc", b"hang"], steps.act(timeout_secs=0.3)))
        assert "std::bad_alloc" in died.error
        assert "in allocate_in_cpp" in died.traceback
        assert "0.3 s" in hung.error
        assert "odd_steps.py" in hung.traceback
        assert "Fatal" not in hung.traceback

    def test_letter_names_the_step_that_ran(self, steps: Steps) -> None:
        calls = [{"call": "odd_steps:same"}, steps.act(isolate=True), {"call": "odd_steps:items"}]
        batches = steps.run([b"segv", b"a", b"exit0"], *calls)
        assert [(letter.step, letter.payload) for letter in letters(batches)] == [
            ("odd_steps:Act", b"segv"),
            ("odd_steps:Act", b"exit0"),
        ]
        assert outputs(batches) == [b"a!-1", b"a!-2", b"a!-3"]

    @pytest.mark.parametrize("action", ["hang", "segv", "memory", "sys_exit"])
    def test_third_item_of_an_iterator_costs_the_whole_record(self, action: str, steps: Steps) -> None:
        step = {"call": "odd_steps:items", "timeout_secs": 0.3, "max_memory_bytes": 1 << 29}
        batches = steps.run([b"a", action.encode(), b"b"], step)
        assert outputs(batches) == [b"a-1", b"a-2", b"a-3", b"b-1", b"b-2", b"b-3"]
        [letter] = letters(batches)
        assert letter.payload == action.encode()
        assert ("at item 3" in letter.error) == (action in ("hang", "segv"))
        check_books(batches, 3)

    def test_kill_by_the_kernel_for_want_of_memory_is_told_from_others(
        self, steps: Steps, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(isolate, "count_memory_kills", itertools.count().__next__)
        [letter] = letters(steps.run([b"kill"]))
        assert (letter.reason, letter.error_type) == ("memory", "SIGKILL")

    def test_bound_of_many_years_is_a_bound(self, steps: Steps) -> None:
        assert outputs(steps.run([b"a"], steps.act(timeout_secs=1e12))) == [b"a!"]

    def test_stop_of_the_job_is_nobodys_fault(self, steps: Steps) -> None:
        isolate.note_stop()
        try:
            with pytest.raises(JobInterrupted):
                steps.run([b"a", b"kill"])
        finally:
            isolate.note_stop(False)


class TestManyRecords:
    def test_outcomes_of_every_kind_come_back_as_they_are(self, steps: Steps) -> None:
        records = [b"x", b"drop", b"none", b"many", b"", b"y"]
        isolated = steps.run(records, {"call": "odd_steps:mixed", "isolate": True})
        assert isolated == steps.run(records, {"call": "odd_steps:mixed"})
        assert outputs(isolated) == [b"x", b"a", b"", b"b", b"", b"y"]

    def test_values_between_steps_stay_in_the_process(self, steps: Steps) -> None:
        batches = steps.run(
            [b"a", b"\xff"], {"call": "odd_steps:decode", "isolate": True}, {"call": "odd_steps:encode"}
        )
        assert outputs(batches) == [b"a."]
        assert [letter.step for letter in letters(batches)] == ["odd_steps:decode"]

    def test_failures_side_by_side_and_at_both_ends(self, steps: Steps) -> None:
        bad = [b"segv", b"exit0", b"hang", b"unprintable"]
        records = [*bad, b"a", b"b", *bad]
        batches = steps.run(records, steps.act(timeout_secs=0.2))
        assert outputs(batches) == [b"a!", b"b!"]
        assert [letter.payload for letter in letters(batches)] == bad * 2
        assert [letter.position for letter in letters(batches)] == [i for i, r in enumerate(records) if r in bad]
        check_books(batches, 10)
        assert steps.calls() == records

    def test_outputs_larger_than_the_memory_between(self, steps: Steps) -> None:
        """Many small ones that fill it, and one that does not fit it, in front of a death."""
        grow = {"call": "odd_steps:grow", "isolate": True}
        sizes = [100_000] * 30 + [0, 5_000_000, 1, (1 << 20) - 32, 1 << 20] + [70_000] * 20
        records = [b"%c%d" % (97 + number % 26, size) for number, size in enumerate(sizes)]
        batches = steps.run([*records, b"not a number", b"z3"], grow)
        assert outputs(batches) == [*(record[:1] * int(record[1:]) for record in records), b"zzz"]
        assert [letter.error_type for letter in letters(batches)] == ["ValueError"]

    def test_records_larger_than_a_pipe(self, steps: Steps) -> None:
        records = [b"a" * 6_000_000, b"b", b"c" * 3_000_000]
        assert outputs(steps.run(records, {"call": "odd_steps:same", "isolate": True})) == records

    def test_output_bound_holds(self, steps: Steps) -> None:
        batches = steps.run([b"a10", b"b11"], {"call": "odd_steps:grow", "isolate": True}, max_record_bytes=10)
        assert outputs(batches) == [b"a" * 10]
        assert [letter.reason for letter in letters(batches)] == ["output_too_large"]


class TestProcess:
    def test_is_kept_from_batch_to_batch_and_ends_with_the_chain(self, steps: Steps) -> None:
        step = {"call": "odd_steps:pid", "isolate": True}
        with steps.chain(step) as chain:
            pids = {pid for _ in range(3) for pid in outputs(list(chain.apply(make_batch([b"a", b"b"]))))}
            [pid] = map(int, pids)
            assert pid != os.getpid()
            assert psutil.pid_exists(pid)
        assert not psutil.pid_exists(pid)

    def test_that_is_killed_between_batches_is_replaced_and_nothing_is_lost(self, steps: Steps) -> None:
        with steps.chain({"call": "odd_steps:pid", "isolate": True}) as chain:
            pids = []
            for _ in range(3):
                [pid] = outputs(list(chain.apply(make_batch([b"a"]))))
                pids.append(int(pid))
                os.kill(int(pid), signal.SIGKILL)
            assert len(set(pids)) == 3

    def test_whose_warden_is_killed_ends_too(self, steps: Steps) -> None:
        with steps.chain({"call": "odd_steps:pid", "isolate": True}) as chain:
            [pid] = map(int, outputs(list(chain.apply(make_batch([b"a"])))))
            child = psutil.Process(pid)
            child.parent().kill()
            wait_until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
            assert outputs(list(chain.apply(make_batch([b"a"])))) != [b"%d" % pid]

    def test_is_ended_when_nobody_wants_the_outcomes_any_more(self, steps: Steps) -> None:
        with steps.chain() as chain:
            generator = chain.apply(make_batch([b"x" * 600_000, b"y" * 600_000, b"hang"]))
            assert next(generator).records == [b"x" * 600_000 + b"!"]
            generator.close()
            assert outputs(list(chain.apply(make_batch([b"a"])))) == [b"a!"]

    def test_is_not_started_without_need(self, steps: Steps) -> None:
        before = psutil.Process().children()
        with steps.chain() as chain:
            batch = make_batch([])
            assert list(chain.apply(batch)) == [batch]
            assert psutil.Process().children() == before

    def test_imports_no_beam(self, steps: Steps) -> None:
        (steps.folder / "odd_steps.py").write_text(
            "import sys\ndef look(record):\n    return b'%d' % ('apache_beam' in sys.modules)\n"
        )
        assert outputs(steps.run([b"a"], {"call": "odd_steps:look", "isolate": True})) == [b"0"]

    @pytest.mark.parametrize("source", ["import os; os._exit(7)", "import ctypes; ctypes.string_at(0)"])
    def test_that_cannot_load_the_steps_fails_the_job(self, source: str, steps: Steps) -> None:
        (steps.folder / "odd_steps.py").write_text(f"def same(record):\n    return record\n{source}\n")
        with pytest.raises(StepError, match=r"ended with (exit status 7|SIGSEGV)"):
            steps.run([b"a"], {"call": "odd_steps:same", "isolate": True})

    def test_that_refuses_the_steps_fails_the_job_with_their_message(self, steps: Steps) -> None:
        with pytest.raises(StepError, match="did you mean 'same'"):
            steps.run([b"a"], {"call": "odd_steps:sam", "isolate": True})

    def test_that_dies_before_every_batch_costs_a_record_and_no_loop(
        self, steps: Steps, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As when something kills whatever it sees: each record costs a few processes, then is a dead letter."""
        started = itertools.count()

        def send(self: Any, parts: Any) -> None:
            if len(parts) != 1 or not parts[0].startswith(b"\x80"):  # Not the job, but a batch.
                next(started)
                psutil.Process(self._process.pid).children()[0].kill()
                wait_until(lambda: not self.is_alive())
            original(self, parts)

        original = isolate.ChildProcess.send
        monkeypatch.setattr(isolate.ChildProcess, "send", send)
        batches = steps.run([b"a", b"b"])
        assert outputs(batches) == []
        assert [(letter.payload, letter.reason) for letter in letters(batches)] == [
            (b"a", "process_died"),
            (b"b", "process_died"),
        ]
        assert next(started) == 6


class TestDescendants:
    def test_end_with_their_parent(self, steps: Steps) -> None:
        with steps.chain() as chain:
            batches = list(chain.apply(make_batch([b"spawn:1", b"segv", b"spawn:2", b"a"])))
            assert outputs(batches) == [b"spawn:1!", b"spawn:2!", b"a!"]
            assert len(psutil.Process().children(recursive=True)) >= 6  # Those of the second process.
        assert steps.processes() == []

    def test_end_with_a_worker_that_is_killed(self, steps: Steps) -> None:
        program = """
            import sys
            from isolation import Steps
            from pathlib import Path
            Steps(Path(sys.argv[1])).run([b"spawn:1", b"hang_c"])
        """
        path = os.pathsep.join([jobs.environment()["PYTHONPATH"], str(Path(__file__).parents[2])])
        command = [sys.executable, "-c", textwrap.dedent(program), str(steps.folder)]
        worker = subprocess.Popen(command, env=jobs.environment({"PYTHONPATH": path}))
        log = steps.folder / "log"
        wait_until(lambda: log.exists() and steps.calls() == [b"spawn:1", b"hang_c"])
        found = steps.processes()
        assert len(found) >= 6
        worker.kill()
        worker.wait()
        wait_until(lambda: not any(process.is_running() for process in found))
        assert steps.processes() == []


class TestRetries:
    def test_after_a_timeout(self, steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(isolate, "pause_secs", lambda failures: 0)
        (steps.folder / "odd_steps.py").write_text(
            textwrap.dedent("""
                import os, time

                def slow_at_first(record, log):
                    with open(log, "ab+") as file:
                        file.write(record)
                        file.seek(0)
                        count = file.read().count(record)
                    if record != b"a" and count < int(record):
                        time.sleep(1000)
                    return record
            """)
        )
        log = str(steps.folder / "log")
        step = {"call": "odd_steps:slow_at_first", "log": log, "timeout_secs": 0.3, "retries": 2}
        batches = steps.run([b"a", b"3", b"4", b"a"], step)
        assert outputs(batches) == [b"a", b"3", b"a"]
        assert [(letter.payload, letter.reason) for letter in letters(batches)] == [(b"4", "timeout")]

    def test_not_of_a_process_that_died(self, steps: Steps) -> None:
        assert outputs(steps.run([b"segv", b"a"], steps.act(isolate=True, retries=3))) == [b"a!"]
        assert steps.calls() == [b"segv", b"a"]


@pytest.mark.parametrize("workers", ["0", "2"])
def test_job_ends_well_and_its_dead_letters_are_exact(workers: str, steps: Steps) -> None:
    actions = {7: b"segv", 20: b"exit9", 21: b"hang_c", 50: b"memory", 99: b"unprintable"}
    records = [actions.get(number, b"x%d" % number) for number in range(100)]
    for file in range(2):
        jobs.write_tfrecord(steps.folder / f"in/f{file}.tfrecord", records[50 * file : 50 * file + 50])
    step = f"odd_steps:Act,log={steps.folder}/log,timeout_secs=0.3,max_memory_bytes=1GiB"
    command = ["convert", "--input", "in/*", "--output", "out", "--shards", "4", "--workers", workers, "--step", step]
    done = jobs.spawn([*command, "--set", "write.secs_per_record=0"], cwd=steps.folder)  # No call beside the job's.
    assert done.returncode == 0, done.stderr[-3000:]
    out = steps.folder / "out"
    assert jobs.records(out) == [record + b"!" for record in records if record.startswith(b"x")]
    found = [(letter["source"][-10:], letter["position"], letter["reason"]) for letter in jobs.dead_letters(out)]
    reasons = ["process_died", "process_died", "timeout", "memory", "exception"]
    expected = []
    for number, reason in zip(actions, reasons, strict=True):
        first = number // 50 * 50
        position = sum(16 + len(record) for record in records[first:number])
        expected.append((f"f{number // 50}.tfrecord"[-10:], position, reason))
    assert found == expected
    assert sorted(steps.calls()) == sorted(records)
    assert steps.processes() == []


def test_dry_run_honours_isolation(steps: Steps) -> None:
    jobs.write_tfrecord(steps.folder / "in/f.tfrecord", [b"a", b"segv", b"b"])
    command = ["convert", "--input", "in/*", "--output", "out", "--dry-run", "--step"]
    done = jobs.spawn([*command, f"odd_steps:Act,log={steps.folder}/log,isolate=true"], cwd=steps.folder)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "becomes 2 bytes b'a!'" in done.stdout
    assert "dead    odd_steps:Act: process_died" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "number"), [("0", signal.SIGTERM), ("2", signal.SIGINT)])
def test_job_that_is_stopped_with_all_its_processes_blames_no_record(
    workers: str, number: signal.Signals, steps: Steps
) -> None:
    """As a service manager stops it: the same signal to everything at once."""
    records = [b"x%d" % number for number in range(20)]
    jobs.write_tfrecord(steps.folder / "in/f.tfrecord", [*records, b"hang"])
    step = f"odd_steps:Act,log={steps.folder}/log,isolate=true"
    command = ["convert", "--input", "in/*", "--output", "out", "--shards", "1", "--workers", workers, "--step", step]
    job = subprocess.Popen([*jobs.GRISTMILL, *command], cwd=steps.folder, env=jobs.environment())
    log = steps.folder / "log"
    wait_until(lambda: log.exists() and steps.calls()[-1:] == [b"hang"])
    everything = [*psutil.Process(job.pid).children(recursive=True), psutil.Process(job.pid)]
    for process in everything:
        process.send_signal(number)
    assert job.wait(60) == 1
    wait_until(lambda: not any(process.is_running() for process in everything))
    assert list((steps.folder / "out/_gristmill").glob("shards/*")) == []
    log.unlink()
    (steps.folder / "odd_steps.py").write_text(MODULE.replace('"hang": lambda: time.sleep(1000)', '"hang": int'))
    assert jobs.spawn([*command, "--overwrite"], cwd=steps.folder).returncode == 0
    assert jobs.records(steps.folder / "out") == [record + b"!" for record in [*records, b"hang"]]
    assert jobs.dead_letters(steps.folder / "out") == []
