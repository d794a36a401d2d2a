"""The same bytes whatever runs the pipeline, and wherever it is started."""

from __future__ import annotations

import gzip
import random
import re
from pathlib import Path

import pytest

import jobs

STEPS = """
import re

def clean(value):
    n = int(re.search(rb"-(\\d{6}) ", value).group(1))
    if n % 97 == 0:
        return None
    if n % 101 == 0:
        raise ValueError("odd %d" % n)
    if n % 50 == 0:
        return iter([value + b"a", value + b"b"])
    return value
"""

RUNNERS = {
    "in_process": ["--workers", "0"],
    "one_worker": ["--workers", "1"],
    "four_workers": ["--workers", "4"],
    "bundle_based": ["--runner=BundleBasedDirectRunner"],
    "every_bundle_twice": ["--runner=BundleBasedDirectRunner", "--direct_runner_bundle_repeat=1"],
}


def damaged_corpus(folder: Path, records: int, gzip_bytes: int) -> Path:
    """Six files: flipped bits everywhere, damage beside every range boundary, one cut, one compressed."""
    for file in range(5):
        data = bytearray(b"".join(jobs.frame(jobs.payload(file, i)) for i in range(records)))
        rng = random.Random(file)
        for _ in range(8):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path = folder / "in" / f"f{file}.tfrecord"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data[: len(data) * 3 // 4] if file == 4 else data)
    payloads = (jobs.payload(5, i) * 10 for i in range(10**6))  # Below 10**6 for the steps that look for six digits.
    with gzip.GzipFile(folder / "in/f5.tfrecord.gz", "wb", compresslevel=1, mtime=0) as stream:
        written = 0
        while written < gzip_bytes:
            piece = b"".join(jobs.frame(next(payloads)) for _ in range(1000))
            stream.write(piece)
            written += len(piece)
    total = sum(path.stat().st_size for path in (folder / "in").iterdir())
    damage_at_cuts(folder / "in", total, 12)
    return folder / "in"


def damage_at_cuts(folder: Path, total: int, num_shards: int) -> None:
    """Flips a byte just before and just after where equal cuts of the plain files lie."""
    before = 0
    for path in sorted(folder.glob("*.tfrecord")):
        data = bytearray(path.read_bytes())
        for cut in (total * k // num_shards - before for k in range(num_shards)):
            for near in (cut - 3, cut + 2):
                if 0 <= near < len(data):
                    data[near] ^= 0x10
        path.write_bytes(data)
        before += len(data)


def run_everywhere(folder: Path, source: Path, runners: dict[str, list[str]]) -> dict[str, dict[str, str]]:
    (folder / "steps_of_runner_test.py").write_text(STEPS)
    found = {}
    for name, flags in runners.items():
        command = ["convert", "--input", source / "*", "--output", folder / name, "--format", "tfrecord"]
        changes = ["--step", "steps_of_runner_test:clean", "--shards", "12", "--set", "dead_letters.max_fraction=0.5"]
        done = jobs.spawn([*command, *changes, *flags], cwd=folder)
        assert done.returncode == 0, done.stderr[-3000:]
        found[name] = jobs.content(folder / name)
    return found


def test_every_runner_writes_the_same_bytes(tmp_path: Path) -> None:
    source = damaged_corpus(tmp_path, records=3000, gzip_bytes=300_000)
    found = run_everywhere(tmp_path, source, RUNNERS)
    assert len(found["in_process"]) > 12
    for name, content in found.items():
        assert content == found["in_process"], name


@pytest.mark.slow
def test_every_runner_writes_the_same_bytes_of_a_large_gzip(tmp_path: Path) -> None:
    source = damaged_corpus(tmp_path, records=30_000, gzip_bytes=200 << 20)
    found = run_everywhere(tmp_path, source, RUNNERS)
    for name, content in found.items():
        assert content == found["in_process"], name


@pytest.mark.parametrize("flags", [["--workers", "0"], ["--workers", "2"]])
def test_folders_of_the_same_names_in_the_working_directory_do_not_shadow_ours(
    flags: list[str], tmp_path: Path
) -> None:
    for package in ("pipelines", "transforms"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("raise RuntimeError('not this one')")
    (tmp_path / "own_step.py").write_text("def upper(value):\n    return value.upper()\n")
    jobs.write_tfrecord(tmp_path / "in/a.tfrecord", [jobs.payload(0, i) for i in range(50)])
    done = jobs.spawn(
        ["convert", "--input", "in/*", "--output", "out", "--step", "own_step:upper", *flags], cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert jobs.records(tmp_path / "out") == [jobs.payload(0, i).upper() for i in range(50)]


MODES = [
    ["--direct_running_mode=multi_threading", "--direct_num_workers=4"],
    pytest.param(["--workers", "12"], marks=pytest.mark.slow),
]


@pytest.mark.parametrize("workers", MODES)
def test_other_local_modes_convert_all_records(workers: list[str], tmp_path: Path) -> None:
    for file in range(8):
        jobs.write_tfrecord(tmp_path / f"in/{file}.tfrecord", [jobs.payload(file, i) for i in range(50)])
    done = jobs.spawn(["convert", "--input", "in/*", "--output", "out", "--shards", "24", *workers], cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert jobs.records(tmp_path / "out") == [jobs.payload(file, i) for file in range(8) for i in range(50)]


def test_framing_nested_in_payloads_is_not_taken_for_records(tmp_path: Path) -> None:
    inner = [b"".join(jobs.frame(jobs.payload(file, i)) for i in range(200)) for file in range(30)]
    jobs.write_tfrecord(tmp_path / "in/nested.tfrecord", inner)
    contents = []
    for flags in (["--workers", "0"], ["--workers", "2"]):
        out = tmp_path / f"out{flags[1]}"
        done = jobs.spawn(["convert", "--input", "in/*", "--output", out, "--shards", "50", *flags], cwd=tmp_path)
        assert done.returncode == 0, done.stderr[-3000:]
        assert jobs.records(out) == inner
        assert jobs.dead_letters(out) == []
        contents.append(jobs.content(out))
    assert contents[0] == contents[1]


def test_many_tiny_files_need_few_file_descriptors(tmp_path: Path) -> None:
    for i in range(500):
        jobs.write_tfrecord(tmp_path / f"in/{i % 7}/f{i:05d}.tfrecord", [b"%06d" % i])
    limited = ["bash", "-c", 'ulimit -n 64; exec "$@"', "bash"]
    done = jobs.spawn(
        ["convert", "--input", "in/*/*.tfrecord", "--output", "out", "--shards", "16", "--workers", "0"],
        cwd=tmp_path,
        prefix=limited,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert sorted(jobs.records(tmp_path / "out")) == [b"%06d" % i for i in range(500)]


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_run_says_nothing_but_its_own_lines(workers: str, tmp_path: Path) -> None:
    jobs.write_tfrecord(tmp_path / "in/a.tfrecord", [b"%06d" % i for i in range(100)])
    command = ["convert", "--input", "in/*", "--output", "out", "--shards", "2", "--workers", workers]
    done = jobs.spawn(command, cwd=tmp_path)
    lines = [line.split(" INFO ", 1) for line in done.stderr.splitlines()]
    assert all(re.fullmatch(r"[-\d]{10} [:\d]{8},\d{3}", line[0]) for line in lines), done.stderr
    assert lines[-1][1] == "done: 100 records written, 0 dropped, 0 dead letters"
    assert done.stdout.splitlines()[0] == "", done.stdout


def test_full_disk_ends_cleanly_and_the_same_command_finishes(tmp_path: Path) -> None:
    rng = random.Random(0)
    payloads = [rng.randbytes(4096) for _ in range(3000)]
    jobs.write_tfrecord(tmp_path / "in/d.tfrecord", payloads)
    command: list[str | Path] = ["convert", "--input", "in/*", "--output", "out", "--shards", "2"]
    limited = ["bash", "-c", "trap '' XFSZ; ulimit -f 4096; exec \"$@\"", "bash"]
    for flags in (["--workers", "0"], ["--workers", "2"]):
        done = jobs.spawn([*command, *flags], cwd=tmp_path, prefix=limited)
        assert done.returncode == 1, done.stderr[-3000:]
        assert "File too large" in done.stderr
        assert "the same command goes on" in done.stderr
        assert "Traceback" not in done.stderr
        assert "Traceback" in (tmp_path / "out/_gristmill/job.log").read_text()
        assert jobs.shards(tmp_path / "out") == []
        assert not [name for name in jobs.tree(tmp_path / "out") if "attempts" in name]
    assert jobs.spawn(command, cwd=tmp_path).returncode == 0
    assert jobs.records(tmp_path / "out") == payloads


def test_a_second_command_is_told_who_holds_the_directory(tmp_path: Path) -> None:
    from transforms.job_lock import JobLock
    from transforms.store import LocalStore

    jobs.write_tfrecord(tmp_path / "in/a.tfrecord", [b"a"])
    with JobLock(LocalStore(str(tmp_path / "out"))):
        done = jobs.spawn(["convert", "--input", "in/*", "--output", "out"], cwd=tmp_path)
    assert done.returncode == 1
    assert "being written by process" in done.stderr
    assert jobs.spawn(["convert", "--input", "in/*", "--output", "out"], cwd=tmp_path).returncode == 0
