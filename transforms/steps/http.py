"""Steps that call a service over HTTP: `http.post`, and `HttpStep` to make others of. No Beam here.

A call that a record is to blame for fails at once; a call that the service is to blame for is tried again, and while it
waits for that, the records behind it go on. A service that cannot keep up gets fewer calls at a time.
"""

from __future__ import annotations

import base64
import contextlib
import os
import re
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any

from transforms.dead_letters import BadRecordError
from transforms.steps.adaptive import AdaptiveLimit
from transforms.steps.aside import aside
from transforms.steps.load import StepError

try:
    import httpx
    import tenacity

    from transforms.steps.http_answer import Expected
    from transforms.steps.http_client import CallBounds, HttpClient, RefusedError, TransientError
except ImportError as error:
    raise ImportError(f"calling a service needs pip install 'gristmill[http]': {error}") from error

MAX_BACKOFF_SECS = 60.0

_CONTENT_TYPE = re.compile(r"[\w!#$&^.+-]+/([\w!#$&^.+-]+|\*)|\*/\*")
_VARIABLE = re.compile(r"\$\{(\w+)\}")


class HttpStep:
    """A step that calls a service; override `request` and `result`.

    `${NAME}` in the URL and in header values stands for the environment variable of that name. Its value is looked
    up where the step runs, and appears in no config, plan, report or dead letter. A credential that stands there
    itself is refused with the config.

    Args:
        url: Of the service, beginning with http:// or https://.
        method: Of the calls.
        headers: Sent with each call.
        timeout_secs: Longest time for one attempt, to the last byte of the answer.
        retries: How often a call that the service is to blame for is tried again.
        max_in_flight: Calls at a time in each worker; fewer while the service cannot keep up.
        max_response_bytes: Longer answers cost their record.
        backoff_secs: Longest wait before the first retry. It doubles with each, up to a minute; the wait is random.
        allow_empty: Whether an answer may be empty (204, or without a body). Else it costs its record.
        answer_types: Content types that answers may have, such as application/json or image/*; others cost their
            record. By default all, but for pages of HTML where the step neither sends nor accepts HTML: these come
            from a login, a proxy or a maintenance page.
    """

    own_deadline = True
    own_retries = True
    plan_records = 3  # A service may charge for what a plan asks of it; see `transforms.timing`.

    def __init__(
        self,
        url: str,
        *,
        method: str = "POST",
        headers: Mapping[str, str] | None = None,
        timeout_secs: float = 60.0,
        retries: int = 8,
        max_in_flight: int = 16,
        max_response_bytes: int = 64 << 20,
        backoff_secs: float = 1.0,
        allow_empty: bool = False,
        answer_types: Sequence[str] | None = None,
    ) -> None:
        _check_number("max_in_flight", max_in_flight, 1)
        _check_number("max_response_bytes", max_response_bytes, 1)
        _check_number("retries", retries, 0)
        _check_number("backoff_secs", backoff_secs, 0, (int, float))
        _check_number("timeout_secs", timeout_secs, 0, (int, float))
        self.max_in_flight = max_in_flight
        secrets: set[str] = set()
        self._url = _check_url(_fill_in("url", url, secrets))
        self._method = method
        self._headers = {name: _fill_in(f"header {name}", value, secrets) for name, value in (headers or {}).items()}
        self._secrets = sorted(_as_sent(secrets, httpx.URL(self._url)), key=len, reverse=True)
        name = f"{type(self).__name__} on {httpx.URL(self._url).host}"
        self._limit = AdaptiveLimit(name, max_in_flight, backoff_secs)
        bounds = CallBounds(timeout_secs, max_response_bytes)
        expected = Expected(allow_empty, _check_types(answer_types))
        self._client = HttpClient(bounds, self._without_secrets, expected)
        self._backoff = tenacity.wait_random_exponential(multiplier=backoff_secs, max=MAX_BACKOFF_SECS)
        self._retries = retries

    def request(self, value: Any) -> dict[str, Any]:
        """Returns what the call for a value carries, as arguments of `httpx.Request`: `json`, `content`, `headers`, ...

        Args:
            value: What the step before returned; the record's bytes in the first step.
        """
        return {"content": value}

    def result(self, response: httpx.Response, value: Any) -> Any:
        """Returns what the step makes of an answer: anything that a step may return.

        Args:
            response: A successful answer (status 2xx), its body read.
            value: What the call was made for.
        """
        return response.content

    def __call__(self, value: Any) -> Any:
        """Calls the service for one value."""
        arguments = {"method": self._method, "url": self._url, **self.request(value)}
        arguments["headers"] = {**self._headers, **arguments.get("headers", {})}
        attempts = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(TransientError),
            stop=tenacity.stop_after_attempt(1 + self._retries),
            wait=self._wait,
            sleep=self._sleep,
            reraise=True,
        )
        try:
            response = attempts(self._attempt, arguments)
        except TransientError as error:
            raise BadRecordError(error.reason, f"{error} (tried {1 + self._retries} times)") from None
        return self.result(response, value)

    def close(self) -> None:
        """Ends all calls and waiting."""
        self._limit.close()
        self._client.close()

    def _attempt(self, arguments: dict[str, Any]) -> httpx.Response:
        """Makes one attempt, and tells the limit how it went."""
        call = self._limit.acquire()
        try:
            response = self._client.send(arguments)
        except TransientError as error:
            self._limit.fail(call, error.reason, error.pause_secs or 0.0)
            raise
        except RefusedError:  # The service is there, and answers.
            self._limit.answer(call)
            raise
        except BaseException:
            self._limit.forget(call)
            raise
        self._limit.answer(call)
        return response

    def _sleep(self, secs: float) -> None:
        """Waits for a retry. While nobody gets an answer, records behind this one wait with it: they would fail too."""
        with contextlib.nullcontext() if self._limit.gets_nothing else aside():
            self._limit.sleep(secs)

    def _wait(self, state: tenacity.RetryCallState) -> float:
        error = state.outcome.exception() if state.outcome is not None else None
        return max(getattr(error, "pause_secs", None) or 0.0, self._backoff(state))

    def _without_secrets(self, text: str) -> str:
        for secret in self._secrets:  # A service may send back what it was sent.
            text = text.replace(secret, "***")
        return text


