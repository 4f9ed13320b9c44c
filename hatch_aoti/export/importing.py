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


__all__ = ["ImportRoots", "import_object", "missing_module"]


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
        sys.meta_path.append(_NotBuilt([*self.paths, *self.packages.values()]))


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


class _NotBuilt(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stands in for a package's `_models.py` while that is made: a package may import models in its `__init__.py`."""

    def __init__(self, roots: Sequence[str]) -> None:
        self.roots = [os.path.realpath(root) for root in roots]

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        del target
        places = [os.path.realpath(place) for place in path or ()]
        own = any(place == root or place.startswith(f"{root}{os.sep}") for place in places for root in self.roots)
        return importlib.machinery.ModuleSpec(fullname, self) if own and fullname.endswith("._models") else None

    def exec_module(self, module: ModuleType) -> None:
        def get(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return _NotBuiltModel(f"{module.__name__}.{name}")

        module.__getattr__ = get  # type: ignore[method-assign]


class _NotBuiltModel:
    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return self()

    def __call__(self, *_: object, **__: object) -> Any:
        raise RuntimeError(f"{self._name} is not built yet: this build makes it, so it cannot be used in a build")


def _namespace(name: str, locations: list[str]) -> importlib.machinery.ModuleSpec:
    spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
    spec.submodule_search_locations = locations
    return spec


def missing_module(error: ModuleNotFoundError, importer: str) -> tuple[str, str]:
    """Return what a module that is not found is to `importer`, the module that was asked for, and what to do."""
    name = error.name
    if name is None:  # raised by hand, perhaps for something else that went wrong
        cause = error.__cause__ or error.__context__
        return raised(error) + (f" ({raised(cause)})" if cause is not None else ""), (
            f"make `python -c 'import {importer}'` work in the build environment"
        )
    if name.partition(".")[0] == importer.partition(".")[0]:
        return f"needs the module `{name}`, which the project itself has not", (
            "check the spelling, and that git does not ignore it. A file that another build hook writes is there if "
            "that hook runs first: hooks run in the order of their tables, so put that of aoti last"
        )
    return f"needs the module `{name}`, which is not installed in the build environment", (
        "add the distribution that provides it to `build-system.requires`, next to torch"
    )


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
        reason, hint = missing_module(error, module_name)
        raise ModelError(
            model, stage, f"importing `{module_name}` {reason}", hint=hint, details=user_traceback(error)
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
