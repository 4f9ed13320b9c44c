"""What the benchmark's jobs are told: they cross a pipe to a worker as `codec` has them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hatch_aoti.export.importing import ImportRoots
from hatch_aoti.settings.model import ModelSettings

__all__ = ["PreparationTask", "ProjectModel", "ReferenceTask", "WheelTask"]


@dataclass(frozen=True)
class ProjectModel:
    """A model of a project, as far as its module has to be made: `root` is the project's folder."""

    entry: ModelSettings
    root: Path
    roots: ImportRoots


@dataclass(frozen=True)
class ReferenceTask:
    """Write the inputs and answers of a model into a directory: a project's, or one of the installed `package`."""

    model: str
    directory: Path
    project: ProjectModel | None = None
    package: str = ""


@dataclass(frozen=True)
class PreparationTask:
    """Make the artifacts of a contender, by its key, for several models of a project."""

    contender: str
    models: tuple[ProjectModel, ...]
    directory: Path


@dataclass(frozen=True)
class WheelTask:
    """Build the wheel of the project in the current directory; `changed` names a model to build in another way."""

    output: Path
    changed: str | None
