"""Steps that call a service, against a real server that misbehaves on purpose."""

from __future__ import annotations

import gzip
import json
import logging
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import jobs
from fakes import make_batch, make_spec, run_python
from services import (
    Call,
    Fault,
    Service,
    drip,
    drip_headers,
    end_in_body,
    endless,
    hang_up,
    never,
    reset,
    send_garbage,
    send_too_much,
    serving,
    status,
    wait_until,
)
from transforms.dead_letters import BadRecordError
from transforms.elements import RecordBatch
from transforms.steps import Drop
from transforms.steps.http import HttpStep, Post
from transforms.steps.http_client import MAX_PAUSE_SECS, retry_after
from transforms.steps.job_chain import load_chain
from transforms.steps.load import StepError, load_steps

TIMEOUT_SECS = 20
QUICK = {"backoff_secs": 0.01, "timeout_secs": 10.0}


@pytest.fixture
def service() -> Iterator[Service]:
    with serving() as service:
        yield service


@pytest.fixture
def post(service: Service) -> Iterator[Callable[..., Post]]:
    """Makes steps that call the service, and closes them."""
    made: list[Post] = []

    def make(path: str = "", **parameters: Any) -> Post:
        made.append(Post(service.url + path, **{**QUICK, **parameters}))
        return made[-1]

    yield make
    for step in made:
        step.close()


def failure(step: HttpStep, value: bytes) -> tuple[str, str]:
    """(reason, text) of the dead letter."""
    with pytest.raises(BadRecordError) as caught:
        step(value)
    return caught.value.reason, str(caught.value)


class TestOneCall:
    def test_sends_the_bytes_and_returns_what_comes_back(self, service: Service, post: Callable[..., Post]) -> None:
        assert post("/v1?size=2", content_type="image/png", headers={"X-Job": "7"})(b"\x00abc") == b"\x00ABC"
        [(_, call)] = service.seen
        assert (call.path, call.headers["content-type"], call.headers["x-job"]) == (
            "/caption/v1?size=2",
            "image/png",
            "7",
        )

    def test_empty_bodies_both_ways(self, post: Callable[..., Post]) -> None:
        assert post()(b"") == b""

    def test_connections_are_used_again(self, service: Service, post: Callable[..., Post]) -> None:
        ports = set()

        def answer(call: Call) -> None:
            ports.add(call._handler.client_address)
            call.reply(200, call.body)

        service.answer = answer
        step = post()
        assert [step(b"%d" % number) for number in range(10)] == [b"%d" % number for number in range(10)]
        assert len(ports) == 1

    def test_no_call_depends_on_the_one_before(self, service: Service, post: Callable[..., Post]) -> None:
        service.answer = lambda call: call.reply(200, call.body, Set_Cookie="backend=7; Path=/")
        step = post()
        assert [step(b"a"), step(b"b")] == [b"a", b"b"]
        assert [call.headers.get("cookie") for _, call in service.seen] == [None, None]

    def test_a_compressed_answer_is_decompressed(self, service: Service, post: Callable[..., Post]) -> None:
        service.answer = lambda call: call.reply(200, gzip.compress(call.body * 1000), Content_Encoding="gzip")
        assert post()(b"a") == b"a" * 1000

    def test_a_damaged_compressed_answer_costs_the_record(self, service: Service, post: Callable[..., Post]) -> None:
        service.answer = lambda call: call.reply(200, b"not gzip", Content_Encoding="gzip")
        assert failure(post(), b"a")[0] == "http_undecodable"
        assert service.calls[b"a"] == 1

    def test_nothing_runs_before_the_first_call(self, service: Service, post: Callable[..., Post]) -> None:
        before = threading.active_count()
        step = post()
        assert threading.active_count() == before
        step.close()
        assert service.seen == []


class Caption(HttpStep):
    """JSON out, JSON in."""

    def request(self, value: bytes) -> dict[str, Any]:
        return {"json": {"text": value.decode()}, "headers": {"x-length": str(len(value))}, "params": {"n": 1}}

    def result(self, response: httpx.Response, value: bytes) -> Any:
        caption = response.json()["caption"]
        return Drop("no_caption") if caption is None else value + b"|" + caption.encode()


