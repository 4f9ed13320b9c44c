"""The artifacts that some contenders load, made before anything is measured, as a script would: a job for a worker."""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING, Any

from hatch_aoti.benchmark.contender import describe_error
from hatch_aoti.benchmark.contenders import CONTENDERS
from hatch_aoti.benchmark.eager import install_roots
from hatch_aoti.benchmark.tasks import PreparationTask
from hatch_aoti.codec import unpack
from hatch_aoti.stages import report_stage

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["prepare_all"]


def prepare_all(payload: Mapping[str, Any]) -> dict[str, str | None]:
    """Do a `PreparationTask` in this process.

    Returns for each model why that failed, or None.
    """
    task = unpack(PreparationTask, payload)
    contender = CONTENDERS[task.contender]
    failures: dict[str, str | None] = {}
    install_roots(task.models[0].roots)  # all of one project
    for model in task.models:
        name = model.entry.name
        try:
            contender.prepare(model, task.directory / f"{name}{contender.artifact}")
            failures[name] = None
        except Exception as error:  # noqa: BLE001 - whatever stops a contender is its result
            traceback.print_exc()
            failures[name] = describe_error(error)
        report_stage(name)
    return failures
