"""What a job is doing, told to the build that waits for it."""

from __future__ import annotations

import contextlib
from typing import IO

__all__ = ["last_stage", "report_stage", "report_to", "send"]


_events: IO[str] | None = None  # in a worker: where stages are reported


_stages = ["start"]  # in a worker: those reported


def report_stage(stage: str) -> None:
    """Tell the build, from inside a job, which stage begins. Outside a worker nobody hears it."""
    _stages.append(stage)
    send(stage)


def report_to(build: IO[str]) -> None:
    """Have stages written to `build`, a line each: a process has one build to report to."""
    global _events  # noqa: PLW0603
    _events = build


def last_stage() -> str:
    """Return the stage that a job reported last."""
    return _stages[-1]


def send(line: str) -> None:
    """Write a line to the build, if one listens."""
    if _events is not None:
        with contextlib.suppress(OSError):
            _events.write(line + "\n")
            _events.flush()
