"""Tells by its first bytes what a file probably is: also what is not read, so that it can be called by its name."""

from __future__ import annotations

import bz2
import dataclasses
import json
import lzma
import re
import zlib
from collections.abc import Callable
from typing import Any

import zstandard

from transforms.formats.tfrecord_scan import HEADER_BYTES, is_header

HEAD_BYTES = 4096
"""What must be known of a file to tell it."""

RIEGELI = bytes.fromhex("83af70d10d884a3f 0000000000000000 4000000000000000")
"""How files of Riegeli's record format begin, of which ArrayRecord is one; see its specification of file signatures."""


@dataclasses.dataclass(frozen=True)
class Kind:
    """What a file is.

    Attributes:
        noun: In words, with an article where it has one.
        format: Name of the source format that reads it, None if none does.
        advice: What to do about it, or "".
        is_companion: Whether such files lie beside data: a read-me, a description, a page in place of a file.
    """

    noun: str
    format: str | None = None
    advice: str = ""
    is_companion: bool = False


_DECOMPRESS = "decompress it first"
_COMPANIONS: tuple[tuple[bytes, str, str], ...] = (
    (b"version https://git-lfs", "a Git LFS pointer", "fetch the real file with `git lfs pull`"),
    (b"<!doctype html", "an HTML page", "perhaps a login or warning page of the site it came from"),
    (b"<html", "an HTML page", "perhaps a login or warning page of the site it came from"),
    (b"<?xml", "an XML page", "perhaps an error message of the store it came from"),
)
"""(beginning in lower case, noun, advice)"""

_SIGNATURES: tuple[tuple[int, bytes, str], ...] = (
    (0, b"\xff\xd8\xff", "a JPEG picture"),
    (0, b"\x89PNG\r\n\x1a\n", "a PNG picture"),
    (0, b"GIF87a", "a GIF picture"),
    (0, b"GIF89a", "a GIF picture"),
    (8, b"WEBP", "a WebP picture"),
    (0, b"II*\0", "a TIFF picture"),
    (0, b"MM\0*", "a TIFF picture"),
    (0, b"8BPS", "a Photoshop picture"),
    (0, b"\0\0\0\x0cjP  ", "a JPEG 2000 picture"),
    (0, b"\0\0\0\x0cJXL ", "a JPEG XL picture"),
    (0, b"v/1\x01", "an OpenEXR picture"),
    (128, b"DICM", "a DICOM picture"),
    (4, b"ftypavif", "an AVIF picture"),
    (4, b"ftyphei", "a HEIC picture"),
    (4, b"ftypmif1", "a HEIC picture"),
    (4, b"ftypM4A", "MPEG-4 sound"),
    (4, b"ftyp", "an MPEG-4 or QuickTime video"),
    (0, b"\x1aE\xdf\xa3", "a Matroska or WebM video"),
    (8, b"AVI LIST", "an AVI video"),
    (0, b"FLV\x01", "a Flash video"),
    (0, b"\0\0\x01\xba", "an MPEG video"),
    (0, b"\0\0\x01\xb3", "an MPEG video"),
    (8, b"WAVE", "WAV sound"),
    (8, b"AIFF", "AIFF sound"),
    (0, b"fLaC", "FLAC sound"),
    (0, b"OggS", "Ogg sound or video"),
    (0, b"ID3", "MP3 sound"),
    (0, b"\xff\xfb\x90", "MP3 sound"),
    (0, b"MThd\0\0\0\x06", "a MIDI file"),
    (0, b"%PDF-", "a PDF document"),
    (0, b"%!PS", "a PostScript document"),
    (0, b"{\\rtf", "an RTF document"),
    (0, b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "an old Microsoft Office document"),
    (0, b"PAR1", "a Parquet file"),
    (0, b"ARROW1", "an Arrow or Feather file"),
    (0, b"FEA1", "a Feather file"),
    (0, b"Obj\x01", "an Avro file"),
    (0, b"ORC\x11", "an ORC file"),
    (0, b"\x89HDF\r\n\x1a\n", "an HDF5 file"),
    (0, b"\x93NUMPY", "a NumPy array"),
    (0, b"GGUF", "a GGUF model"),
    (0, b"SQLite format 3\0", "an SQLite database"),
    (257, b"ustar", "a tar archive"),
    (0, b"7z\xbc\xaf\x27\x1c", "a 7-Zip archive"),
    (0, b"Rar!\x1a\x07", "a RAR archive"),
    (0, b"!<arch>\n", "an ar archive or Debian package"),
    (0, b"\x04\x22\x4d\x18", "LZ4 data"),
    (0, b"\xff\x06\0\0sNaPpY", "Snappy data"),
    (0, b"\x7fELF", "a program"),
    (0, b"\xfe\xed\xfa\xcf", "a program"),
    (0, b"\xcf\xfa\xed\xfe", "a program"),
    (0, b"\xca\xfe\xba\xbe", "a program"),
    (0, b"\0asm", "a program"),
    (0, b"#!", "a script"),
)
"""(place, bytes that stand there, noun); the first that fits counts."""

_ZIP = b"PK\x03\x04"
_ZIPS = (
    (b"[Content_Types].xml", "a Microsoft Office document"),
    (b"word/", "a Microsoft Office document"),
    (b"xl/", "a Microsoft Office document"),
    (b"mimetypeapplication/vnd.oasis", "an OpenDocument document"),
    (b"mimetypeapplication/epub", "an EPUB book"),
    (b"/data.pkl", "a PyTorch checkpoint"),
    (b".npy", "a NumPy archive"),
)
_PICKLES = re.compile(rb"\x80[\x02\x03](?:\}|\]|\(|c|X|q|K)|\x80[\x04\x05]\x95", re.DOTALL)
_PROGRAM = re.compile(rb"MZ.{58}", re.DOTALL)
_BITMAP = re.compile(rb"BM.{4}\0\0\0\0.\0\0\0", re.DOTALL)
_CONTROL = re.compile(rb"[\x00-\x08\x0e-\x1a\x1c-\x1f]")


