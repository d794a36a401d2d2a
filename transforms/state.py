"""State files of a job that hold one JSON object: reads them, or says which is damaged and what mends it. No Beam here.

What a store has taken is whole, so damage comes from elsewhere: a full disk under a copy, an editor, `rm`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Collection, Iterator
from typing import Any, BinaryIO

from transforms.generations import base_name
from transforms.inputs import DamagedLineError
from transforms.plan_file import INPUTS_NAME, PLAN_NAME, read_header
from transforms.store import Store

CONFIG_NAME = "_gristmill/config.json"
MANIFEST_NAME = "manifest.json"
REPORT_NAME = "_gristmill/report.json"

FROM_COPY = "put it back from a copy, or convert everything again with --overwrite"
_PIECE_BYTES = 1 << 20
_MANIFEST_KEYS = {"plan_id", "num_records", "shards"}
_REPORT_KEYS = {"status", "message", "plan_id", "shards", "seconds", "records_written", "records_dead"}
_REPORT_KEYS |= {"dead_by_reason", "dropped_by_reason"}


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
    if manifest and not _names_shards(manifest["shards"]):
        manifest = {}
    if manifest == {}:
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
    return _read(store, CONFIG_NAME, {"source", "steps", "write", "dead_letters"}) or {}


def _read(store: Store, name: str, needed: Collection[str]) -> dict[str, Any] | None:
    """Returns an object, empty when it is damaged, None when there is none."""
    found = store.get(name)
    if found is None:
        return None
    try:
        fields = json.loads(found[0])
    except ValueError:
        return {}
    return fields if isinstance(fields, dict) and fields.keys() >= set(needed) else {}


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


@contextlib.contextmanager
def open_inputs(store: Store) -> Iterator[BinaryIO]:
    """Opens inputs.jsonl of a job that is planned.

    Raises:
        StateError: It is gone, or damaged where it is read.
    """
    try:
        with store.open(INPUTS_NAME) as lines:
            yield lines
    except FileNotFoundError as error:
        raise StateError(store, INPUTS_NAME, "is missing") from error
    except DamagedLineError as error:
        raise StateError(store, INPUTS_NAME, str(error)) from error


def check_inputs(store: Store, header: dict[str, Any]) -> None:
    """Checks that inputs.jsonl is the list that a plan was made of: a cut one would pass for a shorter one.

    Args:
        store: The output directory as the job sees it.
        header: Header of the plan, of a job that is no replay.

    Raises:
        StateError: It is another one.
    """
    digest = hashlib.blake2b(digest_size=16)
    with open_inputs(store) as lines:
        while piece := lines.read(_PIECE_BYTES):
            digest.update(piece)
    if digest.hexdigest() != header["fingerprint"]["inputs"]:
        raise StateError(store, INPUTS_NAME, "is not the list that its plan was made of")
