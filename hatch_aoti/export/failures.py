"""Words for what the project's own code did."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from hatch_aoti.errors import AotiError

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["error_name", "first_line", "first_lines", "raised", "user_traceback", "users_frames"]

_MOST_LINES = 6  # of an error's text: torch's go on with advice on its own logs


def raised(error: BaseException, when: str = "") -> str:
    """Say what user code did, to go on from its name: `raises ValueError: no such file`; `when` follows the error."""
    if isinstance(error, SystemExit):
        return f"ends the process: it calls sys.exit({'' if error.code is None else repr(error.code)}){when}"
    # What input() raises, and breakpoint(), which asks the debugger's user: a build has an empty standard input.
    waits = isinstance(error, EOFError) and "reading a line" in str(error)
    if waits or type(error).__module__ == "bdb":
        return f"waits for input{when}, which a build has not: input() or breakpoint()"
    return f"raises {error_name(error)}{when}: {first_line(error)}"


def error_name(error: BaseException) -> str:
    """Return the name of an error's class."""
    return type(error).__name__


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message that is not empty."""
    if isinstance(error, AotiError):
        return str(error)
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "(no message)")


def first_lines(text: str, count: int) -> str:
    """Return the first `count` lines of `text` that are not empty."""
    return "\n".join([line.rstrip() for line in text.splitlines() if line.strip()][:count])


def users_frames(frames: Iterable[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """Return the frames that lie in the user's code: none of hatch-aoti, importlib, torch, or what they generate."""
    here = str(Path(__file__).parents[1])
    torch_module = sys.modules.get("torch")
    torch_home = str(Path(torch_module.__file__ or "").parent) if torch_module is not None else here

    importing = str(Path(importlib.__file__ or "").parent)

    return [frame for frame in frames if not frame.filename.startswith((here, torch_home, importing, "<"))]


def user_traceback(error: BaseException) -> str:
    """Return the part of the traceback that lies in the user's code, and the beginning of the error's text."""
    frames = users_frames(traceback.extract_tb(error.__traceback__))
    if not frames:
        return ""
    said = "".join(traceback.format_exception_only(error)[:1])
    lines = [*traceback.format_list(frames), first_lines(said, _MOST_LINES)]
    return "Traceback (most recent call last, the project's own frames):\n" + "".join(lines).rstrip()
