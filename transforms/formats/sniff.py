"""Says in words what a file probably is that is not what it should be."""

from __future__ import annotations

RIEGELI = bytes.fromhex("83af70d10d884a3f 0000000000000000 4000000000000000")
"""How files of Riegeli's record format begin, of which ArrayRecord is one; see its specification of file signatures."""

_SIGNATURES = (
    (b"version https://git-lfs", "it is a Git LFS pointer: fetch the real file with `git lfs pull`"),
    (b"\x1f\x8b", "it is gzip data"),
    (b"\x28\xb5\x2f\xfd", "it is zstd data: decompress it first"),
    (b"BZh", "it is bzip2 data: decompress it first"),
    (b"\xfd7zXZ\x00", "it is xz data: decompress it first"),
    (b"PK\x03\x04", "it is a zip archive"),
    (b"PAR1", "it is a Parquet file"),
    (RIEGELI, "it begins like an ArrayRecord"),
    (b"\xff\xd8\xff", "it is a JPEG picture"),
    (b"\x89PNG", "it is a PNG picture"),
    (b"{", "it looks like JSON"),
    (b"<?xml", "it is an XML page, perhaps an error message of the store it came from"),
)


def what_is_it(head: bytes) -> str:
    """Returns a guess for the first bytes of a file, as the end of a sentence."""
    if head and not head.strip(b"\0"):
        return "its first bytes are all zero"
    if not head:
        return "it holds nothing that can be read"
    text = head.lstrip().lower()
    if text.startswith((b"<!doctype html", b"<html")):
        return "it is an HTML page, perhaps a login or warning page of the site it came from"
    for signature, words in _SIGNATURES:
        if head.startswith(signature):
            return words
    try:
        head.decode("utf-8")
    except UnicodeDecodeError:
        return f"it begins with {head[:16].hex(' ')}"
    return "it is plain text"
