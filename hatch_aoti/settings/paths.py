"""The kinds of values that name files and folders."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Any

from hatch_aoti.settings.toml import WrongValueError, wrong
from hatch_aoti.settings.values import TEXT, Kind, string, whole

__all__ = ["folder", "project_file"]


def _absolute(text: str, root: Path) -> Path:
    try:
        return root.absolute() / Path(text).expanduser()
    except RuntimeError:
        raise WrongValueError(f'"{text}" starts at a home folder that this system does not know.') from None


folder = Kind(lambda value: string(value, "the path of a folder"), TEXT, "path", in_project=_absolute)
"""A folder, existing or not, that becomes absolute: it starts at the project's root, or at `~`."""


def project_file(example: str, *suffixes: str) -> Kind[str]:
    """Return the kind of files that exist below the project's root, given relative to it, with one of `suffixes`."""
    expected = f'a file in the project, such as "{example}"'
    inside = "A wheel that is built from the sdist would lack any other file."

    def parse(value: Any) -> str:
        text = string(value, expected)
        path = PurePosixPath(text)
        if path.is_absolute() or ".." in path.parts or text.startswith("~"):
            raise WrongValueError(f'expected a path below the project\'s root folder, but it is "{text}". {inside}')
        return text

    def in_project(text: str, root: Path) -> str:
        path = PurePosixPath(text)
        file = root / path
        if path.suffix not in suffixes and not file.is_dir():
            ending = f"one of {', '.join(suffixes)}" if len(suffixes) > 1 else suffixes[0]
            raise wrong(f"a file that ends in {ending}", text)
        if file.is_dir():
            raise WrongValueError(f'expected a file, but "{text}" is a folder.')
        if not file.is_file():
            raise WrongValueError(
                f'there is no file "{text}" in {root}. If this build starts from an sdist, the file may be missing '
                "there because .gitignore lists it: add it to `tool.hatch.build.targets.sdist.artifacts`."
            )
        if not file.resolve().is_relative_to(root.resolve()):
            raise WrongValueError(f'"{text}" is a link to a file outside the project\'s root folder. {inside}')
        return str(path)

    endings = "|".join(suffix.removeprefix(".") for suffix in suffixes)
    pattern = rf"(?![/~])(?!([^/]*/)*\.\.(/|$)).*[^/]\.({endings})"
    return Kind(parse, whole(pattern), f"path of a {' or '.join(suffixes)} file", in_project=in_project)
