"""State files are read whole or said to be damaged, by the name that the output directory has for them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from transforms.generations import see_as
from transforms.state import (
    CONFIG_NAME,
    MANIFEST_NAME,
    REPORT_NAME,
    StateError,
    check_inputs,
    open_inputs,
    plan_header,
    read_config,
    read_manifest,
    read_report,
)
from transforms.store import LocalStore

DAMAGED = [b"", b"{", b"{}", b"[]", b"null", b"7", b'"text"', b"\xff\xfe", b'{"plan_id": "x"}']


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(str(tmp_path))


def test_what_is_not_there_is_none(store: LocalStore) -> None:
    assert (read_manifest(store), read_report(store), read_config(store)) == (None, None, {})


@pytest.mark.parametrize("data", DAMAGED)
def test_damage_is_no_report_and_no_config_and_names_the_manifest(data: bytes, store: LocalStore) -> None:
    for name in (MANIFEST_NAME, REPORT_NAME, CONFIG_NAME):
        store.put(name, data)
    assert (read_report(store), read_config(store)) == (None, {})
    with pytest.raises(StateError, match=r"manifest.json of .* cannot be read; delete manifest.json, and"):
        read_manifest(store)


@pytest.mark.parametrize("shards", [None, {}, [7], [{}], [{"name": "x"}]])
def test_a_manifest_whose_shards_are_none_is_damaged(shards: object, store: LocalStore) -> None:
    store.put(MANIFEST_NAME, json.dumps({"plan_id": "p", "num_records": 1, "shards": shards}).encode())
    with pytest.raises(StateError):
        read_manifest(store)


def test_a_generation_is_named_by_its_folder(store: LocalStore) -> None:
    seen = see_as(store, "g003")
    with pytest.raises(FileNotFoundError):
        plan_header(seen)
    seen.put("_gristmill/plan.jsonl", b"{}\n")
    with pytest.raises(StateError, match=r"_gristmill/g003/plan.jsonl of .* is not a plan"):
        plan_header(seen)
    with pytest.raises(StateError, match=r"_gristmill/g003/inputs.jsonl of .* is missing"), open_inputs(seen):
        pass


def test_a_list_that_is_not_the_planned_one_is_refused(store: LocalStore) -> None:
    store.put("_gristmill/inputs.jsonl", b"one\ntwo\n")
    planned = {"fingerprint": {"inputs": "63f6bb2a0ce1b1ff6e4ae3b4a8fa4d4a"}, "spec": {"replay": None}}
    with pytest.raises(StateError, match="is not the list that its plan was made of"):
        check_inputs(store, planned)
    check_inputs(store, {**planned, "spec": {"replay": "g001"}})  # Its fingerprint is that of the dead letters.
