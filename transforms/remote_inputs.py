"""Lists inputs that have URLs: gs://, and what Beam has a file system for. No request is made for a single file.

A listing brings names with sizes and generations, page by page. A pattern lists what stands below its part without
wildcards; a list of names costs one listing for each folder, from the first of its names to the last.
"""

from __future__ import annotations

import base64
import fnmatch
import functools
import glob
import re
import sqlite3
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

from transforms.input_table import PENDING, ROWS_AT_ONCE, Found, insert, is_skipped
from transforms.sources import explain_error

SCHEME = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*)://")


class ListingError(ValueError):
    """Nothing can be listed there; the message says why."""


class Object(NamedTuple):
    """One object of a listing.

    Attributes:
        url: Its URL.
        size: Bytes.
        version: Its generation, or the time of its last change in ns.
        crc32c: Checksum of its bytes in hex digits, "" where the listing has none.
    """

    url: str
    size: int
    version: int
    crc32c: str = ""


class _Storage(Protocol):
    def list(self, prefix: str, *, deep: bool, first: str = "") -> Iterator[Object]:
        """Yields what begins with a URL in order of names, below folders only when `deep`; from `first` on."""


class _Gcs:
    _FIELDS = "items(name,size,generation,crc32c),nextPageToken"

    def list(self, prefix: str, *, deep: bool, first: str = "") -> Iterator[Object]:
        from transforms import gcs

        bucket, name = gcs.split_url(prefix)
        options: dict[str, Any] = {"timeout": gcs.TIMEOUT_SECS, "retry": gcs.retry_policy(), "fields": self._FIELDS}
        if not deep:
            options["delimiter"] = "/"
        if first:
            options["start_offset"] = gcs.split_url(first)[1]
        try:
            for page in gcs.client().list_blobs(bucket, prefix=name, **options).pages:
                for item in page.raw_page.get("items", ()):  # As they came: making blobs of them takes longest here.
                    checksum = base64.b64decode(item.get("crc32c", "")).hex()
                    yield Object(f"gs://{bucket}/{item['name']}", int(item["size"]), int(item["generation"]), checksum)
        except Exception as error:
            raise gcs.reading_error(error, prefix) from error


class _Beam:
    """A file system of Beam's, which lists a folder as its module does: whole, or its first level."""

    def list(self, prefix: str, *, deep: bool, first: str = "") -> Iterator[Object]:
        from transforms.beam_files import file_system
        from transforms.transient import try_again

        folder = prefix[: prefix.rfind("/") + 1]
        try:
            found = try_again(lambda: [*file_system(prefix)._list(folder)])
        except FileNotFoundError:
            return
        except Exception as error:
            raise ListingError(f"{prefix}: {error}") from error
        for one in sorted(found, key=lambda one: one.path):
            if one.path.startswith(prefix) and one.path >= first and (deep or "/" not in one.path[len(prefix) :]):
                version = int((one.last_updated_in_seconds or 0) * 1e9)
                yield Object(one.path, int(one.size_in_bytes), version)


def _storage(url: str) -> _Storage:
    return _Gcs() if url.startswith("gs://") else _Beam()


def find_object(url: str) -> Object | None:
    """Looks one object up, None when there is none.

    Raises:
        OSError: It cannot be looked up.
        ListingError: There is no such storage.
    """
    first = next(_storage(url).list(url, deep=False), None)
    return first if first is not None and first.url == url else None


