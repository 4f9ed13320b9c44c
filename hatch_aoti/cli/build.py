"""`hatch-aoti build`: the models of a project as files in a directory, without a wheel."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from hatch_aoti.errors import AotiError

__all__ = ["build"]


@click.command()
@click.argument("project", default=".", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--output",
    required=True,
    metavar="DIR",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where the files go. It is created if need be.",
)
def build(project: Path, output: Path) -> None:
    """Compile the models of PROJECT (default: the current directory) into a directory.

    The directory gets what the wheel's package would get: _models.py, the .pt2 files, _models.json, and the CMake
    package and header for C++. Each file appears whole, when all models have been compiled. Models that did not change
    come from the cache.
    """
    from hatch_aoti.artifact.cache import open_cache
    from hatch_aoti.build.progress import Reporter
    from hatch_aoti.plugin.project import build_project, open_project
    from hatch_aoti.wheel.contents import write_contents

    if sys.platform == "win32":
        raise AotiError("hatch-aoti does not support building on Windows yet; build on Linux or macOS")
    opened = open_project(project.resolve(), environ=os.environ)
    if opened.settings.skip:
        raise AotiError("HATCH_AOTI_SKIP is set, so there is nothing to build; unset it")
    reporter = Reporter()
    cache = open_cache(opened.settings.cache_dir, trusted=opened.settings.trust_cache)
    built, _ = build_project(opened, cache, reporter, environ=os.environ)
    try:
        write_contents(built.contents, output)
    except OSError as error:
        raise AotiError(
            f"cannot write the models into {output}: {error.strerror or error}. Choose another directory with --output"
        ) from error
    reporter.note(f"wrote {', '.join(built.contents.names)} to {output}")
