"""What people see while models compile: which model, which stage, how long; and a table at the end."""

from __future__ import annotations

import dataclasses
import sys
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import Console
    from rich.progress import Progress, TaskID

__all__ = ["Reporter", "Row", "human_size"]


@dataclasses.dataclass(frozen=True)
class Row:
    """One artifact in the closing table."""

    model: str
    target: str
    inputs: str
    size: int  # bytes
    origin: str  # "compiled" or "cached"
    error: str  # the largest difference from eager, in words
    seconds: float


def human_size(size: float) -> str:
    """Return a size in bytes as people write it: 512 B, 1.5 kB, 3.2 MB (powers of 1000)."""
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


class Reporter:
    """Prints to standard error: moving lines in a terminal, one line for each stage elsewhere.

    Its methods may be called from several threads.
    """

    def __init__(self) -> None:
        from rich.console import Console

        # A log file has no width; a build frontend's pipe reports 80 columns and would break lines that need not be.
        width = None if sys.stderr.isatty() else 160
        self.console: Console = Console(stderr=True, width=width, highlight=False, soft_wrap=True)
        self._started: dict[str, float] = {}
        self._ended: dict[str, float] = {}
        self._tasks: dict[str, TaskID] = {}
        self._guard = threading.Lock()
        self._progress: Progress | None = None

    def __enter__(self) -> Reporter:
        if self.console.is_terminal:
            from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

            self._progress = Progress(
                SpinnerColumn(),
                TextColumn("aoti: [bold]{task.description}[/] {task.fields[stage]}"),
                TimeElapsedColumn(),
                console=self.console,
                transient=True,
            )
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def stage(self, model: str, stage: str) -> None:
        """Say that `model` enters `stage`; `start` begins its clock, `done` and `failed` stop it.

        A step of a stage (`verify: x with nan in it`) shows in a terminal, and is no line of a log.
        """
        now = time.monotonic()
        with self._guard:
            started = self._started.setdefault(model, now)
            if stage in {"done", "failed"}:
                self._ended[model] = now
            if self._progress is not None:
                task = self._tasks.get(model)
                if task is None:
                    self._tasks[model] = self._progress.add_task(model, total=None, stage=stage)
                elif stage in {"done", "failed"}:
                    self._progress.remove_task(task)
                else:
                    self._progress.update(task, stage=stage)
            elif stage != "start" and ": " not in stage:
                self._print(f"aoti: {model}: {stage} ({now - started:.1f} s)")

    def seconds(self, model: str) -> float:
        """Return how long a model has taken, in seconds of wall time."""
        started = self._started.get(model)
        return 0.0 if started is None else self._ended.get(model, time.monotonic()) - started

    def note(self, text: str) -> None:
        """Print one line."""
        self._print(f"aoti: {text}")

    def warn(self, text: str) -> None:
        """Print something that should not be overlooked."""
        self.console.print(f"aoti: WARNING: {text}", style="bold yellow", markup=False)

    def error(self, text: str) -> None:
        """Print why the build stops."""
        self.console.print(f"aoti: ERROR: {text}", style="red", markup=False)

    def table(self, rows: Iterable[Row]) -> None:
        """Print the closing table."""
        from rich.box import SIMPLE_HEAD
        from rich.table import Table
        from rich.text import Text

        table = Table(box=SIMPLE_HEAD, pad_edge=False)
        for heading in ("model", "target", "inputs"):
            table.add_column(heading, overflow="fold")
        for heading in ("size", "", "max error", "seconds"):
            table.add_column(heading, justify="right", no_wrap=True)
        for row in rows:
            cells = (row.model, row.target, row.inputs, human_size(row.size), row.origin, row.error)
            table.add_row(*map(Text, cells), f"{row.seconds:.1f}")  # Text: shapes are no markup
        self.console.print(table, soft_wrap=False)

    def _print(self, text: str) -> None:
        self.console.print(text, markup=False)
