"""What a successful answer has to be: no empty one, and no page that nobody asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from http_steps import failure
from services import Service, status
from transforms.steps.http import Post

PAGE = b"<!DOCTYPE html>\n<html><head><title>Sign in</title></head></html>"


def answer(service: Service, body: bytes, content_type: str | None) -> None:
    headers = {} if content_type is None else {"Content_Type": content_type}
    service.answer = status(200, body, **headers)


@pytest.mark.parametrize("code", [200, 201, 202, 204])
class TestEmpty:
    def test_costs_the_record_at_once(self, code: int, service: Service, post: Callable[..., Post]) -> None:
        service.answer = status(code)
        assert failure(post(), b"record") == ("empty_answer", f"POST 127.0.0.1/caption: {code} with no content")
        assert service.calls[b"record"] == 1

    def test_is_a_record_where_the_step_says_so(self, code: int, service: Service, post: Callable[..., Post]) -> None:
        service.answer = status(code)
        assert post(allow_empty=True, answer_types=["text/plain"])(b"record") == b""


class TestPages:
    @pytest.mark.parametrize("content_type", ["text/html", "Text/HTML; charset=utf-8", "application/xhtml+xml"])
    def test_that_say_so_cost_the_record(self, content_type: str, service: Service, post: Callable[..., Post]) -> None:
        answer(service, b"Sign in", content_type)
        assert failure(post(), b"record") == (
            "unexpected_content",
            "POST 127.0.0.1/caption: 200 with a page of HTML: Sign in",
        )
        assert service.calls[b"record"] == 1

    @pytest.mark.parametrize("content_type", [None, "text/plain"])
    @pytest.mark.parametrize(
        "body", [PAGE, b"\xef\xbb\xbf \n" + PAGE.lower(), b"<HTML lang=en>", b"<!-- proxy -->\n<html>"]
    )
    def test_that_do_not_say_so_are_told_by_their_content(
        self, body: bytes, content_type: str | None, service: Service, post: Callable[..., Post]
    ) -> None:
        answer(service, body, content_type)
        assert failure(post(), b"record")[0] == "unexpected_content"

    @pytest.mark.parametrize(
        ("body", "content_type"),
        [
            (PAGE, "application/octet-stream"),
            (PAGE, "application/json"),
            (b"<htmlish>", None),
            (b"about <html>", "text/plain"),
            (b"\xff\xfe\x00", None),
        ],
    )
    def test_that_are_none_pass(
        self, body: bytes, content_type: str | None, service: Service, post: Callable[..., Post]
    ) -> None:
        answer(service, body, content_type)
        assert post()(b"record") == body

    @pytest.mark.parametrize(
        "parameters",
        [
            {"content_type": "text/html"},
            {"headers": {"accept": "text/html,application/json"}},
            {"answer_types": ["text/html"]},
            {"answer_types": "text/*"},
            {"answer_types": ["*/*"]},
        ],
    )
    def test_that_are_asked_for_pass(
        self, parameters: dict[str, Any], service: Service, post: Callable[..., Post]
    ) -> None:
        answer(service, PAGE, "text/html; charset=utf-8")
        assert post(**parameters)(b"record") == PAGE


class TestTypes:
    @pytest.mark.parametrize(
        ("content_type", "fits"),
        [
            ("application/json", True),
            ("Application/JSON; charset=utf-8", True),
            ("image/png", True),
            ("text/plain", False),
            ("imagery/png", False),
            (None, False),
        ],
    )
    def test_others_than_the_steps_cost_the_record(
        self, content_type: str | None, fits: bool, service: Service, post: Callable[..., Post]
    ) -> None:
        answer(service, b"{}", content_type)
        step = post(answer_types=["application/json", "image/*"])
        if fits:
            assert step(b"record") == b"{}"
        else:
            found = content_type or "no content type"
            assert failure(step, b"record") == (
                "unexpected_content",
                f"POST 127.0.0.1/caption: 200 with {found} instead of application/json or image/*: {{}}",
            )