class Post(HttpStep):
    """`http.post`: sends the record's bytes; what comes back is the record.

    Args:
        url: See `HttpStep`, whose further parameters it takes.
        content_type: Of the records.
        headers: Sent with each call.
        parameters: See `HttpStep`.
    """

    def __init__(
        self,
        url: str,
        *,
        content_type: str = "application/octet-stream",
        headers: Mapping[str, str] | None = None,
        **parameters: Any,
    ) -> None:
        super().__init__(url, headers={"content-type": content_type, **(headers or {})}, **parameters)


def _as_sent(secrets: set[str], url: httpx.URL) -> set[str]:
    """Returns secrets in each form in which a service may send them back: plain, quoted, as basic credentials."""
    quoted = {quote(secret) for secret in secrets for quote in (urllib.parse.quote, urllib.parse.quote_plus)}
    basic = {base64.b64encode(url.userinfo).decode(), url.userinfo.decode()} if url.userinfo else set()
    query = url.query.decode("ascii", "replace")
    return secrets | quoted | basic | {part for part in (query, *query.split("&")) if part}


def _check_number(name: str, value: Any, least: int, types: tuple[type, ...] = (int,)) -> None:
    if type(value) not in types or value < least:
        kind = "number" if float in types else "whole number"
        raise StepError(f"{name} must be a {kind} of at least {least}, got {value!r}")


def _check_types(types: Any) -> tuple[str, ...] | None:
    """Returns content types as they are compared."""
    if types is None:
        return None
    found = tuple(types.split()) if isinstance(types, str) else tuple(types)
    if not found or not all(isinstance(name, str) and _CONTENT_TYPE.fullmatch(name) for name in found):
        raise StepError(f"answer_types must be content types such as application/json or image/*, got {types!r}")
    return tuple(name.lower() for name in found)


def _check_url(url: str) -> str:
    """Returns a URL that can be called; the message does not show it, since it may hold secrets."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL:
        parsed = httpx.URL("")
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise StepError("url must be of the form http://HOST/PATH or https://HOST/PATH")
    return url


def _fill_in(what: str, value: Any, secrets: set[str]) -> str:
    """Puts environment variables in the place of their names, and adds their values to the secrets."""
    if not isinstance(value, str):
        raise StepError(f"{what} must be text, got {type(value).__name__}")

    def look_up(found: re.Match[str]) -> str:
        name = found[1]
        secret = os.environ.get(name, "").strip()
        if not secret:
            raise StepError(f"{what}: the environment variable {name} is not set")
        if not secret.isascii() or not secret.isprintable():
            raise StepError(f"{what}: the environment variable {name} has signs that cannot be sent")
        secrets.add(secret)
        return secret

    return _VARIABLE.sub(look_up, value)