class TestSubclass:
    def test_makes_the_request_and_the_result(self, service: Service) -> None:
        def answer(call: Call) -> None:
            text = json.loads(call.body)["text"]
            assert call.headers["x-length"] == str(len(text))
            assert call.headers["x-job"] == "7"
            assert call.path == "/caption?n=1"
            captions = {"a": "an a", "b": None}
            call.reply(200, json.dumps({"caption": captions[text]} if text in captions else {}).encode())

        service.answer = answer
        step = Caption(service.url, headers={"x-job": "7"}, **QUICK)
        assert step(b"a") == b"a|an a"
        assert step(b"b") == Drop("no_caption")
        with pytest.raises(KeyError):  # Costs the record, and is no reason to call again.
            step(b"c")
        assert sum(service.calls.values()) == 3
        step.close()

    def test_a_request_that_cannot_be_made_costs_the_record(self, service: Service) -> None:
        class Wrong(HttpStep):
            def request(self, value: bytes) -> dict[str, Any]:
                return {"headers": {"x-secret": value.decode()}} if value != b"?" else {"unknown": 1}

        step = Wrong(service.url, **QUICK)
        assert failure(step, b"s3cret\nline") == (
            "http_request",
            "POST 127.0.0.1/caption: this is no request: LocalProtocolError",
        )
        assert failure(step, b"?") == ("http_request", "this is no request: TypeError")
        assert step._limit.limit == 16
        step.close()


TRANSIENT: dict[str, list[Fault]] = {
    "busy at first": [status(503, b"starting")] * 3,
    "rate limited without a word": [status(429)],
    "rate limited for no time": [status(429, Retry_After="0")],
    "unreadable Retry-After": [status(429, Retry_After="soon")],
    "date in the past": [status(503, Retry_After="Mon, 01 Jan 2001 00:00:00 GMT")],
    "gateway": [status(502), status(504), status(500)],
    "timeout and early": [status(408), status(425)],
    "reset": [reset, reset],
    "hang up": [hang_up],
    "end in the body": [end_in_body, end_in_body],
    "garbage": [send_garbage],
    "all of them": [reset, status(503), end_in_body, status(429), hang_up, send_garbage],
}


class TestTriedAgain:
    @pytest.mark.parametrize("faults", TRANSIENT.values(), ids=TRANSIENT.keys())
    def test_passes_when_the_service_does(
        self, faults: list[Fault], service: Service, post: Callable[..., Post]
    ) -> None:
        service.faults[b"record"] = faults
        assert post()(b"record") == b"RECORD"
        assert service.calls[b"record"] == len(faults) + 1

    @pytest.mark.parametrize(
        ("fault", "reason", "text"),
        [
            (status(503, b"no model"), "http_503", "POST 127.0.0.1/caption: 503 Service Unavailable: no model"),
            (status(429), "http_429", "POST 127.0.0.1/caption: 429 Too Many Requests"),
            (status(500), "http_500", "POST 127.0.0.1/caption: 500 Internal Server Error"),
            (reset, "http_connection", "POST 127.0.0.1/caption: ReadError"),
            (hang_up, "http_connection", "POST 127.0.0.1/caption: RemoteProtocolError"),
            (end_in_body, "http_connection", "POST 127.0.0.1/caption: RemoteProtocolError"),
        ],
    )
    def test_is_dead_when_the_service_never_does(
        self, fault: Fault, reason: str, text: str, service: Service, post: Callable[..., Post]
    ) -> None:
        service.answer = fault
        found = failure(post(retries=3), b"record")
        assert found[0] == reason
        assert found[1].startswith(text)
        assert found[1].endswith("(tried 4 times)")
        assert service.calls[b"record"] == 4

    def test_no_server_at_all(self) -> None:
        with serving() as gone:
            pass
        step = Post(gone.url, retries=2, **QUICK)
        assert failure(step, b"record")[0] == "http_connection"
        step.close()

    @pytest.mark.parametrize("fault", [never, drip, drip_headers], ids=lambda fault: fault.__name__)
    def test_a_call_ends_at_its_deadline_whatever_trickles_in(
        self, fault: Fault, service: Service, post: Callable[..., Post]
    ) -> None:
        service.answer = fault
        found = failure(post(timeout_secs=0.3, retries=1), b"record")
        assert found == ("http_timeout", "POST 127.0.0.1/caption: no answer in 0.3 s (tried 2 times)")
        assert service.calls[b"record"] == 2

    def test_a_call_that_hung_passes_at_the_next_attempt(self, service: Service, post: Callable[..., Post]) -> None:
        service.faults[b"record"] = [never, drip]
        assert post(timeout_secs=0.3)(b"record") == b"RECORD"


