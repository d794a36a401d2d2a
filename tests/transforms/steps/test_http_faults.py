"""A service that misbehaves: what is tried again, and when, and what is not."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest

from http_steps import QUICK, failure, run_chain
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
from transforms.steps.http import Post
from transforms.steps.http_client import MAX_PAUSE_SECS, retry_after

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

    def test_of_one_call_holds_back_no_other(self, service: Service, post: Callable[..., Post]) -> None:
        records = [b"%d" % number for number in range(40)]
        service.faults = {b"3": [status(429, Retry_After="1")]}
        assert run_chain(post(max_in_flight=4), records) == (records, {})
        first = service.seen[0][0]
        later = [call.body for arrival, call in service.seen if arrival - first >= 1]
        assert later == [b"3"]
        assert len(service.seen) == 41

    def test_of_many_calls_holds_back_all(self, service: Service, post: Callable[..., Post]) -> None:
        records = [b"%d" % number for number in range(40)]
        service.faults = {record: [status(429, Retry_After="1")] for record in records}
        assert run_chain(post(max_in_flight=4), records) == (records, {})
        first = service.seen[0][0]
        early = [call for arrival, call in service.seen if arrival - first < 1]
        assert 4 <= len(early) < 20  # Some began before it was a share.

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
