"""Cores and memory as control groups of both versions leave them, nested ones too."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import jobs
from transforms import machine

MIB = 1 << 20
MOUNTS = {
    1: "35 31 0:32 {top} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    "36 31 0:33 {top} /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n",
    2: "41 31 0:38 {top} /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
}


def make_root(folder: Path, version: int, path: str, top: str, files: dict[str, str]) -> str:
    """Makes what a process in a control group sees of the system."""
    for name, text in {
        "proc/meminfo": "MemTotal: 64000000 kB\nMemAvailable:   32768000 kB\n",
        "proc/vmstat": "oom_kill 7\n",
        "proc/self/cgroup": f"4:memory:{path}\n1:cpu,cpuacct:{path}\n0::/\n" if version == 1 else f"0::{path}\n",
        "proc/self/mountinfo": MOUNTS[version].format(top=top),
        **files,
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return str(folder)


def test_the_least_of_nested_groups_of_version_2_counts(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/a"
    root = make_root(
        tmp_path,
        2,
        "/a/b",
        "/",
        {
            f"{group}/memory.max": f"{512 * MIB}\n",
            f"{group}/memory.current": f"{300 * MIB}\n",
            f"{group}/memory.stat": f"anon 1\ninactive_file {50 * MIB}\n",
            f"{group}/b/memory.max": "max\n",
            f"{group}/b/memory.high": f"{2048 * MIB}\n",
            f"{group}/b/memory.current": f"{300 * MIB}\n",
            f"{group}/b/memory.events": "low 0\noom 3\noom_kill 2\n",
            f"{group}/cpu.max": "100000 100000\n",
            f"{group}/b/cpu.max": "max 100000\n",
        },
    )
    assert machine.available_bytes(root) == 262 * MIB
    assert machine.describe_memory(root) == f"the memory limit here is 512 MiB (memory.max in {tmp_path / group})"
    assert machine.num_cores(root) == 1
    assert machine.count_memory_kills(root) == 2


def test_the_least_of_nested_groups_of_version_1_counts(tmp_path: Path) -> None:
    memory = "sys/fs/cgroup/memory"
    root = make_root(
        tmp_path,
        1,
        "/a/b",
        "/",
        {
            f"{memory}/memory.limit_in_bytes": "9223372036854771712\n",
            f"{memory}/a/memory.limit_in_bytes": f"{256 * MIB}\n",
            f"{memory}/a/memory.usage_in_bytes": f"{100 * MIB}\n",
            f"{memory}/a/memory.stat": f"inactive_file 5\ntotal_inactive_file {10 * MIB}\n",
            f"{memory}/a/b/memory.limit_in_bytes": "9223372036854771712\n",
            f"{memory}/a/b/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n",
            "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "50000\n",
            "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/cpu/a/b/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/a/b/cpu.cfs_period_us": "100000\n",
        },
    )
    assert machine.available_bytes(root) == 166 * MIB
    assert machine.num_cores(root) == 1
    assert machine.count_memory_kills(root) == 5


@pytest.mark.parametrize(("path", "top"), [("/docker/abc", "/docker/abc"), ("/elsewhere", "/docker"), ("/../..", "/")])
def test_a_container_that_sees_only_its_own_group_knows_its_limit(path: str, top: str, tmp_path: Path) -> None:
    limit = {"sys/fs/cgroup/memory.max": f"{256 * MIB}\n", "sys/fs/cgroup/memory.current": "0\n"}
    assert machine.available_bytes(make_root(tmp_path, 2, path, top, limit)) == 256 * MIB


def test_without_groups_the_machine_is_what_there_is(tmp_path: Path) -> None:
    root = make_root(tmp_path, 2, "/", "/", {})
    assert machine.available_bytes(root) == 32_768_000 << 10
    assert machine.num_cores(root) == len(os.sched_getaffinity(0))
    assert machine.describe_memory(root) == "32,000 MiB of memory are free on this machine"
    assert machine.count_memory_kills(root) == 7
    assert machine.available_bytes(str(tmp_path / "nothing")) == 1 << 40


def test_too_little_room_for_threads_is_told_with_its_limit() -> None:
    program = "from transforms.machine import check_threads; print(check_threads())"
    command = ["sh", "-c", 'ulimit -v 1000000; exec "$@"', "limited", sys.executable, "-P", "-c", program]
    done = subprocess.run(command, env=jobs.environment(), capture_output=True, text=True, check=True, timeout=60)
    assert "ulimit -v is 1000000" in done.stdout
    assert machine.check_threads() is None
