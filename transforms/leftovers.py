"""Names that a folder or pattern offers and that are no data: hidden, unfinished, sidecars, the system's own.

One table for local files and for objects. A name is held against it part by part. What a part of a pattern spells out
itself (`_final/part-*`, `*.part`) is asked for, and so is every name that is given literally or by a list. What is
passed over is counted by rule, so that a person sees it.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Iterator

_UNFINISHED = (
    *("tmp", "temp", "incomplete", "inprogress", "partial"),  # Anybody's; rclone's and rsync's are `partial`.
    *("part", "crdownload", "download", "opdownload", "dtapart"),  # Firefox, Chrome, Safari, Opera, DownThemAll.
    *("filepart", "downloading", "fdmdownload", "aria2", "ytdl", "lftp-pget-status"),  # WinSCP's is `filepart`.
    *("!qb", "!ut", "bc!"),  # Clients of BitTorrent.
    *("gstmp", "_copying_"),  # gsutil and gcloud; `hadoop fs -put`.
    *("swp", "swo", "swn"),  # Vim.
)
"""What stands behind the last dot of a file or folder that something has not finished, in lower case."""

_SIDECARS = (
    *("crc", "crc32", "crc32c", "md5", "md5sum", "sha1", "sha1sum", "sha256", "sha256sum", "sha512", "sha512sum"),
    *("sfv", "idx", "index", "bak"),
)
"""The same of files that stand beside the one that they tell of, or are a copy of it; folders may be called so."""

_SYSTEM = (
    *("thumbs.db", "ehthumbs.db", "desktop.ini", "$recycle.bin", "system volume information"),  # Windows
    *("__macosx", "icon\r", "lost+found"),  # macOS, Linux
    *("@eadir", "#recycle", "#snapshot", "~snapshot"),  # Network storage: previews, deleted files, copies of all.
    *("parallel_composite_uploads", "+tmp"),  # Pieces: gsutil's and gcloud's, Kafka Connect's
)
"""Whole names, in lower case."""

_FORMS = (
    ("_*", rb"_", rb"_"),  # Of Hadoop, Spark and their like: _SUCCESS, _temporary, _delta_log.
    (".*", rb"\.", rb"\."),  # Hidden; rsync's `.NAME.XXXXXX` among them.
    ("~$*", rb"~\$", rb"~\$"),  # Office's marks of open files.
    ("*~", rb".*~$", rb".*~$"),
    ("#*#", rb"#.*#$", rb"#.*#$"),  # Emacs.
    ("beam-temp-*", rb"beam-temp-", rb"beam-temp-"),
    ("incomplete.*", rb"incomplete\.([0-9a-f]{32}\.|[a-z0-9]{6}_)", rb"incomplete\."),  # TFDS of today,
    ("*.incomplete*", rb".*\.incomplete([a-z0-9]{6}|\.[0-9a-f-]{8,36})$", rb".*\.incomplete"),  # and of yesterday.
    ("*_$folder$", rb".*_\$folder\$$", rb".*_\$folder\$$"),  # What Hadoop puts in the place of a folder of a bucket.
    ("*___jb_*___", rb".*___jb_(tmp|old)___$", rb".*___jb_(tmp|old)___$"),  # JetBrains.
)
"""(label, form of a name, form of the part of a pattern that asks for such names), in lower case."""

_FOLDERS = ("beam-temp-*",)
"""Labels of forms that folders alone have; a file may be called `beam-temp-2026.tfrecord`."""

FOLDER_MARKER = "folder markers"
"""Label of an object without bytes that only says that there is a folder."""

_NAMED = 5
"""Rules that a message names; the whole number is in it."""

_LABELS = {ending.encode(): f"*.{ending}" for ending in _UNFINISHED}
_FILE_LABELS = {ending.encode(): f"*.{ending}" for ending in _SIDECARS}
_SYSTEM_LABELS = {name.encode(): name.strip() for name in _SYSTEM}
_COMPILED = [(label, re.compile(name, re.DOTALL).match, re.compile(part).match) for label, name, part in _FORMS]

# What may fall under a rule, told by its ends: few names, so that ten million others cost four look-ups each.
_FIRST_BYTES = frozenset(b"._~#@$+bBiI")
_LAST_BYTES = frozenset(b"~#$_")
_MARK = b".incomplete"
_ENDINGS = {*_LABELS, *_FILE_LABELS, *(name.rpartition(b".")[2] for name in _SYSTEM_LABELS)}


def is_plain(name: bytes) -> bool:
    """Whether a part of a name, which is not empty, surely falls under no rule; quick, and true of nearly all."""
    return (
        name[0] not in _FIRST_BYTES
        and name[-1] not in _LAST_BYTES
        and name[name.rfind(b".") + 1 :].lower() not in _ENDINGS
        and _MARK not in name
    )


def passed_over_as(name: bytes, asked: frozenset[str] = frozenset(), *, is_folder: bool = False) -> str | None:
    """Returns the label of the first rule that a part of a name falls under and nobody asked for, None for data.

    Args:
        name: One part of a path or object name. An empty one, as in `raw//x`, falls under no rule.
        asked: Labels that the pattern asks for, see `asked_for`.
        is_folder: Whether it is a folder: sidecars and copies are files, Beam's temporary things are folders.
    """
    lower = name.lower()
    for label, match, _ in _COMPILED:
        if label not in asked and (is_folder or label not in _FOLDERS) and match(lower):
            return label
    ending = lower.rpartition(b".")[2] if b"." in name else b""
    found = _SYSTEM_LABELS.get(lower) or _LABELS.get(ending) or (None if is_folder else _FILE_LABELS.get(ending))
    return None if found in asked else found


@functools.cache
def asked_for(part: bytes) -> frozenset[str]:
    """Returns the labels of the rules that a part of a pattern spells out; `*` and `**` spell nothing."""
    lower = part.lower()
    ending = lower.rpartition(b".")[2]
    found = {label for label, _, asks in _COMPILED if asks(lower)}
    others = (_SYSTEM_LABELS.get(lower), _LABELS.get(ending), _FILE_LABELS.get(ending))
    return frozenset(found.union(filter(None, others)))


class PassedOver:
    """Counts what is passed over, by rule, and says so.

    Attributes:
        counts: Files by the label of the rule.
        outputs: How often the output folder was among what was to be listed; it is no input.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.outputs = 0

    @property
    def total(self) -> int:
        """All files."""
        return self.counts.total()

    @property
    def seen(self) -> tuple[int, int]:
        """What there was so far, for `why_nothing`."""
        return self.total, self.outputs

    def describe(self) -> str:
        """Returns "3 *.part, 2 _*": the most frequent rules first."""
        ordered = sorted(self.counts.items(), key=lambda item: (-item[1], item[0]))
        more = len(ordered) - _NAMED
        shown = ", ".join(f"{count:,} {label}" for label, count in ordered[:_NAMED])
        return f"{shown} and {more} kinds more" if more > 0 else shown

    def notes(self) -> Iterator[str]:
        """Yields what a person should know of what was left out."""
        if self.counts:
            yield f"passed over by their names: {self.describe()}"
        if self.outputs:
            yield "the output folder lies inside the input; what is in it is passed over"

    def why_nothing(self, before: tuple[int, int]) -> str:
        """Returns why an input offers nothing.

        Args:
            before: What was `seen` before it was listed.
        """
        if self.total > before[0]:
            return (
                f"offers only files that are passed over by their names ({self.describe()}); a pattern that spells "
                "this out (such as '*.part' or '_*'), a name, or a list takes them"
            )
        if self.outputs > before[1]:
            return (
                "offers nothing but what lies in the output folder, whose files are never inputs; name another input, "
                "or another folder for the output"
            )
        return "matches no file; check the path, and quote patterns in the shell"
