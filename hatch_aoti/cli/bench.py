"""`hatch-aoti bench`: what a project's models cost, compiled by hatch-aoti and run in other ways."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from hatch_aoti.errors import AotiError

if TYPE_CHECKING:
    from hatch_aoti.benchmark.figures import Report
    from hatch_aoti.benchmark.options import Options

__all__ = ["bench"]

_FILE = click.Path(dir_okay=False, path_type=Path)


@click.command()
@click.argument("project", default=None, required=False, type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--package", metavar="NAME", help="Measure an installed package with models instead of a project.")
@click.option("--model", "models", multiple=True, metavar="NAME", help="Measure this model; may be repeated.")
@click.option("--contender", "contenders", multiple=True, metavar="KEY", help="Measure this one; may be repeated.")
@click.option("--threads", type=click.IntRange(min=1), help="Threads of each contender.  [default: the cores]")
@click.option("--rounds", type=click.IntRange(min=1), default=10, show_default=True, help="Rounds of calls.")
@click.option("--repeats", type=click.IntRange(min=1), default=3, show_default=True, help="Starts of each contender.")
@click.option("--no-builds", is_flag=True, help="Do not compare builds; the wheel may come from the cache.")
@click.option("--json", "json_file", type=_FILE, metavar="FILE", help="Write everything for programs, too.")
@click.option("--plot", type=_FILE, metavar="FILE", help="Draw it, too (needs matplotlib): .png, .svg, .pdf.")
def bench(
    project: Path | None,
    package: str | None,
    models: tuple[str, ...],
    contenders: tuple[str, ...],
    threads: int | None,
    rounds: int,
    repeats: int,
    *,
    no_builds: bool,
    json_file: Path | None,
    plot: Path | None,
) -> None:
    """Measure the models of PROJECT (default: the current directory), side by side with other ways to run them.

    \b
    KEY is one of
      hatch-aoti   the project's wheel, as its users call it
      eager        the module itself
      compile      torch.compile
      torchscript  traced, frozen and saved
      aotinductor  aoti_compile_and_package, aoti_load_package
      onnxruntime  torch.onnx.export, ONNX Runtime (if installed)

    Time to the first result, load, latency, memory of 1 and 4 processes, sizes and builds, each in fresh processes. It
    takes minutes; leave the machine alone meanwhile. docs/benchmark.md says what each figure is.
    """  # noqa: D301 - \b is for click
    from hatch_aoti.benchmark.options import Options, available_contenders

    if package is not None and project is not None:
        raise click.UsageError("--package measures an installed package, PROJECT a project: give one of them.")
    for option, file in (("--json", json_file), ("--plot", plot)):
        if file is not None and not file.absolute().parent.is_dir():
            raise AotiError(f"{option} {file}: there is no folder {file.parent}; create it first")
    if plot is not None:
        from hatch_aoti.benchmark.plot import check_plot

        check_plot(plot)
    options = Options(
        available_contenders(contenders, package=package is not None),
        threads or _cores(),
        models,
        rounds,
        repeats,
        builds=not no_builds,
    )
    signal.signal(signal.SIGTERM, _stop)  # as an interrupt does: processes and temporary files go
    report = _measure(project or Path(), package, options)
    if json_file is not None:
        json_file.write_text(json.dumps(report.to_json(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if plot is not None:
        from hatch_aoti.benchmark.plot import draw

        draw(report, plot)
    _print(report)


def _measure(project: Path, package: str | None, options: Options) -> Report:
    from hatch_aoti.benchmark.measure import measure_package, measure_project
    from hatch_aoti.build.progress import Reporter
    from hatch_aoti.plugin.project import open_project

    command = shlex.join(["hatch-aoti", *sys.argv[1:]])
    if package is not None:
        return measure_package(package, options, Reporter(), command=command, environ=os.environ)
    opened = open_project(project.resolve(), environ=os.environ)
    if opened.settings.skip:
        raise AotiError("HATCH_AOTI_SKIP is set, so there is nothing to measure; unset it")
    return measure_project(opened, options, Reporter(), command=command, environ=os.environ)


def _stop(number: int, _frame: object) -> NoReturn:
    sys.exit(128 + number)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _print(report: Report) -> None:
    from rich.console import Console

    from hatch_aoti.benchmark.table import print_report

    print_report(report, Console(width=None if sys.stdout.isatty() else 160, highlight=False, soft_wrap=True))
