"""What a job leaves for people to read: its log, and the program and script of a failed compilation."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shutil
from typing import TYPE_CHECKING

from hatch_aoti.compiler.reproduce import PROGRAM, SCRIPT
from hatch_aoti.errors import AotiError

if TYPE_CHECKING:
    from pathlib import Path

    from hatch_aoti.artifact.cache import Cache
    from hatch_aoti.build.workers import Outcome

__all__ = ["FOR_READING", "LOG", "Kept", "keep", "kept_for", "relocated", "settle"]


# What is kept of a compilation is for reading, and may name the folder it was made in.
_TEXTS = frozenset({".py", ".sh", ".txt", ".json", ".cpp", ".h", ".log", ""})
_MOST_TEXT = 256 << 20  # bytes
_OBJECTS = frozenset({".o", ".so", ".dylib", ".gch", ".pch", ".lock"})


def relocated(text: str, folder: Path, place: Path) -> str:
    """Return `text` with `place` for `folder`, and for the temporary folder that is in."""
    here = {os.fspath(folder), os.path.realpath(folder), os.fspath(folder.parent), os.path.realpath(folder.parent)}
    longest_first = "|".join(map(re.escape, sorted(here, key=len, reverse=True)))
    return re.sub(longest_first, lambda _: os.fspath(place), text)


def settle(folder: Path, place: Path) -> None:
    """Make `folder`, in which a model was compiled, ready to be moved to `place`.

    Objects go, and texts name the place (see `relocated`).
    """
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or not path.is_file():
            continue
        if path.suffix in _OBJECTS:
            path.unlink()
        elif path.suffix in _TEXTS and path.stat().st_size <= _MOST_TEXT:
            old = path.read_text(encoding="utf-8", errors="surrogateescape")
            new = relocated(old, folder, place)
            if new != old:
                path.write_text(new, encoding="utf-8", errors="surrogateescape")
    for path in sorted(folder.rglob("locks")):
        with contextlib.suppress(OSError):
            path.rmdir()


# In the directory of a job: what it leaves for people to read, with its log.
FOR_READING = "for-reading"


LOG = "log.txt"


@dataclasses.dataclass(frozen=True)
class Kept:
    """Where what a failed job left is: the parts of a `ModelError` that say so."""

    log: str
    folder: str = ""
    script: str = ""


def kept_for(outcome: Outcome, cache: Cache, project: str) -> Kept:
    """Keep what a failed job left; return where it is.

    Never raises: what failed must be heard of, also on a full disk.
    """
    try:
        folder = keep(outcome, cache, project)
        # The latest is that of the target that failed.
        scripts = sorted(folder.glob(f"*/{SCRIPT}"), key=lambda path: path.stat().st_mtime_ns)
    except (OSError, AotiError) as error:
        return Kept(f"could not be kept ({error})")
    log = os.fspath(folder / LOG)
    if scripts and (folder / PROGRAM).is_file():
        return Kept(log, os.fspath(folder), os.fspath(scripts[-1]))
    return Kept(log)


def keep(outcome: Outcome, cache: Cache, project: str) -> Path:
    """Move what a job left for people to read to its place in the cache, with its log; return that."""
    folder, name = outcome.job.directory / FOR_READING, outcome.job.name
    shutil.copyfile(outcome.job.log, folder / LOG)
    settle(folder, cache.debug_folder(project, name))
    return cache.keep_folder(folder, project, name)
