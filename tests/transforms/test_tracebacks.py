"""Tracebacks: what whoever wrote the step looks for, in bounded text, and put into text once."""

from __future__ import annotations

import gc
import json
import linecache
import traceback
import weakref
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest

from transforms import tracebacks
from transforms.dead_letters import MAX_ERROR_CHARS, MAX_TRACEBACK_CHARS, JobInterrupted, describe_exception
from transforms.steps.chain import StepChain
from transforms.steps.load import Step
from transforms.tracebacks import format_frames


def caught(call: Callable[[], Any]) -> BaseException:
    """What a call raises, with a traceback that begins here."""
    try:
        call()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def of_step(step: Callable[[Any], Any], record: bytes = b"record") -> str:
    """The traceback in the dead letter of a record that a step fails on."""
    failure = StepChain([Step("step", step)], 1 << 20).run(record).failure
    assert failure is not None
    return failure.traceback


def lines_of(text: str) -> list[str]:
    """What is said besides the places themselves, and of these the names of the functions."""
    lines = [line for line in text.splitlines() if not line.startswith("    ")]
    return [line.rpartition(", in ")[2] if line.startswith("  File") else line for line in lines]


def parse(record: bytes) -> Any:
    return json.loads(record)


def wrap(record: bytes) -> Any:
    try:
        return parse(record)
    except ValueError as error:
        raise RuntimeError("cannot parse") from error


def fail_while_handling(record: bytes) -> Any:
    try:
        return parse(record)
    except ValueError:
        raise KeyError("other")  # noqa: B904  (the context is what is tested)


def fail_anew(record: bytes) -> Any:
    try:
        return parse(record)
    except ValueError:
        raise KeyError("other") from None


def recurse(depth: int) -> int:
    return recurse(depth + 1)


class TestFrames:
    def test_a_place_is_put_into_text_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        calls: list[int] = []
        format_tb = traceback.format_tb

        def counting(*arguments: Any) -> list[str]:
            calls.append(1)
            return format_tb(*arguments)

        tracebacks._places.clear()
        monkeypatch.setattr(traceback, "format_tb", counting)
        first = of_step(wrap)
        num_places = len(calls)
        assert {of_step(wrap, b"record %d" % number) for number in range(100)} == {first}
        assert len(calls) == num_places <= 12

    def test_shows_the_step_and_not_what_runs_it_nor_what_is_inside_python(self) -> None:
        shown = of_step(parse)
        assert lines_of(shown) == ["parse"]
        assert "return json.loads(record)" in shown
        assert __file__ in shown

    def test_is_what_python_says_of_these_frames(self) -> None:
        error = caught(lambda: recurse_once(3))
        assert format_frames(error, MAX_TRACEBACK_CHARS) == "".join(traceback.format_tb(error.__traceback__))

    def test_a_step_that_is_python_itself_shows_where_inside(self) -> None:
        assert lines_of(of_step(json.loads))[-1] == "raw_decode"

    def test_a_place_of_a_built_in_function_is_nothing(self) -> None:
        assert of_step(int) == ""

    def test_calls_of_one_line_are_told_apart(self) -> None:
        def pick(number: int) -> None:
            (fail_first() if number else fail_second())

        def fail_first() -> None:
            raise ValueError

        def fail_second() -> None:
            raise ValueError

        shown = [format_frames(caught(lambda number=number: pick(number)), MAX_TRACEBACK_CHARS) for number in (0, 1, 0)]
        assert shown[0] == shown[2] != shown[1]

    def test_the_middle_of_a_deep_recursion_is_left_out(self) -> None:
        shown = format_frames(caught(lambda: recurse(0)), MAX_TRACEBACK_CHARS)
        lines = lines_of(shown)
        assert lines[:3] == ["caught", "<lambda>", "recurse"]
        [gap] = [line for line in lines if "more frames" in line]
        assert int(gap.split()[1]) > 500
        assert lines[-1] == "recurse"
        assert len(lines) == 41
        assert len(shown) <= MAX_TRACEBACK_CHARS

    def test_a_line_of_a_megabyte_is_cut(self, tmp_path: Path) -> None:
        (tmp_path / "long.py").write_text(f"def fail(value):\n    raise ValueError('{'x' * 1_000_000}')\n")
        names: dict[str, Any] = {}
        exec(compile((tmp_path / "long.py").read_text(), str(tmp_path / "long.py"), "exec"), names)
        shown = of_step(names["fail"])
        linecache.clearcache()
        assert 'long.py", line 2, in fail' in shown
        assert len(shown) < 1_100

    def test_code_made_anew_for_each_record_is_neither_kept_nor_mistaken(self) -> None:
        def step(record: bytes) -> None:
            code = compile("raise ValueError", f"<record {record.decode()}>", "exec")
            made.append(weakref.ref(code))
            exec(code)

        made: list[weakref.ref[Any]] = []
        for number in range(tracebacks._MAX_PLACES + 100):
            assert f"<record {number}>" in of_step(step, b"%d" % number)
        gc.collect()
        assert len(tracebacks._places) <= tracebacks._MAX_PLACES
        assert not any(code() for code in made)


