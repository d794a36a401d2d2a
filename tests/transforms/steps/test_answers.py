"""Answers that are kept: what an attempt that was killed was told, the next one does not ask for again."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fakes import WorstStore, make_batch, make_spec, make_task
from services import Service, status
from transforms.elements import JobSpec, RecordBatch
from transforms.journal import JOURNALS, forget_journal, stray_journals
from transforms.ledger import Ledger, commit
from transforms.steps.answers import may_keep
from transforms.steps.job_chain import load_chain
from transforms.store import LocalStore, Store

MODULE = """
import itertools, json, os, time
from transforms import BadRecordError, Drop
from transforms.steps.example import example_class, parse_example

def note(what, value):
    with open(LOG, "a") as file:
        file.write(json.dumps([what, repr(value)]) + "\\n")

def ask(value, suffix="!"):
    note("ask", value)
    return value + suffix.encode()

class Answer:
    '''Says something else each time.'''
    max_in_flight = 4
    def __call__(self, value):
        note("answer", value)
        return value + b" " + os.urandom(8).hex().encode()

def odd(value):
    note("odd", value)
    kind = value.split()[0].decode()
    if kind == "drop":
        return Drop("no_use")
    if kind == "none":
        return None
    if kind == "many":
        return many(value)
    if kind == "endless":
        return itertools.islice(many(value), 2)
    if kind == "bad":
        raise BadRecordError("bad_picture", "no picture")
    if kind == "later":
        raise BadRecordError("too_busy", "come again", may_pass=True)
    if kind == "error":
        raise ValueError("anything")
    if kind == "halfway":
        return halfway(value)
    return value

def many(value):
    for number in range(3):
        note("item", number)
        yield value + b" %d" % number
    yield Drop("the_rest")

def halfway(value):
    yield value
    raise BadRecordError("bad_page", "page 2")

def split(value):
    return iter(value.split(b"|"))

def to_list(value):
    note("to_list", value)
    return [value.decode(), {"n": (1, 2.5, None, True)}]

def from_list(values):
    return json.dumps(values).encode()

def to_object(value):
    note("to_object", value)
    return object()

def from_object(value):
    note("from_object", "an object")
    return b"done"

def to_example(value):
    note("to_example", value)
    example = example_class()()
    for name in ("z", "a", "m", "text"):
        example.features.feature[name].bytes_list.value.append(value)
    return example

def from_example(example):
    return example.SerializeToString(deterministic=True)

def slow(value):
    note("slow", value)
    time.sleep(SECS)
    return value + b"."

def count(value):
    note("count", value)
    return value
