"""Editable installs: the generated files in the source tree, with a `.gitignore` of their own."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from hatch_aoti.errors import AotiError

if TYPE_CHECKING:
    from hatch_aoti.bundle import Bundle

__all__ = ["generated_files", "write_into_tree"]

_IGNORE = ".gitignore"
_HEADER = "# Written by hatch-aoti: what an editable install generates here, this file included."


def generated_files(package: Path) -> list[str]:
    """Return the names of the files that an editable install wrote into a package's directory."""
    try:
        lines = (package / _IGNORE).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return []
    if not lines or lines[0] != _HEADER:
        return []
    return [line.removeprefix("/") for line in lines[1:] if line.startswith("/")]


def write_into_tree(bundle: Bundle, package: Path) -> None:
    """Write a bundle into a package's directory, each file at once or not at all, and remove those of an earlier one.

    A `.gitignore` of the project's own in that directory is left alone. Raises `AotiError` if the tree is read-only.
    """
    earlier = generated_files(package)
    try:
        for name, text in bundle.texts.items():
            _replace(package / name, text)
        for name, path in bundle.artifacts.items():
            _replace(package / name, path)
        if earlier or not (package / _IGNORE).exists():
            names = sorted([*bundle.names, _IGNORE])
            _replace(package / _IGNORE, "\n".join([_HEADER, *(f"/{name}" for name in names), ""]))
        for name in set(earlier) - {*bundle.names, _IGNORE}:
            (package / name).unlink(missing_ok=True)
    except OSError as error:
        raise AotiError(
            f"an editable install writes the compiled models into {package}, which failed: {error.strerror or error}. "
            "Make the directory writable, or install without -e"
        ) from error


def _replace(path: Path, content: str | Path) -> None:
    """Put content in place by a rename, so that a process that imports the package never sees half a file."""
    handle, partial = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            if isinstance(content, str):
                file.write(content.encode())
            else:
                with content.open("rb") as source:
                    shutil.copyfileobj(source, file)
        Path(partial).chmod(0o644)
        Path(partial).replace(path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise
