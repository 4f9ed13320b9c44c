"""The kinds of values that name files and folders."""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath
from typing import Any

from hatch_aoti.settings.toml import WrongValueError, wrong
from hatch_aoti.settings.values import TEXT, Kind, string, whole

__all__ = ["folder", "project_file", "shards", "split_key"]


def _absolute(text: str, root: Path) -> Path:
    try:
        return root.absolute() / Path(text).expanduser()
    except RuntimeError:
        raise WrongValueError(f'"{text}" starts at a home folder that this system does not know.') from None


folder = Kind(lambda value: string(value, "the path of a folder"), TEXT, "path", in_project=_absolute)
"""A folder, existing or not, that becomes absolute: it starts at the project's root, or at `~`."""


def split_key(text: str) -> tuple[str, str]:
    """Return the file and the key in `file.pt#key`, which names a part of a file; no key without a `#`."""
    file, _, key = text.partition("#")
    return file, key


def shards(root: Path, file: str) -> list[str]:
    """Return the files that an index of a checkpoint lists, which lie beside it, as far as there are any."""
    if not file.endswith(".index.json"):
        return []
    try:
        names = json.loads((root / file).read_text(encoding="utf-8"))["weight_map"].values()
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []  # loading the weights says what is wrong with it
    beside = PurePosixPath(file).parent
    plain = {name for name in names if isinstance(name, str) and PurePosixPath(name).name == name}
    return [str(beside / name) for name in sorted(plain) if (root / beside / name).is_file()]


def project_file(example: str, *suffixes: str, keyed: bool = False) -> Kind[str]:
    """Return the kind of files that exist below the project's root, given relative to it, with one of `suffixes`.

    With `keyed`, a `#` and a key may follow.
    """
    expected = f'a file in the project, such as "{example}"'
    inside = "A wheel that is built from the sdist would lack any other file."

    def parse(value: Any) -> str:
        text = string(value, expected)
        path = PurePosixPath(text)
        if path.is_absolute() or ".." in path.parts or text.startswith("~"):
            raise WrongValueError(f'expected a path below the project\'s root folder, but it is "{text}". {inside}')
        return text

    def in_project(given: str, root: Path) -> str:
        text, key = split_key(given) if keyed else (given, "")
        if keyed and given.endswith("#"):
            raise wrong("a key after the #", given)
        path = PurePosixPath(text)
        file = root / path
        if not path.name.endswith(suffixes) and not file.is_dir():
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
        return f"{path}#{key}" if key else str(path)

    endings = "|".join(suffix.removeprefix(".").replace(".", r"\.") for suffix in suffixes)
    pattern = rf"(?![/~])(?!([^/]*/)*\.\.(/|$)).*[^/]\.({endings})" + ("(#.+)?" if keyed else "")
    return Kind(parse, whole(pattern), f"path of a {' or '.join(suffixes)} file", in_project=in_project)
