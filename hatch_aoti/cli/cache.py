"""`hatch-aoti cache`: where finished artifacts are kept, how much room they take, and getting it back."""

from __future__ import annotations

from pathlib import Path

import click

from hatch_aoti.errors import AotiError
from hatch_aoti.settings.declaration import variable

__all__ = ["cache"]


def _size(_context: click.Context, _parameter: click.Parameter, value: str | None) -> int | None:
    from hatch_aoti.settings.toml import WrongValueError
    from hatch_aoti.settings.values import parse_size

    if value is None:
        return None
    try:
        return parse_size(int(value) if value.isdigit() else value)
    except WrongValueError as error:
        raise click.BadParameter(str(error)) from error


@click.command()
@click.option(
    "--cache-dir",
    envvar=variable("cache-dir"),
    metavar="DIR",
    type=click.Path(file_okay=False, path_type=Path),
    help="The cache; by default what HATCH_AOTI_CACHE_DIR says, or the platform's cache directory.",
)
@click.option("--clear", is_flag=True, help="Remove everything. Not while a build runs.")
@click.option(
    "--trim",
    is_flag=False,
    flag_value="10 GB",
    metavar="[SIZE]",
    callback=_size,
    help="Remove what has not been used for the longest time until SIZE (default: 10 GB) is left.",
)
@click.option(
    "--trust-cache",
    envvar=variable("trust-cache"),
    is_flag=True,
    help="Take a cache that others can write to, as HATCH_AOTI_TRUST_CACHE=1 does.",
)
def cache(cache_dir: Path | None, *, clear: bool, trim: int | None, trust_cache: bool) -> None:
    """Show where the cache of finished artifacts is and how large; empty or shrink it.

    A directory that is no cache of hatch-aoti is left alone.
    """
    from hatch_aoti.artifact.cache import default_cache_dir, open_cache
    from hatch_aoti.artifact.own_directory import is_vacant
    from hatch_aoti.build.progress import human_size

    if clear and trim is not None:
        raise click.UsageError("--clear removes everything, so --trim has nothing to do: give one of them.")
    directory = cache_dir or default_cache_dir()
    try:
        if is_vacant(directory):
            click.echo(f"{directory}: no cache there yet")
            return
    except OSError as error:
        raise AotiError(f"{directory} cannot be read ({error.strerror or error})") from error
    opened = open_cache(directory, trusted=trust_cache)
    if clear:
        click.echo(f"removed {human_size(opened.clear())}")
    if trim is not None:
        click.echo(f"removed {human_size(opened.trim(trim))}")
    click.echo(f"{directory}: {human_size(opened.size())}")
