"""A report as tables for people: one for each model, one for the builds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hatch_aoti.build.progress import human_size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console, RenderableType

    from hatch_aoti.benchmark.figures import Builds, Calls, ContenderFigures, ModelFigures, Report, Spread

__all__ = ["human_time", "print_report"]

_UNITS = (("s", 1.0), ("ms", 1e3), ("µs", 1e6))
_HEADINGS = (
    "", "load", "first result", "from start", "latency", "quartiles", "relative", "memory", "4 processes", "artifact",
    "answer",
)  # fmt: skip


def print_report(report: Report, console: Console) -> None:
    """Print everything that was measured."""
    machine = report.machine
    console.print(
        f"{report.subject}: {machine.cpu}, {machine.threads} of {machine.cores} cores, torch {machine.torch}, Python "
        f"{machine.python}, hatch-aoti {machine.hatch_aoti}",
        markup=False,
    )
    for model in report.models:
        console.print(f"\n{model.name}({', '.join(model.inputs)})", markup=False)
        console.print(_contenders(model), soft_wrap=False)
        for line in _remarks(model):
            console.print(f"  {line}", markup=False)
    if report.wheel_bytes is not None:
        console.print(f"\nwheel: {human_size(report.wheel_bytes)}", markup=False)
    if report.builds is not None:
        console.print(_builds(report.builds), soft_wrap=False)


def human_time(seconds: float) -> str:
    """Return a time as people write it, with three digits: 8.12 µs, 17.5 ms, 2.30 s, 104 s."""
    unit, factor = next(((unit, factor) for unit, factor in _UNITS if seconds * factor >= 1), _UNITS[-1])
    value = seconds * factor
    return f"{value:.{max(0, 3 - len(str(int(value))))}f} {unit}"


def _contenders(model: ModelFigures) -> RenderableType:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for heading in _HEADINGS:
        table.add_column(heading, justify="left" if heading in {"", "answer"} else "right", no_wrap=bool(heading))
    for item in model.contenders:
        table.add_row(*map(Text, [item.name, *_cells(item, model)]))
    return table


def _cells(item: ContenderFigures, model: ModelFigures) -> list[str]:
    start, memory, latency = item.start, item.memory, item.latency
    relative = model.relative_latency(item.key)
    return [
        _time(start.load if start else None),
        _time(start.result if start else None),
        _time(start.total if start else None),
        _time(latency),
        f"{human_time(latency.low)} … {human_time(latency.high)}" if latency else "-",
        "-" if relative is None else f"{relative:.2f} x",
        human_size(memory.pss) if memory else "-",
        human_size(memory.four_pss) if memory else "-",
        human_size(item.artifact_bytes) if item.artifact_bytes else "-",
        "FAILED"
        if item.error
        else "not compared"
        if item.difference is None
        else "WRONG"
        if item.difference
        else "agrees",
    ]


def _time(spread: Spread | None) -> str:
    return human_time(spread.median) if spread else "-"


def _remarks(model: ModelFigures) -> Iterator[str]:
    for item in model.contenders:
        if item.error:
            yield f"{item.name} failed: {item.error}"
        elif item.difference:
            yield f"{item.name} gives another answer: {item.difference}"
    ratio = model.to_json()["ratios"]["latency_to_best_other"]
    if ratio is not None and model.best_other is not None:
        yield f"latency against the best other contender ({model.best_other.name}): {ratio:.2f} x"
    if model.calls is not None:
        yield _calls(model.calls)


def _calls(calls: Calls) -> str:
    return (
        f"a call with 1 thread: bare C++ loader {human_time(calls.bare.median)}, checked "
        f"{human_time(calls.validated.median)} ({calls.validated_to_bare:.2f} x), PyTorch's own "
        f"{human_time(calls.stock.median)} (checked is {calls.validated_to_stock:.2f} x of it)"
    )


def _builds(builds: Builds) -> RenderableType:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for heading in (f"build of {builds.models} models", "time", "against the script, cold"):
        table.add_column(heading, justify="right" if table.columns else "left")
    rows = [
        ("wheel, empty cache", builds.cold),
        (f"wheel, {builds.changed} changed", builds.one_changed),
        ("wheel, nothing changed", builds.unchanged),
        ("script with aoti_compile_and_package, cold caches", builds.script_cold),
        ("the same script again, warm caches", builds.script_warm),
    ]
    for name, seconds in rows:
        ratio = f"{seconds / builds.script_cold:.2f} x" if seconds and builds.script_cold else "-"
        table.add_row(name, human_time(seconds) if seconds else "FAILED", ratio)
    return table
