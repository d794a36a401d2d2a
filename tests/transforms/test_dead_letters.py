"""Dead letters: a line is small valid UTF-8 JSON, whatever the failure was."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transforms.dead_letters import (
    MAX_ERROR_CHARS,
    MAX_TRACEBACK_CHARS,
    BadRecordError,
    describe_exception,
    from_failure,
    safe_text,
    to_failure,
    to_line,
)
from transforms.elements import DeadLetter, name_from_fields

MAX_LINE_BYTES = 100_000
any_text = st.text(st.characters(codec=None), max_size=100)  # Lone surrogates included.


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class ExitingError(Exception):
    def __str__(self) -> str:
        raise SystemExit(3)


class NumberError(Exception):
    def __str__(self) -> str:
        return 7  # type: ignore[return-value]


class NamelessError(BadRecordError):
    """A user's subclass that does not call its base."""

    def __init__(self) -> None:
        pass


class LazyReasonError(BadRecordError):
    def __init__(self) -> None:
        Exception.__init__(self, "text")

    @property
    def reason(self) -> str:  # type: ignore[override]
        raise RuntimeError("no reason")


SURROGATE_ERROR = type("SurrogateError", (Exception,), {"__qualname__": "Surrogate\ud800Error"})

ODD_ERRORS = [
    ValueError("plain"),
    ValueError(),
    ValueError("x" * 50_000_000),
    ValueError("half a pair \ud83d, and \udcff"),
    ValueError("zero \0 and line \n ends \u2028 \x85"),
    UnicodeDecodeError("utf-8", b"\xff" * 100, 3, 4, "invalid"),
    KeyError(("a", 1)),
    UnprintableError(),
    ExitingError(),
    NumberError(),
    NamelessError(),
    LazyReasonError(),
    SURROGATE_ERROR("text"),
    BadRecordError("too_short", "3 words"),
    BadRecordError("x" * 50_000_000),
    BadRecordError("half\ud83d"),
    BadRecordError(404),  # type: ignore[arg-type]
    BadRecordError(None),  # type: ignore[arg-type]
    SystemExit(1),
    KeyboardInterrupt(),
    GeneratorExit(),
    RecursionError("deep"),
    MemoryError(),
    ExceptionGroup("several", [ValueError("1"), KeyError("2")]),
]


def raised(error: BaseException) -> BaseException:
    """The error with a traceback."""
    try:
        raise error
    except BaseException as caught:
        return caught


def fields_of(line: bytes) -> dict[str, Any]:
    """The fields of a line, which must be one line of UTF-8 JSON."""
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    return dict(json.loads(line.decode("utf-8")))


@pytest.mark.parametrize("error", ODD_ERRORS, ids=[f"{n}-{type(error).__name__}" for n, error in enumerate(ODD_ERRORS)])
class TestOddExceptions:
    def test_line_is_small_and_utf8(self, error: BaseException) -> None:
        letter = from_failure(to_failure(raised(error), "clean"), "/in/a", 7, b"payload")
        line = to_line(letter, 0, 100)
        assert len(line) < MAX_LINE_BYTES
        fields = fields_of(line)
        assert (fields["source"], fields["position"], fields["step"]) == ("/in/a", 7, "clean")
        assert fields["error_type"].startswith(type(error).__qualname__[:9])

    def test_reason_is_text_that_can_be_counted_and_sorted(self, error: BaseException) -> None:
        letter = from_failure(to_failure(raised(error), "clean"), "/in/a", 7, b"payload")
        assert isinstance(letter.reason, str)
        assert len(letter.reason) <= MAX_ERROR_CHARS
        letter.reason.encode("utf-8")


