"""Reading what a project wrote under `[tool.aoti]` and in the variables `HATCH_AOTI_…`.

`parse_settings` turns them into the frozen dataclasses of `model`, whose fields declare what is accepted, or reports
every mistake at once; what is said about several keys together is checked here. Nothing depends on the order in which
tables are written: every mapping is sorted by name, because the order of a TOML table has no meaning and the wheel must
not depend on it.

All this is imported by the build backend in every build, also by those that compile nothing, and is therefore written
without pydantic, whose import alone costs more time than the hook is allowed to take.
"""

from __future__ import annotations

import builtins
import keyword
import re
from typing import TYPE_CHECKING, Any

from hatch_aoti.errors import Problem, SettingsError, did_you_mean
from hatch_aoti.settings import toml
from hatch_aoti.settings.debugging import read_debugging
from hatch_aoti.settings.declaration import ENVIRONMENT_PREFIX, declared, read_declared
from hatch_aoti.settings.inductor import check_inductor_configs, flatten_inductor_configs
from hatch_aoti.settings.inputs import read_inputs
from hatch_aoti.settings.model import ModelSettings, Settings, is_plain, plain

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = [
    "ENVIRONMENT_PREFIX",
    "RESERVED_NAMES",
    "SHAPING_VARIABLES",
    "check_hook_config",
    "parse_settings",
    "shaping_variables",
]

# What `_models.py` defines and imports.
_ACCESSOR_NAMES = ("Any", "LoadError", "MODELS", "Model", "TYPE_CHECKING", "annotations", "load", "torch")

# A model called `list` would take the place of the type in the signatures of the others.
RESERVED_NAMES = frozenset(_ACCESSOR_NAMES) | {name for name in dir(builtins) if not name.startswith("_")}
"""Names that `_models.py` needs for itself, and which no model can have."""

_PROJECT = declared(Settings)
_MODEL = declared(ModelSettings)
_VARIABLES = {item.variable: item for item in _PROJECT if item.variable}

SHAPING_VARIABLES = (
    *sorted(item.variable for item in _PROJECT if item.shapes_wheel),
    "SOURCE_DATE_EPOCH",  # hatchling's, the times of the members
)
"""The variables that stand for settings, or for hatchling's, and change what is in the wheel."""

# For the messages about a key in the wrong place. `model` outside of a model is more likely a misspelled `models`.
_MODEL_KEYS = [item.key for item in _MODEL if item.key != "model"]
_PROJECT_KEYS = [item.key for item in _PROJECT if not item.only_variable]
_HATCHLING_KEYS = ("dependencies", "enable-by-default", "require-runtime-dependencies", "require-runtime-features")


def parse_settings(config: Mapping[str, Any], *, root: Path, environ: Mapping[str, str]) -> Settings:
    """Return the settings of a project.

    `config` is the parsed `pyproject.toml`, `root` the folder that holds it, `environ` the process environment. A
    variable wins over its TOML key, and an empty variable counts as unset. A relative `cache-dir` starts at `root`.

    Raises SettingsError with everything that is wrong, in the order of the keys.
    """
    problems: list[Problem] = []
    project = toml.Table("", config, problems).table("tool").table("aoti")
    environment = toml.Table("", _environment_values(environ), problems)

    debugging, wrong = read_debugging(environ, root)
    problems += wrong
    apart = {"models": _models(project, root), "debugging": debugging}
    values = read_declared(project, Settings, root, environment=environment, leave=apart)
    elsewhere = dict.fromkeys(_MODEL_KEYS, "this key belongs to a model: write it under [tool.aoti.models.<name>].")
    project.reject_unknown(elsewhere | {item.key: item.only_variable for item in _PROJECT if item.only_variable})
    problems += _unknown_variables(environment)
    if problems:
        raise SettingsError(sorted(problems))
    return Settings(**values)


def shaping_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of `environ` that stand for settings, or for hatchling's, and change what is in the wheel.

    The manifest records them: whoever builds the wheel again has to set them again. Those of a debug build are apart.
    """
    return {name: environ[name] for name in SHAPING_VARIABLES if environ.get(name, "").strip()}


def check_hook_config(config: Mapping[str, Any]) -> list[Problem]:
    """Return a problem for each key of `[tool.hatch.build.targets.wheel.hooks.aoti]` that is not hatchling's own."""
    table = "tool.hatch.build.targets.wheel.hooks.aoti"
    message = "this table only turns the hook on; settings live under [tool.aoti]."
    return [
        Problem(toml.join(table, key), message + (f" Write it as `tool.aoti.{key}`." if key in _PROJECT_KEYS else ""))
        for key in sorted(config)
        if key not in _HATCHLING_KEYS
    ]


# --- Environment ----------------------------------------------------------------------------------------------------


