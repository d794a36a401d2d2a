"""Keeps what expensive steps return in the journal of the shard, and takes it from there. No Beam here.

An answer is found again by the record (its input and its position there), by what the step was given, and by the
step itself: its parameters, the source text of its module, and the versions of the libraries. So a changed step is
asked again, and a step whose neighbours have changed is not.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import logging
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from transforms.dead_letters import BadRecordError, Failure
from transforms.journal_file import KEY_BYTES, Frame
from transforms.journal_values import NotPlainError, decode, encode
from transforms.shard_journal import ShardJournal
from transforms.steps.load import Step, source_digest
from transforms.steps.options import OPTION_NAMES, split_options

_LOGGER = logging.getLogger("gristmill")

SLOW_SECS = 0.05
"""A step that takes so long for a record is expensive: three orders of magnitude more than keeping its answer."""

_FIRST_WATCHED = 32
"""Records of which the time is taken at the beginning; later on it is one a batch, since a look costs as much as
a cheap step."""

_STRETCH = 16
"""Records between two looks whether a step has turned out to be slow."""

_HOW = (*OPTION_NAMES, "max_in_flight", "backoff_secs")
"""Parameters that say how a step is called, and do not change what it answers."""

_OF_THE_RECORD = ("http_400", "http_413", "http_414", "http_415", "http_422", "http_request", "http_response_too_large")
"""What a service says of the record. All else that begins with http_ may be mended without the record: a credential, a
bill, an address, a service that is down."""

_NOT_OF_THE_RECORD = ("empty_answer", "unexpected_content")
"""Pages of a login or of maintenance, in the place of an answer."""

_PACKAGES = ("gristmill", "array-record")
_SERVICES = ("http.post",)
_PLACE = struct.Struct("<QqQ")  # Input, position, how often the step was given the same value for this record.
_VALUE, _FAILURE, _ITEMS = b"v", b"f", b"i"
_OFFSET = struct.Struct("<Q")


class KnownFailureError(Exception):
    """A step failed on this value before, and would again.

    Attributes:
        failure: What it was.
    """

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.error)
        self.failure = failure


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Where a record comes from, and the journal of its shard.

    Attributes:
        journal: The journal.
        source: Index of its input.
        position: Its position there.
    """

    journal: ShardJournal
    source: int
    position: int


def may_keep(step: dict[str, Any]) -> bool:
    """Whether the config of a step lets its answers be kept; for "auto" the step itself decides in the end."""
    options, _ = split_options(step)
    if options.journal != "auto":
        return options.journal
    return "call" in step or options.max_per_sec is not None or step["use"] in _SERVICES


class Answers:
    """What is kept of the answers of a chain; used by several threads.

    Args:
        steps: The steps, ready to run.
        config: The same as in the config.
    """

    def __init__(self, steps: list[Step], config: Iterable[dict[str, Any]]) -> None:
        self._steps: list[_KeptStep | None] = [None] * len(steps)
        self._calls = [step.call for step in steps]
        self._watched = 0
        self._state = _State()
        config = list(config)
        if not any(map(may_keep, config)):
            return
        prints = [_fingerprint(step) for step in config]
        for number, (step, fields) in enumerate(zip(steps, config, strict=True)):
            if may_keep(fields):
                before = b"".join(prints[:number])
                self._steps[number] = _KeptStep(step, prints[number], before, self._state)

    @property
    def may_keep(self) -> bool:
        """Whether any answer may be kept."""
        return any(self._steps)

    @property
    def keep(self) -> bool:
        """Whether there are steps whose answers are kept, by now."""
        return self._state.keeps

    def places(self, source: int, positions: Sequence[int], journal: ShardJournal | None) -> Iterator[Place | None]:
        """Yields for each record of a batch where it comes from; None where nothing is kept of it.

        Args:
            source: Index of their input.
            positions: Their positions there.
            journal: The journal of their shard, None where nothing is to be kept.
        """
        if journal is None or not self.may_keep:
            return itertools.repeat(None, len(positions))
        return itertools.chain.from_iterable(self._stretches(source, positions, journal))

    def _stretches(
        self, source: int, positions: Sequence[int], journal: ShardJournal
    ) -> Iterator[Iterable[Place | None]]:
        """Yields the places of a few records at a time: a single one may cost less than a generator's turn."""
        watched = len(positions) if not journal.is_empty else max(1, _FIRST_WATCHED - self._watched)
        self._watched += len(positions)
        yield (Place(journal, source, position) for position in positions[:watched])
        for start in range(watched, len(positions), _STRETCH):
            stretch = positions[start : start + _STRETCH]
            if self._state.keeps:
                yield (Place(journal, source, position) for position in stretch)
            else:
                yield itertools.repeat(None, len(stretch))

    def about(self, place: Place, record: bytes) -> RecordAnswers:
        """Returns the calls for one record.

        Args:
            place: Where it comes from.
            record: The record.
        """
        return RecordAnswers(self._steps, self._calls, place, record)