class TestNotTriedAgain:
    @pytest.mark.parametrize("code", [400, 401, 403, 404, 409, 410, 413, 422, 451])
    def test_what_the_record_is_to_blame_for(self, code: int, service: Service, post: Callable[..., Post]) -> None:
        service.answer = status(code, b"because " + b"x" * 1000)
        reason, text = failure(post(), b"record")
        assert reason == f"http_{code}"
        assert text.startswith(f"POST 127.0.0.1/caption: {code} ")
        assert text.endswith("because " + "x" * 292)
        assert service.calls[b"record"] == 1

    @pytest.mark.parametrize("fault", [endless, status(200, b"x" * 1001)], ids=["without end", "declared"])
    def test_an_answer_that_is_too_large(self, fault: Fault, service: Service, post: Callable[..., Post]) -> None:
        service.answer = fault
        reason, text = failure(post(max_response_bytes=1000), b"record")
        assert (reason, text) == (
            "http_response_too_large",
            "POST 127.0.0.1/caption: the answer has more than 1000 bytes",
        )
        assert service.calls[b"record"] == 1
        service.answer = status(200, b"x" * 1000)
        assert post(max_response_bytes=1000)(b"record") == b"x" * 1000

    def test_the_body_of_an_error_does_not_hide_its_status(self, service: Service, post: Callable[..., Post]) -> None:
        def answer(call: Call) -> None:
            call.reply(404, b"half", Content_Length="8")
            call.hang_up()

        service.answer = answer
        assert failure(post(), b"record") == ("http_404", "POST 127.0.0.1/caption: 404 Not Found: half")
        assert service.calls[b"record"] == 1

    def test_what_follows_the_end_of_an_answer_is_not_taken_for_another(
        self, service: Service, post: Callable[..., Post]
    ) -> None:
        service.faults = {b"%d" % number: [send_too_much] for number in range(0, 6, 2)}
        step = post(max_in_flight=1)
        assert [step(b"%d" % number) for number in range(6)] == [b"%d" % number for number in range(6)]


class TestRedirects:
    @pytest.mark.parametrize("code", [307, 308])
    def test_are_followed_within_the_server_with_the_body(
        self, code: int, service: Service, post: Callable[..., Post]
    ) -> None:
        service.faults[b"record"] = [status(code, Location="/caption/")]
        assert post(headers={"x-job": "7"})(b"record") == b"RECORD"
        assert [(call.path, call.headers["x-job"]) for _, call in service.seen] == [
            ("/caption", "7"),
            ("/caption/", "7"),
        ]

    @pytest.mark.parametrize("code", [301, 302, 303])
    def test_that_would_lose_the_body_are_not(self, code: int, service: Service, post: Callable[..., Post]) -> None:
        service.answer = status(code, Location="/login?token=abc")
        reason, text = failure(post(), b"record")
        assert reason == f"http_{code}"
        assert text.endswith("to http://127.0.0.1/login, which is not followed")
        assert service.calls[b"record"] == 1

    @pytest.mark.parametrize(
        "location", ["http://localhost:{port}/", "https://127.0.0.1:{port}/", "http://127.0.0.1:1/"]
    )
    def test_to_another_server_are_not(self, location: str, service: Service, post: Callable[..., Post]) -> None:
        service.answer = status(307, Location=location.format(port=httpx.URL(service.url).port))
        assert failure(post(headers={"authorization": "secret"}), b"record")[0] == "http_307"
        assert len(service.seen) == 1

    def test_in_a_circle_end(self, service: Service, post: Callable[..., Post]) -> None:
        service.answer = status(307, Location="/caption")
        assert failure(post(), b"record")[0] == "http_307"
        assert len(service.seen) == 6


