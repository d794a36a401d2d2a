"""The library: the transforms that convert and clean a corpus, in the order data flows.

| stage | module | element |
|---|---|---|
| list and plan | `inputs`, `sample`, `plan`, `plan_file` | `ShardTask` |
| read | `read`, `shard_reader`, `formats/` | `RecordBatch` |
| clean | `steps/` | `RecordBatch` |
| write and commit | `write`, `shard_writer`, `ledger`, `store` | `ShardInfo` |
| publish and finish | `publish`, `finish`, `books`, `report` | the report |
| verify | `verify`, `check_shard`, `verify_shards` | `Found` |

The names below load on first use, so that what needs no Beam does not import it.
"""

from __future__ import annotations

import importlib
from typing import Any

_MODULE_OF = {
    "ApplySteps": "transforms.steps.apply",
    "BadRecordError": "transforms.dead_letters",
    "ConvertCorpus": "transforms.convert",
    "ConvertShards": "transforms.convert",
    "DeadLetter": "transforms.elements",
    "Drop": "transforms.steps",
    "JobSpec": "transforms.elements",
    "LocalStore": "transforms.store",
    "OutputError": "transforms.store",
    "Publish": "transforms.publish",
    "ReadPlan": "transforms.read",
    "ReadRecords": "transforms.read",
    "RecordBatch": "transforms.elements",
    "ShardInfo": "transforms.elements",
    "ShardTask": "transforms.elements",
    "Store": "transforms.store",
    "VerifyShards": "transforms.verify_shards",
    "WriteShards": "transforms.write",
    "register_store": "transforms.store",
}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return list(__all__)
