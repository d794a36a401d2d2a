"""Where a job's files live: a small interface that the worst object store can offer, and its local form.

An object store has no rename and no append, and its listing may be late. All of Gristmill's state therefore rests
on two promises only: an object appears whole or not at all, and `put_if_absent` has exactly one winner.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from typing import BinaryIO, Protocol

from transforms.folder_lock import FolderBusyError, folder_lock

Version = object
"""What identifies one content under a name: an inode locally, a generation in an object store."""


class OutputError(RuntimeError):
    """The output cannot be written: disk full, no permission, quota. Ends the job; the same command resumes."""


class BusyError(OutputError):
    """A change of the output has been under way for too long: who makes it must be suspended."""


class Spool(Protocol):
    """A file being written, invisible to others until sealed.

    Attributes:
        path: Local path to write to.
    """

    path: str

    def seal(self) -> int:
        """Makes what was written durable under its name and returns its bytes."""


class Store(Protocol):
    """Named byte strings under one root. Names are relative, with `/`; several threads may use it at once.

    `requests_at_once` says how many requests a process should have on their way to it: 1 where they take no time.
    """

    root: str
    requests_at_once: int

    def put_if_absent(self, name: str, data: bytes) -> bool:
        """Creates `name` durably unless it exists; returns whether this call created it."""

    def put(self, name: str, data: bytes) -> None:
        """Creates or replaces `name` as a whole."""

    def put_file(self, path: str, name: str) -> None:
        """Creates or replaces `name` as a whole with the content of a local file."""

    def put_if_version(self, name: str, data: bytes, version: Version | None) -> Version | None:
        """Replaces `name` as a whole only while it has that version, or creates it for None.

        Returns:
            The new version; None when somebody else was quicker, and nothing was done.
        """

    def put_file_if_version(self, path: str, name: str, version: Version | None) -> Version | None:
        """Does the same with the content of a local file."""

    def get(self, name: str) -> tuple[bytes, Version] | None:
        """Returns content and version, None when there is no such name."""

    def version(self, name: str) -> Version | None:
        """Returns the version of `name`, None when it does not exist."""

    def open(self, name: str) -> BinaryIO:
        """Opens a name for reading with seek.

        Raises:
            FileNotFoundError: There is no such name.
        """

    def size(self, name: str) -> int | None:
        """Returns the bytes of `name`, None when it does not exist."""

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Yields (name, bytes) of everything whose name begins with `prefix`, sorted by name."""

    def copy(self, source: str, target: str) -> None:
        """Gives `source`'s content the further name `target`, replacing what stands there. May be repeated."""

    def copy_if_version(self, source: str, target: str, version: Version | None) -> Version | None:
        """Copies only while `target` has that version, or does not exist for None. `source` may be `target`.

        Returns:
            The new version; None when somebody else was quicker, and nothing was done.

        Raises:
            FileNotFoundError: There is no `source`.
        """

    def delete(self, name: str, version: Version | None = None) -> bool:
        """Deletes `name`, only if it still has that version when one is given; returns whether it did."""

    def hold(self) -> contextlib.AbstractContextManager[None]:
        """Sees to it that no change of a guarded store is under way, where there are such.

        Raises:
            BusyError: One was for too long.
        """

    def guarded(self, check: Callable[[], object]) -> Store | None:
        """Returns the same store, whose changes happen right after a check, and never while somebody holds the store.

        Args:
            check: Raises an error where a change must not happen; it is asked before each.

        Returns:
            None where the store cannot do that. Then a change can only be bound to the version that was seen.
        """

    def spool(self, name: str) -> Spool:
        """Begins a new file that will be called `name`."""

    def clean(self) -> None:
        """Deletes what writers that were killed left behind under no name. The caller holds the job's lock."""

    def local_copy(self, name: str) -> contextlib.AbstractContextManager[str]:
        """Gives a local path to read `name` from, for libraries that know only paths."""


