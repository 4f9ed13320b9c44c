"""`hatch-aoti verify`: whether a wheel is what its own records say."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hatch_aoti.artifact.untrusted import printable

if TYPE_CHECKING:
    from hatch_aoti.wheel.check import WheelReport

__all__ = ["verify"]


@click.command()
@click.argument("wheel", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
def verify(wheel: Path, *, as_json: bool) -> None:
    """Check WHEEL against its own records, without installing it.

    Every hash and size in its RECORD and in _models.json, names and tags, and the ids of the archives. Nothing of the
    wheel is executed or imported. The exit status is 1 when anything is not as it should be.

    This finds damage and careless changes. Whoever can change a wheel can change its records, too: `hatch-aoti
    reproduce` tells whether it comes from the sources that it is said to come from.
    """
    from hatch_aoti.wheel.check import check_wheel

    report = check_wheel(wheel)
    if as_json:
        click.echo(json.dumps(report.to_json(), indent=2))
    else:
        _print(report)
    if report.problems:
        sys.exit(1)


def _print(report: WheelReport) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from hatch_aoti.build.progress import human_size

    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False, soft_wrap=True)
    console.print(printable(report.source), markup=False)
    if report.debug:
        variables = ", ".join(f"{name}={value}" for name, value in report.debug.items())
        console.print(printable(f"a DEBUG BUILD ({variables}), not for release"), markup=False)
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for heading in ("file", "size", "state"):
        table.add_column(heading, overflow="fold", justify="right" if heading == "size" else "left")
    for file in report.files:
        table.add_row(Text(printable(file.name)), human_size(file.bytes), file.state)
    console.print(table, soft_wrap=False)
    for problem in report.problems:
        console.print(f"UNSOUND: {printable(problem)}", markup=False)
    console.print(f"{report.listed} files are as RECORD says; {len(report.problems) or 'no'} problems", markup=False)
