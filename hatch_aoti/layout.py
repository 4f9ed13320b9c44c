"""Where the wheel's packages come from in the tree, read from the pairs of source and wheel paths of a build."""

from __future__ import annotations

import dataclasses
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from hatch_aoti.errors import AotiError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Layout", "read_layout"]


@dataclasses.dataclass(frozen=True)
class Layout:
    """The import package that receives `_models.py`, and how to import the project before it is installed."""

    package: str  # dotted import name
    wheel_directory: str  # of the package inside the wheel, with `/`
    source_directory: Path  # of the package in the tree
    import_paths: tuple[str, ...]  # directories for sys.path, the project root last
    import_packages: dict[str, str]  # import name -> directory, where the wheel renames


def read_layout(files: Iterable[tuple[str, str]], *, root: Path, package: str | None) -> Layout:
    """Work out the layout from `(path relative to root, path in the wheel)` of every file the wheel would have.

    `package` is the setting `tool.aoti.package`; None takes the wheel's only package. Raises `AotiError` when there
    is none, when there are several, or when the named one is not in the wheel.
    """
    sources = [(PurePosixPath(source), PurePosixPath(target)) for source, target in files if source]
    code = [(source, target) for source, target in sources if target.suffix in {".py", ".pyi"}]
    packages = _packages(target for _, target in code)
    chosen = _choose(package, packages, {target for _, target in sources})
    prefixes = sorted({_rename(source, target) for source, target in code})
    directory = _source_directory(chosen, sources, root)
    paths = [str(root / source) for source, target in prefixes if target == PurePosixPath()]
    return Layout(
        ".".join(chosen.parts),
        str(chosen),
        directory,
        tuple(dict.fromkeys([*paths, str(root)])),
        {".".join(target.parts): str(root / source) for source, target in prefixes if target != PurePosixPath()},
    )


def _packages(targets: Iterable[PurePosixPath]) -> list[PurePosixPath]:
    """Return the outermost packages: directories with an `__init__.py` that no other such directory contains."""
    found = sorted({target.parent for target in targets if target.name == "__init__.py"} - {PurePosixPath()})
    return [path for path in found if not any(parent in found for parent in path.parents)]


def _choose(package: str | None, packages: list[PurePosixPath], targets: set[PurePosixPath]) -> PurePosixPath:
    names = [".".join(path.parts) for path in packages]
    if package is not None:
        path = PurePosixPath(*package.split("."))
        if not any(path in target.parents for target in targets):
            raise AotiError(
                f'`tool.aoti.package`: the wheel has no package "{package}".{did_you_mean(package, names)} '
                f"It has: {', '.join(names) or 'none'}. Name one of these, or let hatchling ship yours "
                "(`tool.hatch.build.targets.wheel.packages`)"
            )
        return path
    if len(packages) == 1:
        return packages[0]
    if not packages:
        raise AotiError(
            "the wheel has no import package to put `_models.py` into; let hatchling ship one "
            "(`tool.hatch.build.targets.wheel.packages`), or name a namespace package in `tool.aoti.package`"
        )
    raise AotiError(
        f"the wheel has several packages ({', '.join(names)}); say in `tool.aoti.package` which one receives "
        "`_models.py`"
    )


def _rename(source: PurePosixPath, target: PurePosixPath) -> tuple[PurePosixPath, PurePosixPath]:
    """Strip what two paths have in common at their ends: what remains is the renamed prefix."""
    left, right = list(source.parts), list(target.parts)
    while left and right and left[-1] == right[-1]:
        left.pop()
        right.pop()
    return PurePosixPath(*left), PurePosixPath(*right)


def _source_directory(package: PurePosixPath, sources: list[tuple[PurePosixPath, PurePosixPath]], root: Path) -> Path:
    """Find the tree's directory for `package`: where its `__init__.py` is, or else where its first file points to."""
    inside = [(source, target) for source, target in sources if package in target.parents]
    inside.sort(key=lambda pair: (pair[1] != package / "__init__.py", len(pair[1].parts), pair[1]))
    source, target = inside[0]
    for _ in target.relative_to(package).parts:
        source = source.parent
    return root / source
