"""Listing: which files a job reads, in which order, and what it says of those it cannot read."""

from __future__ import annotations

import errno
import json
import os
import random
import socket
from pathlib import Path
from typing import Any

import pytest

from listings import LITERAL_NAMES, enter_folder, errors_of, listed, names_of, write
from transforms.elements import Input
from transforms.inputs import InputPatternError, list_inputs, read_inputs
from transforms.remote_inputs import Object, _Gcs

corpus = pytest.fixture(enter_folder, name="corpus")


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
        "pattern",
        ["missing.rec", "*.nothing", "missing/", "missing/*.rec", "a.rec/*.x", "**/*.nothing", "empty", "empty/*"],
    )
    def test_unmatched_argument_is_refused_by_name(self, corpus: Path, pattern: str) -> None:
        write(corpus, "a.rec")
        (corpus / "empty").mkdir()
        with pytest.raises(InputPatternError) as refused:
            listed("a.rec", pattern)
        assert repr(pattern) in str(refused.value)

    @pytest.mark.parametrize("name", ["gs://bucket/x.rec", "s3://bucket/*", "https://host/x"])
    def test_url_of_what_cannot_be_listed_is_refused_by_name(
        self, corpus: Path, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("NO_GCE_CHECK", "true")
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
    def test_working_directory_with_glob_characters(
        self, corpus: Path, monkeypatch: pytest.MonkeyPatch, folder: str
    ) -> None:
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


class TestDuplicates:
    def test_other_spellings_of_a_name_count_once(self, corpus: Path) -> None:
        write(corpus, "in/a.rec")
        spellings = [
            "in/a.rec",
            "./in/a.rec",
            "in//a.rec",
            "in/../in/a.rec",
            str(corpus / "in/a.rec"),
            "in/*.rec",
            "in",
        ]
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
        assert (
            errors_of("in") == errors_of("in/*") == errors_of("in/a.rec", "in/dangling.rec", "in/loop.rec") == expected
        )

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

    def test_file_that_vanishes_while_it_is_listed_is_an_error(
        self, corpus: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
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
    "b.rec.incompleteAB12CD",
    "1.0.0.incompleteAB12CD/b.rec",
    "beam-temp-b-5f1d3c0a9b8e11ee8c990242ac120002/x/b.rec",
    "b.rec_.gstmp",
    "b.rec.part",
    "b.rec.partial",
    "b.rec.filepart",
    "b.rec._COPYING_",
    ".b.rec.Xy12Zq",
    "b.rec.crc",
    "b.rec.md5",
    "b.rec.idx",
    "b.rec.index",
    "#b.rec#",
    "raw_$folder$",
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

    @pytest.mark.parametrize(
        ("pattern", "expected"),
        [
            ("*/_final/*", ["run1/_final/a", "run2/_final/a"]),
            ("**/_final/*", ["run1/_final/a", "run2/_final/a"]),
            (".hid*/*", [".hidden/a"]),
            ("_loose-*", ["_loose-0"]),
            ("*.part", ["a.part"]),
            ("**/*.part", ["a.part", "run1/b.part"]),
            ("beam-temp-*/*", ["beam-temp-x/a"]),
            ("run1/**", []),
            ("*", []),
            ("*/*", []),
            ("?final/*", []),
        ],
    )
    def test_part_of_a_pattern_that_spells_it_out_asks_for_it(
        self, corpus: Path, pattern: str, expected: list[str]
    ) -> None:
        write(corpus, "run1/_final/a", "run1/_final/.a", "run2/_final/a", "run1/b.part", "run1/_SUCCESS")
        write(corpus, ".hidden/a", ".hidden/b.tmp", "_loose-0", "_loose-1~", "a.part", "beam-temp-x/a", "_final/x~")
        if expected:
            assert names_of(pattern) == expected
        else:
            with pytest.raises(InputPatternError, match="passed over"):
                listed(pattern)

    def test_kinds_that_were_passed_over_are_noted(self, corpus: Path) -> None:
        write(corpus, "in/a", "in/_SUCCESS", "in/_logs/x", "in/b.part", "other/c.part")
        listing, _ = listed("in")
        assert listing.notes == ("passed over by their names: 2 _*, 1 *.part",)
        assert listed("in/a")[0].notes == ()

    def test_input_of_such_names_alone_is_refused_with_the_way_out(self, corpus: Path) -> None:
        write(corpus, "in/a.part", "in/b.part", "x.tmp")
        with pytest.raises(InputPatternError, match=r"input 'in' offers only files.*2 \*\.part.*spells this out"):
            listed("x.tmp", "in")
        assert names_of("in/*.part") == ["in/a.part", "in/b.part"]

    @pytest.mark.parametrize("argument", ["out", "out/*", "out/**/*.rec", "out/_gristmill/*", "out/_gristmill/shards"])
    def test_input_that_is_the_output_is_said_to_be(self, corpus: Path, argument: str) -> None:
        write(corpus, "a.rec", "out/corpus.rec", "out/_gristmill/shards/00000.json")
        with pytest.raises(InputPatternError, match=r"'out.*lies in the output folder, whose files are never inputs"):
            listed("a.rec", argument, excluded="out")

    def test_output_below_the_input_is_noted_though_it_may_not_be_there_yet(self, corpus: Path) -> None:
        write(corpus, "in/a.rec", "in/sub/b.rec")
        for argument in ("in", ".", "in/**", "**/*.rec"):
            listing, _ = listed(argument, excluded="in/out")
            assert listing.notes == ("the output folder lies inside the input; what is in it is passed over",)
        write(corpus, "in/out/_gristmill/x.rec", "in/out/a.rec")
        assert names_of("in/*/*.rec", excluded="in/out") == ["in/sub/b.rec"]
        assert "inside the input" in listed("in/*/*.rec", excluded="in/out")[0].notes[0]
        assert listed("in/*.rec", "in/sub", excluded="in/out")[0].notes == ()

    def test_folder_below_the_output_that_is_named_is_an_input(self, corpus: Path) -> None:
        write(corpus, "data/raw/a.rec", "data/corpus.rec")
        assert names_of("data/raw", excluded="data") == names_of("data/raw/*", excluded="data") == ["data/raw/a.rec"]

    def test_output_folder_is_never_an_input(self, corpus: Path) -> None:
        write(corpus, "a.rec", "out/corpus.rec", "out/_gristmill/x.rec", "outer/b.rec")
        os.symlink("out", "link")
        for excluded in ("out", "./out/", str(corpus / "out"), "link"):
            assert names_of(".", excluded=excluded) == ["a.rec", "outer/b.rec"]
            assert names_of("**/*.rec", excluded=excluded) == ["a.rec", "outer/b.rec"]
        with pytest.raises(InputPatternError):
            listed("out/*.rec", excluded="out")


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_a_listing_of_urls_is_in_order_of_names_however_it_came(
    monkeypatch: pytest.MonkeyPatch, order: tuple[int, ...]
) -> None:
    names = ["gs://b/x/a", "gs://b/x/a/b", "gs://b/x/\u00fc"]
    found = [Object(names[number], number + 1, 10 * number) for number in order]
    found.insert(0, Object("gs://b/x/.hidden", 7, 7))
    monkeypatch.setattr(_Gcs, "list", lambda *_, **__: iter(found))
    listing, inputs = listed("gs://b/x/")
    assert inputs == [Input(number, name, number + 1, 10 * number) for number, name in enumerate(names)]
    assert (listing.num_inputs, listing.total_bytes, listing.num_skipped, listing.num_duplicates) == (3, 6, 1, 0)
