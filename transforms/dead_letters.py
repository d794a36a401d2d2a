"""Dead letters on disk: one JSON line each, and their payloads beside them in an ArrayRecord.

A line is small and valid UTF-8 whatever the failure was: an exception that cannot be printed, 50 MB of text, half a
surrogate pair. It never holds the record itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from transforms.elements import DeadLetter, name_fields, name_from_fields, printable, to_json
from transforms.tracebacks import format_frames

MAX_ERROR_CHARS = 2_000
MAX_REASON_CHARS = 100
MAX_TRACEBACK_CHARS = 8_000
MAX_REASONS = 1_000
"""Reasons that a shard and a job count by themselves: more than anybody reads, in 100 KB of a ledger or report."""

OTHER_REASONS = "other_reasons"
"""What all others are counted under."""

_MAX_NOTES = 10
_UNPRINTABLE = "(the exception's text cannot be printed)"


class BadRecordError(ValueError):
    """Raise this in a step to dead-letter a record with a reason code of your own.

    Args:
        reason: Short snake_case code, counted in the report.
        message: What is wrong with the record.
        may_pass: Whether the record is not to blame, so that another run of the job should try it again.
    """

    def __init__(self, reason: str, message: str = "", *, may_pass: bool = False) -> None:
        super().__init__(message or reason)
        self.reason = reason
        self.may_pass = may_pass


class JobInterrupted(KeyboardInterrupt):
    """Somebody stops the job: the one exception that is not a record's fault, wherever it strikes."""


@dataclasses.dataclass(frozen=True, slots=True)
class Failure:
    """Why a step failed on a record, as text that crosses process borders whatever was raised.

    Attributes:
        step: Name of the step.
        reason: Short snake_case code.
        error_type: Class of the exception, or "".
        error: What happened, in words.
        traceback: Frames of the exception, or "".
    """

    step: str
    reason: str
    error_type: str = ""
    error: str = ""
    traceback: str = ""


def safe_text(text: str, max_chars: int) -> str:
    """Returns text that is valid UTF-8 and at most `max_chars` long."""
    clipped = str.__getitem__(text, slice(max_chars))  # A subclass may do anything when it is cut.
    if clipped.isascii():
        return clipped
    return clipped.encode("utf-8", "backslashreplace").decode("utf-8")[:max_chars]


def reason_code(reason: object) -> str:
    """Returns whatever a step gave as its reason as short text that can be counted."""
    try:
        text = safe_text(reason if isinstance(reason, str) else repr(reason), MAX_REASON_CHARS)
    except Exception:  # A reason whose repr fails must not cost more than its record: that is a dead letter already.
        text = ""
    return printable(text)[:MAX_REASON_CHARS] or "no_reason"


def describe_exception(error: BaseException) -> tuple[str, str, str]:
    """Returns (class name, message, frames) of any exception, also of one whose `__str__` raises.

    Raises:
        JobInterrupted: Somebody stops the job meanwhile.
    """
    return (
        _described(lambda: safe_text(type(error).__qualname__, MAX_ERROR_CHARS), "Exception"),
        _described(lambda: _message(error), _UNPRINTABLE),
        _described(lambda: safe_text(format_frames(error, MAX_TRACEBACK_CHARS), MAX_TRACEBACK_CHARS), ""),
    )


def _described(describe: Callable[[], str], otherwise: str) -> str:
    """Returns a text that code of the exception has a hand in, whatever that code does."""
    try:
        return describe()
    except JobInterrupted:
        raise
    except BaseException:
        return otherwise


def _message(error: BaseException) -> str:
    """Returns the text of an exception, and the notes that were added to it."""
    message = safe_text(str(error), MAX_ERROR_CHARS)
    notes = getattr(error, "__notes__", None)
    if not isinstance(notes, list):
        return message
    texts = [safe_text(note, MAX_ERROR_CHARS) for note in notes[:_MAX_NOTES] if isinstance(note, str)]
    return "\n".join([message, *texts])[:MAX_ERROR_CHARS]


