"""Finds steps by name or import path and fits them with their parameters."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any

from transforms.steps.options import OPTION_NAMES, StepOptions, split_options

BUILT_IN = {"example.check": "transforms.steps.example:check", "http.post": "transforms.steps.http:Post"}
"""Steps of the library, by the name that `use` takes."""

CHEAP = {"example.check"}
"""Those of them that take so little that a job need not be planned by their time."""


_OURS = ("pipelines", "transforms")
"""Packages whose modules may be called as steps wherever the command runs, also where their source lies."""
OTHER_NAME = "give yours a name that nothing else has, or run the command elsewhere to take that one"
"""The way out where a module is hidden, see `what_hides`."""


class StepError(ValueError):
    """A step of the config cannot be used; the message says which and why."""


@dataclasses.dataclass(frozen=True)
class Step:
    """A step ready to run.

    Attributes:
        name: As in the config, used in dead letters, counters and messages.
        call: The function.
        options: How it is to be run.
        owner: The function or object of the step itself, which may have attributes; None for `call`.
    """

    name: str
    call: Callable[[Any], Any]
    options: StepOptions = dataclasses.field(default_factory=StepOptions)
    owner: Any = dataclasses.field(default=None, compare=False)

    def attribute(self, name: str) -> Any:
        """Returns an attribute that the step itself has, None when it has not."""
        return getattr(self.call if self.owner is None else self.owner, name, None)


def must_isolate(steps: Iterable[dict[str, Any]], import_paths: Iterable[str]) -> bool:
    """Whether the options of a chain ask for a process that can be killed.

    A step may set `own_deadline = True` (as an attribute of the function or class), if it takes `timeout_secs` itself
    and keeps to it, as HTTP calls can. Steps are only imported where that has to be known.

    Raises:
        StepError: A step does not exist.
    """
    folders = _extend_path(import_paths)
    numbered = [(f"steps[{number}]", step, split_options(step)[0]) for number, step in enumerate(steps)]
    if any(options.isolate or options.max_memory_bytes is not None for _, _, options in numbered):
        return True
    return any(
        options.timeout_secs is not None and not _has_own_deadline(_import_step(where, step, folders))
        for where, step, options in numbered
    )


def step_name(step: dict[str, Any]) -> str:
    """Returns the name of a step of the config."""
    return str(step["call"] if "call" in step else step["use"])


def _has_own_deadline(found: Any) -> bool:
    return getattr(found, "own_deadline", False) is True


def _extend_path(import_paths: Iterable[str]) -> tuple[str, ...]:
    folders = tuple(import_paths)
    sys.path.extend(folder for folder in folders if folder not in sys.path)
    return folders


def load_steps(steps: Iterable[dict[str, Any]], import_paths: Iterable[str]) -> list[Step]:
    """Imports the steps of a chain.

    Args:
        steps: One dict a step: `use` or `call`, and parameters.
        import_paths: Folders to look in after everything installed, so that a folder of the user's that happens
            to be called `transforms` cannot take our place.

    Raises:
        StepError: A step does not exist, or does not take its parameters.
    """
    folders = _extend_path(import_paths)
    return [_load_step(f"steps[{number}]", step, folders) for number, step in enumerate(steps)]


def _load_step(where: str, step: dict[str, Any], folders: tuple[str, ...]) -> Step:
    name = step_name(step)
    found = _import_step(where, step, folders)
    options, parameters = split_options(step)
    options, parameters = _hand_over(found, options, parameters, step)
    if inspect.isclass(found):
        made = _make(f"{where}: {name}", found, parameters)
        return Step(name, made, options, owner=made)
    try:
        inspect.signature(found).bind(b"", **parameters)
    except TypeError as error:
        hint = _nearest_parameter(found, parameters)
        raise StepError(f"{where}: {name} does not take these parameters: {error}{hint}") from error
    except ValueError:
        pass  # Functions built into Python have no signature to check.
    return Step(name, functools.partial(found, **parameters) if parameters else found, options, owner=found)


def _hand_over(
    found: Any, options: StepOptions, parameters: dict[str, Any], given: dict[str, Any]
) -> tuple[StepOptions, dict[str, Any]]:
    """Makes parameters of the options that a step sees to itself: it says so by `own_deadline` and `own_retries`."""
    unset = StepOptions()
    for name, flag in (("timeout_secs", "own_deadline"), ("retries", "own_retries")):
        if getattr(found, flag, False) and given.get(name) is not None:
            parameters = {**parameters, name: getattr(options, name)}
            options = dataclasses.replace(options, **{name: getattr(unset, name)})
    return options, parameters


def _make(where: str, found: Callable[..., Any], parameters: dict[str, Any]) -> Callable[[Any], Any]:
    """Makes the step of a class; its constructor checks the parameters."""
    try:
        step = found(**parameters)
    except StepError as error:
        raise StepError(f"{where}: {error}") from error
    except Exception as error:
        text = f"{type(error).__name__}: {error}{_nearest_parameter(found, parameters)}"
        raise StepError(f"{where} does not take these parameters: {text}") from error
    if not callable(step):
        raise StepError(f"{where} is a class whose objects cannot be called; give it a __call__(value)")
    return step


def _nearest_parameter(found: Callable[..., Any], parameters: dict[str, Any]) -> str:
    """Returns "; did you mean X?" for the first parameter that the step does not have, "" where none is near."""
    try:
        known = [*inspect.signature(found).parameters, *OPTION_NAMES]
    except ValueError:  # Classes built into Python have no signature.
        return ""
    unknown = next((name for name in parameters if name not in known), "")
    near = difflib.get_close_matches(unknown, known, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _import_step(where: str, step: dict[str, Any], folders: tuple[str, ...]) -> Callable[..., Any]:
    name = step_name(step)
    if "call" in step:
        return _import(where, name, folders)
    if name not in BUILT_IN:
        near = difflib.get_close_matches(name, BUILT_IN, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known steps: {', '.join(sorted(BUILT_IN))}."
        raise StepError(f"{where}: unknown step {name!r}; {hint} Functions of your own are called as module:function")
    return _import(where, BUILT_IN[name])


def what_hides(module_name: str, folders: Iterable[str]) -> str | None:
    """Returns in words which module is imported in the place of one that lies in a folder of the user's.

    These folders are looked at after everything installed, so a `tokenize.py` or `transforms` in one is never found.

    Args:
        module_name: As `import` takes it.
        folders: Where the user's modules are.

    Returns:
        None where there is none in these folders, or it is the one that is found.
    """
    top, *_ = parts = module_name.split(".")
    for folder in folders:
        path = os.path.join(folder, *parts)
        own = next(filter(os.path.isfile, (f"{path}.py", os.path.join(path, "__init__.py"))), None)
        found = None if own is None else _find_places(top)
        if found and not any(_is_same(place, os.path.join(folder, top)) for place in found):
            return f"the module {top!r} that Python finds is {found[0]}, which hides {own}"
    return None


def _find_places(top: str) -> list[str]:
    """Returns the files or folders of a module, or what it is instead; nothing where there is no such module."""
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return []
    if spec is None:
        return []
    file = getattr(sys.modules.get(top), "__file__", None) or spec.origin or ""
    return [
        *(spec.submodule_search_locations or ()),
        *([file] if os.path.isabs(file) else [f"built into Python ({file})"]),
    ]


def _is_same(place: str, own: str) -> bool:
    return os.path.realpath(place) in (os.path.realpath(own), os.path.realpath(f"{own}.py"))


def _import(where: str, target: str, folders: tuple[str, ...] = ()) -> Callable[..., Any]:
    module_name, separator, attribute = target.partition(":")
    if not separator or not module_name or not attribute:
        raise StepError(f"{where}: expected module:function, got {target!r}")
    if "/" in module_name or module_name.startswith("."):
        raise StepError(f"{where}: expected a module as `import` names it, not a path to it, got {target!r}")
    hidden = what_hides(module_name, folders)
    if hidden is not None and module_name.partition(".")[0] not in _OURS:
        raise StepError(f"{where}: {target}: {hidden}; {OTHER_NAME}")
    hint = "" if hidden is None else f"; {hidden}; {OTHER_NAME}"
    try:
        found: Any = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # A script that ends itself must not end the job with its status.
        raise StepError(
            f"{where}: module {module_name!r} cannot be imported: {type(error).__name__}: {error}"
            + ("; a module is named without .py" if module_name.endswith(".py") else hint)
        ) from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            near = difflib.get_close_matches(part, dir(found), n=1)
            raise StepError(
                f"{where}: {module_name} has no {part!r}"
                + (f"; did you mean {near[0]!r}?" if near and not hint else hint)
            )
        found = getattr(found, part)
    if not callable(found):
        raise StepError(f"{where}: {target} is not a function, it is a {type(found).__name__}")
    return found


def source_digest(steps: Iterable[dict[str, Any]]) -> str:
    """Returns a digest of the source text of all modules that `call` steps name: changed code is a changed job."""
    digest = hashlib.blake2b(digest_size=16)
    for step in steps:
        if "call" in step:
            name = str(step["call"]).partition(":")[0]
            module = importlib.import_module(name)
            try:
                digest.update(inspect.getsource(module).encode("utf-8", "surrogateescape"))
            except (OSError, TypeError):  # A compiled module has no text; its name must do.
                digest.update(name.encode())
    return digest.hexdigest()
