"""Reads `@lists`: files with one name, pattern or folder a line, as people and their tools write them.

A name is whatever bytes stand between two line ends, or between two zero bytes (`find -print0`). Lists of other systems
are taken too: with CR or CRLF at the line ends, as UTF-16 or UTF-32, with a byte order mark. What else may stand around
a name (blanks, quotes, the mark of a list that was appended) is taken off only where no such file exists.
"""

from __future__ import annotations

import codecs
import io
import os
from collections.abc import Iterator
from typing import BinaryIO

_HEAD_BYTES = 1 << 16
"""Bytes by which the form of a list is told."""

_MAX_NAME_BYTES = 1 << 16
"""Longer is no name anywhere: paths end at 4,096 bytes, URLs of objects at some more. So memory stays flat."""

_MARKS = (  # The longer first: the mark of UTF-32 begins with that of UTF-16.
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_PIECE_BYTES = 1 << 20

_MORE_ZEROS = 3
"""So many more zero bytes than low ones the high bytes of UTF-16 have at least: names have dots, slashes, digits."""


class ListError(ValueError):
    """A list cannot be read as one; the message says why and what can be done."""


def list_lines(path: str) -> Iterator[bytes]:
    """Yields the names of a list, as they stand there; no empty ones.

    Args:
        path: A local file.

    Raises:
        ListError: It cannot be read, or is no list of names.
    """
    try:
        with open(path, "rb", buffering=_HEAD_BYTES) as file:
            yield from _lines(file)
    except OSError as error:
        hint = "; a list is a local file, copy it here" if "://" in path else ""
        raise ListError(f"the list cannot be read: {error.strerror}{hint}") from error


def spellings(line: bytes) -> Iterator[bytes]:
    """Yields what a line may mean whose bytes are no name: without mark and blanks, without quotes, from a home."""
    bare = line.removeprefix(codecs.BOM_UTF8)
    found = [bare, bare.rstrip(), bare.strip()]
    quote = found[-1][:1]
    if quote in (b'"', b"'") and found[-1][1:].endswith(quote):
        found.append(found[-1][1:-1].replace(quote * 2, quote))  # As spreadsheets write them.
    if found[-1].startswith(b"~/"):
        found.append(os.path.expanduser(found[-1]))
    yield from (name for name in dict.fromkeys(found) if name and name != line)


def is_remark(line: bytes) -> bool:
    """Whether a line that is no name is none because it is empty, or a comment."""
    bare = line.removeprefix(codecs.BOM_UTF8).strip()
    return not bare or bare.startswith(b"#")


def _lines(file: BinaryIO) -> Iterator[bytes]:
    head = file.peek(_HEAD_BYTES)  # type: ignore[attr-defined]  # Nothing is read twice: it may be a pipe.
    encoding = _encoding(head)
    if encoding is not None:
        yield from _decoded(file, encoding)
    elif b"\0" in head:
        # From a program, which writes no comments.
        yield from (b"./" + name if name[:1] == b"#" else name for name in _separated(file, b"\0", b""))
    elif b"\r" in head.rstrip(b"\r\n") and b"\n" not in head:  # Macs of old.
        yield from _separated(file, b"\r", b"\r\n")
    else:
        yield from _separated(file, b"\n", b"\r\n")


def _separated(file: BinaryIO, end: bytes, strips: bytes) -> Iterator[bytes]:
    """Yields what stands between separators, without what it ends in."""
    rest = b""
    while piece := file.read(_PIECE_BYTES):
        *names, rest = (rest + piece).split(end)
        yield from filter(None, (_checked(name).rstrip(strips) for name in names))
        _checked(rest)
    if rest := rest.rstrip(strips):
        yield rest


def _checked(name: bytes) -> bytes:
    if len(name) > _MAX_NAME_BYTES:
        raise ListError(f"this is no list of names: one of them has more than {_MAX_NAME_BYTES:,} bytes")
    return name


def _decoded(file: BinaryIO, encoding: str) -> Iterator[bytes]:
    """Yields the lines of a list in UTF-16 or UTF-32, in UTF-8 as all names are."""
    try:
        with io.TextIOWrapper(file, encoding, newline=None) as text:
            while line := text.readline(_MAX_NAME_BYTES + 1):
                name = line.rstrip("\n").encode()
                if name:
                    yield _checked(name)
    except UnicodeError as error:
        raise ListError(f"the list is not {encoding.upper()}, as it begins: {error}; save it as UTF-8") from error


def _encoding(head: bytes) -> str | None:
    """Returns UTF-16 or UTF-32 where the head of a list is in it, None for one byte after the other.

    Without a mark it is told by line ends: zero bytes separate no names where what they make of UTF-16 has lines.
    """
    for mark, encoding in _MARKS:
        if head.startswith(mark):
            return encoding
    if b"\0" not in head:
        return None
    for encoding, high in (("utf-16-le", 1), ("utf-16-be", 0)):
        text = _decode(head, encoding)
        if text is not None and "\0" not in text and any(end in text for end in "\n\r"):
            zeros = [head[start::2].count(0) for start in (high, 1 - high)]
            if zeros[0] > _MORE_ZEROS * zeros[1]:
                return encoding
    if len(head) > 2 and any(not any(head[start::2]) for start in (0, 1)):
        raise ListError("this may be UTF-16, or names of one letter with zero bytes between; save it as UTF-8")
    return None


def _decode(data: bytes, encoding: str) -> str | None:
    try:
        return codecs.getincrementaldecoder(encoding)().decode(data)
    except UnicodeDecodeError:
        return None
