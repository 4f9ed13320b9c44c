"""The command `hatch-aoti`: a thin face on the modules of the package."""

from __future__ import annotations

import io
import sys
from typing import NoReturn

import click

from hatch_aoti import __version__
from hatch_aoti.cli.bench import bench
from hatch_aoti.cli.build import build
from hatch_aoti.cli.cache import cache
from hatch_aoti.cli.inspect import inspect
from hatch_aoti.cli.reproduce import reproduce
from hatch_aoti.cli.schema import schema
from hatch_aoti.cli.verify import verify
from hatch_aoti.errors import AotiError, full_disk

__all__ = ["main"]


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="hatch-aoti", message="%(prog)s %(version)s")
def commands() -> None:
    """Compile PyTorch models ahead of time, as the build hook does, look into what came of it, check and measure it."""


for _command in (bench, build, cache, inspect, reproduce, schema, verify):
    commands.add_command(_command)


def main() -> NoReturn:
    """Run the command that the process was given, and exit: 0, 1 for an expected failure, 2 for wrong arguments."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as standard error is: names and shapes are not all ASCII
    try:
        commands(prog_name="hatch-aoti")
    except (AotiError, OSError) as error:
        reason = str(error) if isinstance(error, AotiError) else full_disk(error)
        if not reason:
            raise
        from hatch_aoti.artifact.untrusted import printable
        from hatch_aoti.build.progress import Reporter

        Reporter().error(printable(reason, lines=True))
    sys.exit(1)
