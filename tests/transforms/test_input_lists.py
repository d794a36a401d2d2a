"""`@lists` of names: their order, their separators, what is missing, and a million of them."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from listings import LITERAL_NAMES, enter_folder, errors_of, listed, names_of, write
from transforms.inputs import InputPatternError, read_inputs

corpus = pytest.fixture(enter_folder, name="corpus")


class TestLists:
    def test_one_name_a_line_in_the_order_of_the_lines(self, corpus: Path) -> None:
        write(corpus, *LITERAL_NAMES)
        names = [name for name in reversed(LITERAL_NAMES) if "\n" not in name]
        Path("list").write_bytes(b"\n".join(map(os.fsencode, names)))
        assert names_of("@list") == names

    def test_line_ends_of_other_systems_and_empty_lines_are_no_names(self, corpus: Path) -> None:
        write(corpus, "a.rec", "b.rec")
        Path("list").write_bytes(b"\r\nb.rec\r\n\r\n\na.rec\n\n")
        assert names_of("@list") == ["b.rec", "a.rec"]

    def test_names_may_be_separated_by_nul(self, corpus: Path) -> None:
        write(corpus, *LITERAL_NAMES)
        for end in (b"", b"\0"):
            Path("list").write_bytes(b"\0".join(map(os.fsencode, reversed(LITERAL_NAMES))) + end)
            assert names_of("@list") == LITERAL_NAMES[::-1]

    def test_relative_names_count_from_the_working_directory(self, corpus: Path) -> None:
        write(corpus, "a.rec", "lists/a.rec")
        Path("lists/list").write_text("a.rec\n")
        assert names_of("@lists/list") == ["a.rec"]

    def test_patterns_and_folders_in_a_list_are_sorted_where_they_stand(self, corpus: Path) -> None:
        names = [f"{number:03d}.rec" for number in range(60)]
        shuffled = random.Random(7).sample(names, 60)
        write(corpus, *(f"p/{name}" for name in shuffled), *(f"d/{name}" for name in shuffled), "z.rec", "a.rec")
        Path("list").write_text("z.rec\np/*.rec\nd\na.rec\n")
        expected = ["z.rec", *(f"p/{name}" for name in names), *(f"d/{name}" for name in names), "a.rec"]
        assert names_of("@list") == expected

    def test_missing_names_are_errors_on_their_line(self, corpus: Path) -> None:
        write(corpus, "a.rec", "b.rec")
        Path("list").write_text("b.rec\nmissing.rec\nno/folder/x.rec\n*.nothing\nempty/\na.rec\nb.rec/below\n")
        assert errors_of("@list") == {
            "b.rec": None,
            "missing.rec": "not_found",
            "no/folder/x.rec": "not_found",
            "*.nothing": "not_found",
            "empty": "not_found",
            "a.rec": None,
            "b.rec/below": "not_found",
        }
        assert list(errors_of("@list"))[:3] == ["b.rec", "missing.rec", "no/folder/x.rec"]

    def test_too_long_a_name_is_an_error_on_its_line(self, corpus: Path) -> None:
        write(corpus, "a.rec")
        Path("list").write_text(f"a.rec\n{'x' * 300}\n{'y/' * 3000}z\n")
        errors = errors_of("@list")
        assert len(errors) == 3
        assert errors["a.rec"] is None
        assert all(reason is not None for name, reason in errors.items() if name != "a.rec")

    def test_zeros_far_down_in_a_list_are_an_error_on_their_line(self, corpus: Path) -> None:
        """As a crash leaves them at the end of a file."""
        write(corpus, "a.rec")
        lines = [f"missing-{number:06d}" for number in range(6000)]
        Path("list").write_bytes("\n".join(["a.rec", *lines]).encode() + b"\n" + bytes(100) + b"\n")
        _, inputs = listed("@list")
        assert [source.error is None for source in inputs[:6001]] == [True] + [False] * 6000

    def test_list_that_cannot_be_read_is_refused_by_name(self, corpus: Path) -> None:
        for name in ("missing", "folder"):
            os.makedirs("folder", exist_ok=True)
            with pytest.raises(InputPatternError, match=f"@{name}"):
                listed(f"@{name}")

    def test_line_that_begins_with_at_is_a_name_so_no_list_can_name_itself(self, corpus: Path) -> None:
        write(corpus, "a.rec", "@b.rec")
        Path("list").write_text("a.rec\n@list\n@b.rec\n")
        assert errors_of("@list") == {"a.rec": None, "@list": "not_found", "@b.rec": None}

    def test_pattern_or_folder_that_holds_nothing_is_an_error_on_its_line(self, corpus: Path) -> None:
        write(corpus, "a.rec")
        os.makedirs("empty")
        Path("list").write_text("*.nothing\nempty\nempty/*\na.rec\n")
        errors = errors_of("@list")
        assert errors.pop("a.rec") is None
        assert sorted(errors) == ["*.nothing", "empty", "empty/*"]
        assert None not in errors.values()

    def test_empty_list_is_refused_by_name(self, corpus: Path) -> None:
        Path("list").write_bytes(b"")
        with pytest.raises(InputPatternError, match="@list"):
            listed("@list")


PROGRAM = """
    import resource, sys, time
    from transforms.inputs import list_inputs
    started = time.perf_counter()
    listing = list_inputs(["@" + sys.argv[1]], sys.argv[2], "/nowhere/out")
    seconds = time.perf_counter() - started
    peak = int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) << 10
    print(listing.num_inputs, listing.num_duplicates, round(seconds, 1), peak)
"""


def list_in_subprocess(names: Path, inputs: Path) -> tuple[int, int, int]:
    """Lists in a process of its own; returns (inputs, duplicates, peak bytes) and prints the time."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), str(names), str(inputs)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    num_inputs, num_duplicates, seconds, peak = done.stdout.split()
    print(f"{num_inputs} inputs listed in {seconds} s, {int(peak) >> 20} MiB")
    return int(num_inputs), int(num_duplicates), int(peak)


@pytest.mark.slow
class TestScale:
    def test_a_million_names_cost_under_300_mb(self, corpus: Path) -> None:
        with open("list", "w") as out:
            out.writelines(
                f"{number % 1000:03d}/shard-{number:09d}-of-001000000.tfrecord\n" for number in range(1_000_000)
            )
            out.write("000/shard-000000000-of-001000000.tfrecord\n")
        num_inputs, num_duplicates, peak = list_in_subprocess(corpus / "list", corpus / "inputs.jsonl")
        assert (num_inputs, num_duplicates) == (1_000_000, 1)
        assert peak < 300_000_000
        with open("inputs.jsonl", "rb") as lines:
            for index, source in read_inputs(lines):
                assert source.error is not None
                assert source.error[0] == "not_found"
                if index > 100_000:
                    break

    def test_twenty_thousand_files_cost_no_more(self, corpus: Path) -> None:
        names = [f"in/{number % 50:02d}/{number:06d}.rec" for number in range(20_000)]
        for name in names[:50]:
            os.makedirs(os.path.dirname(name))
        for name in names:
            Path(name).write_bytes(b"x")
        Path("list").write_text("\n".join(reversed(names)))
        num_inputs, num_duplicates, peak = list_in_subprocess(corpus / "list", corpus / "inputs.jsonl")
        assert (num_inputs, num_duplicates) == (20_000, 0)
        assert peak < 150_000_000
        with open("inputs.jsonl", "rb") as lines:
            assert [os.path.relpath(source.name) for _, source in read_inputs(lines)] == names[::-1]
