"""Which of hatch-aoti's own modules a module runs, found in their text: what is made by other code is not reused."""

from __future__ import annotations

import functools
import hashlib
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["code_digest", "modules_of"]

_PACKAGE = __name__.partition(".")[0]
_HOME = Path(__file__).parent

# Not `ast`: parsing all modules takes 100 ms, which every build would wait for. A test compares.
_FOR_TYPES = re.compile(r"^if TYPE_CHECKING:\n(?:[ \t]+.*\n|\n)*", re.MULTILINE)
_IMPORT = re.compile(rf"^[ \t]*import ({_PACKAGE}[\w.]*)", re.MULTILINE)
_FROM_IMPORT = re.compile(rf"^[ \t]*from ((?:{_PACKAGE}|\.)[\w.]*) import (\([^)]*\)|.*)", re.MULTILINE)


@functools.cache
def modules_of(name: str) -> Mapping[str, Path]:
    """Return the module `name` and all modules of this package that it imports, directly or not: names and files.

    Imports inside functions count, and the packages that modules are in; imports for type checkers do not.
    """
    found: dict[str, Path] = {}
    todo = [name]
    while todo:
        module = todo.pop()
        path = _file(module)
        if path is None or module in found:
            continue
        found[module] = path
        todo += [module.rpartition(".")[0], *_imports(module, path)]
    return dict(sorted(found.items()))


@functools.cache
def code_digest(name: str) -> str:
    """Return a hash of the text of the module `name` and of all that it imports from this package."""
    digest = hashlib.sha256()
    for module, path in modules_of(name).items():
        digest.update(f"{module}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\0".encode())
    return digest.hexdigest()


def _imports(module: str, path: Path) -> Iterator[str]:
    """Yield what a module imports from this package; some are names in modules, not modules."""
    text = _FOR_TYPES.sub("", path.read_text(encoding="utf-8"))
    for imported in _IMPORT.finditer(text):
        yield imported[1]
    for imported in _FROM_IMPORT.finditer(text):
        origin = _absolute(imported[1], module, path)
        yield origin
        for part in re.sub(r"#.*", "", imported[2]).strip("()").split(","):
            yield f"{origin}.{(part.split() or [''])[0]}"


def _absolute(name: str, module: str, path: Path) -> str:
    """Return the whole name of what a module imports by a name that may begin with dots."""
    relative = name.lstrip(".")
    dots = len(name) - len(relative)
    if not dots:
        return name
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    return ".".join([*package[: len(package) - dots + 1], *([relative] if relative else [])])


def _file(module: str) -> Path | None:
    first, *rest = module.split(".")
    if first != _PACKAGE or not all(rest):
        return None
    place = _HOME.joinpath(*rest)
    candidates = (place / "__init__.py", place.with_name(f"{place.name}.py"))
    return next((path for path in candidates if path.is_file()), None)