"""


@dataclasses.dataclass
class Asked:
    """Steps that note what they are asked, and attempts at the one shard of a job."""

    folder: Path
    store: Store

    def calls(self) -> Counter[str]:
        """What was asked since the last time."""
        path = self.folder / "log"
        lines = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return Counter(json.loads(line)[0] for line in lines)

    def spec(self, *steps: Any, **fields: Any) -> JobSpec:
        named = [{"call": f"asked_steps:{step}"} if isinstance(step, str) else step for step in steps]
        kept = [{**step, "journal": step.get("journal", True)} for step in named]
        return make_spec(self.store.root, steps=tuple(kept), import_paths=(str(self.folder),), **fields)

    @contextlib.contextmanager
    def attempt(self, spec: JobSpec, records: list[bytes], try_number: int = 1) -> Iterator[list[RecordBatch]]:
        """An attempt that is left as a killed one leaves it, with what it has done."""
        chain = load_chain(spec, self.store)
        done: list[RecordBatch] = []
        for sequence, batch in enumerate(batches(records)):
            done += chain.apply(dataclasses.replace(batch, sequence=sequence, try_number=try_number))
        # What is in flight comes to its end, as it would in the moment before the process is killed.
        with contextlib.closing(chain):
            yield done

    def finish(self, spec: JobSpec, records: list[bytes], try_number: int = 1) -> list[RecordBatch]:
        """An attempt that comes to its end."""
        with contextlib.closing(load_chain(spec, self.store)) as chain:
            done: list[RecordBatch] = []
            numbered = [*batches(records), make_batch(last=True)]
            for sequence, batch in enumerate(numbered):
                done += chain.apply(dataclasses.replace(batch, sequence=sequence, try_number=try_number))
            return done


def batches(records: list[bytes], size: int = 5) -> list[RecordBatch]:
    return [
        make_batch(part, positions=list(range(start, start + len(part))))
        for start in range(0, len(records), size)
        for part in [records[start : start + size]]
    ]


def outcome(done: list[RecordBatch]) -> Any:
    """What is the same in every run."""
    letters = [dataclasses.astuple(letter) for batch in done for letter in batch.dead]
    dropped: Counter[str] = Counter()
    for batch in done:
        dropped.update(batch.dropped)
    return [record for batch in done for record in batch.records], letters, dropped


@pytest.fixture(params=["local", "worst"])
def asked(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Asked:
    (tmp_path / "asked_steps.py").write_text(f"LOG = {str(tmp_path / 'log')!r}\nSECS = 0.06\n{MODULE}")
    monkeypatch.syspath_prepend(str(tmp_path))
    store = LocalStore(str(tmp_path / "out")) if request.param == "local" else WorstStore()
    return Asked(tmp_path, store)


@pytest.fixture(autouse=True)
def fresh_module() -> Iterator[None]:
    """Each test has a module of its own."""
    import sys

    yield
    sys.modules.pop("asked_steps", None)


RECORDS = [b"record %d" % number for number in range(12)]


def test_a_second_attempt_asks_only_for_what_the_first_was_not_told(asked: Asked) -> None:
    spec = asked.spec("ask")
    with asked.attempt(spec, RECORDS[:7]):
        pass
    assert asked.calls() == {"ask": 7}
    done = asked.finish(spec, RECORDS)
    assert asked.calls() == {"ask": 5}
    assert outcome(done) == ([record + b"!" for record in RECORDS], [], {})
    assert [batch.journalled for batch in done if batch.last] == [True]


def test_what_was_told_first_counts_though_the_service_says_something_else_now(asked: Asked) -> None:
    spec = asked.spec("Answer")
    first = outcome(asked.finish(spec, RECORDS[:9]))[0]
    assert outcome(asked.finish(spec, RECORDS))[0][:9] == first
    assert asked.calls() == {"answer": 12}


ODD = [b"drop 1", b"none 2", b"many 3", b"endless 4", b"bad 5", b"later 6", b"error 7", b"halfway 8", b"plain 9"]


def test_everything_a_step_may_do_is_kept_but_failures_that_may_pass(asked: Asked) -> None:
    spec = asked.spec("odd")
    undisturbed = outcome(asked.finish(asked.spec("odd", plan_id="plan-b"), ODD))
    asked.calls()
    with asked.attempt(spec, ODD) as done:
        assert [letter[4] for letter in outcome(done)[1]] == ["bad_picture", "too_busy", "exception", "bad_page"]
    assert asked.calls() == {"odd": 9, "item": 5}
    again = outcome(asked.finish(spec, ODD))
    assert asked.calls() == {"odd": 2}  # The one that may pass, and what may be a fault of the machine.
    assert without_frames(again) == without_frames(undisturbed)
    assert undisturbed[2] == {"no_use": 1, "returned_none": 1, "the_rest": 1}


def without_frames(found: Any) -> Any:
    records, letters, dropped = found
    return records, [[field for field in letter if "File" not in str(field)] for letter in letters], dropped


def test_the_same_values_of_one_record_are_asked_for_one_by_one(asked: Asked) -> None:
    spec = asked.spec({"call": "asked_steps:split", "journal": False}, "Answer")
    done = outcome(asked.finish(spec, [b"a|b|a", b"a"]))[0]
    assert outcome(asked.finish(spec, [b"a|b|a", b"a"]))[0] == done
    assert asked.calls() == {"answer": 4}
    assert [record.split()[0] for record in done] == [b"a", b"b", b"a", b"a"]
    assert len(set(done)) == 4


@pytest.mark.parametrize("steps", [("to_list", "from_list"), ("to_example", "from_example")])
def test_values_between_steps_are_kept(steps: tuple[str, str], asked: Asked) -> None:
    first, second = steps
    spec = asked.spec(first, {"call": f"asked_steps:{second}", "journal": False})
    with asked.attempt(spec, RECORDS) as done:
        before = outcome(done)
    assert asked.calls() == {first: 12}
    assert outcome(asked.finish(spec, RECORDS)) == before
    assert asked.calls() == {}


def test_what_has_no_plain_form_is_said_once_and_asked_for_again(
    asked: Asked, caplog: pytest.LogCaptureFixture
) -> None:
    spec = asked.spec("to_object", "from_object")
    with caplog.at_level(logging.WARNING, "gristmill"), asked.attempt(spec, RECORDS):
        pass
    assert asked.calls() == {"to_object": 12, "from_object": 12}
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1
    assert said[0].startswith("asked_steps:to_object returns values of type object, which are not kept")
    asked.finish(spec, RECORDS)
    # The second step was given something without a plain form: what the first makes of the record stands for it.
    assert asked.calls() == {"to_object": 12}


def test_what_is_not_kept_is_said_once_by_isolated_steps_too(asked: Asked, caplog: pytest.LogCaptureFixture) -> None:
    spec = asked.spec({"call": "asked_steps:to_object", "isolate": True}, "from_object")
    with caplog.at_level(logging.WARNING, "gristmill"):
        asked.finish(spec, RECORDS)
    assert [message.partition(" returns")[0] for message in caplog.messages] == ["asked_steps:to_object"]


class TestFingerprint:
    def test_a_changed_step_is_asked_again_and_its_neighbour_is_not(self, asked: Asked) -> None:
        with asked.attempt(asked.spec("ask", "count"), RECORDS):
            pass
        assert asked.calls() == {"ask": 12, "count": 12}
        changed = asked.spec({"call": "asked_steps:ask", "suffix": "?"}, "count")
        assert outcome(asked.finish(changed, RECORDS))[0] == [record + b"?" for record in RECORDS]
        assert asked.calls() == {"ask": 12, "count": 12}
        asked.finish(asked.spec("ask", {"call": "asked_steps:to_list", "journal": False}), RECORDS)
        assert asked.calls() == {"to_list": 12}

    def test_how_a_step_is_called_does_not_change_what_it_answers(self, asked: Asked) -> None:
        with asked.attempt(asked.spec("ask"), RECORDS):
            pass
        asked.calls()
        other = asked.spec({"call": "asked_steps:ask", "retries": 3, "max_per_sec": 1000.0})
        asked.finish(other, RECORDS)
        assert asked.calls() == {}

    def test_changed_source_text_of_a_step_is_another_step(self, asked: Asked) -> None:
        with asked.attempt(asked.spec("ask"), RECORDS):
            pass
        asked.calls()
        source = asked.folder / "asked_steps.py"
        source.write_text(source.read_text() + "\n# Mended.\n")
        asked.finish(asked.spec("ask"), RECORDS)
        assert asked.calls() == {"ask": 12}

    def test_another_record_at_the_same_place_is_another_question(self, asked: Asked) -> None:
        with asked.attempt(asked.spec("ask"), RECORDS):
            pass
        asked.calls()
        assert outcome(asked.finish(asked.spec("ask"), [b"other", *RECORDS[1:]]))[0][0] == b"other!"
        assert asked.calls() == {"ask": 1}


class TestWhichSteps:
    @pytest.mark.parametrize(
        ("step", "expected"),
        [
            ({"call": "m:f"}, True),
            ({"call": "m:f", "journal": False}, False),
            ({"use": "example.check"}, False),
            ({"use": "example.check", "journal": True}, True),
            ({"use": "example.check", "max_per_sec": 5.0}, True),
            ({"use": "http.post"}, True),
            ({"use": "http.post", "journal": False}, False),
        ],
    )
    def test_may_be_kept(self, step: dict[str, Any], expected: bool) -> None:
        assert may_keep(step) is expected

    def test_slow_steps_are_kept_from_the_first_record_on(self, asked: Asked) -> None:
        spec = asked.spec(
            {"call": "asked_steps:slow", "journal": "auto"}, {"call": "asked_steps:count", "journal": "auto"}
        )
        with asked.attempt(spec, RECORDS):
            pass
        assert asked.calls() == {"slow": 12, "count": 12}
        asked.finish(spec, RECORDS, try_number=2)
        assert asked.calls() == {"count": 12}

    def test_quick_steps_leave_no_journal(self, asked: Asked) -> None:
        spec = asked.spec({"call": "asked_steps:count", "journal": "auto"})
        with asked.attempt(spec, RECORDS * 10):
            pass
        done = asked.finish(spec, RECORDS)
        assert list(asked.store.list(JOURNALS)) == []
        assert [batch.journalled for batch in done if batch.last] == [False]

    def test_that_call_services_can_be_left_out(self, asked: Asked) -> None:
        spec = asked.spec({"call": "asked_steps:Answer", "journal": False})
        with asked.attempt(spec, RECORDS):
            pass
        assert list(asked.store.list(JOURNALS)) == []


class TestAttempts:
    def test_two_at_once_write_files_of_their_own_and_later_ones_use_the_first_of_two_answers(
        self, asked: Asked
    ) -> None:
        spec = asked.spec("Answer")
        with contextlib.ExitStack() as stack:
            chains = [stack.enter_context(contextlib.closing(load_chain(spec, asked.store))) for _ in range(2)]
            told: list[list[RecordBatch]] = [[], []]
            for sequence, batch in enumerate([*batches(RECORDS), make_batch(last=True)]):
                for chain, done in zip(chains, told, strict=True):
                    done += chain.apply(dataclasses.replace(batch, sequence=sequence))
        assert 12 < asked.calls()["answer"] <= 24  # The second may have been told some of what the first asked before.
        assert len(list(asked.store.list(JOURNALS))) == 2
        ways = [outcome(done)[0] for done in told]
        assert ways[0] != ways[1]
        assert [outcome(asked.finish(spec, RECORDS))[0] for _ in range(2)] == [ways[0]] * 2
        assert asked.calls() == {}

    def test_isolated_ones_use_the_same_journal(self, asked: Asked) -> None:
        spec = asked.spec("ask")
        with asked.attempt(spec, RECORDS[:4]):
            pass
        isolated = asked.spec({"call": "asked_steps:ask", "isolate": True})
        with asked.attempt(isolated, RECORDS[:8]):
            pass
        assert asked.calls() == {"ask": 8}
        assert outcome(asked.finish(spec, RECORDS))[0] == [record + b"!" for record in RECORDS]
        assert asked.calls() == {"ask": 4}

    def test_what_an_isolated_process_was_told_outlives_it(self, asked: Asked) -> None:
        (asked.folder / "dying_steps.py").write_text(
            "import os\ndef die(value):\n    if value == b'record 3!':\n        os._exit(7)\n    return value\n"
        )
        die = {"call": "dying_steps:die", "isolate": True, "journal": False}
        done = outcome(asked.finish(asked.spec("ask", die), RECORDS))
        assert [letter[4] for letter in done[1]] == ["process_died"]
        assert asked.calls() == {"ask": 12}
        mended = asked.spec("ask", {"call": "asked_steps:count", "isolate": True, "journal": False})
        assert outcome(asked.finish(mended, RECORDS))[0] == [record + b"!" for record in RECORDS]
        assert asked.calls() == {"count": 12}

    def test_damaged_journals_are_asked_around(self, asked: Asked, caplog: pytest.LogCaptureFixture) -> None:
        spec = asked.spec("odd")
        with asked.attempt(spec, ODD) as done:
            before = without_frames(outcome(done))
        [(name, size)] = asked.store.list(JOURNALS)
        data = bytearray((asked.store.get(name) or (b"", 0))[0])
        for at in range(100, size, 97):
            damaged = bytearray(data)
            damaged[at] ^= 16
            asked.store.put(name, bytes(damaged[: size - at % 7]))
            assert without_frames(outcome(asked.finish(spec, ODD))) == before
            for other in [one for one, _ in asked.store.list(JOURNALS) if one != name]:
                asked.store.delete(other)

    def test_a_journal_that_cannot_be_written_is_said_and_costs_nothing_else(
        self, asked: Asked, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def full(*_: Any) -> int:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("transforms.journal_file.JournalFile._create", full)
        with caplog.at_level(logging.WARNING, "gristmill"):
            done = asked.finish(asked.spec("ask"), RECORDS)
        assert outcome(done)[0] == [record + b"!" for record in RECORDS]
        assert [one for one in caplog.messages if "not kept in a journal any more" in one] == caplog.messages
        assert len(caplog.messages) == 1


class TestDeletion:
    def test_takes_all_files_of_the_shard_and_no_other(self, asked: Asked) -> None:
        spec = asked.spec("ask", num_shards=2)
        for _ in range(2):
            with asked.attempt(spec, RECORDS):
                pass
        asked.store.put(f"{JOURNALS}00001/x", b"")
        forget_journal(asked.store, spec, make_task())
        assert [name for name, _ in asked.store.list(JOURNALS)] == [f"{JOURNALS}00001/x"]

    def test_journals_of_committed_shards_and_of_none_are_strays(self, asked: Asked) -> None:
        spec = asked.spec("ask", num_shards=2)
        for name in ("00000/a", "00000/b", "00001/c", "7/d", "odd/e", "f"):
            asked.store.put(JOURNALS + name, b"")
        commit(asked.store, spec, Ledger(spec.plan_id, 0, (), None, None, (), {}, {}))
        found = sorted(stray_journals(asked.store, spec))
        assert found == [JOURNALS + name for name in ("00000/a", "00000/b", "7/d", "f", "odd/e")]

    def test_nobody_writes_on_once_the_journal_was_deleted(self, asked: Asked) -> None:
        if not isinstance(asked.store, LocalStore):
            return
        spec = asked.spec("ask")
        with contextlib.closing(load_chain(spec, asked.store)) as chain:
            for sequence, batch in enumerate(batches(RECORDS)):
                list(chain.apply(dataclasses.replace(batch, sequence=sequence)))
                forget_journal(asked.store, spec, make_task())
        assert list(asked.store.list(JOURNALS)) == []


@pytest.mark.parametrize(
    ("code", "calls"), [(400, 3), (422, 3), (401, 6), (403, 6), (404, 6), (302, 6), (503, 6), (429, 6)]
)
def test_of_the_failures_of_a_service_those_are_kept_that_are_verdicts_on_the_record(
    code: int, calls: int, service: Service, asked: Asked
) -> None:
    service.answer = status(code)
    spec = asked.spec({"use": "http.post", "url": service.url, "retries": 0, "max_in_flight": 2})
    before = without_frames(outcome(asked.finish(spec, RECORDS[:3])))
    assert [letter[4] for letter in before[1]] == [f"http_{code}"] * 3
    assert without_frames(outcome(asked.finish(spec, RECORDS[:3]))) == before
    assert len(service.seen) == calls
