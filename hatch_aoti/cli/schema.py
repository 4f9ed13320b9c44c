"""`hatch-aoti schema`: the settings as a JSON schema, for editors."""

from __future__ import annotations

import click

from hatch_aoti.settings.schema import SCHEMA_FILE

__all__ = ["schema"]


@click.command()
def schema() -> None:
    """Print the JSON schema of the table [tool.aoti] in pyproject.toml, for editors and validators."""
    click.echo(SCHEMA_FILE.read_text(encoding="utf-8"), nl=False)
