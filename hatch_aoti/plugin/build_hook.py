"""The hatchling build hook: which files, tag and requirements go into the wheel."""

from __future__ import annotations

import functools
import os
import sys
from typing import TYPE_CHECKING, Any, ParamSpec

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

from hatch_aoti.errors import AotiError, full_disk

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from hatch_aoti.layout import Layout
    from hatch_aoti.plugin.project import Project
    from hatch_aoti.settings.model import Settings
    from hatch_aoti.wheel.contents import WheelContents

__all__ = ["AotiBuildHook"]

_P = ParamSpec("_P")


def _short_errors(function: Callable[_P, None]) -> Callable[_P, None]:
    """Turn expected failures into their text and exit status 1: a traceback of ours would help nobody."""

    @functools.wraps(function)
    def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> None:
        try:
            function(*args, **kwargs)
        except (AotiError, OSError) as error:
            reason = str(error) if isinstance(error, AotiError) else full_disk(error)
            if not reason:
                raise
            from hatch_aoti.build.progress import Reporter

            Reporter().error(reason)
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

        For an sdist nothing is compiled; weights and saved programs that version control ignores are added, so that a
        wheel can be built from it.
        """
        if self.target_name not in {"wheel", "sdist"}:
            return
        if sys.platform == "win32":
            raise AotiError("hatch-aoti does not support building on Windows yet; build on Linux or macOS")
        _check_source_date(os.environ)
        from hatch_aoti.plugin.project import read_project

        project = read_project(self.metadata, self.config, environ=os.environ)
        if self.target_name == "sdist":
            self._leave_out_generated(project.layout)
            _add_files(build_data, project.settings, project.root)
        else:
            self._build_wheel(version, build_data, project)

    def _build_wheel(self, version: str, build_data: dict[str, Any], project: Project) -> None:
        from hatch_aoti.artifact.cache import open_cache
        from hatch_aoti.build.progress import Reporter
        from hatch_aoti.plugin.editable import refuse_foreign_accessor
        from hatch_aoti.plugin.project import build_project
        from hatch_aoti.wheel.contents import ACCESSOR, WheelContents, skipped_accessor

        settings, layout = project.settings, project.layout
        reporter = Reporter()
        editable = version == "editable"
        refuse_foreign_accessor(layout.source_directory, layout.package)
        if settings.skip:
            reporter.warn(
                "HATCH_AOTI_SKIP is set: this wheel has NO compiled models, and importing "
                f"{layout.package}._models from it raises ImportError"
            )
            if not editable:  # an editable tree keeps the models it has
                contents = WheelContents({ACCESSOR: skipped_accessor(layout.package)}, {})
                self._include(
                    build_data, layout, contents, open_cache(settings.cache_dir, trusted=settings.trust_cache)
                )
            return
        cache = open_cache(settings.cache_dir, trusted=settings.trust_cache)
        built, requirement = build_project(project, cache, reporter, environ=os.environ)
        if requirement is not None:
            build_data["dependencies"].append(requirement)
            reporter.warn(
                f"the wheel requires {requirement}, which `project.dependencies` does not say: tools that read "
                f'metadata without a build, such as uv, do not see it (astral-sh/uv#2130). Add "{requirement}" there'
            )
        if editable:
            from hatch_aoti.plugin.editable import write_into_tree

            write_into_tree(built.contents, layout.source_directory)
            return
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{built.tag.tag}"
        self._include(build_data, layout, built.contents, cache)

    def _leave_out_generated(self, layout: Layout, also: Iterable[str] = ()) -> None:
        """Keep what an editable install wrote into the tree, and files named in `also`, out of this archive.

        They may be stale, and a second file of one name is an error in a wheel (pypa/hatch#2301).
        """
        from hatch_aoti.plugin.editable import generated_files

        names = sorted({*generated_files(layout.source_directory), *also})
        if not names:
            return
        where = layout.source_directory.relative_to(self.root).as_posix()
        patterns = [f"/{name}" if where == "." else f"/{where}/{name}" for name in names]
        target, project = self.build_config.target_config, self.build_config.build_config
        target["exclude"] = [*target.get("exclude", project.get("exclude", [])), *patterns]
        artifacts = target.get("artifacts", project.get("artifacts", []))
        if artifacts:  # these patterns win over `exclude`, so they need an exception of their own
            target["artifacts"] = [*artifacts, *(f"!{pattern}" for pattern in patterns)]

    def _include(self, build_data: dict[str, Any], layout: Layout, contents: WheelContents, cache: Any) -> None:
        """Map its files into the wheel. Generated texts get a place in the cache, as they need one."""
        from importlib.metadata import version

        from hatch_aoti.wheel.manifest import MANIFEST, parse_manifest
        from hatch_aoti.wheel.sbom import SBOM, render_sbom

        self._leave_out_generated(layout, also=contents.names)
        texts = cache.keep_texts(contents.texts)
        for name in contents.names:
            source = contents.artifacts.get(name) or texts / name
            build_data["force_include"][os.fspath(source)] = f"{layout.wheel_directory}/{name}"
        if contents.metadata:
            metadata = cache.keep_texts(contents.metadata)
            build_data["extra_metadata"] |= {os.fspath(metadata / name): name for name in contents.metadata}
        if MANIFEST in contents.texts:
            sbom = render_sbom(
                parse_manifest(contents.texts[MANIFEST].encode()),
                name=self.metadata.name,
                version=self.metadata.version,
                hatchling=version("hatchling"),
            )
            build_data["sbom_files"].append(os.fspath(cache.keep_texts({SBOM: sbom}) / SBOM))


def _add_files(build_data: dict[str, Any], settings: Settings, root: Path) -> None:
    for entry in settings.models.values():
        for file in entry.files(root):
            build_data["force_include"][os.fspath(root / file)] = file


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
