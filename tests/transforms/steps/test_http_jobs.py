"""Many calls at a time, and whole jobs that call a service."""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import jobs
from fakes import run_python
from http_steps import TIMEOUT_SECS, run_chain
from services import (
    Call,
    Service,
    end_in_body,
    hang_up,
    never,
    reset,
    send_garbage,
    status,
    wait_until,
)
from transforms.steps.http import Post


class TestInFlight:
    @pytest.mark.parametrize("batch_records", [1, 50])
    def test_calls_reach_the_bound_and_never_exceed_it(
        self, batch_records: int, service: Service, post: Callable[..., Post]
    ) -> None:
        together = threading.Barrier(8, timeout=TIMEOUT_SECS)

        def first(call: Call) -> None:
            together.wait()  # Breaks unless eight calls stand here at once.
            call.reply(200, call.body.upper())

        service.faults = {b"r%d" % number: [first] for number in range(8)}
        records = [b"r%d" % number for number in range(80)]
        out = run_chain(post(max_in_flight=8), records, batch_records)
        assert out == ([record.upper() for record in records], {})
        assert service.peak == 8

    def test_the_service_sees_no_more_calls_than_it_took(self, service: Service, post: Callable[..., Post]) -> None:
        crowd = threading.Barrier(8, timeout=TIMEOUT_SECS)
        step = post(max_in_flight=8)
        numbers: list[int] = []

        def taken(call: Call) -> None:
            crowd.wait()
            deadline = time.monotonic() + TIMEOUT_SECS
            while step._limit.limit > 4 and time.monotonic() < deadline:
                time.sleep(0.005)  # Until the step has read that the other six were refused.
            call.reply(200, call.body.upper())

        def refused(call: Call) -> None:
            crowd.wait()
            call.reply(503)

        def answer(call: Call) -> None:
            numbers.append(service.in_flight)
            time.sleep(0.05)  # Another call would come now.
            call.reply(200, call.body.upper())

        service.answer = answer
        records = [b"r%d" % number for number in range(16)]
        service.faults = {record: [taken] for record in records[:2]} | {record: [refused] for record in records[2:8]}
        assert run_chain(step, records) == ([record.upper() for record in records], {})
        assert service.peak == 8
        assert max(numbers[:8]) <= 4  # Two, and what began before it was clear.

    def test_where_nobody_gets_an_answer_further_records_are_not_tried(
        self, service: Service, post: Callable[..., Post]
    ) -> None:
        service.answer = status(503)
        records = [b"r%d" % number for number in range(50)]
        out, dead = run_chain(post(max_in_flight=4, retries=3), records, 50)
        assert (out, dead) == ([], dict.fromkeys(records, "http_503"))
        assert len(service.seen) == 200
        assert len({call.body for _, call in service.seen[:40]}) <= 20

    def test_records_go_on_while_one_waits_for_its_retry(self, service: Service, post: Callable[..., Post]) -> None:
        records = [b"r%d" % number for number in range(200)]
        service.faults = {record: [status(503, Retry_After="1")] for record in records[:2]}
        out = run_chain(post(max_in_flight=2), records)
        assert out == ([record.upper() for record in records], {})
        order = [call.body for _, call in service.seen]
        assert min(order.index(record, 2) for record in records[:2]) > 20
        assert service.peak <= 2

    def test_among_many_faults_every_record_gets_its_own_result(
        self, service: Service, post: Callable[..., Post]
    ) -> None:
        records = [b"record %d" % number for number in range(300)]
        faults = [reset, status(503), hang_up, status(429), end_in_body, status(500), send_garbage, status(408)]
        for number, record in enumerate(records):
            if number % 3 == 0:
                service.faults[record] = faults[number % 8 : number % 8 + 1 + number % 2]
            if number % 50 == 7:
                service.faults[record] = [status(404 if number % 100 == 7 else 400)]
            if number % 100 == 8:
                service.faults[record] = [status(502)] * 100
        out, dead = run_chain(post(max_in_flight=16, retries=4), records, 7)
        expected = dict.fromkeys(records[7::100], "http_404")
        expected |= dict.fromkeys(records[57::100], "http_400")
        expected |= dict.fromkeys(records[8::100], "http_502")
        assert dead == expected
        assert out == [record.upper() for record in records if record not in expected]
        assert {record: service.calls[record] for record in expected} == {
            record: 5 if reason == "http_502" else 1 for record, reason in expected.items()
        }
        assert service.peak <= 16

    def test_closing_ends_calls_that_hang_and_calls_that_wait(
        self, service: Service, post: Callable[..., Post]
    ) -> None:
        service.answer = never
        service.faults[b"busy"] = [status(429, Retry_After="500")]
        step = post(timeout_secs=500.0)
        ended = threading.Semaphore(0)

        def call(value: bytes) -> None:
            with pytest.raises(Exception):  # noqa: B017, PT011
                step(value)
            ended.release()

        threads = [threading.Thread(target=call, args=(value,), daemon=True) for value in (b"hangs", b"busy", b"later")]
        for thread in threads:
            thread.start()
        while len(service.seen) < 2:
            time.sleep(0.01)
        step.close()
        for thread in threads:
            thread.join(TIMEOUT_SECS)
        assert [thread.is_alive() for thread in threads] == [False] * 3
        assert ended._value == 3

    def test_the_process_can_end_while_a_call_hangs(self, service: Service) -> None:
        service.answer = never
        program = """
import sys, threading, time
from transforms.steps.http import Post
step = Post(sys.argv[1], timeout_secs=500.0)
threading.Thread(target=step, args=(b"record",), daemon=True).start()
time.sleep(0.5)
print("ended")
"""
        assert run_python(program, service.url).stdout == "ended\n"


