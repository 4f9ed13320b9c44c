"""The hatchling build hook: which files, tag and requirements go into the wheel."""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

from hatch_aoti.errors import AotiError, Problem, SettingsError

if TYPE_CHECKING:
    from collections.abc import Callable

    from hatch_aoti.bundle import Bundle
    from hatch_aoti.layout import Layout
    from hatch_aoti.settings import Settings

__all__ = ["AotiBuildHook"]

_P = ParamSpec("_P")


def _short_errors(function: Callable[_P, None]) -> Callable[_P, None]:
    """Turn expected failures into their text and exit status 1: a traceback of ours would help nobody."""

    @functools.wraps(function)
    def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> None:
        try:
            function(*args, **kwargs)
        except AotiError as error:
            from hatch_aoti.progress import Reporter

            Reporter().error(str(error))
            raise SystemExit(1) from None

    return wrapper


# Not subscripted: hatchling 1.32.3 changed the interface's type parameters, and every plugin that named them broke
# (pypa/hatch#2437).
class AotiBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Compiles the models of `[tool.aoti.models]` into the wheel."""

    PLUGIN_NAME = "aoti"

    @_short_errors
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the models and add them to `build_data` (standard wheels) or to the tree (editable ones).

        For an sdist nothing is compiled; weights that version control ignores are added, so that a wheel can be built
        from it.
        """
        if self.target_name not in {"wheel", "sdist"}:
            return
        if sys.platform == "win32":
            raise AotiError("hatch-aoti does not support building on Windows yet; build on Linux or macOS")
        _check_source_date(os.environ)
        root = Path(self.root)
        settings = self._settings(root)
        layout = self._layout(root, settings)
        if self.target_name == "sdist":
            self._leave_out_generated(layout)
            _add_weights(build_data, settings, root)
        else:
            self._build_wheel(version, build_data, settings, layout, root)

    def _build_wheel(
        self, version: str, build_data: dict[str, Any], settings: Settings, layout: Layout, root: Path
    ) -> None:
        from hatch_aoti.bundle import ACCESSOR, Bundle, skipped_accessor
        from hatch_aoti.cache import Cache, default_cache_dir
        from hatch_aoti.pipeline import build_models
        from hatch_aoti.progress import Reporter
        from hatch_aoti.requirements import extra_requirement, installed_torch

        reporter = Reporter()
        editable = version == "editable"
        if settings.skip:
            reporter.warn(
                "HATCH_AOTI_SKIP is set: this wheel has NO compiled models, and importing "
                f"{layout.package}._models from it raises ImportError"
            )
            if not editable:  # an editable tree keeps the models it has
                self._leave_out_generated(layout)
                self._include(
                    build_data, layout, Bundle({ACCESSOR: skipped_accessor(layout.package)}, {}),
                    Cache(settings.cache_dir or default_cache_dir()),
                )  # fmt: skip
            return
        torch = installed_torch()
        requirement = extra_requirement(self.metadata.core.dependencies_complex.values(), torch)
        cache = Cache(settings.cache_dir or default_cache_dir())
        built = build_models(settings, layout, cache, reporter, root=root, torch_version=str(torch), environ=os.environ)
        if requirement is not None:
            build_data["dependencies"].append(requirement)
            reporter.note(f"the wheel requires {requirement}")
        if editable:
            from hatch_aoti.editable import write_into_tree

            write_into_tree(built.bundle, layout.source_directory)
            return
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{built.tag.tag}"
        self._leave_out_generated(layout)
        self._include(build_data, layout, built.bundle, cache)

    def _settings(self, root: Path) -> Settings:
        from hatch_aoti.settings import check_hook_config, parse_settings

        problems: list[Problem] = check_hook_config(self.config)
        try:
            settings = parse_settings(self.metadata.config, root=root, environ=os.environ)
        except SettingsError as error:
            raise SettingsError([*problems, *error.problems]) from None
        if problems:
            raise SettingsError(problems)
        return settings

    def _layout(self, root: Path, settings: Settings) -> Layout:
        from hatchling.builders.wheel import WheelBuilder

        from hatch_aoti.layout import read_layout

        # A builder of its own: hatchling computes and keeps the file patterns on first use, and this hook may still
        # have to add to those of the running build.
        builder = WheelBuilder(self.root, metadata=self.metadata)
        files = (
            (file.relative_path.replace(os.sep, "/"), file.distribution_path.replace(os.sep, "/"))
            for file in builder.recurse_selected_project_files()
        )
        return read_layout(files, root=root, package=settings.package)

    def _leave_out_generated(self, layout: Layout) -> None:
        """Keep what an editable install wrote into the tree out of this archive: it may be stale."""
        from hatch_aoti.editable import generated_files

        names = generated_files(layout.source_directory)
        if not names:
            return
        where = layout.source_directory.relative_to(self.root).as_posix()
        target, project = self.build_config.target_config, self.build_config.build_config
        existing = target.get("exclude", project.get("exclude", []))
        target["exclude"] = [*existing, *(f"/{where}/{name}" for name in names)]

    def _include(self, build_data: dict[str, Any], layout: Layout, bundle: Bundle, cache: Any) -> None:
        """Map the bundle's files into the wheel. Generated texts get a place in the cache, as they need one."""
        texts = cache.keep_texts(bundle.texts)
        for name in bundle.names:
            source = bundle.artifacts.get(name) or texts / name
            build_data["force_include"][os.fspath(source)] = f"{layout.wheel_directory}/{name}"


def _add_weights(build_data: dict[str, Any], settings: Settings, root: Path) -> None:
    for entry in settings.models.values():
        if entry.weights is not None:
            build_data["force_include"][os.fspath(root / entry.weights)] = entry.weights


def _check_source_date(environ: Any) -> None:
    """Refuse a SOURCE_DATE_EPOCH that hatchling would crash on (pypa/hatch#1605)."""
    value = environ.get("SOURCE_DATE_EPOCH")
    if value is None:
        return
    latest = 4354819199  # 2107-12-31 23:59:59 UTC, the last second that a zip archive can hold
    try:
        seconds = int(value)
    except ValueError:
        seconds = -1
    if not 0 <= seconds <= latest:
        raise AotiError(
            f"the environment variable SOURCE_DATE_EPOCH is {value!r}; it must be a whole number of seconds since "
            f"1970-01-01, from 0 to {latest} (the year 2107, the last that a wheel can hold). Correct it or unset it"
        )
