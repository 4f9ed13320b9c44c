"""The artifacts that some contenders load, made before anything is measured, as a script would: a job for a worker."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hatch_aoti.benchmark.contender import describe_error
from hatch_aoti.benchmark.contenders import CONTENDERS
from hatch_aoti.benchmark.eager import install_roots
from hatch_aoti.settings.model import ModelSettings
from hatch_aoti.stages import report_stage

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["prepare_all"]


def prepare_all(payload: Mapping[str, Any]) -> dict[str, str | None]:
    """Make one contender's artifacts for several models in this process.

    Returns for each model why that failed, or None.
    """
    install_roots(payload["roots"])
    contender = CONTENDERS[payload["contender"]]
    failures: dict[str, str | None] = {}
    for data in payload["entries"]:
        entry = ModelSettings.from_json(data)
        path = Path(payload["directory"], f"{entry.name}{contender.artifact}")
        try:
            contender.prepare(entry, Path(payload["root"]), path)
            failures[entry.name] = None
        except Exception as error:  # noqa: BLE001 - whatever stops a contender is its result
            traceback.print_exc()
            failures[entry.name] = describe_error(error)
        report_stage(entry.name)
    return failures
