"""A report as a picture: for each model the first result, latency and memory of each contender; the builds."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from hatch_aoti.errors import AotiError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from hatch_aoti.benchmark.figures import ContenderFigures, ModelFigures, Report

__all__ = ["check_plot", "draw"]

_OURS, _OTHER = "#b5442c", "#8a94a0"


def check_plot(path: Path) -> None:
    """Make sure, before anything is measured, that a plot can be drawn into a file. Raises `AotiError`."""
    if importlib.util.find_spec("matplotlib") is None:
        raise AotiError('--plot needs matplotlib, which is not installed here: pip install "hatch-aoti[bench]"')
    from matplotlib.backend_bases import FigureCanvasBase

    formats = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in formats:
        raise AotiError(f"--plot {path}: the file's ending chooses the format, one of {', '.join(sorted(formats))}")


def draw(report: Report, path: Path) -> None:
    """Draw a report into a file, in the format that its ending says."""
    from matplotlib.figure import Figure

    rows = len(report.models) + (report.builds is not None)
    figure = Figure(figsize=(13, 0.9 + 2.3 * rows), layout="constrained")
    machine = report.machine
    figure.suptitle(f"{report.subject}: {machine.cpu}, {machine.threads} threads, torch {machine.torch}", fontsize=10)
    axes = figure.subplots(rows, 3, squeeze=False)
    for row, model in zip(axes, report.models, strict=False):
        _draw_model(row, model)
    if report.builds is not None:
        first, *rest = axes[-1]
        for unused in rest:
            unused.remove()
        builds = report.builds
        times = {
            "wheel, cold": builds.cold,
            f"wheel, {builds.changed} changed": builds.one_changed,
            "wheel, unchanged": builds.unchanged,
            "script, cold": builds.script_cold,
            "script, warm": builds.script_warm,
        }
        known = [(name, value) for name, value in times.items() if value is not None]
        _bars(first, f"build of {builds.models} models, s", known, lambda name: name.startswith("wheel"))
    figure.savefig(path)


def _draw_model(axes: Sequence[Any], model: ModelFigures) -> None:
    panels: list[tuple[str, Callable[[ContenderFigures], float | None]]] = [
        ("first result, ms", lambda item: item.start.result.median * 1e3 if item.start else None),
        ("latency, ms", lambda item: item.latency.median * 1e3 if item.latency else None),
        ("memory, MB: 1 and 4 processes", lambda item: item.memory.pss / 1e6 if item.memory else None),
    ]
    for place, (title, read) in zip(axes, panels, strict=True):
        known = [(item.name, value) for item in model.contenders if (value := read(item)) is not None]
        if title.startswith("memory"):
            four = [(item.name, item.memory.four_pss / 1e6) for item in model.contenders if item.memory]
            _bars(place, "", four, lambda _: False, alpha=0.35)
        _bars(place, f"{model.name}: {title}", known, lambda name: name == "hatch-aoti")
    if axes[0].patches:
        axes[0].set_xscale("log")


def _bars(
    axes: Any, title: str, values: Sequence[tuple[str, float]], ours: Callable[[str], bool], *, alpha: float = 1.0
) -> None:
    names = [name for name, _ in values]
    colours = [_OURS if ours(name) else _OTHER for name in names]
    bars = axes.barh(names, [value for _, value in values], color=colours, alpha=alpha)
    axes.bar_label(bars, fmt="%.3g", padding=3, fontsize=7)
    axes.set_title(title, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.margins(x=0.15)
    if not axes.yaxis_inverted():
        axes.invert_yaxis()
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
