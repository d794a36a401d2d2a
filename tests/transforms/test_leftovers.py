"""Which names are no data, and which of them a pattern asks for."""

from __future__ import annotations

import pytest

from transforms.leftovers import PassedOver, asked_for, is_plain, passed_over_as

LEFTOVERS = {
    "_*": ["_SUCCESS", "_temporary", "_x.tfrecord"],
    ".*": [".hidden", ".part-0.tfrecord.crc", ".a.tfrecord.Xy12Zq", ".rsync-partial"],
    "~$*": ["~$report.docx"],
    "*~": ["a.tfrecord~", "a.tfrecord.~1~"],
    "#*#": ["#a.tfrecord#"],
    "incomplete.*": [
        "incomplete.0123456789abcdef0123456789abcdef.corpus-train.tfrecord-00000-of-00008",
        "incomplete.AB12CD_1.0.0",
    ],
    "*.incomplete*": [
        "corpus-train.tfrecord-00000-of-00008.incompleteAB12CD",
        "a.tfrecord.incomplete.0123456789abcdef0123456789abcdef",
    ],
    "*_$folder$": ["raw_$folder$"],
    "*___jb_*___": ["a.tfrecord___jb_tmp___", "a.tfrecord___jb_old___"],
    "*.tmp": ["a.tfrecord.tmp", "A.TFRECORD.TMP"],
    "*.temp": ["a.temp"],
    "*.incomplete": ["a.tfrecord.incomplete"],
    "*.inprogress": ["application_1.inprogress"],
    "*.partial": ["a.tfrecord.5e1d9f3a.partial"],
    "*.part": ["a.tfrecord.part", "corpus.part"],
    "*.filepart": ["a.tfrecord.filepart"],
    "*.crdownload": ["a.tfrecord.crdownload"],
    "*.download": ["a.tfrecord.download"],
    "*.opdownload": ["a.tfrecord.opdownload"],
    "*.fdmdownload": ["a.tfrecord.fdmdownload"],
    "*.aria2": ["a.tfrecord.aria2"],
    "*.lftp-pget-status": ["a.tfrecord.lftp-pget-status"],
    "*.!qb": ["a.tfrecord.!qB"],
    "*.gstmp": ["a.tfrecord_.gstmp"],
    "*._copying_": ["a.tfrecord._COPYING_"],
    "*.swp": ["a.swp"],
    "*.bak": ["a.tfrecord.bak"],
    "*.crc": ["a.tfrecord.crc"],
    "*.md5": ["a.tfrecord.md5"],
    "*.sha256": ["a.tfrecord.sha256"],
    "*.idx": ["part-0.idx", "a.tfrecord.idx"],
    "*.index": ["a.tfrecord.index"],
    "thumbs.db": ["Thumbs.db"],
    "lost+found": ["lost+found"],
    "@eadir": ["@eaDir"],
    "#snapshot": ["#snapshot"],
    "parallel_composite_uploads": ["parallel_composite_uploads"],
}

DATA = [
    *("a.tfrecord", "part-00000", "part-0-of-1", "corpus.part-0", "a.part.tfrecord", "tmp", "part", "index", "idx"),
    *("temp.tfrecord", "books.tfrecord", "beam-data.rec", "incomplete.tfrecord", "data.incomplete.tfrecord"),
    *("speech.incomplete_sentences.tfrecord", "index.tfrecord", "image.jpg", "2026.11.30", "a.20261130", "backup.rec"),
    *(
        "a b",
        "a#1",
        "#1.rec",
        "$x",
        "@x",
        "+x",
        "~x",
        "a$",
        "a_",
        "x.",
        "",
        "日本.tfrecord",
        "I",
        "b",
        "train-idx3-ubyte",
    ),
]


@pytest.mark.parametrize("label", LEFTOVERS)
def test_a_leftover_is_told_by_its_rule(label: str) -> None:
    for name in LEFTOVERS[label]:
        assert passed_over_as(name.encode()) == label
        assert not is_plain(name.encode())


@pytest.mark.parametrize("name", DATA)
def test_data_is_no_leftover(name: str) -> None:
    assert passed_over_as(name.encode()) is None
    assert passed_over_as(name.encode(), is_folder=True) is None


def test_what_beam_leaves_is_a_folder() -> None:
    name = b"beam-temp-corpus-5f1d3c0a9b8e11ee8c990242ac120002"
    assert passed_over_as(name, is_folder=True) == "beam-temp-*"
    assert not is_plain(name)
    assert passed_over_as(b"beam-temp-2026.tfrecord") is None


def test_bytes_that_are_no_text_are_told_as_well() -> None:
    assert passed_over_as(b"\xff\n\xfe.part") == "*.part"
    assert passed_over_as(b"\xff\n\xfe") is None


@pytest.mark.parametrize("name", ["2026.index", "vectors.idx", "x.bak", "x.md5"])
def test_a_folder_may_be_called_like_a_sidecar(name: str) -> None:
    assert passed_over_as(name.encode(), is_folder=True) is None
    assert passed_over_as(name.encode()) is not None


@pytest.mark.parametrize(
    ("part", "taken", "left"),
    [
        ("_final", ["_final"], []),
        ("_*", ["_x", "_SUCCESS"], ["_x.tmp"]),
        (".hid*", [".hidden"], [".hidden~"]),
        ("*.part", ["x.part"], ["_x.part", ".x.part"]),
        ("_*.part", ["_x.part"], []),
        ("*.PART", ["x.part"], []),
        ("*.incomplete*", ["x.incompleteAB12CD"], []),
        ("beam-temp-*", [], ["beam-temp-x~"]),
        ("incomplete.*", ["incomplete.AB12CD_x"], []),
        ("*~", ["x~"], ["x.part"]),
        ("lost+found", ["lost+found"], []),
        ("*", [], ["_x", ".x", "x.part", "x.idx", "x~", "#x#"]),
        ("**", [], ["_x", ".x", "x.part", "x.idx", "x~", "#x#"]),
        ("?final", [], ["_final"]),
        ("[_.]final", [], ["_final", ".final"]),
    ],
)
def test_a_pattern_asks_for_what_it_spells_out_and_for_nothing_else(
    part: str, taken: list[str], left: list[str]
) -> None:
    asked = asked_for(part.encode())
    assert [passed_over_as(name.encode(), asked) for name in taken] == [None] * len(taken)
    assert None not in [passed_over_as(name.encode(), asked) for name in left]


def test_counts_name_the_most_frequent_rules_first() -> None:
    passed_over = PassedOver()
    assert (passed_over.total, list(passed_over.notes())) == (0, [])
    passed_over.counts.update({"*.part": 3, "_*": 1_200, **{f"*.{number}": 1 for number in range(6)}})
    text = "1,200 _*, 3 *.part, 1 *.0, 1 *.1, 1 *.2 and 3 kinds more"
    assert list(passed_over.notes()) == [f"passed over by their names: {text}"]
    assert passed_over.total == 1_209