class LocalStore:
    """A folder of this machine, or one that is mounted on it.

    Args:
        root: Its path.
        check: See `Store.guarded`; whatever takes time is done before and afterwards.
    """

    def __init__(self, root: str, check: Callable[[], object] | None = None) -> None:
        self.root = os.path.abspath(root)
        self.requests_at_once = 1
        self._check = check

    def put_if_absent(self, name: str, data: bytes) -> bool:
        """Links a finished temporary file to the name: the file system lets one caller win."""
        path = self._path(name)
        temporary = self._write_temporary(path, data)
        try:
            with self._guard():
                os.link(temporary, path)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK):
                raise _output_error(error, path) from error
            return self._create_exclusively(path, data)
        finally:
            os.unlink(temporary)
        _sync_folder(os.path.dirname(path))
        return True

    def _create_exclusively(self, path: str, data: bytes) -> bool:
        """For file systems without hard links. A crash may leave half an entry, which counts as none."""
        with folder_lock(os.path.dirname(path)):  # Nobody may take the entry for a broken one while it is written.
            try:
                with self._guard():
                    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            except FileExistsError:
                return False
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
            except OSError as error:
                os.unlink(path)
                raise _output_error(error, path) from error
        _sync_folder(os.path.dirname(path))
        return True

    def put(self, name: str, data: bytes) -> None:
        """Writes a temporary file and renames it over the name."""
        path = self._path(name)
        temporary = self._write_temporary(path, data)
        try:
            with self._guard():
                os.rename(temporary, path)
        except OSError as error:
            raise _output_error(error, path) from error
        finally:
            _unlink_if_there(temporary)
        _sync_folder(os.path.dirname(path))

    def put_file(self, path: str, name: str) -> None:
        """Copies to a temporary file and renames it over the name."""
        target = self._path(name)
        temporary = _temporary_name(target)
        try:
            _make_folder(os.path.dirname(target))
            shutil.copyfile(path, temporary)
            _sync_file(temporary)
            with self._guard():
                os.rename(temporary, target)
            _sync_folder(os.path.dirname(target))
        except OSError as error:
            raise _output_error(error, target) from error
        finally:
            _unlink_if_there(temporary)

    def put_if_version(self, name: str, data: bytes, version: Version | None) -> Version | None:
        """Writes a temporary file and renames it, which excludes other changes of a version; links it for None."""
        if version is None:
            return self.version(name) if self.put_if_absent(name, data) else None
        path = self._path(name)
        temporary = self._write_temporary(path, data)
        try:
            new = _version(os.stat(temporary))
            with self._guard(), folder_lock(os.path.dirname(path)):
                if self.version(name) != version:
                    return None
                os.rename(temporary, path)
        except OSError as error:
            raise _output_error(error, path) from error
        finally:
            _unlink_if_there(temporary)
        _sync_folder(os.path.dirname(path))
        return new

    def put_file_if_version(self, path: str, name: str, version: Version | None) -> Version | None:
        """Looks, then copies, as far as a file system can; whoever needs more takes a guarded store."""
        if self.version(name) != version:
            return None
        self.put_file(path, name)
        return self.version(name)

    def get(self, name: str) -> tuple[bytes, Version] | None:
        """Reads the whole file."""
        try:
            with open(self._path(name), "rb") as file:
                return file.read(), _version(os.fstat(file.fileno()))
        except (FileNotFoundError, NotADirectoryError):
            return None

    def version(self, name: str) -> Version | None:
        """Looks the file up."""
        try:
            return _version(os.stat(self._path(name)))
        except (FileNotFoundError, NotADirectoryError):
            return None

    def open(self, name: str) -> BinaryIO:
        """Opens the file."""
        try:
            return open(self._path(name), "rb")
        except NotADirectoryError as error:
            raise FileNotFoundError(*error.args) from error

    def size(self, name: str) -> int | None:
        """Looks the file up."""
        try:
            return os.stat(self._path(name)).st_size
        except (FileNotFoundError, NotADirectoryError):
            return None

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Walks the folder of the prefix, leaving out temporary files."""
        folder, _, start = prefix.rpartition("/")
        yield from self._list_folder(folder, start)

    def _list_folder(self, folder: str, start: str) -> Iterator[tuple[str, int]]:
        try:
            with os.scandir(self._path(folder)) as entries:
                found = [(e.name, e.is_dir(follow_symlinks=False)) for e in entries if e.name.startswith(start)]
        except (FileNotFoundError, NotADirectoryError):
            return
        found.sort(key=lambda item: f"{item[0]}/" if item[1] else item[0])  # The order of whole names.
        for base, is_folder in found:
            name = f"{folder}/{base}" if folder else base
            if is_folder:
                yield from self._list_folder(name, "")
            elif not base.startswith(_TEMPORARY_PREFIX):
                size = self.size(name)
                if size is not None:
                    yield name, size

    def copy(self, source: str, target: str) -> None:
        """Links the file to the further name, or copies it where the file system has no links."""
        path = self._path(target)
        temporary = _temporary_name(path)
        try:
            _make_folder(os.path.dirname(path))
            try:
                os.link(self._path(source), temporary)
            except FileNotFoundError:
                raise
            except OSError:
                shutil.copyfile(self._path(source), temporary)
                _sync_file(temporary)
            with self._guard():
                os.rename(temporary, path)
            _sync_folder(os.path.dirname(path))
        except FileNotFoundError:
            raise
        except OSError as error:
            raise _output_error(error, path) from error
        finally:
            # Renaming one link over another of the same file does nothing, and leaves both names.
            _unlink_if_there(temporary)

    def copy_if_version(self, source: str, target: str, version: Version | None) -> Version | None:
        """Looks, then links, as far as a file system can; whoever needs more takes a guarded store."""
        if self.version(target) != version:
            return None
        self.copy(source, target)
        return self.version(target)

    def delete(self, name: str, version: Version | None = None) -> bool:
        """Deletes the file, and its folder once that is empty."""
        path = self._path(name)
        try:
            if version is None:
                with self._guard():
                    os.unlink(path)
            elif not self._delete_version(path, version):
                return False
        except (FileNotFoundError, NotADirectoryError):
            return False
        folder = os.path.dirname(path)
        if folder != self.root:
            with contextlib.suppress(OSError):
                os.rmdir(folder)
        return True

    def _delete_version(self, path: str, version: Version) -> bool:
        # Changes of a version exclude each other, and nothing can be created under the name while it exists.
        with self._guard(), folder_lock(os.path.dirname(path)):
            if _version(os.stat(path)) != version:
                return False
            os.unlink(path)
            return True

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Locks the folder, in which nothing else is locked: names that are created once or by version lie deeper."""
        with contextlib.ExitStack() as stack:
            try:
                _make_folder(self.root)
                stack.enter_context(folder_lock(self.root))
            except FolderBusyError as error:
                raise BusyError(f"cannot write {self.root}: {error.strerror}") from error
            except OSError as error:
                raise _output_error(error, self.root) from error
            yield

    def guarded(self, check: Callable[[], object]) -> LocalStore:
        """Locks the folder beside others for the moment of each change, where it can be locked."""
        return LocalStore(self.root, check)

    @contextlib.contextmanager
    def _guard(self) -> Iterator[None]:
        if self._check is None:
            yield
            return
        with folder_lock(self.root, shared=True):
            self._check()
            yield

    def spool(self, name: str) -> Spool:
        """Writes in place: a name that no ledger speaks of is invisible enough."""
        path = self._path(name)
        try:
            _make_folder(os.path.dirname(path))
        except OSError as error:
            raise _output_error(error, path) from error
        return _LocalSpool(path)

    @contextlib.contextmanager
    def local_copy(self, name: str) -> Iterator[str]:
        """The file itself."""
        yield self._path(name)

    def clean(self) -> None:
        """Deletes temporary files of writers that were killed: they lie in the root and at most three folders below."""
        for pattern in ("", "*/", "*/*/", "*/*/*/"):
            for path in glob.iglob(f"{glob.escape(self.root)}/{pattern}{_TEMPORARY_PREFIX}*"):
                with self._guard():
                    _unlink_if_there(path)

    def _path(self, name: str) -> str:
        return os.path.join(self.root, name) if name else self.root

    def _write_temporary(self, path: str, data: bytes) -> str:
        temporary = _temporary_name(path)
        try:
            with _create(temporary) as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise _output_error(error, path) from error
        return temporary


