"""What a job is doing, told to the build that waits for it."""

from __future__ import annotations

import contextlib
from typing import IO

__all__ = ["add_note", "last_stage", "notes", "report_stage", "report_to", "send"]


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


_notes: list[str] = []  # in a worker: what its job has to say beside the result


def add_note(text: str) -> None:
    """Have the build say something about the model, whether it is built now or was before."""
    if text not in _notes:
        _notes.append(text)


def notes() -> tuple[str, ...]:
    """Return what jobs of this process have to say."""
    return tuple(_notes)


def last_stage() -> str:
    """Return the stage that a job reported last."""
    return _stages[-1]


def send(line: str) -> None:
    """Write a line to the build, if one listens."""
    if _events is not None:
        with contextlib.suppress(OSError):
            _events.write(line + "\n")
            _events.flush()