class TestFromException:
    def test_bad_record_error_carries_its_reason(self) -> None:
        letter = from_failure(
            to_failure(raised(BadRecordError("too_short", "3 words")), "clean"), "/in/a", 7, b"payload"
        )
        assert (letter.reason, letter.error, letter.error_type) == ("too_short", "3 words", "BadRecordError")
        assert (letter.payload, letter.length, letter.position) == (b"payload", 7, 7)

    def test_bad_record_error_without_a_message_says_its_reason(self) -> None:
        assert str(BadRecordError("too_short")) == "too_short"

    def test_other_exceptions_have_the_reason_exception(self) -> None:
        letter = from_failure(to_failure(raised(KeyError("text")), "clean"), "/in/a", 7, b"payload")
        assert (letter.reason, letter.error_type, letter.error) == ("exception", "KeyError", "'text'")

    def test_traceback_names_the_place_and_is_capped_at_its_end(self) -> None:
        def deep(count: int) -> None:
            if count:
                deeper(count - 1)
            raise ValueError("at the bottom")

        def deeper(count: int) -> None:
            deep(count)

        with pytest.raises(ValueError, match="at the bottom") as caught:
            deep(200)
        _, _, frames = describe_exception(caught.value)
        assert len(frames) <= MAX_TRACEBACK_CHARS
        assert frames.rstrip().endswith('raise ValueError("at the bottom")')

    def test_unprintable_one_still_says_its_class(self) -> None:
        error_type, message, frames = describe_exception(raised(UnprintableError()))
        assert error_type == "UnprintableError"
        assert "cannot be printed" in message
        assert "raise error" in frames


class TestToLine:
    def test_has_every_field_of_the_contract(self) -> None:
        letter = DeadLetter("/in/a", 12, 40, "read", "data_checksum", "", "bad sum", "", b"x" * 24, extra={"row": 3})
        assert fields_of(to_line(letter, 5, 100)) == {
            "source": "/in/a",
            "position": 12,
            "row": 3,
            "length": 40,
            "step": "read",
            "reason": "data_checksum",
            "error_type": "",
            "error": "bad sum",
            "traceback": "",
            "attempts": 1,
            "payload_index": 5,
            "payload_bytes": 24,
            "payload_truncated": False,
        }

    def test_without_payload_its_fields_are_null(self) -> None:
        fields = fields_of(to_line(DeadLetter("/in/a", 0, 0, "read", "not_found"), None, 100))
        assert (fields["payload_index"], fields["payload_bytes"], fields["payload_truncated"]) == (None, None, False)

    @pytest.mark.parametrize(("size", "truncated"), [(0, False), (100, False), (101, True)])
    def test_says_when_the_payload_was_cut(self, size: int, truncated: bool) -> None:
        fields = fields_of(to_line(DeadLetter("/in/a", 0, 0, "read", "x", payload=bytes(size)), 0, 100))
        assert (fields["payload_bytes"], fields["payload_truncated"]) == (size, truncated)

    def test_never_holds_the_payload(self) -> None:
        letter = DeadLetter("/in/a", 0, 0, "read", "x", payload=b"secret-payload" * 1000)
        assert b"secret" not in to_line(letter, 0, 1 << 20)

    @pytest.mark.parametrize("name", ["/in/ünï", "/in/line\nend", "/in/\udcff\udcfe", "/in/\u2028", '/in/"quoted"'])
    def test_source_can_be_recovered_exactly(self, name: str) -> None:
        assert name_from_fields("source", fields_of(to_line(DeadLetter(name, 0, 0, "read", "x"), None, 100))) == name

    @given(any_text, any_text, any_text, any_text, any_text, any_text)
    def test_any_text_anywhere_gives_utf8(
        self, step: str, reason: str, error_type: str, error: str, frames: str, member: str
    ) -> None:
        letter = DeadLetter("/in/a", 0, 0, step, reason, error_type, error, frames, extra={"member": member})
        fields_of(to_line(letter, None, 100))

    def test_long_text_of_a_reader_is_capped(self) -> None:
        big = "x" * 10_000_000
        letter = DeadLetter("/in/a", 0, 0, "read", "x", error=big, traceback=big)
        assert len(to_line(letter, None, 100)) < MAX_LINE_BYTES


class TestSafeText:
    @given(any_text, st.integers(0, 50))
    def test_is_utf8_within_its_bound(self, text: str, max_chars: int) -> None:
        safe = safe_text(text, max_chars)
        assert len(safe) <= max_chars
        safe.encode("utf-8")

    def test_good_text_stays_as_it_is(self) -> None:
        assert safe_text("grüße 山 \U0001f600\0\n", 100) == "grüße 山 \U0001f600\0\n"