def to_failure(error: BaseException, step: str) -> Failure:
    """Returns what a step's exception says, as text only."""
    error_type, message, frames = describe_exception(error)
    reason = "memory" if isinstance(error, MemoryError) else "exception"
    if isinstance(error, BadRecordError):
        try:
            reason = reason_code(error.reason)
        except Exception:  # A subclass may compute its reason, or have none.
            reason = "no_reason"
    return Failure(step, reason, error_type, message, frames)


def from_failure(failure: Failure, source: str, position: int, payload: bytes) -> DeadLetter:
    """Returns the dead letter of a source record that a step failed on."""
    return DeadLetter(
        source,
        position,
        len(payload),
        failure.step,
        failure.reason,
        failure.error_type,
        failure.error,
        failure.traceback,
        payload,
    )


def to_line(letter: DeadLetter, payload_index: int | None, max_payload_bytes: int) -> bytes:
    """Returns the line of a dead letter.

    Args:
        letter: The dead letter.
        payload_index: Number of its payload in the payload file, None when it has none.
        max_payload_bytes: Where payloads are cut.

    Returns:
        UTF-8 JSON with a line end. A line stands for one record read and one record dead.
    """
    if letter.carried is not None:
        fields = {**letter.carried, "attempts": letter.attempts, "payload_index": payload_index}
        return to_json(fields)
    num_bytes = None if letter.payload is None else len(letter.payload)
    fields = {
        **name_fields("source", letter.source),
        "position": letter.position,
        **{key: _safe_value(value) for key, value in letter.extra.items()},
        "length": letter.length,
        **({} if letter.records_estimate is None else {"records_estimate": letter.records_estimate}),
        "step": safe_text(letter.step, MAX_ERROR_CHARS),
        "reason": reason_code(letter.reason),
        "error_type": safe_text(letter.error_type, MAX_ERROR_CHARS),
        "error": safe_text(letter.error, MAX_ERROR_CHARS),
        "traceback": safe_text(letter.traceback, MAX_TRACEBACK_CHARS),
        "attempts": letter.attempts,
        "payload_index": payload_index,
        "payload_bytes": num_bytes,
        "payload_truncated": num_bytes is not None and num_bytes > max_payload_bytes,
    }
    return to_json(fields)


_LINE_FIELDS = {field.name for field in dataclasses.fields(DeadLetter)}
_LINE_FIELDS |= {"source_base64", "payload_index", "payload_bytes", "payload_truncated"}


def from_fields(fields: dict[str, Any], payload: bytes | None) -> DeadLetter:
    """Returns the dead letter of a line, which it carries; the inverse of `to_line`."""
    texts = {name: fields[name] for name in ("step", "reason", "error_type", "error", "traceback")}
    return DeadLetter(
        name_from_fields("source", fields),
        fields["position"],
        fields["length"],
        **texts,
        payload=payload,
        extra={name: value for name, value in fields.items() if name not in _LINE_FIELDS},
        attempts=fields["attempts"],
        carried=fields,
        records_estimate=fields.get("records_estimate"),
    )


_SINGLE = {"record_too_large", "empty_file"}


def estimate_records(letters: list[DeadLetter], record_bytes: float) -> None:
    """Estimates how many records were in what the reader could not read.

    Args:
        letters: Letters; those of single records and those that are carried along stay as they are.
        record_bytes: Mean bytes of a record by the plan, so that no cut and no batch changes it; 0 if unknown.
    """
    if not record_bytes:
        return
    for letter in letters:
        is_kept = letter.payload is not None or letter.carried is not None
        if letter.step == "read" and not is_kept and letter.reason not in _SINGLE and "row" not in letter.extra:
            letter.records_estimate = max(1, round(letter.length / record_bytes))


def _safe_value(value: object) -> object:
    return safe_text(value, MAX_ERROR_CHARS) if isinstance(value, str) else value
