"""Where an exception came from, as text: the same place costs next to nothing the second time. No Beam here.

Steps may fail on every record of a corpus, so a place in the code is put into text once and kept. What is shown is
what whoever wrote the step looks for: the frames of the step and of the libraries that it calls, not those of what
runs the step, nor those inside Python itself.
"""

from __future__ import annotations

import os
import traceback
import weakref
from collections.abc import Iterator
from types import CodeType, TracebackType

_MAX_PLACES = 4_096
"""Places that are kept; code that is made anew for each record must not fill the memory."""

_MAX_PLACE_CHARS = 1_000
_FIRST_FRAMES, _LAST_FRAMES = 12, 28
"""Frames shown of a deep recursion: how it began, and where it ended."""

_MAX_LINKS = 8
"""Exceptions shown of a chain: a loop that tries again may link a thousand."""

_MAX_MEMBERS = 8
_MAX_DEPTH = 3
_MAX_TITLE_CHARS = 500
_CAUSE = "The exception above was the direct cause of the one below:\n"
_CONTEXT = "While the exception above was handled, the one below was raised:\n"

_RUNNING = ("answers", "aside", "chain", "fit", "in_flight", "isolate", "job_chain", "rate", "serve", "surroundings")
"""Modules of `transforms.steps` that run steps."""


_RUNNING_FILES = frozenset(os.path.join(os.path.dirname(__file__), "steps", f"{name}.py") for name in _RUNNING)
_PYTHON_FOLDER = os.path.dirname(os.__file__) + os.sep
_PACKAGE_FOLDERS = tuple(_PYTHON_FOLDER + name for name in ("site-packages", "dist-packages"))

_Place = tuple["weakref.ref[CodeType]", str, str]
"""Code that is gone may have left its id to another; the text of the place, "" where it is not shown; and its text if
it is inside Python, which is shown where nothing else is."""

_places: dict[tuple[int, int], _Place] = {}


def format_frames(error: BaseException, max_chars: int) -> str:
    """Returns the frames of an exception, between those of what it was raised from and of the members of a group.

    Args:
        error: The exception.
        max_chars: Where the text is cut: the causes first, then the members, last its own frames from their top.
    """
    own = _own_frames(error)[-max_chars:]
    left = max_chars - len(own)
    members = "".join(_members(error, _MAX_DEPTH))[: left // 2]
    left -= len(members)
    causes = "".join(_causes(error))
    return (causes[-left:] if left else "") + own + members


def _causes(error: BaseException) -> list[str]:
    """Returns texts of what an exception was raised from, the first one first."""
    texts: list[str] = []
    seen = {id(error)}
    for _ in range(_MAX_LINKS):
        before, link = error.__cause__, _CAUSE
        if before is None and not error.__suppress_context__:
            before, link = error.__context__, _CONTEXT
        if before is None or id(before) in seen:
            break
        seen.add(id(before))
        texts.append(f"{_own_frames(before)}{_title(before)}\n{link}")
        error = before
    return texts[::-1]


def _members(error: BaseException, depth: int) -> Iterator[str]:
    """Yields texts of the members of a group."""
    if not isinstance(error, BaseExceptionGroup) or not depth:
        return
    members = error.exceptions
    for number, member in enumerate(members[:_MAX_MEMBERS], 1):
        yield f"Exception {number} of {len(members)} in the group: {_title(member)}\n{_own_frames(member)}"
        yield from _members(member, depth - 1)


def _title(error: BaseException) -> str:
    """Returns class and text of an exception in a line or more."""
    try:
        text = str.__getitem__(str(error), slice(_MAX_TITLE_CHARS))
    except KeyboardInterrupt:  # Somebody stops the job.
        raise
    except BaseException:
        text = "(the exception's text cannot be printed)"
    name = str(type(error).__qualname__)[:_MAX_TITLE_CHARS]
    return f"{name}: {text}" if text else name


def _own_frames(error: BaseException) -> str:
    nodes: list[TracebackType] = []
    node = error.__traceback__
    while node is not None:
        nodes.append(node)
        node = node.tb_next
    num_hidden = len(nodes) - _FIRST_FRAMES - _LAST_FRAMES
    if num_hidden <= 0:
        text = _joined(nodes)
    else:
        text = f"{_joined(nodes[:_FIRST_FRAMES])}  ... {num_hidden} more frames ...\n{_joined(nodes[-_LAST_FRAMES:])}"
    return text + _source_line(error) if isinstance(error, SyntaxError) else text


def _joined(nodes: list[TracebackType]) -> str:
    places = []
    for node in nodes:
        code = node.tb_frame.f_code
        place = _places.get((id(code), node.tb_lasti))
        places.append(place if place is not None and place[0]() is code else _new_place(node, code))
    return "".join([shown for _, shown, _ in places]) or "".join([inside for _, _, inside in places])


def _source_line(error: SyntaxError) -> str:
    """Returns the line that Python could not read, which is in no frame."""
    if not isinstance(error.text, str):
        return ""
    text = error.text.strip()[:_MAX_TITLE_CHARS]
    return f'  File "{str(error.filename)[:_MAX_TITLE_CHARS]}", line {error.lineno}\n    {text}\n'


def _new_place(node: TracebackType, code: CodeType) -> _Place:
    """Puts the place of a frame into text; the instruction tells it, since a line may hold several calls."""
    text = "".join(traceback.format_tb(node, 1))
    if len(text) > _MAX_PLACE_CHARS:
        text = f"{text[:_MAX_PLACE_CHARS]}...\n"
    is_python = _is_python(code.co_filename)
    is_shown = not is_python and code.co_filename not in _RUNNING_FILES
    place = weakref.ref(code), text if is_shown else "", text if is_python else ""
    if len(_places) >= _MAX_PLACES:
        _places.clear()
    _places[id(code), node.tb_lasti] = place
    return place


def _is_python(path: str) -> bool:
    in_library = path.startswith(_PYTHON_FOLDER) and not path.startswith(_PACKAGE_FOLDERS)
    return in_library or path.startswith("<frozen ")