@dataclasses.dataclass(slots=True)
class _State:
    """What all steps of a chain share.

    Attributes:
        keeps: Whether answers of one of them are kept.
    """

    keeps: bool = False


def _surely_kept(step: Step) -> bool:
    in_flight = step.attribute("max_in_flight")
    return step.options.journal is True or step.options.max_per_sec is not None or isinstance(in_flight, int)


@functools.cache
def _versions() -> bytes:
    """Returns the versions of the libraries that touch records."""
    import importlib.metadata  # Takes longer to import than a process for isolated steps takes to start.

    found = []
    for package in _PACKAGES:
        try:
            found.append(importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            found.append("not installed")
    return json.dumps(found).encode()


def _fingerprint(step: dict[str, Any]) -> bytes:
    """Returns a digest of a step: taken when it is loaded, since its source may be changed at any time later."""
    fields = {key: value for key, value in step.items() if key not in _HOW}
    text = json.dumps([fields, source_digest([step])], sort_keys=True, default=str)
    return hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=KEY_BYTES).digest()


def _is_of_the_record(error: BaseException, reason: str) -> bool:
    """Whether a failure is a verdict on the record, which would be the same the next time."""
    if not isinstance(error, BadRecordError) or getattr(error, "may_pass", False) or reason in _NOT_OF_THE_RECORD:
        return False
    return not reason.startswith("http_") or reason in _OF_THE_RECORD


class _KeptStep:
    """A step whose answers may be kept.

    Attributes:
        name: Of the step.
        fingerprint: What tells it from a step that would answer something else.
        before: The fingerprints of the steps in front of it.
        is_kept: Whether its answers are kept: from the beginning, or once it has turned out to be slow.
    """

    def __init__(self, step: Step, fingerprint: bytes, before: bytes, state: _State) -> None:
        self.name = step.name
        self.fingerprint = fingerprint
        self.before = before
        self.is_kept = _surely_kept(step)
        self._state = state
        state.keeps |= self.is_kept
        self._secs = 0.0
        self._calls = 0
        self._warned = False

    def took(self, secs: float, calls: int = 1) -> None:
        """Takes note of how long a call took, or, as part of no further call, an item of the iterator it returned."""
        if not self.is_kept:
            self._secs += secs
            self._calls += calls
            if self._secs > SLOW_SECS * self._calls:
                self.is_kept = self._state.keeps = True

    def cannot_keep(self, error: NotPlainError) -> None:
        """Says once that an answer is not kept."""
        if not self._warned:
            self._warned = True
            _LOGGER.warning(
                "%s returns values of type %s, which are not kept in the journal: a job that was killed calls it again "
                "for the shards that were not committed",
                self.name,
                error,
            )


