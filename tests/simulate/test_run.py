"""A small simulation from end to end, and the arithmetic of its costs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from simulate import report, run
from simulate.rates import Rates


def test_a_small_simulation_prints_all_it_promises(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--files", "3000", "--bytes", "30GB", "--workers", "10", "--seed", "3", "--work", str(tmp_path)]
    assert run.main(flags) == 0
    printed = capsys.readouterr().out
    titles = re.findall(r"^([A-Z]{4,})", printed, re.MULTILINE)
    assert titles == ["CORPUS", "PLANNING", "BALANCE", "OPERATIONS", "ALONE", "COST"]
    assert "3,000 files, 30.0 GB (seed 3)" in printed
    assert re.findall(r"^(\d[\d,]*)  .*  (\d[\d,]*)$", printed, re.MULTILINE) == [
        ("30", "2"),
        ("300", "12"),
        ("3,000", "112"),
    ]
    assert len(re.findall(r"^(?:all alike|speeds differ|and |the same)", printed, re.MULTILINE)) == 5
    assert re.search(r"^all  .*  [1-9]\d*  .*\d\.\d\d$", printed, re.MULTILINE)
    assert list(tmp_path.iterdir()) == []


def test_the_cost_of_a_terabyte_can_be_followed() -> None:
    rates = Rates(
        compress_rate=100e6, copy_rate=400e6, download_rate=200e6, upload_rate=100e6, saving=0.6, open_secs=0.01,
        shard_requests=10, request_secs=0.02, vcpu_hour=0.06, memory_hour=0.004, disk_hour=0.0001, memory=4, disk=20,
    )  # fmt: skip
    lines = report.cost_per_tb(rates, files=10_000, shards=1_000, operations_cost=0.05).splitlines()
    figures = [re.findall(r"[\d,.]+(?= s\b(?!.* s\b)|$)|\$[\d.]+$", line)[-1] for line in lines[2:]]
    compressed = (10_000 + 4_000 + 100 + 200) / 3600
    plain = (5_000 + 10_000 + 100 + 200) / 3600
    assert f"{compressed:.2f}" in lines[6]
    assert f"{plain:.2f}" in lines[6]
    assert lines[-1].split()[-2:] == [
        f"${hours * (0.06 + 4 * 0.004 + 20 * 0.0001) + 0.05:.2f}" for hours in (compressed, plain)
    ]
    assert len(figures) == 10


@pytest.mark.parametrize(
    ("secs", "text"), [(5, "5.0 s"), (119, "119.0 s"), (120, "2.0 min"), (5399, "90.0 min"), (5400, "1.5 h")]
)
def test_times_have_the_unit_that_suits_them(secs: float, text: str) -> None:
    assert report.span(secs) == text
