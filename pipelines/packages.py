"""Brings code to workers elsewhere: this package, and the modules of the user's steps, as source distributions.

Nothing is taken from the main session: what a worker runs is what it imports.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import shutil
import sys
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType

from packaging.requirements import Requirement

import pipelines
from pipelines.beam_options import flag_value
from pipelines.errors import UsageError
from transforms.steps.load import OTHER_NAME, what_hides

_OURS = ("pipelines", "transforms")
_EXTRAS = {"transforms.steps.http": "http", "tensorflow": "tensorflow"}
"""Modules that stand for an extra: once a step has imported one, workers need what it brings."""
_STEPS_NAME = "gristmill-steps"
_NOT_COPIED = shutil.ignore_patterns("__pycache__", "*.pyc", ".git", ".venv*", "*.egg-info")


def code_flags(flags: list[str], py_modules: list[str], scratch: str) -> list[str]:
    """Returns flags that bring the code to the workers.

    Args:
        flags: Beam flags of the user's. With an image of their own, this package is in there.
        py_modules: See `pack_steps`.
        scratch: Folder for what is packed; it must live until the job is submitted.

    Raises:
        UsageError: A module of the user's cannot be packed.
    """
    added = []
    if flag_value(flags, "sdk_container_image") is not None:
        added.append("--sdk_location=container")
    elif flag_value(flags, "setup_file") is None:
        added.append(f"--setup_file={pack_ourselves(scratch)}")
    steps = pack_steps(py_modules, scratch, os.getcwd())
    return [*added, f"--extra_package={steps}"] if steps is not None else added


def pack_ourselves(scratch: str) -> str:
    """Writes a project of the package that is running, with the extras that the loaded steps need.

    Args:
        scratch: Folder to write into.

    Returns:
        The path of its setup.py, for Beam's `--setup_file`.
    """
    root = Path(pipelines.__file__).parents[1]
    needed = {extra for module, extra in _EXTRAS.items() if module in sys.modules}
    folder = Path(scratch) / "gristmill"
    version = importlib.metadata.version("gristmill")
    _write_project(folder, "gristmill", version, [root / name for name in _OURS], requirements(needed))
    return str(folder / "setup.py")


def requirements(extras: Iterable[str] = ()) -> list[str]:
    """Returns what this package needs, with some of its extras, as pip takes it."""
    wanted = ["", *extras]
    found = []
    for text in importlib.metadata.requires("gristmill") or []:
        requirement = Requirement(text)
        marker, requirement.marker = requirement.marker, None
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in wanted):
            found.append(str(requirement))
    return found


def pack_steps(py_modules: Iterable[str], scratch: str, folder: str) -> str | None:
    """Writes a source distribution of the user's modules: those that are loaded, and those that are named.

    Args:
        py_modules: Modules and packages that the steps import only later.
        scratch: Folder to write into.
        folder: Where the user's modules are: only what lies right there travels along.

    Returns:
        Its path, for Beam's `--extra_package`; None when there are no such modules.

    Raises:
        UsageError: A named module does not exist, or lies elsewhere.
    """
    for name in py_modules:
        _import_named(name, folder)
    found = sorted(set(_local_modules(folder)))
    if not found:
        return None
    project = Path(scratch) / f"{_STEPS_NAME}-0"
    _write_project(project, _STEPS_NAME, "0", found, [])
    path = f"{project}.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        archive.add(project, project.name)
    return path


def check_modules(py_modules: Iterable[str]) -> None:
    """Checks that modules exist, without importing them.

    Raises:
        UsageError: One does not.
    """
    for name in py_modules:
        try:
            found = importlib.util.find_spec(name)
        except (ImportError, ValueError):
            found = None
        if found is None:
            raise UsageError(f"py_modules: there is no module {name!r} in {os.getcwd()}, nor among what is installed")
        hidden = what_hides(name, (os.getcwd(),))
        if hidden is not None:
            raise UsageError(f"py_modules: {name}: {hidden}; {OTHER_NAME}")


def _import_named(name: str, folder: str) -> None:
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        raise UsageError(f"py_modules: {name} cannot be imported: {error}") from error
    if _place(module, folder) is None:
        raise UsageError(
            f"py_modules: {name} does not lie in {folder}, where the command runs; what is installed reaches workers "
            "by --requirements_file, --extra_package or an image"
        )


def _local_modules(folder: str) -> Iterator[Path]:
    """Yields the files and folders of loaded modules that lie right in a folder."""
    for name, module in list(sys.modules.items()):
        if "." not in name and name not in (*_OURS, "__main__", "__mp_main__", "setup"):
            place = _place(module, folder)
            if place is not None:
                yield place


def _place(module: ModuleType, folder: str) -> Path | None:
    """Returns the file or folder of a top-level module if it lies right in a folder."""
    file = getattr(module, "__file__", None)
    paths = [str(path) for path in getattr(module, "__path__", [])]
    place = Path(paths[0]) if paths else Path(file) if file else None
    return place if place is not None and os.path.realpath(place.parent) == os.path.realpath(folder) else None


def _write_project(folder: Path, name: str, version: str, places: Iterable[Path], requires: list[str]) -> None:
    folder.mkdir()
    modules, packages = [], []
    for place in places:
        if place.is_dir():
            shutil.copytree(place, folder / place.name, ignore=_NOT_COPIED)
            packages += sorted(_packages_in(folder / place.name, folder))
        else:
            shutil.copy(place, folder)
            modules.append(place.stem)
    fields: dict[str, object] = {"name": name, "version": version, "py_modules": modules, "packages": packages}
    fields |= {"install_requires": requires, "package_data": {"": ["*"]}}
    (folder / "setup.py").write_text(f"from setuptools import setup\n\nsetup(**{fields!r})\n", encoding="utf-8")
    (folder / "MANIFEST.in").write_text("graft .\n", encoding="utf-8")


def _packages_in(folder: Path, root: Path) -> Iterator[str]:
    for path, _, _ in os.walk(folder):
        yield ".".join(Path(path).relative_to(root).parts)