class TestRetryAfter:
    @pytest.mark.parametrize("fault", [status(429, Retry_After="1"), wait_until(503, 1)], ids=["seconds", "date"])
    def test_is_waited_for(self, fault: Fault, service: Service, post: Callable[..., Post]) -> None:
        service.faults[b"record"] = [fault]
        assert post()(b"record") == b"RECORD"
        [(first, _), (second, _)] = service.seen
        assert second - first >= 1

    def test_holds_back_all_calls(self, service: Service, post: Callable[..., Post]) -> None:
        told = threading.Event()

        def busy(call: Call) -> None:
            call.reply(429, Retry_After="1")
            told.set()

        def later(call: Call) -> None:
            told.wait(TIMEOUT_SECS)
            time.sleep(0.3)  # Until the step has read that the service is busy.
            call.reply(200, call.body.upper())

        service.faults = {b"0": [busy], b"1": [later], b"2": [later], b"3": [later]}
        records = [b"%d" % number for number in range(12)]
        out = run_chain(post(max_in_flight=4), records)
        assert out == (records, {})
        first = service.seen[0][0]
        assert [arrival - first >= 1 for arrival, _ in service.seen[4:]] == [True] * 9

    @pytest.mark.parametrize(
        ("value", "secs"),
        [
            ("0", 0),
            ("120", 120),
            (" 7 ", 7),
            ("86400", MAX_PAUSE_SECS),
            ("9" * 400, MAX_PAUSE_SECS),
            ("Tue, 01 Jan 2030 00:00:30 GMT", 30),
            ("Tue, 01 Jan 2030 00:00:30 -0000", 30),
            ("Tue, 01 Jan 2030 09:00:00 GMT", MAX_PAUSE_SECS),
            ("Mon, 31 Dec 2029 00:00:00 GMT", 0),
            ("", None),
            ("-5", None),
            ("1.5", None),
            ("soon", None),
            ("nan", None),
            ("\u0663", None),
            ("Tue, 99 Jan 2030 00:00:30 GMT", None),
        ],
    )
    def test_values(self, value: str, secs: float | None) -> None:
        headers = httpx.Headers({"date": "Tue, 01 Jan 2030 00:00:00 GMT"})
        headers = httpx.Headers([*headers.raw, (b"retry-after", value.encode("utf-8"))])
        assert retry_after(headers) == secs


def run_chain(step: HttpStep, records: list[bytes], batch_records: int = 1) -> tuple[list[bytes], dict[bytes, str]]:
    """Puts a shard through a chain as the worker does: records out, and the reason by record for the dead."""
    from transforms.steps.in_flight import ConcurrentChain
    from transforms.steps.load import Step

    chain = ConcurrentChain([Step("http.post", step)], 10_000_000, step.max_in_flight)
    starts = range(0, len(records), batch_records)
    batches = [
        make_batch(records[start : start + batch_records], sequence=number) for number, start in enumerate(starts)
    ]
    batches.append(make_batch(sequence=len(batches), last=True))
    out: list[RecordBatch] = [out for batch in batches for out in chain.apply(batch)]
    assert sum(batch.records_read for batch in out) == len(records)
    letters = [letter for batch in out for letter in batch.dead]
    return [record for batch in out for record in batch.records], {
        letter.payload or b"": letter.reason for letter in letters
    }


class TestInFlight:
    @pytest.mark.parametrize("batch_records", [1, 50])
    def test_calls_reach_the_bound_and_never_exceed_it(
        self, batch_records: int, service: Service, post: Callable[..., Post]
    ) -> None:
        together = threading.Barrier(8, timeout=TIMEOUT_SECS)

        def answer(call: Call) -> None:
            together.wait()  # Breaks unless eight calls stand here at once.
            call.reply(200, call.body.upper())

        service.answer = answer
        records = [b"r%d" % number for number in range(80)]
        out = run_chain(post(max_in_flight=8), records, batch_records)
        assert out == ([record.upper() for record in records], {})
        assert service.peak == 8

    def test_the_service_sees_the_calls_halve(self, service: Service, post: Callable[..., Post]) -> None:
        crowd, fewer = threading.Barrier(8, timeout=TIMEOUT_SECS), threading.Barrier(4, timeout=TIMEOUT_SECS)
        numbers: list[int] = []

        def answer(call: Call) -> None:
            numbers.append(service.in_flight)
            fewer.wait()
            time.sleep(0.1)  # Another call would come now.
            call.reply(200, call.body.upper())

        def overloaded(call: Call) -> None:
            crowd.wait()
            call.reply(503)

        service.answer = answer
        records = [b"r%d" % number for number in range(8)]
        service.faults = {record: [overloaded] for record in records}
        step = post(max_in_flight=8)
        assert run_chain(step, records) == ([record.upper() for record in records], {})
        assert service.peak == 8
        assert max(numbers[:4]) == 4
        assert step._limit.limit in (5, 6)  # Four, and what eight answers added to it.

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


