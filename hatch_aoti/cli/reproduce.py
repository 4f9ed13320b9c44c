"""`hatch-aoti reproduce`: whether a wheel comes from the sources that it is said to come from."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hatch_aoti.artifact.untrusted import printable
from hatch_aoti.errors import AotiError

if TYPE_CHECKING:
    from hatch_aoti.wheel.rebuild import Comparison, Fact

__all__ = ["reproduce"]


@click.command()
@click.argument("wheel", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--source",
    type=click.Path(exists=True, path_type=Path),
    metavar="PATH",
    help="The sdist, or the folder of a checkout.  [default: the sdist beside WHEEL]",
)
@click.option("--no-isolation", is_flag=True, help="Build with the packages of this environment.")
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Keep the rebuilt wheel and the build's log there; it must not have files yet.",
)
@click.option("--diffoscope", is_flag=True, help="Have diffoscope, which must be installed, explain the differences.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
def reproduce(
    wheel: Path, source: Path | None, output: Path | None, *, no_isolation: bool, diffoscope: bool, as_json: bool
) -> None:
    """Build WHEEL again from its sources and compare the two, byte for byte.

    The build is that of the recorded versions of torch, hatchling and hatch-aoti, in an environment of its own, with
    the recorded settings and an empty cache. The exit status is 0 only when the wheels are identical. If they are not,
    each file that differs is named, with what differs in it, and with what was not the same in the two builds.

    Nothing of WHEEL is executed or imported. Building executes the code of the SOURCE, as every build does: use one
    that you trust.
    """
    from hatch_aoti.build.progress import Reporter
    from hatch_aoti.wheel.rebuild import find_source, read_release
    from hatch_aoti.wheel.rebuild import reproduce as rebuild

    if diffoscope and shutil.which("diffoscope") is None:
        raise AotiError("diffoscope is not installed; without --diffoscope, what differs is explained in short")
    if output is not None:
        if output.exists() and any(output.iterdir()):
            raise AotiError(f"--output {output}: has files already; name a new folder")
        output.mkdir(parents=True, exist_ok=True)
    release = read_release(wheel)
    source = source or find_source(wheel)
    directory = output or Path(tempfile.mkdtemp(prefix="hatch-aoti-rebuild-"))
    log, rebuilt = directory / "rebuild.log", False
    Reporter().note(f"building {printable(source)} again; the log is {log}")
    try:
        result = rebuild(release, source, directory, isolation=not no_isolation, environ=os.environ)
        rebuilt = True
        if as_json:
            click.echo(json.dumps(result.to_json(), indent=2))
        else:
            _print(result)
        if result.differences and diffoscope:
            subprocess.run(["diffoscope", "--", os.fspath(wheel), os.fspath(result.rebuilt)], check=False)
    except AotiError as error:
        if rebuilt or not log.exists():  # refused before there was a build
            raise
        raise AotiError(f"{str(error).rstrip()}\n  Full log: {log}") from error
    finally:
        if output is None and (rebuilt or not log.exists()):  # the log of a failed build is for reading
            shutil.rmtree(directory, ignore_errors=True)
    if result.differences:
        sys.exit(1)


def _print(result: Comparison) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False, soft_wrap=True)
    console.print(printable(result.released), markup=False)
    if not result.differences:
        console.print(f"IDENTICAL: the rebuilt wheel has the same bytes, in all {result.files} files", markup=False)
        return
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("file", overflow="fold")
    table.add_column("what differs (released, rebuilt)", overflow="fold")
    for item in result.differences:
        name = item.name or "(the archive)"
        for number, detail in enumerate(item.details[:_MOST_DETAILS] or (item.state,)):
            table.add_row(Text(printable(name) if number == 0 else ""), Text(printable(detail)))
        if len(item.details) > _MOST_DETAILS:
            table.add_row("", f"and {len(item.details) - _MOST_DETAILS} more")
    console.print(table, soft_wrap=False)
    console.print(_facts(result.facts), soft_wrap=False)
    same = result.files - sum(bool(item.name) and item.state == "differs" for item in result.differences)
    console.print(f"DIFFERENT: {same} of {result.files} files of the rebuilt wheel are the same", markup=False)
    if shutil.which("diffoscope") is not None:
        console.print("for more, use --diffoscope", markup=False)


_MOST_DETAILS = 12


def _facts(facts: tuple[Fact, ...]) -> object:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    if not facts:
        return Text("what is recorded of both builds is the same: other sources, or something that is not recorded")
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for heading in ("recorded of the build", "released", "rebuilt"):
        table.add_column(heading, overflow="fold")
    for fact in facts:
        cells = (fact.name, fact.released or "(nothing)", fact.rebuilt or "(nothing)")
        table.add_row(*(Text(printable(cell)) for cell in cells))
    return table
