"""Listing: which files a job reads, in which order, and what it says of those it cannot read."""

from __future__ import annotations

import errno
import json
import os
import random
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from transforms.elements import Input
from transforms.inputs import InputPatternError, Listing, list_inputs, read_inputs


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: an empty folder whose path is no link."""
    folder = Path(os.path.realpath(tmp_path)) / "corpus"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def write(folder: Path, *names: str | bytes) -> None:
    """Makes files whose size is their number, from 1."""
    for number, name in enumerate(names, 1):
        path = os.path.join(os.fsencode(folder), os.fsencode(name))
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(bytes(number))


def listed(*arguments: str, excluded: str = "/nowhere/out") -> tuple[Listing, list[Input]]:
    """The listing, and the lines of inputs.jsonl."""
    path = Path(os.environ["TMPDIR"] if "TMPDIR" in os.environ else "/tmp") / f"inputs-{os.getpid()}.jsonl"
    try:
        listing = list_inputs(list(arguments), str(path), excluded)
        with open(path, "rb") as lines:
            inputs = [source for _, source in read_inputs(lines)]
    finally:
        path.unlink(missing_ok=True)
    assert [source.index for source in inputs] == list(range(listing.num_inputs))
    assert listing.total_bytes == sum(source.size for source in inputs)
    return listing, inputs


def names_of(*arguments: str, **options: Any) -> list[str]:
    """Listed names, relative to the working directory."""
    return [os.path.relpath(source.name) for source in listed(*arguments, **options)[1]]


def errors_of(*arguments: str) -> dict[str, str | None]:
    """Reason of each listed name, None for the good ones."""
    return {os.path.relpath(source.name): source.error and source.error[0] for source in listed(*arguments)[1]}


class TestPatterns:
    def test_file_is_listed_with_size_and_time(self, corpus: Path) -> None:
        write(corpus, "a.tfrecord", "b.tfrecord")
        os.utime("b.tfrecord", ns=(1, 1_234_567_890_123_456_789))
        listing, [source] = listed("b.tfrecord")
        assert source == Input(0, str(corpus / "b.tfrecord"), 2, 1_234_567_890_123_456_789)
        assert (listing.num_inputs, listing.total_bytes, listing.num_skipped, listing.num_duplicates) == (1, 2, 0, 0)

    def test_pattern_is_sorted_by_name(self, corpus: Path) -> None:
        names = [f"{number:03d}.tfrecord" for number in range(60)]
        write(corpus, *random.Random(7).sample(names, 60), "x.txt")
        assert names_of("*.tfrecord") == names

    @pytest.mark.parametrize(
        ("pattern", "expected"),
        [
            ("*.rec", ["a.rec", "b.rec"]),
            ("?.rec", ["a.rec", "b.rec"]),
            ("[b-z].rec", ["b.rec"]),
            ("[!b].rec", ["a.rec"]),
            ("*/*.rec", ["d/c.rec", "e/c.rec"]),
            ("*/deep/*.rec", ["e/deep/f.rec"]),
            ("**/*.rec", ["a.rec", "b.rec", "d/c.rec", "e/c.rec", "e/deep/f.rec"]),
            ("e/**", ["e/c.rec", "e/deep/f.rec"]),
            ("**/deep/**", ["e/deep/f.rec"]),
            ("./e/../*.rec", ["a.rec", "b.rec"]),
            ("{cwd}/d/*", ["d/c.rec"]),
        ],
    )
    def test_form_of_pattern(self, corpus: Path, pattern: str, expected: list[str]) -> None:
        write(corpus, "a.rec", "b.rec", "d/c.rec", "e/c.rec", "e/deep/f.rec")
        assert names_of(pattern.format(cwd=corpus)) == expected

    def test_folder_is_taken_with_all_below(self, corpus: Path) -> None:
        write(corpus, "in/b/2.rec", "in/a.rec", "in/b/1.rec", "in/c.rec", "other.rec")
        expected = ["in/a.rec", "in/b/1.rec", "in/b/2.rec", "in/c.rec"]
        assert names_of("in") == names_of("in/") == names_of(str(corpus / "in")) == expected

    def test_arguments_keep_their_order(self, corpus: Path) -> None:
        write(corpus, "z.rec", "a.rec", "m/2.rec", "m/1.rec")
        assert names_of("z.rec", "m", "a.rec") == ["z.rec", "m/1.rec", "m/2.rec", "a.rec"]

    @pytest.mark.parametrize(
        "pattern", ["missing.rec", "*.nothing", "missing/", "missing/*.rec", "a.rec/*.x", "**/*.nothing", "empty", "empty/*"]
    )
    def test_unmatched_argument_is_refused_by_name(self, corpus: Path, pattern: str) -> None:
        write(corpus, "a.rec")
        (corpus / "empty").mkdir()
        with pytest.raises(InputPatternError) as refused:
            listed("a.rec", pattern)
        assert repr(pattern) in str(refused.value)

    @pytest.mark.parametrize("name", ["gs://bucket/x.rec", "s3://bucket/*", "https://host/x"])
    def test_url_is_refused_by_name(self, corpus: Path, name: str) -> None:
        with pytest.raises(InputPatternError, match=name.replace("*", r"\*")):
            listed(name)

    def test_bytes_of_compressed_names_are_added_up(self, corpus: Path) -> None:
        write(corpus, "a.rec", "b.rec.gz", "c.GZ", "d.zz")
        listing, _ = listed("*")
        assert (listing.total_bytes, listing.compressed_bytes) == (10, 9)

    def test_same_files_give_the_same_fingerprint_and_changed_ones_another(self, corpus: Path) -> None:
        write(corpus, "a.rec", "b.rec")
        before = listed("*")[0].digest
        assert listed("*.rec")[0].digest == before
        os.utime("b.rec", ns=(1, 1))
        assert listed("*")[0].digest != before


LITERAL_NAMES = [
    "a[1].rec",
    "a1.rec",
    "star*.rec",
    "what?.rec",
    "two words.rec",
    " leading.rec",
    "trailing.rec ",
    "line\nend.rec",
    "tab\t.rec",
    "-dash.rec",
    "@at.rec",
    "ünï-山.rec",
    "quote'\".rec",
    "back\\slash.rec",
    os.fsdecode(b"bytes-\xff\xfe.rec"),
]


class TestLiteralNames:
    @pytest.mark.parametrize("name", LITERAL_NAMES)
    def test_name_stands_for_itself_only(self, corpus: Path, name: str) -> None:
        write(corpus, *LITERAL_NAMES)
        _, [source] = listed(name)
        assert source.name == str(corpus / name)
        assert source.size == LITERAL_NAMES.index(name) + 1

    def test_pattern_and_folder_offer_every_name(self, corpus: Path) -> None:
        write(corpus, *(f"in/{name}" for name in LITERAL_NAMES))
        expected = sorted((f"in/{name}" for name in LITERAL_NAMES), key=os.fsencode)
        assert names_of("in") == names_of("in/*") == expected

    def test_lines_are_json_in_utf8_whatever_the_names(self, corpus: Path, tmp_path: Path) -> None:
        write(corpus, *LITERAL_NAMES)
        path = tmp_path / "inputs.jsonl"
        list_inputs(["*"], str(path), "/nowhere/out")
        assert len([json.loads(line) for line in path.read_bytes().decode("utf-8").splitlines()]) == len(LITERAL_NAMES)

    def test_lines_can_be_read_from_any_offset(self, corpus: Path, tmp_path: Path) -> None:
        write(corpus, *LITERAL_NAMES)
        path = tmp_path / "inputs.jsonl"
        list_inputs(["*"], str(path), "/nowhere/out")
        with open(path, "rb") as lines:
            whole = list(read_inputs(lines))
            for index, (offset, _) in enumerate(whole):
                assert list(read_inputs(lines, offset, index)) == whole[index:]

    @pytest.mark.parametrize("folder", ["run[1]", "a*b", "what?", "[a-z]"])
    def test_working_directory_with_glob_characters(self, corpus: Path, monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
        write(corpus, f"{folder}/in/1.rec", f"{folder}/in/2.rec", "run1/in/3.rec", "ab/in/3.rec", "b/in/3.rec")
        monkeypatch.chdir(corpus / folder)
        (corpus / folder / "list").write_text("in/1.rec\nin/*.rec\n")
        assert names_of("in/*.rec") == names_of("in") == names_of("**/*.rec") == ["in/1.rec", "in/2.rec"]
        assert names_of("@list") == ["in/1.rec", "in/2.rec"]

    def test_dots_after_a_linked_folder_mean_the_folder_above_its_target(self, corpus: Path) -> None:
        write(corpus, "far/data.rec", "data.rec")
        os.makedirs("far/deep")
        os.symlink("far/deep", "link")
        _, [source] = listed("link/../data.rec")
        assert os.path.samefile(source.name, "far/data.rec")


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
        assert len(errors) == 3 and errors["a.rec"] is None
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

    def test_list_that_names_itself_is_refused(self, corpus: Path) -> None:
        write(corpus, "a.rec")
        Path("list").write_text("a.rec\n@list\n")
        with pytest.raises(InputPatternError, match="list"):
            listed("@list")

    def test_empty_list_is_refused_by_name(self, corpus: Path) -> None:
        Path("list").write_bytes(b"")
        with pytest.raises(InputPatternError, match="@list"):
            listed("@list")


class TestDuplicates:
    def test_other_spellings_of_a_name_count_once(self, corpus: Path) -> None:
        write(corpus, "in/a.rec")
        spellings = ["in/a.rec", "./in/a.rec", "in//a.rec", "in/../in/a.rec", str(corpus / "in/a.rec"), "in/*.rec", "in"]
        listing, inputs = listed(*spellings)
        assert [source.name for source in inputs] == [str(corpus / "in/a.rec")]
        assert listing.num_duplicates == len(spellings) - 1

    def test_link_and_target_count_once_under_the_name_that_came_first(self, corpus: Path) -> None:
        write(corpus, "real.rec", "d/x.rec")
        os.symlink("real.rec", "a-link.rec")
        os.symlink("d", "e")
        assert names_of("real.rec", "a-link.rec") == ["real.rec"]
        assert names_of("a-link.rec", "real.rec") == ["a-link.rec"]
        assert names_of("*.rec") == ["a-link.rec"]
        assert names_of("e/x.rec", "d/x.rec") == ["e/x.rec"]
        assert names_of("e", "d") == ["e/x.rec"]
        assert names_of("*/x.rec") == ["d/x.rec"]

    def test_overlapping_patterns_keep_the_place_of_the_first(self, corpus: Path) -> None:
        write(corpus, "a.rec", "b.rec", "c.rec")
        assert names_of("[bc].rec", "*.rec") == ["b.rec", "c.rec", "a.rec"]

    def test_overlapping_lists_keep_the_place_of_the_first_line(self, corpus: Path) -> None:
        write(corpus, "a.rec", "b.rec", "c.rec")
        Path("one").write_text("c.rec\na.rec\nc.rec\n")
        Path("two").write_text("./b.rec\nin/../a.rec\n")
        listing, _ = listed("@one", "@two")
        assert names_of("@one", "@two") == ["c.rec", "a.rec", "b.rec"]
        assert listing.num_duplicates == 2

    def test_missing_name_that_is_listed_twice_is_one_error(self, corpus: Path) -> None:
        Path("list").write_text("missing.rec\n./missing.rec\n")
        assert errors_of("@list") == {"missing.rec": "not_found"}

    def test_hard_links_are_files_of_their_own(self, corpus: Path) -> None:
        write(corpus, "a.rec")
        os.link("a.rec", "b.rec")
        assert names_of("*.rec") == ["a.rec", "b.rec"]


class TestLinksAndSpecialFiles:
    def test_dangling_and_looping_links_are_errors(self, corpus: Path) -> None:
        write(corpus, "in/a.rec")
        os.symlink("nowhere", "in/dangling.rec")
        os.symlink("loop.rec", "in/loop.rec")
        expected = {"in/a.rec": None, "in/dangling.rec": "not_found", "in/loop.rec": "symlink_loop"}
        assert errors_of("in") == errors_of("in/*") == errors_of("in/a.rec", "in/dangling.rec", "in/loop.rec") == expected

    def test_pipe_socket_and_device_are_errors_and_are_not_opened(self, corpus: Path) -> None:
        write(corpus, "in/a.rec")
        os.mkfifo("in/pipe")
        os.symlink("/dev/null", "in/null")
        with socket.socket(socket.AF_UNIX) as server:
            server.bind("in/socket")
            expected = {"in/a.rec": None, "in/null": "not_a_file", "in/pipe": "not_a_file", "in/socket": "not_a_file"}
            assert errors_of("in") == errors_of("in/*") == expected

    def test_loops_of_folders_end(self, corpus: Path) -> None:
        write(corpus, "in/a/1.rec", "in/b/2.rec")
        os.symlink("..", "in/a/up")
        os.symlink(".", "in/a/self")
        os.symlink("../a", "in/b/other")
        os.symlink("../b", "in/a/other")
        os.symlink("up", "in/up")
        assert errors_of("in") == {"in/a/1.rec": None, "in/a/other/2.rec": None, "in/up": "symlink_loop"}
        assert names_of("in/**/*.rec") == ["in/a/1.rec", "in/a/other/2.rec"]

    def test_linked_folder_is_followed(self, corpus: Path) -> None:
        write(corpus, "far/x.rec", "in/a.rec")
        os.symlink("../far", "in/link")
        assert names_of("in") == ["in/a.rec", "in/link/x.rec"]

    @pytest.mark.parametrize("pattern", ["in", "in/**", "in/*/*.rec"])
    def test_folder_that_may_not_be_read_is_an_error_and_not_silently_missing(
        self, corpus: Path, monkeypatch: pytest.MonkeyPatch, pattern: str
    ) -> None:
        write(corpus, "in/open/a.rec", "in/closed/b.rec")
        scan = os.scandir

        def scan_what_may_be_read(path: Any) -> Any:
            if not isinstance(path, int) and os.fsdecode(path).endswith("closed"):
                raise PermissionError(errno.EACCES, "Permission denied", path)
            return scan(path)

        monkeypatch.setattr(os, "scandir", scan_what_may_be_read)
        assert errors_of(pattern) == {"in/closed": "permission_denied", "in/open/a.rec": None}

    def test_file_that_vanishes_while_it_is_listed_is_an_error(self, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        write(corpus, "a.rec", "b.rec")
        stat = os.stat

        def stat_without_b(path: Any, *args: Any, **kwargs: Any) -> os.stat_result:
            if not isinstance(path, int) and os.fsdecode(path).endswith("b.rec"):
                raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)
            return stat(path, *args, **kwargs)

        monkeypatch.setattr(os, "stat", stat_without_b)
        assert errors_of("a.rec", "b.rec") == {"a.rec": None, "b.rec": "not_found"}


SKIPPED = [
    ".hidden.rec",
    "_SUCCESS",
    "._a.rec",
    ".DS_Store",
    "Thumbs.db",
    "desktop.ini",
    "a.rec~",
    "a.rec.tmp",
    "A.REC.TMP",
    ".a.rec.swp",
    "a.rec.crdownload",
    "_temporary/part-0.rec",
    ".git/objects/x.rec",
    "__MACOSX/a.rec",
    "deep/_logs/x/y.rec",
]


class TestSkipped:
    def test_hidden_temporary_and_system_files_are_skipped_and_counted(self, corpus: Path) -> None:
        write(corpus, "in/a.rec", "in/deep/b.rec", *(f"in/{name}" for name in SKIPPED))
        listing, _ = listed("in")
        assert names_of("in") == ["in/a.rec", "in/deep/b.rec"]
        assert listing.num_skipped == len(SKIPPED)

    def test_pattern_skips_them_too(self, corpus: Path) -> None:
        write(corpus, "a.rec", ".b.rec", "_c.rec", "d.rec~")
        listing, _ = listed("*")
        assert (names_of("*"), listing.num_skipped) == (["a.rec"], 3)

    @pytest.mark.parametrize("name", [".hidden.rec", "_SUCCESS", "a.rec~", "_temporary/part-0.rec"])
    def test_what_is_asked_for_by_name_is_read(self, corpus: Path, name: str) -> None:
        write(corpus, *SKIPPED)
        Path("list").write_text(name)
        assert names_of(name) == names_of("@list") == [name]

    def test_output_folder_is_never_an_input(self, corpus: Path) -> None:
        write(corpus, "a.rec", "out/corpus.rec", "out/_gristmill/x.rec", "outer/b.rec")
        os.symlink("out", "link")
        for excluded in ("out", "./out/", str(corpus / "out"), "link"):
            assert names_of(".", excluded=excluded) == ["a.rec", "outer/b.rec"]
            assert names_of("**/*.rec", excluded=excluded) == ["a.rec", "outer/b.rec"]
        with pytest.raises(InputPatternError):
            listed("out/*.rec", excluded="out")


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
        [sys.executable, "-c", textwrap.dedent(PROGRAM), str(names), str(inputs)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    num_inputs, num_duplicates, seconds, peak = done.stdout.split()
    print(f"{num_inputs} inputs listed in {seconds} s, {int(peak) >> 20} MiB")
    return int(num_inputs), int(num_duplicates), int(peak)


@pytest.mark.slow
class TestScale:
    def test_a_million_names_cost_under_300_mb(self, corpus: Path) -> None:
        with open("list", "w") as out:
            out.writelines(f"{number % 1000:03d}/shard-{number:09d}-of-001000000.tfrecord\n" for number in range(1_000_000))
            out.write("000/shard-000000000-of-001000000.tfrecord\n")
        num_inputs, num_duplicates, peak = list_in_subprocess(corpus / "list", corpus / "inputs.jsonl")
        assert (num_inputs, num_duplicates) == (1_000_000, 1)
        assert peak < 300_000_000
        with open("inputs.jsonl", "rb") as lines:
            for index, source in read_inputs(lines):
                assert source.error is not None and source.error[0] == "not_found"
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
