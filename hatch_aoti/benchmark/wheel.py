"""Building a project's wheel as frontends do: a job for a worker, in the project's directory."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any

from hatch_aoti.benchmark.tasks import WheelTask
from hatch_aoti.codec import unpack

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["build"]


def build(payload: Mapping[str, Any]) -> str:
    """Do a `WheelTask`: call hatchling as frontends do, and return the wheel's file name.

    A model that is to change is built with another `seed` than the project sets, without a change to anyone's file.
    """
    from hatchling.build import build_wheel

    task = unpack(WheelTask, payload)
    if task.changed is not None:
        _change(task.changed)
    return build_wheel(os.fspath(task.output))


def _change(name: str) -> None:
    from hatch_aoti.plugin import project

    read = project.read_project

    def read_changed(*args: Any, **kwargs: Any) -> project.Project:
        found = read(*args, **kwargs)
        entry = found.settings.models[name]
        models = {**found.settings.models, name: dataclasses.replace(entry, seed=entry.seed + 1)}
        return dataclasses.replace(found, settings=dataclasses.replace(found.settings, models=models))

    project.read_project = read_changed
