"""How a setting is declared: once, at the field of the dataclass that holds it (`model`).

The reader's checks, the variables `HATCH_AOTI_…`, the JSON schema (`schema`) and the tables in the documentation all
come from these declarations.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from hatch_aoti.settings.toml import Table
    from hatch_aoti.settings.values import Kind

__all__ = ["ENVIRONMENT_PREFIX", "REQUIRED", "Setting", "declared", "read_declared", "setting", "variable"]

ENVIRONMENT_PREFIX = "HATCH_AOTI_"
REQUIRED: Any = object()
"""The default of a setting that has none."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is declared of one setting.

    `field` is the name of the dataclass's field, `key` the one in TOML; `default` is what the field has without it, or
    `REQUIRED`. `description` is a sentence or two in Markdown without links, and `see` a file of the documentation,
    with a heading after # perhaps, that has more. `default_text` says what happens by default where the field's default
    does not. `since` is the first version that had the setting.

    `missing` says what to write where a required setting is absent. With `has_variable` an environment variable stands
    for the setting, and wins over it; `only_variable` is for what has no key in TOML: a sentence that says so. A
    setting that `shapes_wheel` decides what is in the wheel, so a variable in its place is recorded in the manifest.
    `in_program` says why the setting is not for a saved program.
    """

    kind: Kind[Any]
    description: str
    since: str
    see: str = ""
    default_text: str = ""
    missing: str = ""
    has_variable: bool = False
    only_variable: str = ""
    shapes_wheel: bool = False
    in_program: str = ""
    key: str = ""
    field: str = ""
    default: Any = REQUIRED

    @property
    def variable(self) -> str:
        """The environment variable that stands for the setting; empty if none does."""
        return variable(self.key) if self.has_variable or self.only_variable else ""


def variable(key: str) -> str:
    """Return the environment variable that stands for the setting `key`, if one does."""
    return ENVIRONMENT_PREFIX + key.upper().replace("-", "_")


def setting(
    kind: Kind[Any],
    description: str,
    *,
    since: str,
    default: Any = REQUIRED,
    default_factory: Callable[[], Any] | None = None,
    **declaration: Any,
) -> Any:
    """Return a dataclass field with the declaration of a setting; `declaration` are other fields of `Setting`."""
    metadata = {"setting": Setting(kind, description, since, **declaration)}
    if default_factory is not None:
        return dataclasses.field(default_factory=default_factory, metadata=metadata)
    if default is REQUIRED:
        return dataclasses.field(metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@functools.cache
def declared(settings: type) -> tuple[Setting, ...]:
    """Return the settings that the fields of a dataclass declare, in their order."""
    found = []
    for field in dataclasses.fields(settings):
        if (item := field.metadata.get("setting")) is not None:
            factory = field.default_factory
            default = field.default if factory is dataclasses.MISSING else factory()
            default = REQUIRED if default is dataclasses.MISSING else default
            key = item.key or field.name.replace("_", "-")
            found.append(dataclasses.replace(item, key=key, field=field.name, default=default))
    return tuple(found)


def read_declared(
    table: Table,
    settings: type,
    root: Path,
    *,
    environment: Table | None = None,
    leave: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Read the settings of a dataclass from `table`, and from their variables in `environment`, which win.

    Returns the values by field, and reports what is wrong to the tables. The fields in `leave` are not read, but have
    the values there. `root` is the project's folder.
    """
    values = {}
    for item in declared(settings):
        if leave is not None and item.field in leave:
            values[item.field] = leave[item.field]
            continue
        read = functools.partial(item.kind.read, root=root)
        value = None if item.default is REQUIRED else item.default
        if not item.only_variable:
            if item.default is REQUIRED and item.key not in table.values:
                table.report(f"missing; {item.missing}", item.key)
            value = table.read(item.key, read, value)
        if environment is not None and item.variable:
            value = environment.read(item.variable, read, value)
        values[item.field] = value
    return values