class RemoteLister:
    """Expands URLs; counts what it skips.

    Args:
        excluded: URL of the output folder, which is never an input.
    """

    def __init__(self, excluded: str) -> None:
        self._excluded = excluded.rstrip("/") + "/"
        self.num_skipped = 0

    def expand(self, url: str) -> Iterator[Found]:
        """Yields the objects of a name, folder or pattern; a name that exists is a name, whatever is in it.

        Raises:
            ListingError: Nothing can be listed there.
        """
        try:
            found = None if url.endswith("/") else find_object(url)
            if found is not None:
                yield _found(found)
            else:
                yield from self._match(url)
        except OSError as error:
            raise ListingError(str(error.strerror or error)) from error

    def _match(self, url: str) -> Iterator[Found]:
        base, parts = _split_pattern(url)
        deep = len(parts) > 1 or parts[-1] == "**"
        prefix = base if deep else base + re.split(r"[*?\[]", parts[0], maxsplit=1)[0]
        for found in _storage(url).list(prefix, deep=deep):
            rest = found.url[len(base) :]
            names = rest.split("/")
            if not names[-1] or found.url.startswith(self._excluded) or not _matches(parts, names):
                continue
            if any(map(is_skipped, rest.encode().split(b"/"))):
                self.num_skipped += 1
            else:
                yield _found(found)

    def resolve(self, table: sqlite3.Connection) -> None:
        """Finds what lists name: the rows whose folders have not been listed yet."""
        table.create_function("folder_of", 1, lambda key: key[: key.rfind(b"/") + 1], deterministic=True)
        table.execute(f"CREATE INDEX pending ON found (key) WHERE reason = '{PENDING}'")
        table.execute(
            "CREATE TEMP TABLE folders AS SELECT folder_of(key) AS folder, min(key) AS first, max(key) AS last "
            f"FROM found WHERE reason = '{PENDING}' GROUP BY folder_of(key)"
        )
        for folder, first, last in table.execute("SELECT folder, first, last FROM folders ORDER BY folder"):
            try:
                self._resolve_folder(table, folder.decode(), first.decode(), last)
            except (OSError, ListingError) as error:
                reason, text = explain_error(error) if isinstance(error, OSError) else ("os_error", str(error))
                table.execute(
                    f"UPDATE found SET reason = ?, error = ? WHERE reason = '{PENDING}' AND folder_of(key) = ?",
                    [reason, text, folder],
                )
        self._resolve_patterns(table)
        table.execute(
            "UPDATE found SET reason = 'not_found', error = 'no such object, and nothing matches it as a pattern' "
            f"WHERE reason = '{PENDING}'"
        )

    def _resolve_folder(self, table: sqlite3.Connection, folder: str, first: str, last: bytes) -> None:
        rows: list[tuple[int, int, str, bytes]] = []
        for found in _storage(folder).list(folder, deep=False, first=first):
            key = found.url.encode()
            if key > last:
                break
            rows.append((found.size, found.version, found.crc32c, key))
            if len(rows) == ROWS_AT_ONCE:
                _set_sizes(table, rows)
        _set_sizes(table, rows)

    def _resolve_patterns(self, table: sqlite3.Connection) -> None:
        pending = f"SELECT rowid, pattern, name FROM found WHERE reason = '{PENDING}'"
        for rowid, number, name in table.execute(pending).fetchall():
            if not glob.has_magic(name):
                continue
            before = table.execute("SELECT count(*) FROM found").fetchone()
            insert(table, ((number, found) for found in self.expand(name.decode())))
            if table.execute("SELECT count(*) FROM found").fetchone() != before:
                table.execute("DELETE FROM found WHERE rowid = ?", [rowid])


def _set_sizes(table: sqlite3.Connection, rows: list[tuple[int, int, str, bytes]]) -> None:
    table.execute("BEGIN")
    table.executemany(
        f"UPDATE found SET size = ?, mtime_ns = ?, crc32c = ?, reason = NULL WHERE key = ? AND reason = '{PENDING}'",
        rows,
    )
    table.execute("COMMIT")
    rows.clear()


def pending(url: bytes) -> Found:
    """Returns what a list names by a URL, to be resolved with all others of its folder."""
    return Found(url, url, 0, 0, PENDING)


def _found(found: Object) -> Found:
    name = found.url.encode()
    return Found(name, name, found.size, found.version, crc32c=found.crc32c)


def _split_pattern(url: str) -> tuple[str, tuple[str, ...]]:
    """Splits into the URL of the folder above the first wildcard, and the parts below; a folder is taken whole."""
    if not glob.has_magic(url):
        return url.rstrip("/") + "/", ("**",)
    match = SCHEME.match(url)
    assert match is not None
    parts = url[match.end() :].split("/")
    fixed = next(number for number, part in enumerate(parts) if glob.has_magic(part))
    base = url[: match.end()] + "".join(f"{part}/" for part in parts[:fixed])
    rest = tuple(part for part in parts[fixed:] if part)
    return base, rest if parts[-1] else (*rest, "**")


def _matches(parts: tuple[str, ...], names: list[str]) -> bool:
    """Whether the parts of a name match those of a pattern; `**` stands for any folders, at the end for all below."""
    if not parts:
        return not names
    if parts[0] != "**":
        return bool(names) and _regex(parts[0])(names[0]) is not None and _matches(parts[1:], names[1:])
    if len(parts) == 1:
        return bool(names)
    return any(_matches(parts[1:], names[start:]) for start in range(len(names)))


@functools.cache
def _regex(part: str) -> Any:
    return re.compile(fnmatch.translate(part)).match
