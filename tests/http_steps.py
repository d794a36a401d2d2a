"""What the tests of steps that call a service share."""

from __future__ import annotations

import pytest

from fakes import make_batch
from transforms.dead_letters import BadRecordError
from transforms.elements import RecordBatch
from transforms.steps.http import HttpStep

TIMEOUT_SECS = 20
QUICK = {"backoff_secs": 0.01, "timeout_secs": 10.0}


def failure(step: HttpStep, value: bytes) -> tuple[str, str]:
    """(reason, text) of the dead letter."""
    with pytest.raises(BadRecordError) as caught:
        step(value)
    return caught.value.reason, str(caught.value)


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