def _gunzip(head: bytes) -> bytes:
    return zlib.decompressobj(31).decompress(head, HEAD_BYTES)


def _unzlib(head: bytes) -> bytes:
    return zlib.decompressobj().decompress(head, HEAD_BYTES)


def _unzstd(head: bytes) -> bytes:
    return zstandard.ZstdDecompressor(max_window_size=1 << 27).decompressobj().decompress(head)[:HEAD_BYTES]


def _unxz(head: bytes) -> bytes:
    return lzma.LZMADecompressor(memlimit=1 << 27).decompress(head, HEAD_BYTES)


def _unbzip2(head: bytes) -> bytes:
    return bz2.BZ2Decompressor().decompress(head, HEAD_BYTES)


_COMPRESSIONS: tuple[tuple[bytes, str, Callable[[bytes], bytes], str], ...] = (
    (b"\x1f\x8b", "gzip data", _gunzip, ""),
    (b"\x28\xb5\x2f\xfd", "zstd data", _unzstd, _DECOMPRESS),
    (b"BZh", "bzip2 data", _unbzip2, _DECOMPRESS),
    (b"\xfd7zXZ\0", "xz data", _unxz, _DECOMPRESS),
)
"""(beginning, noun, what inflates a beginning, advice); TFRecord in gzip and zlib is read as it is."""


def tell(head: bytes) -> Kind | None:
    """Returns what a file is by its first `HEAD_BYTES`, None where they do not tell."""
    if is_header(head[:HEADER_BYTES]):
        return Kind("a TFRecord file", "tfrecord")
    if head.startswith(RIEGELI):
        return Kind("an ArrayRecord file", "array_record")
    return _tell_compressed(head) or _tell_binary(head) or _tell_text(head)


def _tell_compressed(head: bytes) -> Kind | None:
    for magic, noun, inflate, advice in _COMPRESSIONS:
        if head.startswith(magic):
            inside = _tell_inside(head, inflate)
            if inside is not None and inside.format == "tfrecord" and magic == b"\x1f\x8b":
                return Kind("gzip data of a TFRecord file", "tfrecord")
            return Kind(f"{noun} of {inside.noun}" if inside is not None else noun, advice=advice)
    if len(head) >= 2 and head[0] & 0x8F == 0x08 and int.from_bytes(head[:2], "big") % 31 == 0:
        inside = _tell_inside(head, _unzlib)
        if inside is not None and inside.format == "tfrecord":
            return Kind("zlib data of a TFRecord file", "tfrecord")
    return None


def _tell_inside(head: bytes, inflate: Callable[[bytes], bytes]) -> Kind | None:
    try:
        start = inflate(head)
    except (zlib.error, zstandard.ZstdError, lzma.LZMAError, OSError, ValueError, EOFError, MemoryError):
        return None
    return tell(start) if start else None


def _tell_binary(head: bytes) -> Kind | None:
    for place, magic, noun in _SIGNATURES:
        if head.startswith(magic, place):
            return Kind(noun)
    if head.startswith(_ZIP):
        beginning = head[:HEAD_BYTES]
        return Kind(next((noun for mark, noun in _ZIPS if mark in beginning), "a zip archive"))
    if _PICKLES.match(head):
        return Kind("a Python pickle")
    if _BITMAP.match(head):
        return Kind("a BMP picture")
    return Kind("a program") if _PROGRAM.match(head) and b"\0\0" in head[:64] else None


def _tell_text(head: bytes) -> Kind | None:
    start = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    for beginning, noun, advice in _COMPANIONS:
        if start[: len(beginning)].lower() == beginning:
            return Kind(noun, advice=advice, is_companion=True)
    text = _as_text(head)
    if text is None or not text.strip():
        return None
    if start.startswith((b"{", b"[")):
        return _tell_json(text.strip())
    lines = text.splitlines()[:20]
    for separator in (",", "\t", ";"):
        # In prose a blank follows the comma.
        counts = {line.count(separator) - line.count(f"{separator} ") for line in lines[: len(lines) - 1 or 1] if line}
        if len(lines) > 2 and len(counts) == 1 and max(counts) > 0:
            return Kind("a table of text (CSV)")
    return Kind("plain text", is_companion=True)


def _as_text(head: bytes) -> str | None:
    """Returns UTF-8 as text, which may be cut inside its last sign; None for what is none."""
    if _CONTROL.search(head):
        return None
    try:
        return head.decode("utf-8")
    except UnicodeDecodeError as error:
        return head[: error.start].decode("utf-8") if error.start > len(head) - 4 and error.start else None


def _tell_json(text: str) -> Kind:
    first, _, rest = text.partition("\n")
    if rest.strip() and _is_json(first):
        return Kind("JSON lines")
    return Kind("JSON", is_companion=True)


def _is_json(text: str) -> bool:
    try:
        value: Any = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict | list)


def what_is_it(head: bytes) -> str:
    """Returns a guess for the first bytes of a file, as the end of a sentence."""
    if not head:
        return "it holds nothing that can be read"
    if not head.strip(b"\0"):
        return "its first bytes are all zero"
    kind = tell(head)
    if kind is None:
        return f"it begins with {head[:16].hex(' ')}"
    if kind.format == "array_record":
        return "it begins like an ArrayRecord"
    joint = ", " if kind.advice.startswith("perhaps") else ": "
    return f"it is {kind.noun}" + (joint + kind.advice if kind.advice else "")