class _LocalSpool:
    def __init__(self, path: str) -> None:
        self.path = path

    def seal(self) -> int:
        try:
            _sync_file(self.path)
            _sync_folder(os.path.dirname(self.path))
            return os.stat(self.path).st_size
        except OSError as error:
            raise _output_error(error, self.path) from error


_TEMPORARY_PREFIX = ".gristmill-"
_FOLDER_ATTEMPTS = 10


def _temporary_name(path: str) -> str:
    return os.path.join(os.path.dirname(path), f"{_TEMPORARY_PREFIX}{uuid.uuid4().hex}")


def _unlink_if_there(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def _version(info: os.stat_result) -> Version:
    return (info.st_dev, info.st_ino, info.st_mtime_ns, info.st_size)


def _output_error(error: OSError, path: str) -> OutputError:
    return OutputError(f"cannot write {path}: {error.strerror or error}")


def _make_folder(folder: str) -> None:
    """Makes a folder and those above it, and makes their names durable."""
    for attempt in range(_FOLDER_ATTEMPTS):
        if os.path.isdir(folder):
            return
        above = os.path.dirname(folder)
        _make_folder(above)
        try:
            os.mkdir(folder)
        except FileExistsError:
            continue
        except FileNotFoundError:  # Another worker has just deleted the empty folder above.
            if attempt == _FOLDER_ATTEMPTS - 1:
                raise
            continue
        _sync_folder(above)
        return
    if not os.path.isdir(folder):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), folder)


def _create(path: str) -> BinaryIO:
    """Opens a new file for writing, and makes its folder again if somebody deletes it meanwhile as empty."""
    for _ in range(_FOLDER_ATTEMPTS):
        _make_folder(os.path.dirname(path))
        with contextlib.suppress(FileNotFoundError):
            return open(path, "xb")
    return open(path, "xb")


def _sync_file(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_folder(folder: str) -> None:
    """Makes names in a folder durable; some network file systems cannot and say EINVAL."""
    try:
        _sync_file(folder)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise


_STORES: dict[str, Callable[[str], Store]] = {}


def register_store(scheme: str, factory: Callable[[str], Store]) -> None:
    """Makes roots such as `scheme://...` open through `factory`."""
    _STORES[scheme] = factory


def open_store(root: str) -> Store:
    """Opens the store of an output directory.

    Raises:
        ValueError: No store is known for the scheme of `root`, or there are no credentials for it.
    """
    scheme, separator, _ = root.partition("://")
    if not separator:
        return LocalStore(root)
    if scheme in _STORES:
        return _STORES[scheme](root)
    if scheme == "gs":
        from transforms.gcs_store import open_gcs

        return open_gcs(root)
    from transforms.beam_store import BeamStore

    try:
        return BeamStore(root)
    except Exception as error:
        raise ValueError(
            f"{root} cannot be opened: {error}; expected a local path, gs://, or a file system whose module and "
            "options Beam has, such as pip install 'apache-beam[aws]' and --s3_region_name=... for s3://"
        ) from error
