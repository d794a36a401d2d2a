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
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

from transforms.input_table import PENDING, ROWS_AT_ONCE, Found, insert
from transforms.leftovers import FOLDER_MARKER, PassedOver, asked_for, is_plain, passed_over_as
from transforms.sources import MachineFaultError, explain_error

_FOLDER = -1
"""The size of what is no object, or one that only says that there is a folder."""

_MAX_WAITING = 1_000
"""Objects that wait until it is known whether one in front of them marks a folder; then a request tells."""

SCHEME = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*)://")


class ListingError(ValueError):
    """Nothing can be listed there; the message says why."""


class Object(NamedTuple):
    """One object of a listing.

    Attributes:
        url: Its URL.
        size: Bytes; -1 for a folder.
        version: Its generation, or the time of its last change in ns.
        crc32c: Checksum of its bytes in hex digits, "" where the listing has none.
    """

    url: str
    size: int
    version: int
    crc32c: str = ""


class _Storage(Protocol):
    def list(self, prefix: str, *, deep: bool, first: str = "", folders: bool = False) -> Iterator[Object]:
        """Yields what begins with a URL in order of names, below folders only when `deep`; from `first` on.

        With `folders`, those that are not gone into stand among the objects, with the size of a folder.
        """


class _Gcs:
    _FIELDS = "items(name,size,generation,crc32c),nextPageToken"

    def list(self, prefix: str, *, deep: bool, first: str = "", folders: bool = False) -> Iterator[Object]:
        from transforms import gcs

        bucket, name = gcs.split_url(prefix)
        options: dict[str, Any] = {"timeout": gcs.TIMEOUT_SECS, "retry": gcs.retry_policy(), "fields": self._FIELDS}
        if not deep:
            options["delimiter"] = "/"
        if folders:
            options["fields"] += ",prefixes"
        if first:
            options["start_offset"] = gcs.split_url(first)[1]
        try:
            for page in gcs.client().list_blobs(gcs.bucket(bucket), prefix=name, **options).pages:
                answer = page.raw_page  # As it came: making blobs of it takes longest here.
                items = (_from_item(bucket, item) for item in answer.get("items", ()))
                below = [Object(f"gs://{bucket}/{name}", _FOLDER, 0) for name in answer.get("prefixes", ())]
                yield from sorted([*items, *below]) if below else items
        except Exception as error:
            raise gcs.reading_error(error, prefix) from error


def _from_item(bucket: str, item: dict[str, Any]) -> Object:
    checksum = base64.b64decode(item.get("crc32c", "")).hex()
    return Object(f"gs://{bucket}/{item['name']}", int(item["size"]), int(item["generation"]), checksum)