def recurse_once(depth: int) -> None:
    if depth:
        recurse_once(depth - 1)
    FunctionType(compile("raise ValueError", "<made>", "exec"), {})()


class TestChains:
    def test_a_cause_stands_in_front_of_what_it_caused(self) -> None:
        assert lines_of(of_step(wrap)) == [
            "wrap",
            "parse",
            "JSONDecodeError: Expecting value: line 1 column 1 (char 0)",
            "The exception above was the direct cause of the one below:",
            "wrap",
        ]

    def test_so_does_what_was_being_handled(self) -> None:
        assert lines_of(of_step(fail_while_handling))[-2:] == [
            "While the exception above was handled, the one below was raised:",
            "fail_while_handling",
        ]

    def test_raising_from_none_leaves_it_out(self) -> None:
        assert lines_of(of_step(fail_anew)) == ["fail_anew"]

    def test_a_thousand_tries_are_eight(self) -> None:
        def step(record: bytes) -> None:
            last: BaseException = ValueError("try 0")
            for number in range(1, 1000):
                following = ValueError(f"try {number}")
                following.__context__, last = last, following
            raise last

        shown = lines_of(of_step(step))
        assert [line for line in shown if line.startswith("ValueError")] == [
            f"ValueError: try {number}" for number in range(991, 999)
        ]

    def test_a_circle_of_causes_ends(self) -> None:
        def step(record: bytes) -> None:
            one, other = ValueError("one"), ValueError("other")
            one.__cause__, other.__cause__ = other, one
            raise one

        assert lines_of(of_step(step)) == [
            "ValueError: other",
            "The exception above was the direct cause of the one below:",
            "step",
        ]

    def test_members_of_a_group_follow_it(self) -> None:
        def step(record: bytes) -> None:
            raise ExceptionGroup("several", [caught(lambda: parse(record)), ExceptionGroup("in", [KeyError("k")])])  # type: ignore[list-item]

        assert lines_of(of_step(step)) == [
            "step",
            "Exception 1 of 2 in the group: JSONDecodeError: Expecting value: line 1 column 1 (char 0)",
            "caught",
            "<lambda>",
            "parse",
            "Exception 2 of 2 in the group: ExceptionGroup: in (1 sub-exception)",
            "Exception 1 of 1 in the group: KeyError: 'k'",
        ]

    def test_a_large_group_is_bounded_and_keeps_the_frames_of_the_step(self) -> None:
        def step(record: bytes) -> None:
            raise ExceptionGroup("many", [ValueError("x" * 10_000) for _ in range(10_000)])

        shown = of_step(step)
        assert len(shown) <= MAX_TRACEBACK_CHARS
        assert lines_of(shown)[0] == "step"
        assert shown.count(" of 10000 in the group: ValueError: x") == 8

    def test_the_line_that_python_could_not_read_is_shown(self) -> None:
        def step(record: bytes) -> None:
            exec(record.decode())

        assert of_step(step, b"a =  = 1").endswith('  File "<string>", line 1\n    a =  = 1\n')


class TestMessages:
    def test_notes_follow_the_text(self) -> None:
        def step() -> None:
            error = ValueError("text")
            error.add_note("in document 7")
            error.__notes__.append(8)  # type: ignore[arg-type]
            raise error

        assert describe_exception(caught(step))[1] == "text\nin document 7"

    def test_a_million_notes_are_bounded(self) -> None:
        error = ValueError("text")
        error.__notes__ = ["x" * 100] * 1_000_000
        assert len(describe_exception(error)[1]) < MAX_ERROR_CHARS

    def test_100_mb_of_text_are_cut(self) -> None:
        class HugeError(Exception):
            def __str__(self) -> str:
                return "é" * 50_000_000

        def step(record: bytes) -> None:
            raise RuntimeError("outer") from HugeError()

        assert describe_exception(HugeError())[1] == "é" * MAX_ERROR_CHARS
        assert f"HugeError: {'é' * 500}\n" in of_step(step)

    def test_text_of_a_class_that_raises_when_it_is_cut_is_text(self) -> None:
        class Text(str):
            def __getitem__(self, key: Any) -> str:
                raise RuntimeError

            def encode(self, *arguments: Any) -> bytes:
                raise RuntimeError

        class OddError(Exception):
            def __str__(self) -> str:
                return Text("odd ü")

        assert describe_exception(OddError())[:2] == (OddError.__qualname__, "odd ü")

    def test_a_cause_that_cannot_be_printed_costs_its_text_alone(self) -> None:
        class UnprintableError(Exception):
            def __str__(self) -> str:
                raise ValueError

        def step(record: bytes) -> None:
            raise RuntimeError("outer") from UnprintableError()

        shown = lines_of(of_step(step))
        assert shown[0].endswith("UnprintableError: (the exception's text cannot be printed)")
        assert shown[-1] == "step"

    def test_whoever_stops_the_job_meanwhile_is_heard(self) -> None:
        class StoppedError(Exception):
            def __str__(self) -> str:
                raise JobInterrupted

        def step(record: bytes) -> None:
            raise StoppedError

        with pytest.raises(JobInterrupted):
            of_step(step)
