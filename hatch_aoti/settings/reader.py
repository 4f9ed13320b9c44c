"""What a project may write: the keys of `[tool.aoti]` and the variables `HATCH_AOTI_…`, and their validation.

`parse_settings` turns them into frozen dataclasses or reports every mistake at once. Nothing here depends on the
order in which tables are written: every mapping is sorted by name, because the order of a TOML table has no meaning
and the wheel must not depend on it.

`toml_values` reads and refuses single values, `input_settings` reads what a model says of its inputs. All three are
imported by the build backend in every build, also by those that compile nothing, and are therefore written without
pydantic, whose import alone costs more time than the hook is allowed to take.
"""

from __future__ import annotations

import builtins
import dataclasses
import keyword
import re
from typing import TYPE_CHECKING, Any, TypeVar

from hatch_aoti.errors import Problem, SettingsError, did_you_mean
from hatch_aoti.settings import toml
from hatch_aoti.settings.debugging import read_debugging
from hatch_aoti.settings.environment import is_settled
from hatch_aoti.settings.inductor import check_inductor_configs, flatten_inductor_configs
from hatch_aoti.settings.inputs import read_inputs
from hatch_aoti.settings.model import Dim, ModelSettings, Settings, TensorInput, is_plain, plain

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

__all__ = [
    "ENVIRONMENT_PREFIX",
    "RESERVED_NAMES",
    "SHAPING_VARIABLES",
    "check_hook_config",
    "parse_settings",
    "shaping_variables",
]

T = TypeVar("T")
D = TypeVar("D")

ENVIRONMENT_PREFIX = "HATCH_AOTI_"

# What `_models.py` defines and imports.
_ACCESSOR_NAMES = ("Any", "LoadError", "MODELS", "Model", "TYPE_CHECKING", "annotations", "load", "torch")

# A model called `list` would take the place of the type in the signatures of the others.
RESERVED_NAMES = frozenset(_ACCESSOR_NAMES) | {name for name in dir(builtins) if not name.startswith("_")}
"""Names that `_models.py` needs for itself, and which no model can have."""

_DEVICES = ("cpu", "cuda", "auto")
_CONSTANTS = ("embedded", "external")


def parse_settings(config: Mapping[str, Any], *, root: Path, environ: Mapping[str, str]) -> Settings:
    """Return the settings of a project.

    `config` is the parsed `pyproject.toml`, `root` the folder that holds it, `environ` the process environment. A
    variable wins over its TOML key, and an empty variable counts as unset. A relative `cache-dir` starts at `root`.

    Raises SettingsError with everything that is wrong, in the order of the keys.
    """
    problems: list[Problem] = []
    project = toml.Table("", config, problems).table("tool").table("aoti")
    environment = toml.Table("", _environment_values(environ), problems)

    def read(key: str, parse: Callable[[Any], T], default: D) -> T | D:
        return environment.read(_variable(key), parse, project.read(key, parse, default))

    package = read("package", toml.package, None)
    target = read("target", toml.target, ())
    jobs = read("jobs", toml.integer(1), None)
    cache_dir = read("cache-dir", toml.directory(root), None)
    cache_size = read("cache-size", toml.size, 10 * 1000**3)
    platform_tag = read("platform-tag", toml.platform_tag, None)
    include_sources = read("include-sources", toml.boolean, default=False)
    keep_intermediates = read("keep-intermediates", toml.boolean, default=False)
    pass_environment = read("pass-environment", toml.variables(is_settled), ())
    build_timeout = read("build-timeout", toml.integer(1), None)
    skip = environment.read(_variable("skip"), toml.boolean, default=False)
    trust_cache = environment.read(_variable("trust-cache"), toml.boolean, default=False)
    models = _models(project, root=root, check_options=not skip)

    elsewhere = dict.fromkeys(_MODEL_KEYS, "this key belongs to a model: write it under [tool.aoti.models.<name>].")
    elsewhere["skip"] = "skipping is for a single build: set the variable HATCH_AOTI_SKIP=1 instead."
    elsewhere["trust-cache"] = (
        "a cache is trusted where it is: set the variable HATCH_AOTI_TRUST_CACHE=1 there instead."
    )
    project.reject_unknown(elsewhere)
    problems += _unknown_variables(environment)
    debugging, wrong = read_debugging(environ, root)
    problems += wrong
    if problems:
        raise SettingsError(sorted(problems))
    return Settings(
        models=models,
        package=package,
        target=target,
        jobs=jobs,
        cache_dir=cache_dir,
        cache_size=cache_size,
        platform_tag=platform_tag,
        include_sources=include_sources,
        keep_intermediates=keep_intermediates,
        pass_environment=pass_environment,
        build_timeout=build_timeout,
        skip=skip,
        trust_cache=trust_cache,
        debugging=debugging,
    )


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


def _keys(settings: type[ModelSettings | Settings], *but: str) -> list[str]:
    return [field.name.replace("_", "-") for field in dataclasses.fields(settings) if field.name not in but]


# For the messages about a key in the wrong place. `model` outside of a model is more likely a misspelled `models`.
_MODEL_KEYS = _keys(ModelSettings, "name", "model")
_PROJECT_KEYS = _keys(Settings, "skip", "trust_cache", "debugging")
_HATCHLING_KEYS = ("dependencies", "enable-by-default", "require-runtime-dependencies", "require-runtime-features")


# --- Environment ----------------------------------------------------------------------------------------------------