class RecordAnswers:
    """The calls of the steps for one record: each answer comes from the journal, or goes there.

    Args:
        steps: Those whose answers may be kept, None for others.
        calls: The calls of all steps.
        place: Where the record comes from.
        record: The record.

    Attributes:
        calls: The calls to make in their place.
    """

    __slots__ = ("_failed", "_given", "_journal", "_record", "_source", "calls")

    def __init__(
        self, steps: list[_KeptStep | None], calls: list[Callable[[Any], Any]], place: Place, record: bytes
    ) -> None:
        self._journal = place.journal
        self._source = (place.source, place.position)
        self._record = record
        self._given: dict[bytes, int] = {}
        self._failed: tuple[BaseException, bytes | None] | None = None
        self.calls = [
            call if kept is None else self._make_call(kept, call) for kept, call in zip(steps, calls, strict=True)
        ]

    def _make_call(self, kept: _KeptStep, call: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda value: self._ask(kept, call, value)

    def failed(self, error: BaseException, failure: Failure) -> None:
        """Keeps the failure of the record, if the step was sure that the record is to blame.

        Args:
            error: What the chain ended with.
            failure: The same in words.
        """
        culprit, key = self._failed or (None, None)
        if culprit is error and key is not None and _is_of_the_record(error, failure.reason):
            body = _FAILURE + json.dumps(dataclasses.astuple(failure)).encode()
            self._journal.put(key, self._source, body)

    def _ask(self, kept: _KeptStep, call: Callable[[Any], Any], value: Any) -> Any:
        key = None
        if kept.is_kept or not self._journal.is_empty:
            key = self._key(kept, value)
            found = self._journal.find(key, self._source)
            if found is not None:
                # Damaged, or a message whose class nobody has imported: then the step is asked again.
                with contextlib.suppress(ValueError):
                    return self._answer_of(found)
        return self._ask_step(kept, call, value, key)

    def _ask_step(self, kept: _KeptStep, call: Callable[[Any], Any], value: Any, key: bytes | None) -> Any:
        started = time.perf_counter()
        try:
            answer = call(value)
        except BaseException as error:
            self._failed = (error, key if kept.is_kept else None)
            raise
        finally:
            kept.took(time.perf_counter() - started)
        if key is None and kept.is_kept and type(value) is bytes:  # It was slow just now, and cannot have changed that.
            key = self._key(kept, value)
        if isinstance(answer, Iterator):
            return self._keep_items(kept, key, answer)
        return answer if key is None or not kept.is_kept else self._keep(kept, key, answer)

    def _key(self, kept: _KeptStep, value: Any) -> bytes:
        """Returns the key of an answer."""
        digest = hashlib.blake2b(kept.fingerprint, digest_size=KEY_BYTES)
        digest.update(_versions())
        if type(value) is bytes:
            digest.update(b"b")
            digest.update(value)
        else:
            try:
                digest.update(b"v" + encode(value))
            except NotPlainError:  # Such as a picture: then it is what the steps before made of the record.
                digest.update(b"r" + kept.before)
                digest.update(self._record)
        asked = digest.digest()
        times = self._given.get(asked, 0)
        self._given[asked] = times + 1
        digest.update(_PLACE.pack(*self._source, times))
        return digest.digest()

    def _keep(self, kept: _KeptStep, key: bytes, answer: Any) -> Any:
        try:
            data = encode(answer)
        except NotPlainError as error:
            kept.cannot_keep(error)
            return answer
        self._journal.put(key, self._source, _VALUE + data)
        return answer if type(answer) is bytes else decode(data)  # So that both ways give the very same value.

    def _keep_items(self, kept: _KeptStep, key: bytes | None, items: Iterator[Any]) -> Iterator[Any]:
        """Passes the items of an iterator on and keeps them; they count once the last one is there."""
        offsets: list[int] | None = [] if kept.is_kept and key is not None else None
        while True:
            started = time.perf_counter()
            try:
                item = next(items)
            except StopIteration:
                break
            except BaseException as error:
                self._failed = (error, key if kept.is_kept else None)
                raise
            finally:
                kept.took(time.perf_counter() - started, calls=0)
            if offsets is not None:
                offset, item = self._keep_item(kept, item)
                if offset is None:
                    offsets = None
                else:
                    offsets.append(offset)
            yield item
        if offsets is not None and key is not None:
            self._journal.put(key, self._source, _ITEMS + b"".join(map(_OFFSET.pack, offsets)))

    def _keep_item(self, kept: _KeptStep, item: Any) -> tuple[int | None, Any]:
        try:
            data = encode(item)
        except NotPlainError as error:
            kept.cannot_keep(error)
            return None, item
        return self._journal.put_item(self._source, data), item if type(item) is bytes else decode(data)

    def _answer_of(self, frame: Frame) -> Any:
        """Returns what a step answered.

        Raises:
            KnownFailureError: It failed.
            ValueError: The frame cannot be used.
        """
        kind, data = frame.body[:1], frame.body[1:]
        if kind == _VALUE:
            return decode(data)
        if kind == _FAILURE:
            raise KnownFailureError(Failure(*json.loads(data)))
        if kind != _ITEMS or len(data) % _OFFSET.size:
            raise ValueError("no answer")
        offsets = [offset for (offset,) in _OFFSET.iter_unpack(data)]
        for offset in offsets:  # All of them before the first is passed on: then it is too late to ask the step.
            self._item(frame, offset)
        return (self._item(frame, offset) for offset in offsets)

    def _item(self, frame: Frame, offset: int) -> Any:
        data = self._journal.item(frame, offset)
        if data is None:
            raise ValueError("an item of the journal is damaged")
        return decode(data)
