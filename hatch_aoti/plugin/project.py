"""A project as hatchling sees it: its settings, its layout, and what building its models takes.

The build hook and the command line both start here.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hatch_aoti.artifact.cache import default_cache_dir
from hatch_aoti.build.pipeline import build_models
from hatch_aoti.errors import AotiError, Problem, SettingsError
from hatch_aoti.layout import read_layout
from hatch_aoti.plugin.requirements import (
    extra_requirement,
    installed_torch,
    torch_requires_python,
    unsupported_pythons,
)
from hatch_aoti.settings.reader import check_hook_config, parse_settings

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from hatchling.metadata.core import ProjectMetadata
    from packaging.requirements import Requirement

    from hatch_aoti.artifact.cache import Cache
    from hatch_aoti.build.pipeline import Built
    from hatch_aoti.build.progress import Reporter
    from hatch_aoti.layout import Layout
    from hatch_aoti.settings.model import Settings

__all__ = ["Project", "build_project", "open_project", "read_project"]


@dataclasses.dataclass(frozen=True)
class Project:
    """What a build of the models in `root` needs to know.

    `requires_python` and `dependencies` are what the project states, the first empty where it states nothing.
    """

    root: Path
    version: str
    requires_python: str
    dependencies: tuple[Requirement, ...]
    settings: Settings
    layout: Layout


def read_project(
    metadata: ProjectMetadata[Any], hook_config: Mapping[str, Any], *, environ: Mapping[str, str]
) -> Project:
    """Read the project of `metadata`; `hook_config` is the table that turns the build hook on.

    Raises `SettingsError` with everything that is wrong in the configuration, and `AotiError` if the wheel has no
    package for the models, or if Python and PyTorch would not find the same files by their names.
    """
    from hatchling.builders.wheel import WheelBuilder

    root = Path(metadata.root)
    settings = _read_settings(metadata, hook_config, root, environ)
    # A builder of its own: hatchling computes and keeps the file patterns on first use, and the hook may still have to
    # add to those of the running build.
    builder = WheelBuilder(metadata.root, metadata=metadata)
    files = [
        (file.relative_path.replace(os.sep, "/"), file.distribution_path.replace(os.sep, "/"))
        for file in builder.recurse_selected_project_files()
    ]
    folders = (str(root), str(settings.cache_dir or default_cache_dir()), tempfile.gettempdir())
    # Also the names that hatchling was given: it finds no files by those that it cannot encode.
    given = (settings.package or "", *builder.config.packages)
    _check_names([*folders, *given, *(source for source, _ in files)])
    layout = read_layout(files, root=root, package=settings.package)
    dependencies = tuple(metadata.core.dependencies_complex.values())
    return Project(root, metadata.version, metadata.core.requires_python, dependencies, settings, layout)


def open_project(root: Path, *, environ: Mapping[str, str]) -> Project:
    """Read the project in `root`, outside a build. Raises as `read_project` does."""
    from hatchling.builders.wheel import WheelBuilder

    if not (root / "pyproject.toml").is_file():
        raise AotiError(f"{root} has no pyproject.toml: name the folder of a project with [tool.aoti.models]")
    try:
        builder = WheelBuilder(str(root))
        hook_config = builder.config.hook_config.get("aoti", {})
        return read_project(builder.metadata, hook_config, environ=environ)
    except (ValueError, TypeError, OSError) as error:  # hatchling's, whose texts name the field or the file
        raise AotiError(f"{root / 'pyproject.toml'}: {error}") from error


def _check_names(names: Iterable[str]) -> None:
    """Raise `AotiError` for a name that means one file to Python and another to PyTorch, whose C++ code takes UTF-8.

    That is so without a UTF-8 locale where Python's own remedies for it (PEP 538 and 540) are off, or for another
    locale than C.
    """
    encoding = sys.getfilesystemencoding()
    name = next((name for name in names if not name.isascii()), None)
    if encoding != "utf-8" and name is not None:
        shown = name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        raise AotiError(
            f'"{shown}" is not ASCII, and Python takes the names of files for {encoding} here, but PyTorch for UTF-8: '
            "set PYTHONUTF8=1, or a UTF-8 locale (LC_ALL=C.UTF-8)"
        )


def _read_settings(
    metadata: ProjectMetadata[Any], hook_config: Mapping[str, Any], root: Path, environ: Mapping[str, str]
) -> Settings:

    problems: list[Problem] = check_hook_config(hook_config)
    try:
        settings = parse_settings(metadata.config, root=root, environ=environ)
    except SettingsError as error:
        raise SettingsError([*problems, *error.problems]) from None
    if problems:
        raise SettingsError(problems)
    return settings


def build_project(
    project: Project, cache: Cache, reporter: Reporter, *, environ: Mapping[str, str]
) -> tuple[Built, str | None]:
    """Compile the project's models, or take them from the cache.

    Returns what was built, and the requirement on torch that a wheel must add to those of the project, None if it
    states one itself. Raises `AotiError`, also if that one excludes the torch that compiles.
    """
    torch, needs = installed_torch(), torch_requires_python()
    too_old = unsupported_pythons(project.requires_python, needs)
    if too_old:
        reporter.warn(
            f'`project.requires-python` is "{project.requires_python}", which admits Python {too_old}; torch {torch} '
            f'and the generated code need "{needs}". Require that, or the models cannot be used there'
        )
    requirement = extra_requirement(project.dependencies, torch)
    built = build_models(
        project.settings,
        project.layout,
        cache,
        reporter,
        root=project.root,
        version=project.version,
        torch_version=str(torch),
        environ=environ,
    )
    return built, requirement
