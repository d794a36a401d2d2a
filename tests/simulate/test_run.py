"""A small simulation from end to end, and the arithmetic of its costs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from simulate import report, run
from simulate.rates import Rates


def test_a_small_simulation_prints_all_it_promises(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "_SMALLER", (10,))
    flags = ["--files", "3000", "--bytes", "30GB", "--workers", "10", "--seed", "3", "--work", str(tmp_path)]
    assert run.main(flags) == 0
    printed = capsys.readouterr().out
    titles = re.findall(r"^([A-Z]{4,})", printed, re.MULTILINE)
    assert titles == ["CORPUS", "PLANNING", "BALANCE", "OPERATIONS", "ALONE", "COST"]
    assert "3,000 files, 30.0 GB (seed 3)" in printed
    planned = re.findall(r"^(\d[\d,]*)  .*  (\d[\d,]*)$", printed, re.MULTILINE)
    assert planned == [("300", "126"), ("3,000", "1,000")]
    assert len(re.findall(r"^(?:all alike|speeds differ|and |the same)", printed, re.MULTILINE)) == 5
    assert re.search(r"^all  .*  [1-9]\d*  .*\d\.\d\d$", printed, re.MULTILINE)
    assert list(tmp_path.iterdir()) == []


def test_the_cost_of_a_terabyte_can_be_followed() -> None:
    rates = Rates(
        compress_rate=100e6, copy_rate=400e6, download_rate=200e6, upload_rate=100e6, saving=0.6, open_secs=0.01,
        shard_requests=10, request_secs=0.02, vcpu_hour=0.06, memory_hour=0.004, disk_hour=0.001, memory=4, disk=20,
    )  # fmt: skip
    printed = report.cost_per_tb(rates, files=10_000, shards=1_000, operations_cost=0.05)
    opened, waited = "10,000 x 0.01 s = 100 s", "1,000 x 10 x 0.02 s = 200 s"
    assert [re.split(r"\s{2,}", line.strip()) for line in printed.splitlines()[2:]] == [
        ["read, check, write: 1 TB / rate", "/ 100 MB/s = 10,000 s", "/ 200 MB/s = 5,000 s"],
        ["upload: what is written / rate", "0.40 TB / 100 MB/s = 4,000 s", "1.00 TB / 100 MB/s = 10,000 s"],
        ["open files", opened, opened],
        ["small requests of shards", waited, waited],
        ["vCPU hours", "3.97", "4.25"],
        ["x vCPU $0.06", "$0.238", "$0.255"],
        ["x 4 GB x $0.004", "$0.064", "$0.068"],
        ["x 20 GB disk x $0.001", "$0.079", "$0.085"],
        ["operations", "$0.050", "$0.050"],
        ["together", "$0.43", "$0.46"],
    ]


@pytest.mark.parametrize(
    ("secs", "text"), [(5, "5.0 s"), (119, "119.0 s"), (120, "2.0 min"), (5399, "90.0 min"), (5400, "1.5 h")]
)
def test_times_have_the_unit_that_suits_them(secs: float, text: str) -> None:
    assert report.span(secs) == text
