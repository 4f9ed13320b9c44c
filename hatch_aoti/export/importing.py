"""Finding what an entry of `[tool.aoti.models]` names in the project's own modules."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hatch_aoti.errors import ModelError, did_you_mean
from hatch_aoti.export.failures import raised, user_traceback

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from types import ModuleType


__all__ = ["ImportRoots", "import_object"]


@dataclasses.dataclass(frozen=True)
class ImportRoots:
    """Where the project's modules are before they are installed.

    `paths` are directories for `sys.path`; `packages` maps an import name to the directory that the wheel's `sources`
    option renames to it.
    """

    paths: tuple[str, ...]
    packages: Mapping[str, str]

    def install(self) -> None:
        """Put the roots on this process's import path: before what is installed, behind Python's own modules.

        As for an installed project: a `json.py` next to its packages is not what others get that import `json`.
        """
        own = {os.path.realpath(path) for path in sysconfig.get_paths().values() if "site-packages" not in path}
        first = [path for path in sys.path if path and _is_pythons(path, own)]
        rest = [path for path in sys.path if path not in {*first, *self.paths}]
        sys.path[:] = [*first, *self.paths, *rest]
        if self.packages:
            sys.meta_path.insert(0, _RenamedPackages(dict(self.packages)))


def _is_pythons(path: str, homes: Collection[str]) -> bool:
    """Whether an entry of `sys.path` has modules of Python itself: one of `homes`, or its archive or `lib-dynload`."""
    path = os.path.realpath(path)
    return (
        path in homes
        or path.endswith(f"python{sys.version_info.major}{sys.version_info.minor}.zip")
        or (
            os.path.basename(path) == "lib-dynload" and os.path.dirname(path) in homes  # noqa: PTH119, PTH120
        )
    )


class _RenamedPackages(importlib.abc.MetaPathFinder):
    """Finds packages under the names that the wheel gives them, where the tree has others."""

    def __init__(self, packages: dict[str, str]) -> None:
        self.packages = packages

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        del path, target
        directory = self.packages.get(fullname)
        if directory is not None:
            init = Path(directory) / "__init__.py"
            if init.is_file():
                return importlib.util.spec_from_file_location(fullname, init, submodule_search_locations=[directory])
            return _namespace(fullname, [directory])
        if any(name.startswith(f"{fullname}.") for name in self.packages):
            return _namespace(fullname, [])
        return None


def _namespace(name: str, locations: list[str]) -> importlib.machinery.ModuleSpec:
    spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
    spec.submodule_search_locations = locations
    return spec


def import_object(model: str, stage: str, key: str, reference: str) -> Any:
    """Import `module:attribute`; raise `ModelError` at `stage` that names the key it comes from."""
    module_name, _, attribute = reference.partition(":")
    try:
        value: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise ModelError(
                model,
                stage,
                f'`{key} = "{reference}"` names the module `{module_name}`, but there is no module `{error.name}`',
                hint="check the spelling, and that the file is part of the package that this wheel ships",
            ) from error
        raise ModelError(
            model,
            stage,
            f"importing `{module_name}` needs the module `{error.name}`, which is not installed in the build "
            "environment",
            hint="add the distribution that provides it to `build-system.requires`, next to torch",
            details=user_traceback(error),
        ) from error
    except BaseException as error:
        raise ModelError(
            model,
            stage,
            f"importing `{module_name}` {raised(error)}",
            hint=f"make `python -c 'import {module_name}'` work",
            details=user_traceback(error),
        ) from error
    for part in attribute.split("."):
        try:
            value = getattr(value, part)
        except AttributeError as error:
            raise ModelError(
                model,
                stage,
                f'`{key} = "{reference}"`: `{module_name}` has no attribute `{attribute}`.'
                f"{did_you_mean(part, [name for name in dir(value) if not name.startswith('__')])}",
                hint="write the name of a class, an instance or a function that the module defines",
            ) from error
    return value
