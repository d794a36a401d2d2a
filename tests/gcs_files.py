"""Copies folders to and from Cloud Storage."""

from __future__ import annotations

from pathlib import Path

from transforms import gcs
from transforms.gcs_store import GcsStore


def upload(folder: Path, url: str) -> None:
    """Puts all files of a folder below a URL."""
    bucket, prefix = gcs.split_url(url)
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            gcs.bucket(bucket).blob(f"{prefix}/{path.relative_to(folder)}").upload_from_filename(path)


def download(url: str, folder: Path) -> Path:
    """Copies all objects below a URL to a folder."""
    store = GcsStore(url)
    for name, _ in store.list(""):
        found = store.get(name)
        assert found is not None
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(found[0])
    return folder


def read(url: str) -> bytes:
    """Returns an object's bytes."""
    bucket, name = gcs.split_url(url)
    return bytes(gcs.bucket(bucket).blob(name).download_as_bytes())
