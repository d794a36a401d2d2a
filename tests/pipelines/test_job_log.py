"""The log of a job: what steps say about each record is bounded, what the job says itself is not."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from pipelines.job_log import log_to_job
from transforms.store import LocalStore

WORKERS_TEXT = 'severity: WARN\nmessage: "record {number}"\nlog_location: "/steps/{module}.py:7"\nthread: "T"\n'


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(str(tmp_path))


def lines(store: LocalStore) -> list[str]:
    return (Path(store.root) / "_gristmill/job.log").read_text().splitlines()


def test_what_one_place_says_is_kept_a_thousand_times_and_the_last_says_so(store: LocalStore) -> None:
    with log_to_job(store):
        for number in range(5_000):
            logging.getLogger("my_steps").warning("record %d", number)
        logging.getLogger("my_steps").warning("another place")
    found = lines(store)
    assert [line.split(" WARNING ")[1] for line in found[:999]] == [f"record {number}" for number in range(999)]
    assert re.search(r" record 999 \(what .*test_job_log\.py:\d+ says from here on is left out\)$", found[999])
    assert [line.split(" WARNING ")[1] for line in found[1000:]] == ["another place"]


def test_what_workers_say_is_told_apart_by_its_own_place(store: LocalStore) -> None:
    with log_to_job(store):
        for module in ("one", "two"):
            for number in range(1_500):
                logging.getLogger().warning(WORKERS_TEXT.format(number=number, module=module))
    text = "\n".join(lines(store))
    for module in ("one", "two"):
        assert text.count(f'"/steps/{module}.py:7"') == 1_000
        assert text.count(f"what /steps/{module}.py:7 says from here on is left out") == 1


def test_code_made_anew_for_each_record_is_one_place(store: LocalStore) -> None:
    with log_to_job(store):
        for number in range(3_000):
            logging.getLogger().handle(
                logging.LogRecord("x", logging.WARNING, f"<record {number}>", 1, "text", None, None)
            )
    assert len(lines(store)) == 2_000


def test_a_message_of_megabytes_is_cut(store: LocalStore) -> None:
    with log_to_job(store):
        logging.getLogger("my_steps").warning("x" * 10_000_000)
    [line] = lines(store)
    assert line.endswith(" WARNING " + "x" * 10_000 + " ...")


def test_what_the_job_says_itself_is_all_kept(store: LocalStore) -> None:
    with log_to_job(store):
        for number in range(1_500):
            logging.getLogger("gristmill").info("%d shards", number)
    assert len(lines(store)) == 1_500