class _Beam:
    """A file system of Beam's, which lists a folder as its module does: whole, or its first level."""

    def list(self, prefix: str, *, deep: bool, first: str = "", folders: bool = False) -> Iterator[Object]:
        from transforms.beam_files import file_system
        from transforms.transient import try_again

        folder = prefix[: prefix.rfind("/") + 1]
        try:
            found = try_again(lambda: [*file_system(prefix)._list(folder)])
        except FileNotFoundError:
            return
        except Exception as error:
            raise ListingError(f"{prefix}: {error}") from error
        last = ""
        for one in sorted(found, key=lambda one: one.path):
            if not one.path.startswith(prefix) or one.path < first:
                continue
            name, below, _ = one.path[len(prefix) :].partition("/")
            if deep or not below:
                version = int((one.last_updated_in_seconds or 0) * 1e9)
                yield Object(one.path, int(one.size_in_bytes), version)
            elif folders and name != last:
                last = name
                yield Object(f"{prefix}{name}/", _FOLDER, 0)


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

    The name of an object is what stands between slashes, also where that is nothing: `raw//a` does not lie in `raw/` as
    `a` does, and `raw//` is what begins so.

    Args:
        excluded: URL of the output folder, which is never an input.
        passed_over: Where to count.
    """

    def __init__(self, excluded: str, passed_over: PassedOver) -> None:
        self._excluded = excluded.rstrip("/") + "/"
        self._passed_over = passed_over

    def expand(self, url: str) -> Iterator[Found]:
        """Yields the objects of a name, folder or pattern; a name that exists is a name, whatever is in it.

        Raises:
            ListingError: Nothing can be listed there.
        """
        try:
            found = None if url.endswith("/") else find_object(url)
            if found is not None and (found.size or not _has_below(url)):
                yield _found(found)
                return
            if found is not None:
                self._passed_over.counts[FOLDER_MARKER] += 1
            yield from self._match(url)
        except OSError as error:
            raise ListingError(str(error.strerror or error)) from error

    def _match(self, url: str) -> Iterator[Found]:
        base, parts = _split_pattern(url)
        deep = len(parts) > 1 or parts[-1] == "**"
        prefix = base if deep else base + re.split(r"[*?\[]", parts[0], maxsplit=1)[0]
        if "**" in parts and self._excluded.startswith(base):
            self._passed_over.outputs += 1  # It may not be there yet.
        pattern = _Pattern(parts)
        for found in _with_markers(_storage(url).list(prefix, deep=deep, folders=not deep)):
            rest = found.url[len(base) :]
            if not pattern.matches(rest):
                continue
            if found.url.startswith(self._excluded):
                self._passed_over.outputs += 1
                continue
            label = FOLDER_MARKER if found.size == _FOLDER else pattern.passed_over_as(rest)
            if label is None:
                yield _found(found)
            else:
                self._passed_over.counts[label] += 1

    def resolve(self, table: sqlite3.Connection) -> None:
        """Finds what lists name: the rows whose folders have not been listed yet."""
        table.create_function("folder_of", 1, lambda key: key[: key.rfind(b"/") + 1], deterministic=True)
        table.create_function("bare", 1, bytes.rstrip, deterministic=True)
        table.execute(f"CREATE INDEX pending ON found (key) WHERE reason = '{PENDING}'")
        self._resolve_names(table)
        # Blanks behind a name are part of it only where such an object exists.
        changed = table.execute(
            "UPDATE found SET name = bare(name), key = bare(key) "
            f"WHERE reason = '{PENDING}' AND length(bare(key)) <> length(key)"
        )
        if changed.rowcount:
            self._resolve_names(table)
        self._resolve_patterns(table)
        table.execute(
            "UPDATE found SET reason = 'not_found', error = 'no such object, and nothing matches it as a pattern' "
            f"WHERE reason = '{PENDING}'"
        )

    def _resolve_names(self, table: sqlite3.Connection) -> None:
        table.execute("DROP TABLE IF EXISTS folders")
        table.execute(
            "CREATE TEMP TABLE folders AS SELECT folder_of(key) AS folder, min(key) AS first, max(key) AS last "
            f"FROM found WHERE reason = '{PENDING}' GROUP BY folder_of(key)"
        )
        for folder, first, last in table.execute("SELECT folder, first, last FROM folders ORDER BY folder"):
            try:
                self._resolve_folder(table, folder.decode(), first.decode(), last)
            except MachineFaultError as error:
                raise ListingError(str(error)) from error
            except (OSError, ListingError) as error:
                reason, text = explain_error(error) if isinstance(error, OSError) else ("os_error", str(error))
                table.execute(
                    f"UPDATE found SET reason = ?, error = ? WHERE reason = '{PENDING}' AND folder_of(key) = ?",
                    [reason, text, folder],
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
            if not glob.has_magic(name) and not name.endswith(b"/"):
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


def _has_below(url: str) -> bool:
    """Whether there are objects below a name, as in a folder."""
    try:
        return next(_storage(url).list(f"{url}/", deep=True), None) is not None
    except ListingError:  # A file system that tells files from folders, and this is a file.
        return False


def _with_markers(listed: Iterator[Object]) -> Iterator[Object]:
    """Yields a listing in its order; an object that only marks a folder has the size of one.

    Such objects have a name that ends in `/`, or no bytes and other objects below their name. These come later:
    `raw/sub`, `raw/sub-1`, `raw/sub/x`. So what comes between waits, but never more than a bounded number.
    """
    waiting: deque[Object] = deque()
    for one in listed:
        if one.size and not waiting and one.url[-1] != "/":
            yield one
            continue
        waiting.append(one)
        yield from _settled(waiting, is_whole=False)
    yield from _settled(waiting, is_whole=True)


def _settled(waiting: deque[Object], *, is_whole: bool) -> Iterator[Object]:
    """Yields what need not wait longer; `is_whole` when nothing comes any more."""
    while waiting:
        one = waiting[0]
        if one.url[-1] == "/":
            one = one._replace(size=_FOLDER)
        elif one.size == 0:
            below = f"{one.url}/"
            if waiting[-1].url < below and not is_whole and len(waiting) < _MAX_WAITING:
                return
            later = next((other.url for other in waiting if other.url >= below), None)
            if later.startswith(below) if later is not None else not is_whole and _has_below(one.url):
                one = one._replace(size=_FOLDER)
        waiting.popleft()
        yield one


def _split_pattern(url: str) -> tuple[str, tuple[str, ...]]:
    """Splits into the URL of the folder above the first wildcard, and the parts below; a folder is taken whole."""
    if not glob.has_magic(url):
        return url if url.endswith("/") else f"{url}/", ("**",)
    match = SCHEME.match(url)
    assert match is not None
    parts = url[match.end() :].split("/")
    fixed = next(number for number, part in enumerate(parts) if glob.has_magic(part))
    base = url[: match.end()] + "".join(f"{part}/" for part in parts[:fixed])
    rest = tuple(parts[fixed:])
    return base, rest if rest[-1] else (*rest[:-1], "**")


class _Pattern:
    """Which names the parts of a pattern match, and which of them it passes over."""

    def __init__(self, parts: tuple[str, ...]) -> None:
        self._parts = parts
        self._takes_all = parts == ("**",)
        self._folder = ""
        self._folder_is_plain = True

    def matches(self, name: str) -> bool:
        """Whether a name below the pattern's folder is one of its names."""
        return self._takes_all or _matches(self._parts, name.split("/"), strict=False)

    def passed_over_as(self, name: str) -> str | None:
        """Returns the label of the rule that a name of the pattern falls under, None for data."""
        if self._is_plain(name):
            return None
        names = name.split("/")
        if _matches(self._parts, names, strict=True):
            return None
        asked = frozenset[str]().union(*(asked_for(part.encode()) for part in self._parts))
        for known in (asked, frozenset[str]()):
            for at, part in enumerate(names, 1):
                if label := passed_over_as(part.encode(), known, is_folder=at < len(names)):
                    return label
        return None

    def _is_plain(self, name: str) -> bool:
        """Whether no part of a name falls under a rule; names come in order, so folders are looked at once."""
        at = name.rfind("/") + 1
        folder, last = name[:at], name[at:].encode()
        if folder != self._folder:
            self._folder = folder
            self._folder_is_plain = all(not part or is_plain(part) for part in folder.encode().split(b"/"))
        return self._folder_is_plain and (not last or is_plain(last))


def _matches(parts: tuple[str, ...], names: list[str], *, strict: bool) -> bool:
    """Whether the parts of a name match those of a pattern; `**` stands for any folders, at the end for all below.

    When `strict`, none may fall under a rule that the part which it matches does not ask for.
    """
    if not parts:
        return not names
    if parts[0] != "**":
        return (
            bool(names)
            and _regex(parts[0])(names[0]) is not None
            and (not strict or _is_data(parts[0], names[0], is_folder=len(names) > 1))
            and _matches(parts[1:], names[1:], strict=strict)
        )
    for number, name in enumerate(names, 1):
        if len(parts) > 1 and _matches(parts[1:], names[number - 1 :], strict=strict):
            return True
        if strict and not _is_data("**", name, is_folder=number < len(names)):
            return False
    return len(parts) == 1 and bool(names)


def _is_data(part: str, name: str, *, is_folder: bool) -> bool:
    return passed_over_as(name.encode(), asked_for(part.encode()), is_folder=is_folder) is None


@functools.cache
def _regex(part: str) -> Any:
    return re.compile(fnmatch.translate(part)).match
