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


NAMES = ["a.rec", "b c.rec", "d/ü-山.rec"]


class TestListsOfOtherSystems:
    """What editors, spreadsheets and shells make of a list."""

    @pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
    @pytest.mark.parametrize("ends_with", [True, False])
    @pytest.mark.parametrize(
        "encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "bom utf-16-be"]
    )
    def test_encodings_and_line_ends_are_taken(self, corpus: Path, encoding: str, end: str, ends_with: bool) -> None:
        write(corpus, *NAMES)
        text = end.join(NAMES) + (end if ends_with else "")
        *mark, codec = encoding.split()
        Path("list").write_bytes((b"\xfe\xff" if mark else b"") + text.encode(codec))
        assert names_of("@list") == NAMES

    def test_a_long_list_in_utf_16_is_read_in_pieces(self, corpus: Path) -> None:
        write(corpus, "山.rec")
        Path("list").write_bytes(
            "\n".join(["山.rec", *(f"missing-{number}" for number in range(40_000))]).encode("utf-16")
        )
        listing, inputs = listed("@list")
        assert (listing.num_inputs, inputs[0].error) == (40_001, None)

    @pytest.mark.parametrize(
        "line", ["a.rec ", "a.rec\t", "  a.rec", "'a.rec'", '"a.rec"', "\ufeffa.rec", '\ufeff "a.rec" ']
    )
    def test_what_stands_around_a_name_is_taken_off(self, corpus: Path, line: str) -> None:
        write(corpus, "a.rec")
        Path("list").write_text(f"{line}\n")
        assert errors_of("@list") == {"a.rec": None}

    @pytest.mark.parametrize("name", ["a.rec ", " a.rec", "'a.rec'", '"a.rec"', "#a.rec", "# a", "\ufeffa.rec", "~"])
    def test_and_is_part_of_it_where_such_a_file_exists(self, corpus: Path, name: str) -> None:
        write(corpus, "a.rec", name)
        Path("list").write_text(f"{name}\na.rec\n")
        assert names_of("@list") == [name, "a.rec"]

    def test_quotes_that_a_spreadsheet_doubled(self, corpus: Path) -> None:
        write(corpus, 'the "a".rec')
        Path("list").write_text('"the ""a"".rec"\n')
        assert names_of("@list") == ['the "a".rec']

    def test_comments_and_blank_lines_are_no_names(self, corpus: Path) -> None:
        write(corpus, "a.rec", "b.rec")
        Path("list").write_text("# both of *.rec\n\n#b.rec\n  \na.rec\n  # more\n#\n")
        assert errors_of("@list") == {"a.rec": None}

    def test_a_list_of_zeros_between_has_no_comments(self, corpus: Path) -> None:
        write(corpus, "a.rec")
        Path("list").write_bytes(b"#gone.rec\0a.rec\0")
        assert errors_of("@list") == {"#gone.rec": "not_found", "a.rec": None}

    def test_names_of_odd_lengths_between_zeros_are_not_utf_16(self, corpus: Path) -> None:
        write(corpus, "abc", "d\n", "efghi")
        Path("list").write_bytes(b"abc\0d\n\0efghi\0")
        assert names_of("@list") == ["abc", "d\n", "efghi"]

    def test_patterns_and_folders_with_blanks_behind(self, corpus: Path) -> None:
        write(corpus, "p/a.rec", "d/b.rec")
        Path("list").write_text("p/*.rec  \nd/ \n*.nothing \n")
        assert errors_of("@list") == {"p/a.rec": None, "d/b.rec": None, "*.nothing": "not_found"}

    def test_home_folders(self, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        write(corpus, "home/a.rec", "~/b.rec")
        monkeypatch.setenv("HOME", str(corpus / "home"))
        Path("list").write_text("~/a.rec\n~/b.rec\n")
        assert errors_of("@list") == {"home/a.rec": None, "~/b.rec": None}

    @pytest.mark.parametrize(
        ("data", "why"),
        [
            ("a.rec".encode("utf-16-le"), "may be UTF-16"),
            (b"\xff\xfea\0\n\0\0\xd8\n\0", "not UTF-16"),
            ("a.rec\n".encode("utf-16")[:-1], "not UTF-16"),
            (b"a.rec\n" + b"x" * 100_000, "no list of names"),
            (b"a.rec\n" + b"x" * 5_000_000, "no list of names"),
            (("a.rec\n" + "x" * 100_000).encode("utf-16"), "no list of names"),
        ],
        ids=["no mark, no line end", "half a pair", "cut", "long line", "very long line", "long line in UTF-16"],
    )
    def test_what_cannot_be_told_is_refused_before_any_work(self, corpus: Path, data: bytes, why: str) -> None:
        write(corpus, "a.rec")
        Path("list").write_bytes(data)
        with pytest.raises(InputPatternError, match=f"@list: .*{why}"):
            listed("@list")

    def test_a_list_in_a_bucket_is_refused_with_the_way_out(self, corpus: Path) -> None:
        with pytest.raises(InputPatternError, match="copy it here"):
            listed("@gs://bucket/list")


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