def _environment_values(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the values that TOML would have, of all variables with the prefix that are not empty."""
    texts = {name: text for name, text in environ.items() if name.startswith(ENVIRONMENT_PREFIX) and text.strip()}
    return {name: _VARIABLES[name].kind.from_text(text) if name in _VARIABLES else text for name, text in texts.items()}


def _unknown_variables(environment: toml.Table) -> list[Problem]:
    """Return a problem for each variable that no setting reads: a misspelled one would be ignored without a word."""
    # Compared without the prefix, which would make any two of them look alike.
    endings = [name.removeprefix(ENVIRONMENT_PREFIX) for name in _VARIABLES]
    known = f"hatch-aoti reads {', '.join(sorted(_VARIABLES))}."
    return [
        Problem(name, f"unknown variable.{did_you_mean(name.removeprefix(ENVIRONMENT_PREFIX), endings)} {known}")
        for name in environment.values
        if name not in _VARIABLES
    ]


# --- Models ---------------------------------------------------------------------------------------------------------


def _models(project: toml.Table, root: Path) -> dict[str, ModelSettings]:
    if project.values.get("models", {}) == {}:
        project.report(
            "there is no model to compile. Add a table for each, such as\n"
            "      [tool.aoti.models.digits]\n"
            '      model = "example_project.digits:DigitsNet"\n'
            "      inputs = { image = { shape = [1, 8, 8] } }",
            "models",
        )
    models = project.table("models")
    _check_model_names(models)
    tables = models.tables("a table of its own for each model, [tool.aoti.models.<name>]")
    entries = {name: _model(name, table, root) for name, table in tables.items()}
    _check_bundles(entries, tables)
    return entries


def _check_bundles(entries: Mapping[str, ModelSettings], tables: Mapping[str, toml.Table]) -> None:
    """Report bundles whose file could be taken for another one, and those with models for different devices."""
    alone = {_folded(name): name for name, entry in entries.items() if entry.bundle is None}
    first: dict[str, ModelSettings] = {}
    for name, entry in entries.items():
        if entry.bundle is None:
            continue
        one = first.setdefault(_folded(entry.bundle), entry)
        if (other := alone.get(_folded(entry.bundle))) is not None:
            tables[name].report(
                f'the bundle "{entry.bundle}" and the model "{other}" would have one file, {other}.pt2. Rename one of '
                f'them, or put "{other}" into the bundle.',
                "bundle",
            )
        elif one.bundle != entry.bundle:
            tables[name].report(
                f'"{one.bundle}" (of {one.name}) and "{entry.bundle}" are one name where case does not count, as in '
                "the file names of some systems. Write both alike, or rename one of them.",
                "bundle",
            )
        elif one.device != entry.device:
            tables[name].report(
                f'the models of a bundle are for one device, but {one.name} has `device = "{one.device}"` and {name} '
                f'"{entry.device}": PyTorch\'s `load_package` loads every model of a file, so those for the CPU would '
                "not load without a GPU. Use a bundle for each device.",
                "bundle",
            )


def _folded(name: str) -> str:
    """Return what of a name is left where neither case nor the difference between - _ . counts."""
    return re.sub(r"[-_.]+", "_", name.lower())


def _check_model_names(models: toml.Table) -> None:
    taken: dict[str, str] = {}
    for name in sorted(models.values):
        if message := _model_name_problem(name):
            models.report(message, name)
        other = taken.setdefault(_folded(name), name)
        if other != name:
            models.report(
                f'"{other}" and "{name}" are one name where neither case nor the difference between - _ . counts, as '
                "in the file names of some systems. Rename one of them.",
                name,
            )


def _model_name_problem(name: str) -> str:
    """Return what is wrong with a model's name: people write `from example_project._models import <name>`."""
    if keyword.iskeyword(name) or keyword.issoftkeyword(name):
        return f'"{name}" is a Python keyword. Choose another name.'
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        instead = re.sub(r"\W", "_", name, flags=re.ASCII).strip("_")
        suggestion = f' Did you mean "{instead}"?' if instead[:1].isalpha() else ""
        return f"a model's name is a Python identifier: letters a-z, digits and _, no digit first.{suggestion}"
    if name.startswith("_"):
        return "a model's name cannot start with an underscore; such names are the generated module's own."
    return f'"{name}" has a meaning of its own in _models.py. Choose another name.' if name in RESERVED_NAMES else ""


def _reject_in_program(table: toml.Table) -> None:
    """Report the keys that a saved program leaves nothing to say about."""
    for item in _MODEL:
        if item.in_program:
            table.known.append(item.key)
            if item.key in table.values:
                table.report(f"not with `exported`: {item.in_program}. Remove one of the two keys.", item.key)
    if table.values.get("device") == "auto":
        table.report('not with `exported`: a program is for one device. Write "cpu" or "cuda".', "device")


def _model(name: str, table: toml.Table, root: Path) -> ModelSettings:
    apart: dict[str, Any] = {"inductor_configs": _inductor_configs(table)}
    if "exported" in table.values:
        _reject_in_program(table)
        apart |= {"model": "", "inputs": {}, "dims": {}, "dynamic_shapes": None, "weights": None}
    else:
        apart["inputs"], apart["dims"], apart["dynamic_shapes"] = read_inputs(table, root)
    settings = ModelSettings(name=name, **read_declared(table, ModelSettings, root, leave=apart))
    if settings.constants == "external" and (settings.optimize or settings.inductor_configs.get("freezing")):
        table.report(
            'constants outside the compiled object cannot be prepacked into it. Drop `constants = "external"`, or set '
            "`optimize = false`.",
            "constants",
        )
    table.reject_unknown(dict.fromkeys(_PROJECT_KEYS, "this key is for the whole project: write it under [tool.aoti]."))
    return settings


def _inductor_configs(model: toml.Table) -> dict[str, Any]:
    options = flatten_inductor_configs(model.read("inductor-configs", toml.mapping(), {}))
    key = toml.join(model.key, "inductor-configs")
    configs: dict[str, Any] = {}
    for name, value in options:
        if name in configs or any(name.startswith(f"{other}.") for other in configs):  # sorted: the shorter is first
            model.problems.append(Problem(f"{key}.{name}", "given twice, by its dotted name and in a table."))
        elif is_plain(value):
            configs[name] = plain(value)
        else:
            error = toml.wrong("a boolean, a finite number, a string or a list", value)
            model.problems.append(Problem(f"{key}.{name}", str(error)))
    model.problems += check_inductor_configs(configs, key)
    return configs
