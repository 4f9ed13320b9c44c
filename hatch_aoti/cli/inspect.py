"""`hatch-aoti inspect`: what is inside a wheel, a folder or a `.pt2`, for people and for programs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hatch_aoti.artifact.untrusted import printable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import Console, RenderableType

    from hatch_aoti.wheel.inspection import FileReport, Report

__all__ = ["inspect"]


@click.command()
@click.argument("path", type=click.Path(exists=True, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
def inspect(path: Path, *, as_json: bool) -> None:
    """Say what is inside PATH: a wheel, the folder of a package with models, its _models.json, or a .pt2.

    Shows the models with their signatures, targets and toolchain, and what the compiled objects need of a system.
    Nothing of it is executed or imported. Files that are missing or were changed are named, and the exit status is
    1 then.
    """
    from hatch_aoti.wheel.inspection import inspect_path

    report = inspect_path(path)
    if as_json:
        click.echo(json.dumps(report.to_json(), indent=2))
    else:
        _print(report)
    if any(file.state in {"differs", "missing"} for file in report.files):
        sys.exit(1)


def _print(report: Report) -> None:
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False, soft_wrap=True)
    _line(console, report.source)
    if report.package is not None:
        _line(console, f"models of {report.package} for {report.platform_tag}, made by {report.generator}")
    if report.debug:
        variables = ", ".join(f"{name}={value}" for name, value in report.debug.items())
        _line(console, f"a DEBUG BUILD ({variables}), not for release")
    for model in report.models:
        console.print()
        _line(console, f"{printable(model.name)}{model.signature}", lines=True)  # the signature is printable
        bundle = "" if model.bundle is None else f", in the bundle {model.bundle}"
        gpu = model.gpu
        kernels = f" {gpu.cuda}, compiled on {gpu.name}; kernels for {', '.join(gpu.architectures)}" if gpu else ""
        _line(console, f"  from {model.source}, for {model.device}{kernels}{bundle}")
        for artifact in model.artifacts:
            checked = "checked against eager" if artifact.verified else "NOT checked against eager"
            _line(
                console,
                f"  {artifact.file}: {artifact.target} ({artifact.description}), {checked}; torch {artifact.torch}, "
                f"{artifact.compiler}",
            )
    console.print(_table(report.files), soft_wrap=False)


def _line(console: Console, text: str, *, lines: bool = False) -> None:
    console.print(printable(text, lines=lines), markup=False)  # shapes are no markup


def _table(files: Iterable[FileReport]) -> RenderableType:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    from hatch_aoti.build.progress import human_size

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for heading in ("file", "size", "state", "model inside", "machine", "needs", "stack", "symbols"):
        table.add_column(heading, overflow="fold", justify="right" if heading == "size" else "left")
    for file in files:
        first = [file.name, human_size(file.bytes), file.state]
        rows = [
            [
                item.model,
                item.machine,
                ", ".join(f"{kind} {number}" for kind, number in item.versions.items()),
                "EXECUTABLE" if item.executable_stack else "not executable",
                "stripped" if item.stripped else "present",
            ]
            for item in file.objects
        ]
        for number, row in enumerate(rows or [[]]):
            cells = [*(first if number == 0 else ["", "", ""]), *row]
            table.add_row(*(Text(printable(cell)) for cell in cells))
    return table
