"""With array-record-beam-sdk beside us: its output is our input, and both write the same records."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import jobs

pytestmark = pytest.mark.sdk
SDK_CONVERT = Path(__file__).parent.parent / "bench" / "sdk_convert.py"


def test_what_the_sdk_wrote_is_resharded_without_loss(tmp_path: Path) -> None:
    payloads = [jobs.payload(file, i) for file in range(3) for i in range(100)]
    for file in range(3):
        jobs.write_tfrecord(tmp_path / f"in/f{file}.tfrecord", payloads[100 * file : 100 * file + 100])
    sdk = tmp_path / "sdk"
    sdk.mkdir()
    command = [sys.executable, SDK_CONVERT, "--input", tmp_path / "in/*", "--output", sdk, "--num-shards", "4"]
    subprocess.run(list(map(str, command)), check=True, timeout=300)
    ours, resharded = tmp_path / "ours", tmp_path / "resharded"
    assert jobs.convert("--input", tmp_path / "in", "--output", ours, "--shards", "4") == 0
    assert jobs.convert("--input", sdk, "--format", "array_record", "--output", resharded, "--shards", "2") == 0
    assert jobs.records(ours) == payloads
    assert sorted(jobs.records(resharded)) == sorted(payloads)
