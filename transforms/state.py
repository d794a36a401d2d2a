"""What a job keeps beside its ledgers: reads it, or says which file is damaged and what mends it. No Beam here.

What a store has taken is whole, so damage comes from elsewhere: a full disk under a copy, an editor, `rm`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator
from typing import Any, BinaryIO

from transforms.generations import base_name
from transforms.input_table import without_checksum
from transforms.plan_file import INPUTS_NAME, PLAN_NAME, DamagedLineError, read_header
from transforms.store import Store

CONFIG_NAME = "_gristmill/config.json"
MANIFEST_NAME = "manifest.json"
REPORT_NAME = "_gristmill/report.json"

FROM_COPY = "put it back from a copy, or convert everything again with --overwrite"
_MANIFEST_KEYS = {"plan_id", "num_records", "shards"}
_CONFIG_KEYS = {"source", "steps", "write", "dead_letters"}
_REPORT_KEYS = {
    *("status", "message", "plan_id", "shards", "seconds", "records_written", "records_dead"),
    *("dead_by_reason", "dropped_by_reason"),
}


class StateError(ValueError):
    """A file that a job keeps, such as its plan or manifest, is gone or damaged; the message says the way out."""

    def __init__(self, store: Store, name: str, what: str, cure: str = FROM_COPY) -> None:
        super().__init__(f"{base_name(store, name)} of {store.root} {what}; {cure}")


def read_manifest(store: Store) -> dict[str, Any] | None:
    """Returns the manifest, None when there is none.

    Raises:
        StateError: It is damaged.
    """
    manifest = _read(store, MANIFEST_NAME, _MANIFEST_KEYS)
    if manifest is None:
        return None
    if not manifest or not _names_shards(manifest["shards"]):
        cure = f"delete {MANIFEST_NAME}, and the same convert command again writes it anew"
        raise StateError(store, MANIFEST_NAME, "cannot be read", cure)
    return manifest


def _names_shards(shards: Any) -> bool:
    return isinstance(shards, list) and all(isinstance(one, dict) and {"name", "bytes"} <= one.keys() for one in shards)


def read_report(store: Store) -> dict[str, Any] | None:
    """Returns the report that the last run wrote, None when there is none that can be read."""
    return _read(store, REPORT_NAME, _REPORT_KEYS) or None


def read_config(store: Store) -> dict[str, Any]:
    """Returns the resolved config of the last run, empty when there is none that can be read."""
    return _read(store, CONFIG_NAME, _CONFIG_KEYS) or {}


def _read(store: Store, name: str, needed: set[str]) -> dict[str, Any] | None:
    """Returns an object, empty when it is damaged, None when there is none."""
    found = store.get(name)
    if found is None:
        return None
    try:
        fields = json.loads(found[0])
    except ValueError:
        return {}
    return fields if isinstance(fields, dict) and fields.keys() >= needed else {}


def plan_header(store: Store) -> dict[str, Any]:
    """Returns the header of the plan.

    Raises:
        FileNotFoundError: There is no plan.
        StateError: What stands there is none.
    """
    try:
        with store.open(PLAN_NAME) as plan:
            return read_header(plan)
    except ValueError as error:
        raise StateError(store, PLAN_NAME, str(error)) from error


def open_plan(store: Store) -> contextlib.AbstractContextManager[BinaryIO]:
    """Opens plan.jsonl of a job that is planned; see `open_inputs`."""
    return _open_lines(store, PLAN_NAME)


def open_inputs(store: Store) -> contextlib.AbstractContextManager[BinaryIO]:
    """Opens inputs.jsonl of a job that is planned.

    Raises:
        StateError: It is gone, or damaged where it is read.
    """
    return _open_lines(store, INPUTS_NAME)


@contextlib.contextmanager
def _open_lines(store: Store, name: str) -> Iterator[BinaryIO]:
    try:
        with store.open(name) as lines:
            yield lines
    except FileNotFoundError as error:
        raise StateError(store, name, "is missing") from error
    except DamagedLineError as error:
        raise StateError(store, name, str(error)) from error


def check_inputs(store: Store, header: dict[str, Any]) -> None:
    """Checks that inputs.jsonl is the list that a plan was made of: a cut one would pass for a shorter one.

    The list of a replay is not checked: its fingerprint is that of the dead letters.

    Args:
        store: The output directory as the job sees it.
        header: Header of the plan.

    Raises:
        StateError: It is another one.
    """
    if header["spec"]["replay"] is not None:
        return
    digest = hashlib.blake2b(digest_size=16)
    with open_inputs(store) as lines:
        for line in lines:
            digest.update(without_checksum(line))
    if digest.hexdigest() != header["fingerprint"]["inputs"]:
        raise StateError(store, INPUTS_NAME, "is not the list that its plan was made of")