class TestJob:
    """A whole job, its workers in processes of their own."""

    def records(self) -> list[list[bytes]]:
        return [[b"file %d record %d" % (file, number) for number in range(60)] for file in range(4)]

    def arguments(self, service: Service, folder: Path, out: str) -> list[str | Path]:
        step = f"http.post,url={service.url},max_in_flight=4,backoff_secs=0.01,timeout_secs=10,retries=20"
        command = ["--input", folder / "in/*", "--output", folder / out, "--shards", "4", "--step", step]
        return [*command, "--set", "write.secs_per_record=0"]  # No call beside the job's.

    def test_a_service_that_misbehaves_changes_nothing_in_the_output(self, service: Service, tmp_path: Path) -> None:
        for number, records in enumerate(self.records()):
            jobs.write_tfrecord(tmp_path / f"in/{number}.tfrecord", records)
        every = [record for records in self.records() for record in records]
        dead = {record: status(404, b"no such picture") for record in every[5::40]}
        dead |= {record: status(422, b"not a picture") for record in every[6::80]}

        def answer(call: Call) -> None:
            dead.get(call.body, lambda call: call.reply(200, call.body.upper()))(call)

        service.answer = answer
        assert jobs.convert(*self.arguments(service, tmp_path, "good")) == 0
        assert set(service.calls.values()) == {1}
        service.calls.clear()
        faults = [reset, status(503), hang_up, status(429), end_in_body, status(500), send_garbage, status(502)]
        service.faults = {record: faults[number % 8 :: 3] for number, record in enumerate(every) if number % 2}
        service.faults[every[0]] = [status(429, Retry_After="1"), wait_until(503, 1)]
        done = jobs.spawn(["convert", *self.arguments(service, tmp_path, "bad"), "--workers", "2"], cwd=tmp_path)
        assert done.returncode == 0, done.stderr

        assert jobs.records(tmp_path / "bad") == [record.upper() for record in every if record not in dead]
        letters = jobs.dead_letters(tmp_path / "bad")
        assert [(letter["step"], letter["reason"]) for letter in letters] == [
            ("http.post", "http_404" if number % 40 == 5 else "http_422")
            for number, record in enumerate(every)
            if record in dead
        ]
        assert jobs.content(tmp_path / "bad") == jobs.content(tmp_path / "good")
        assert service.peak <= 2 * 4

    def test_can_be_stopped_while_calls_hang_and_goes_on_later(self, service: Service, tmp_path: Path) -> None:
        for number, records in enumerate(self.records()):
            jobs.write_tfrecord(tmp_path / f"in/{number}.tfrecord", records)
        every = [record for records in self.records() for record in records]
        service.faults = {record: [never] for record in every[70:74]}  # All calls of the second shard hang.
        arguments = self.arguments(service, tmp_path, "out")
        command = [*jobs.GRISTMILL, "convert", "--workers", "0", *map(str, arguments)]
        with subprocess.Popen(command, cwd=tmp_path, env=jobs.environment(), stderr=subprocess.PIPE) as job:
            while not all(service.calls[record] for record in every[70:74]):
                time.sleep(0.02)
            job.send_signal(signal.SIGTERM)
            _, printed = job.communicate(timeout=TIMEOUT_SECS)
        assert job.returncode == 1
        assert b"stopped. Nothing is lost" in printed
        committed = len(list((tmp_path / "out/_gristmill/shards").glob("*.json")))
        assert jobs.convert(*arguments) == 0
        assert jobs.records(tmp_path / "out") == [record.upper() for record in every]
        assert [service.calls[record] for record in every].count(1) >= 60 * committed >= 60
