"""Files of every kind are told by what they hold, also inside compressed data."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import pickle
import sqlite3
import sys
import tarfile
import wave
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
import zstandard
from PIL import Image

from corpora import frame_all
from transforms.formats.sniff import HEAD_BYTES, tell, what_is_it

RECORDS = frame_all([b"one", b"two"] * 50)
JSONL = b'{"text": "a"}\n{"text": "b"}\n'


def picture(kind: str) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (40, 40)).save(out, kind)
    return out.getvalue()


def tar() -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        info = tarfile.TarInfo("a.txt")
        info.size = 3
        archive.addfile(info, io.BytesIO(b"abc"))
    return out.getvalue()


def zipped(*names: str) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name in names:
            archive.writestr(name, "x")
    return out.getvalue()


def sound() -> bytes:
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(8_000)
        file.writeframes(bytes(800))
    return out.getvalue()


def array() -> bytes:
    out = io.BytesIO()
    np.save(out, np.arange(10))
    return out.getvalue()


KINDS = {
    "a TFRecord file": RECORDS,
    "gzip data of a TFRecord file": gzip.compress(RECORDS, mtime=0),
    "zlib data of a TFRecord file": zlib.compress(RECORDS),
    "zstd data of a TFRecord file": zstandard.ZstdCompressor().compress(RECORDS),
    "xz data of JSON lines": lzma.compress(JSONL),
    "bzip2 data of JSON lines": bz2.compress(JSONL),
    "gzip data of a tar archive": gzip.compress(tar(), mtime=0),
    "gzip data of a NumPy array": gzip.compress(array(), mtime=0),
    "a JPEG picture": picture("JPEG"),
    "a PNG picture": picture("PNG"),
    "a GIF picture": picture("GIF"),
    "a BMP picture": picture("BMP"),
    "a TIFF picture": picture("TIFF"),
    "a WebP picture": picture("WEBP"),
    "WAV sound": sound(),
    "MP3 sound": b"ID3\x04\0\0\0\0\0\0",
    "FLAC sound": b"fLaC\0\0\0\x22",
    "an MPEG-4 or QuickTime video": b"\0\0\0\x18ftypmp42\0\0\0\0mp42isom",
    "a Matroska or WebM video": b"\x1aE\xdf\xa3\x9fB\x86\x81\x01",
    "a PDF document": b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n",
    "a Microsoft Office document": zipped("[Content_Types].xml", "word/document.xml"),
    "a PyTorch checkpoint": zipped("archive/data.pkl", "archive/version"),
    "a NumPy archive": zipped("arr_0.npy"),
    "a zip archive": zipped("a.txt"),
    "a tar archive": tar(),
    "a Parquet file": b"PAR1\x15\x04\x15\0",
    "an HDF5 file": b"\x89HDF\r\n\x1a\n\0\0\0\0\0\x08\x08\0",
    "a NumPy array": array(),
    "a Python pickle": pickle.dumps({"a": [1, 2, 3]}),
    "JSON lines": JSONL,
    "JSON": json.dumps({"name": "demo", "splits": [{"name": "train"}]}, indent=1).encode(),
    "a table of text (CSV)": b"id,text,label\n1,one,0\n2,two,1\n3,three,0\n",
    "plain text": "Ein Satz über nichts.\nNoch einer.\n".encode(),
    "an HTML page": b"\n<!DOCTYPE html><html><head></head></html>",
    "a program": Path(sys.executable).read_bytes()[:HEAD_BYTES],
    "a Git LFS pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:01\n",
}


@pytest.mark.parametrize("noun", KINDS)
def test_a_file_is_told_by_its_content(noun: str) -> None:
    kind = tell(KINDS[noun][:HEAD_BYTES])
    assert kind is not None
    assert kind.noun == noun
    if kind.format is None:
        assert what_is_it(KINDS[noun][:HEAD_BYTES]).startswith(f"it is {noun}")


@pytest.mark.parametrize("noun", ["gzip data of a TFRecord file", "zlib data of a TFRecord file", "a TFRecord file"])
def test_what_is_read_as_tfrecord_has_its_format(noun: str) -> None:
    kind = tell(KINDS[noun])
    assert kind is not None
    assert kind.format == "tfrecord"


def test_a_database_is_told(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "x.db") as table:
        table.execute("CREATE TABLE t (a)")
    assert what_is_it((tmp_path / "x.db").read_bytes()) == "it is an SQLite database"


@pytest.mark.parametrize(
    "data", [b"", bytes(64), b"\x01\x02\x03\xff\xfe" * 20, b"\xff\xfe\0", b"PK", b"BZh", b"\x1f\x8b"]
)
def test_what_tells_nothing_is_guessed_at_without_failing(data: bytes) -> None:
    kind = tell(data)
    assert kind is None or kind.format is None
    assert what_is_it(data).startswith("it")


def test_text_that_is_cut_inside_a_sign_is_text() -> None:
    kind = tell("é".encode() * 2_000 + "é".encode()[:1])
    assert kind is not None
    assert kind.noun == "plain text"