class TestSecrets:
    def test_stand_only_in_the_request(
        self, service: Service, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setenv("MODEL_KEY", "s3cret-key\n")
        monkeypatch.setenv("MODEL_PATH", "hidden-path")
        service.answer = lambda call: call.reply(400, json.dumps({**call.headers, "path": call.path}).encode())
        url = service.url.replace("http://", "http://user:pa55word@") + "/${MODEL_PATH}?key=${MODEL_KEY}&more=qu3ry"
        parameters = {"url": url, "headers": {"Authorization": "Bearer ${MODEL_KEY}"}}
        chain = load_chain(make_spec("/nowhere", steps=({"use": "http.post", **parameters},)))
        with caplog.at_level(logging.DEBUG, "gristmill"), caplog.at_level(logging.INFO):
            outs = [*chain.apply(make_batch([b"record"])), *chain.apply(make_batch(sequence=1, last=True))]
        chain.close()
        [letter] = [letter for out in outs for letter in out.dead]
        [(_, call)] = service.seen
        assert call.path == "/caption/hidden-path?key=s3cret-key&more=qu3ry"
        assert letter.reason == "http_400"
        assert letter.error.startswith("POST 127.0.0.1/caption/***: 400 Bad Request: ")
        shown = letter.error + letter.traceback + caplog.text
        assert [secret for secret in ("s3cret-key", "hidden-path", "pa55word", "qu3ry") if secret in shown] == []

    @pytest.mark.parametrize("value", ["", "  ", "two\nlines", "ümlaut"])
    def test_that_are_missing_or_cannot_be_sent_are_told_before_any_work(
        self, value: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("MODEL_KEY", value)
        with pytest.raises(StepError, match=r"steps\[0\]: http.post: header x-key: the environment variable MODEL_KEY"):
            load_steps([{"use": "http.post", "url": "http://a/", "headers": {"x-key": "${MODEL_KEY}"}}], [])


class TestParameters:
    @pytest.mark.parametrize(
        ("parameters", "message"),
        [
            ({"url": "localhost:8000"}, "url must be of the form http://HOST/PATH"),
            ({"url": "ftp://a/"}, "url must be of the form"),
            ({"url": "http://[::1"}, "url must be of the form"),
            ({"url": 7}, "url must be text, got int"),
            ({"headers": {"x": 7}}, "header x must be text, got int"),
            ({"max_in_flight": 0}, "max_in_flight must be a whole number of at least 1, got 0"),
            ({"max_in_flight": "8"}, "max_in_flight must be a whole number of at least 1, got '8'"),
            ({"max_response_bytes": 1.5}, "max_response_bytes must be a whole number"),
            ({"backoff_secs": -1}, "backoff_secs must be a number of at least 0, got -1"),
            ({"colour": "red"}, "unexpected keyword argument 'colour'"),
        ],
    )
    def test_that_are_wrong_are_told(self, parameters: dict[str, Any], message: str) -> None:
        with pytest.raises(StepError) as caught:
            load_steps([{"use": "http.post", "url": "http://localhost/", **parameters}], [])
        assert message in str(caught.value)
        assert str(caught.value).startswith("steps[0]: http.post")

    def test_options_of_every_step_are_the_steps_own(self) -> None:
        [step] = load_steps([{"use": "http.post", "url": "http://localhost/", "timeout_secs": 5.0, "retries": 0}], [])
        assert isinstance(step.call, Post)
        assert (step.call._client._bounds.timeout_secs, step.call._retries) == (5.0, 0)
        assert (step.options.timeout_secs, step.options.retries) == (None, 0)

    def test_without_the_extra_the_message_says_what_to_install(self, tmp_path: Path) -> None:
        program = """
import sys
sys.modules["httpx"] = None
from transforms.steps.load import StepError, load_steps
try:
    load_steps([{"use": "http.post", "url": "http://localhost/"}], [])
except StepError as error:
    print(error)
"""
        assert "pip install 'gristmill[http]'" in run_python(program).stdout

    def test_is_imported_only_where_it_is_used(self) -> None:
        program = """
import sys
from transforms.steps.load import load_steps
load_steps([{"use": "example.check"}], [])
print([name for name in ("httpx", "tenacity", "anyio") if name in sys.modules])
"""
        assert run_python(program).stdout == "[]\n"


class TestJob:
    """A whole job, its workers in processes of their own."""

    def records(self) -> list[list[bytes]]:
        return [[b"file %d record %d" % (file, number) for number in range(60)] for file in range(4)]

    def arguments(self, service: Service, folder: Path, out: str) -> list[str | Path]:
        step = f"http.post,url={service.url},max_in_flight=4,backoff_secs=0.01,timeout_secs=10,retries=20"
        return ["--input", folder / "in/*", "--output", folder / out, "--shards", "4", "--step", step]

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
