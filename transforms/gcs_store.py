"""Output directories in Google Cloud Storage, gs://BUCKET/FOLDER.

What the other stores get from the file system is here a precondition on the object's generation: a name is created
with `if_generation_match=0`, deleted at the generation that was seen, copied onto the generation that was seen. A
request whose answer was lost is repeated, and may then meet its own effect: every write bears a mark of its own, by
which it is known again.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import uuid
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, TypeVar

from google.api_core.exceptions import NotFound, PreconditionFailed
from google.cloud.storage import Blob, Bucket
from google.cloud.storage.exceptions import DataCorruption

from transforms import gcs
from transforms.billing import billing_project
from transforms.gcs_reader import open_object
from transforms.sources import InputChangedError
from transforms.spool import UploadSpool, delete_left_over, spooled
from transforms.store import OutputError, Spool, Version
from transforms.transient import status_of

T = TypeVar("T")

CHUNK_BYTES = 16 << 20
"""What an upload session holds in memory; files of up to 8 MiB go in one request, larger ones in one session."""

_MARK = "gristmill-write"
_SESSION = "upload_id="
_MAX_SESSIONS = 3
_MAX_RACES = 5
_NEEDS_A_BUCKET = ("write", "list")
_LISTED = "items(name,size),nextPageToken"


class GcsStore:
    """A folder of a bucket.

    Args:
        root: Its URL.

    Raises:
        ValueError: There is no bucket in it.
        CredentialsError: There are no credentials.
    """

    requests_at_once = gcs.REQUESTS_AT_ONCE

    def __init__(self, root: str) -> None:
        self.root = root.rstrip("/")
        self._bucket_name, folder = gcs.split_url(self.root)
        self._prefix = f"{folder}/" if folder else ""
        self._payer = billing_project()  # Goes along where the store is handed to another process.
        gcs.client()

    def put_if_absent(self, name: str, data: bytes) -> bool:
        """Creates the object at generation 0, which one caller can."""
        return self.put_if_version(name, data, None) is not None

    def put_if_version(self, name: str, data: bytes, version: Version | None) -> Version | None:
        """Writes the object onto the generation that was seen, which one caller can."""
        upload = functools.partial(_upload_bytes, data)
        return self._write(name, _new_mark(), upload, version)

    def put(self, name: str, data: bytes) -> None:
        """Creates or replaces the object in one request."""
        self._call("write", name, lambda: self._new_blob(name).upload_from_string(data, **_options()))

    def put_file(self, path: str, name: str) -> None:
        """Uploads the file, in one session when it is large."""
        self._upload(
            lambda: self._call("write", name, lambda: self._new_blob(name).upload_from_filename(path, **_options()))
        )

    def put_file_if_version(self, path: str, name: str, version: Version | None) -> Version | None:
        """Uploads the file onto the generation that was seen."""
        return self._write_file(path, name, version)

    def version(self, name: str) -> Version | None:
        """Looks the object up; its generation is its version."""
        blob = self._look(name)
        return None if blob is None else int(blob.generation or 0)

    def get(self, name: str) -> tuple[bytes, Version] | None:
        """Reads the whole object; its generation is its version."""
        blob = self._blob(name)
        options = {"raw_download": True, "checksum": "crc32c"}
        try:
            data = self._call("read", name, lambda: gcs.retry_policy()(blob.download_as_bytes)(**options, **_asking()))
        except FileNotFoundError:
            return None
        if blob.generation is None:  # A proxy has taken the header away.
            raise OutputError(f"cannot read {self._url(name)}: the answer does not tell its generation")
        return data, int(blob.generation)

    def open(self, name: str) -> BinaryIO:
        """Opens the object for ranged reads of the generation that stands now."""
        for _ in range(_MAX_RACES):
            blob = self._look(name)
            if blob is None:
                break
            with contextlib.suppress(InputChangedError):  # It was replaced in between.
                return open_object(self._url(name), int(blob.size or 0), int(blob.generation or 0))
        raise FileNotFoundError(f"there is no {self._url(name)}")

    def size(self, name: str) -> int | None:
        """Looks the object up."""
        blob = self._look(name)
        return None if blob is None else int(blob.size or 0)

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Lists objects page by page, in the order of their names. What consoles show as empty folders is left out."""
        pages = gcs.client().list_blobs(self._bucket(), prefix=self._prefix + prefix, fields=_LISTED, **_asking())
        blobs = iter(pages)
        while (blob := self._call("list", prefix, lambda: next(blobs, None))) is not None:
            name = blob.name.removeprefix(self._prefix)
            if name and not name.endswith("/"):
                yield name, int(blob.size or 0)

    def copy(self, source: str, target: str) -> None:
        """Copies within the service, from and onto the generations that were seen; no byte comes here."""
        for _ in range(_MAX_RACES):
            blob, stands = self._look(source), self._look(target)
            if blob is None:
                raise FileNotFoundError(f"there is no {self._url(source)}")
            if source == target or (stands is not None and _is_same(blob, stands)):
                return
            version = None if stands is None else stands.generation
            with contextlib.suppress(PreconditionFailed):  # Ours of before, or somebody else's: look again.
                self._call("copy to", target, functools.partial(self._rewrite, blob, version, target))
                return
        raise OutputError(f"cannot copy to {self._url(target)}: it is being written by others")

    def copy_if_version(self, source: str, target: str, version: Version | None) -> Version | None:
        """Copies within the service onto the generation that was seen, which thereby always becomes another one.

        When the answer to a copy was lost, it says None: somebody wrote the object, perhaps this call.
        """
        blob = self._look(source)
        if blob is None:
            raise FileNotFoundError(f"there is no {self._url(source)}")
        try:
            return self._call("copy to", target, functools.partial(self._rewrite, blob, version, target))
        except PreconditionFailed:
            return None

    def delete(self, name: str, version: Version | None = None) -> bool:
        """Deletes the object, at its generation when one is given.

        When the answer to a deletion was lost, it says False: somebody deleted the object, perhaps this call.
        """
        blob = self._blob(name)
        try:
            self._call("delete", name, lambda: blob.delete(if_generation_match=version, **_asking()))
        except (FileNotFoundError, PreconditionFailed):
            return False
        return True

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Nothing is under way that could be waited for."""
        yield

    def guarded(self, check: Callable[[], object]) -> None:
        """Cannot: no object waits for another."""

    def spool(self, name: str) -> Spool:
        """Writes to a local file, which sealing uploads."""
        return UploadSpool(lambda path: self.create_file(path, name))

    def clean(self) -> None:
        """Deletes local files of writers that were killed; objects appear whole, under their names only."""
        delete_left_over()

    @contextlib.contextmanager
    def local_copy(self, name: str) -> Iterator[str]:
        """Downloads the object for a while."""
        blob = self._look(name)
        if blob is None:
            raise FileNotFoundError(f"there is no {self._url(name)}")
        with spooled(int(blob.size or 0)) as path:
            options = {"raw_download": True, "checksum": "crc32c", "if_generation_match": blob.generation}
            try:
                download = gcs.retry_policy()(blob.download_to_filename)
                self._call("read", name, lambda: download(path, **options, **_asking()))
            except PreconditionFailed as error:
                raise OutputError(f"cannot read {self._url(name)}: it was replaced meanwhile") from error
            yield path

    def create_file(self, path: str, name: str) -> None:
        """Creates an object that is not there yet with the content of a local file.

        Raises:
            OutputError: It could not be written, or there is such an object that is not ours.
        """
        if self._write_file(path, name, None) is None:
            raise OutputError(f"cannot write {self._url(name)}: somebody else has")

    def _write_file(self, path: str, name: str, version: Version | None) -> Version | None:
        written: Version | None = None
        mark, upload = _new_mark(), functools.partial(_upload_file, path)

        def write() -> None:
            nonlocal written
            written = self._write(name, mark, upload, version)

        self._upload(write)
        return written

    def _write(self, name: str, mark: str, upload: Callable[..., None], version: Version | None) -> Version | None:
        """Uploads onto a generation, 0 for None; an object that bears our mark is our own, whose answer was lost."""
        blob = self._new_blob(name)
        blob.metadata = {_MARK: mark}
        try:
            self._call("write", name, lambda: upload(blob, if_generation_match=version or 0, **_options()))
        except PreconditionFailed:
            stands = self._look(name)
            if stands is None or (stands.metadata or {}).get(_MARK) != mark:
                return None
            return int(stands.generation or 0)
        return int(blob.generation or 0)

    def _upload(self, upload: Callable[[], None]) -> None:
        """Uploads a file; a session that the service has forgotten, or that went wrong, is begun anew."""
        for session in range(1, _MAX_SESSIONS + 1):
            try:
                return upload()
            except OutputError as error:
                if session == _MAX_SESSIONS or not _may_begin_anew(error):
                    raise
        raise AssertionError

    def _rewrite(self, blob: Blob, version: Version | None, target: str) -> Version:
        new, token = self._blob(target), None
        while True:
            token, _, _ = new.rewrite(
                blob,
                token=token,
                if_generation_match=version or 0,
                if_source_generation_match=blob.generation,
                **_asking(),
            )
            if token is None:
                return int(new.generation or 0)

    def _look(self, name: str) -> Blob | None:
        return self._call("look up", name, lambda: self._bucket().get_blob(self._prefix + name, **_asking()))

    def _call(self, what: str, name: str, call: Callable[[], T]) -> T:
        """Runs a request; what stays wrong with it is an OutputError, but for names that are not there and races."""
        try:
            return call()
        except PreconditionFailed:
            raise
        except NotFound as error:
            if what in _NEEDS_A_BUCKET:
                raise self._error(what, name, error) from error
            raise FileNotFoundError(f"there is no {self._url(name)}: {gcs.describe_error(error)}") from error
        except Exception as error:
            raise self._error(what, name, error) from error

    def _error(self, what: str, name: str, error: Exception) -> OutputError:
        return OutputError(f"cannot {what} {self._url(name)}: {gcs.describe_error(error)}")

    def _bucket(self) -> Bucket:
        return gcs.bucket(self._bucket_name, self._payer)

    def _blob(self, name: str) -> Blob:
        return self._bucket().blob(self._prefix + name)

    def _new_blob(self, name: str) -> Blob:
        return self._bucket().blob(self._prefix + name, chunk_size=CHUNK_BYTES)

    def _url(self, name: str) -> str:
        return f"{self.root}/{name}" if name else self.root


def _upload_bytes(data: bytes, blob: Blob, **options: Any) -> None:
    blob.upload_from_string(data, **options)


def _upload_file(path: str, blob: Blob, **options: Any) -> None:
    blob.upload_from_filename(path, **options)


def _new_mark() -> str:
    return uuid.uuid4().hex


def _asking() -> dict[str, Any]:
    return {"timeout": gcs.TIMEOUT_SECS, "retry": gcs.retry_policy()}


def _options() -> dict[str, Any]:
    return {"checksum": "crc32c", "content_type": "application/octet-stream", **_asking()}


def _is_same(one: Blob, other: Blob) -> bool:
    """Whether two objects have the same content, as far as the service's checksums tell."""
    return (one.size, one.crc32c, one.md5_hash) == (other.size, other.crc32c, other.md5_hash)


def _may_begin_anew(error: Exception) -> bool:
    cause = error.__cause__
    if isinstance(cause, DataCorruption | ValueError):  # Bytes were lost on the way, or the session lost count.
        return True
    if cause is None:
        return False
    # A session that has ended is not found; it may have ended well, with its answer lost.
    return status_of(cause) == http.client.GONE or (
        status_of(cause) == http.client.NOT_FOUND and _SESSION in str(cause)
    )


def open_gcs(root: str) -> GcsStore:
    """Opens an output directory in Google Cloud Storage.

    Raises:
        ValueError: There is no bucket in its URL, or there are no credentials; the message says what to do.
    """
    try:
        return GcsStore(root)
    except gcs.CredentialsError as error:
        raise ValueError(f"{root}: {error}") from error
