"""Steps that call a service: what is sent, what comes back, and what is never told."""

from __future__ import annotations

import gzip
import json
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from fakes import make_batch, make_spec, run_python
from http_steps import QUICK, failure
from services import (
    Call,
    Service,
)
from transforms.steps import Drop
from transforms.steps.http import HttpStep, Post
from transforms.steps.job_chain import load_chain
from transforms.steps.load import StepError, load_steps


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
        assert post(allow_empty=True)(b"") == b""

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
            (
                {"answer_types": "json"},
                "answer_types must be content types such as application/json or image/*, got 'json'",
            ),
            ({"answer_types": []}, "answer_types must be content types"),
            ({"answer_types": [7]}, "answer_types must be content types"),
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