def _variable(key: str) -> str:
    return ENVIRONMENT_PREFIX + key.upper().replace("-", "_")


def _integer_text(text: str) -> int | str:
    return int(text) if re.fullmatch(r"\s*[+-]?[0-9]{1,19}\s*", text) else text


def _boolean_text(text: str) -> bool | str:
    words = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    return words.get(text.strip().lower(), text)


def _list_text(text: str) -> list[str]:
    return [item.strip() for item in text.split(",")]


# How the text of a variable becomes the value that TOML would have; a text that does not fit is left for the key's
# own check to refuse.
_VARIABLES: Mapping[str, Callable[[str], Any]] = {
    _variable("package"): str,
    _variable("target"): _list_text,
    _variable("jobs"): _integer_text,
    _variable("cache-dir"): str,
    _variable("cache-size"): str,
    _variable("platform-tag"): str,
    _variable("include-sources"): _boolean_text,
    _variable("keep-intermediates"): _boolean_text,
    _variable("pass-environment"): _list_text,
    _variable("build-timeout"): _integer_text,
    _variable("skip"): _boolean_text,
    _variable("trust-cache"): _boolean_text,
    _variable("sanitize"): str,  # see `debugging`
}


SHAPING_VARIABLES = (
    *map(_variable, ("include-sources", "package", "pass-environment", "platform-tag", "target")),
    "SOURCE_DATE_EPOCH",  # hatchling's, the times of the members
)


def _environment_values(environ: Mapping[str, str]) -> dict[str, Any]:
    texts = {name: text for name, text in environ.items() if name.startswith(ENVIRONMENT_PREFIX) and text.strip()}
    return {name: _VARIABLES.get(name, str)(text) for name, text in texts.items()}


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


def _models(project: toml.Table, *, root: Path, check_options: bool) -> dict[str, ModelSettings]:
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
    entries = {name: _model(name, table, root, check_options=check_options) for name, table in tables.items()}
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


# What a saved program has in it already.
_IN_THE_PROGRAM = {
    "model": "the program is the model, with its code",
    "weights": "the weights are in the program",
    "inputs": "the inputs are the example inputs in the program",
    "dims": "the ranges of sizes are in the program",
    "dynamic-shapes": "which sizes are dynamic is in the program",
}


def _reject_in_program(table: toml.Table) -> None:
    """Report the keys that a saved program leaves nothing to say about."""
    for key, reason in _IN_THE_PROGRAM.items():
        table.known.append(key)
        if key in table.values:
            table.report(f"not with `exported`: {reason}. Remove one of the two keys.", key)
    if table.values.get("device") == "auto":
        table.report('not with `exported`: a program is for one device. Write "cpu" or "cuda".', "device")


def _model(name: str, table: toml.Table, root: Path, *, check_options: bool) -> ModelSettings:
    exported = table.read("exported", toml.program(root), None)
    model = ""
    inputs: str | dict[str, TensorInput] = {}
    dims: dict[str, Dim] = {}
    dynamic_shapes = None
    if "exported" in table.values:
        _reject_in_program(table)
    else:
        inputs, dims, dynamic_shapes = read_inputs(table)
        model = table.require(
            "model",
            toml.reference("example_project.digits:DigitsNet"),
            "",
            missing='write where the model is defined, such as model = "example_project.digits:DigitsNet"; or name a '
            'program saved by torch.export.save, as in exported = "programs/digits.pt2".',
        )
    settings = ModelSettings(
        name=name,
        model=model,
        exported=exported,
        weights=None if "exported" in table.values else table.read("weights", toml.weights(root), None),
        inputs=inputs,
        dims=dims,
        dynamic_shapes=dynamic_shapes,
        device=table.read("device", toml.choice(_DEVICES), "cpu"),
        inductor_configs=_inductor_configs(table, check_options=check_options),
        seed=table.read("seed", toml.integer(0), 0),
        verify=table.read("verify", toml.boolean, default=True),
        rtol=table.read("rtol", toml.tolerance, None),
        atol=table.read("atol", toml.tolerance, None),
        num_runners=table.read("num-runners", toml.integer(1), 1),
        optimize=table.read("optimize", toml.boolean, None),
        constants=table.read("constants", toml.choice(_CONSTANTS), None),
        bundle=table.read("bundle", toml.file_stem("vision"), None),
    )
    if settings.constants == "external" and (settings.optimize or settings.inductor_configs.get("freezing")):
        table.report(
            'constants outside the compiled object cannot be prepacked into it. Drop `constants = "external"`, or set '
            "`optimize = false`.",
            "constants",
        )
    table.reject_unknown(dict.fromkeys(_PROJECT_KEYS, "this key is for the whole project: write it under [tool.aoti]."))
    return settings


def _inductor_configs(model: toml.Table, *, check_options: bool) -> dict[str, Any]:
    options = flatten_inductor_configs(model.read("inductor-configs", toml.mapping(), {}))
    key = toml.join(model.key, "inductor-configs")
    configs: dict[str, Any] = {}
    for name, value in options:
        if name in configs:
            model.problems.append(Problem(f"{key}.{name}", "given twice, by its dotted name and in a table."))
        elif is_plain(value):
            configs[name] = plain(value)
        else:
            error = toml.wrong("a boolean, a finite number, a string or a list", value)
            model.problems.append(Problem(f"{key}.{name}", str(error)))
    if check_options:
        model.problems += check_inductor_configs(configs, key)
    return configs


# --- Plain data ----------------------------------------------------------------------------------------------------
