"""The options of the installed `torch._inductor.config`, read without importing torch.

Importing torch takes seconds and has no place in the build process, so the names and types of the options come from
the syntax tree of torch's own `_inductor/config.py`. What cannot be told from the source is not checked here: the
compiler has the last word.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hatch_aoti.errors import Problem, did_you_mean

if TYPE_CHECKING:
    import ast
    from collections.abc import Iterator, Mapping, Sequence

__all__ = ["DECIDED_OPTIONS", "Option", "check_inductor_configs", "flatten_inductor_configs", "installed_options"]

_TARGET = "the CPU baseline sets it; choose one with `tool.aoti.target`"
_PACKAGING = "hatch-aoti writes the .pt2 file itself, so that it is the same on every build"
_CONSTANTS = "hatch-aoti decides where the weights are stored, because the loader it generates has to find them"
_CALLING = "hatch-aoti records the calling convention itself"
_COMPILER = "hatch-aoti runs the compiler itself, to keep builds reproducible; choose one with the variable CXX"
_THREADS = "a wheel does not know how many cores it will meet, so the number of threads is left to run time"
_LOADABLE = "the result has to load into the torch that the wheel requires"

DECIDED_OPTIONS: Mapping[str, str] = {
    "aot_inductor.aoti_shim_library": _LOADABLE,
    "aot_inductor.aoti_shim_library_path": _LOADABLE,
    "aot_inductor.cross_target_platform": _LOADABLE,
    "aot_inductor.dynamic_linkage": _LOADABLE,
    "aot_inductor.enable_line_tables": "line tables carry paths of the build machine into the wheel",
    "aot_inductor.force_mmap_weights": _CONSTANTS,
    "aot_inductor.link_libtorch": _LOADABLE,
    "aot_inductor.metadata": "hatch-aoti writes it, and keeps in it what the loader needs",
    "aot_inductor.model_name_for_generated_files": _PACKAGING,
    "aot_inductor.output_path": _PACKAGING,
    "aot_inductor.package": _PACKAGING,
    "aot_inductor.package_constants_in_so": _CONSTANTS,
    "aot_inductor.package_constants_on_disk_format": _CONSTANTS,
    "aot_inductor.package_cpp_only": _LOADABLE,
    "aot_inductor.serialized_in_spec": _CALLING,
    "aot_inductor.serialized_out_spec": _CALLING,
    "aot_inductor_mode.compile_standalone": _LOADABLE,
    "compile_threads": "every model is compiled in a process of its own; set how many at once with `tool.aoti.jobs`",
    "cpp.cxx": _COMPILER,
    "cpp.dynamic_threads": _THREADS,
    "cpp.march": _TARGET,
    "cpp.simdlen": _TARGET,
    "cpp.threads": _THREADS,
    "cpp.vec_isa_ok": _TARGET,
    "cpp_wrapper": "AOTInductor always writes a C++ wrapper",
}
"""Options that hatch-aoti sets and a project cannot, each with the reason and, where there is one, the other way."""

# The types that a TOML value can have, by the name that torch's annotations use for them. A TOML array stands for
# each of Python's sequences.
_TYPES = {"bool": bool, "int": int, "float": float, "str": str, "dict": dict, "list": list, "tuple": list, "set": list}
_NOUNS = {bool: "true or false", int: "an integer", float: "a number", str: "a string", dict: "a table", list: "a list"}


@dataclasses.dataclass(frozen=True)
class Option:
    """What torch's source says about one option.

    `types` are the TOML types (`bool`, `int`, `float`, `str`, `list`, `dict`) that it takes, empty when the source
    does not tell; `choices` are its only values, empty when there is no such limit.
    """

    types: frozenset[type] = frozenset()
    choices: tuple[Any, ...] = ()

    def expects(self, value: Any) -> str:
        """Return what was expected when `value` clearly contradicts this option, otherwise an empty string."""
        if self.choices and value not in self.choices:
            return "one of " + ", ".join(f'"{choice}"' for choice in self.choices)
        fits = not self.types or type(value) in self.types or (type(value) is int and float in self.types)
        return "" if fits else " or ".join(noun for kind, noun in _NOUNS.items() if kind in self.types)


def installed_options() -> Mapping[str, Option] | None:
    """Return the options of the installed torch by their dotted names (`max_autotune`, `cpp.simdlen`).

    Returns None when torch is not installed, and no options at all when its source does not have them where torch
    2.13 has them.
    """
    # Finding a top-level module, unlike `torch._inductor`, imports nothing.
    spec = importlib.util.find_spec("torch")
    if spec is None:
        return None
    places = [Path(place) / "_inductor" / "config.py" for place in spec.submodule_search_locations or ()]
    return next((_options_in_file(place) for place in places if place.is_file()), {})


def flatten_inductor_configs(configs: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return `configs` as pairs of a dotted name and a value, sorted by name.

    TOML's `cpp.min_chunk_size = 64` arrives as a nested table, and is the option `cpp.min_chunk_size`. A table stays
    whole where torch has an option of that name. A name comes twice if the project wrote it in both forms.
    """
    return sorted(_flatten(configs, installed_options() or {}, ""), key=lambda pair: pair[0])


def check_inductor_configs(configs: Mapping[str, Any], prefix_key: str) -> list[Problem]:
    """Return what is wrong with `configs`, a mapping of dotted option names to TOML values.

    `prefix_key` is the key that holds them, for instance `tool.aoti.models.digits.inductor-configs`.
    """
    if not configs:
        return []
    options = installed_options()
    if options is None:
        text = (
            "cannot be checked, because torch is not installed in the build environment. "
            'Add it to `build-system.requires` in pyproject.toml, as "torch==2.13.0" for instance.'
        )
        return [Problem(prefix_key, text)]
    found = {name: _check(name, value, options) for name, value in configs.items()}
    return [Problem(f"{prefix_key}.{name}", message) for name, message in found.items() if message]


def _check(name: str, value: Any, options: Mapping[str, Option]) -> str:
    if name in DECIDED_OPTIONS:
        return f"hatch-aoti sets this option itself: {DECIDED_OPTIONS[name]}. Remove it."
    if not options:
        return ""
    if name not in options:
        return f"torch._inductor.config has no such option.{_suggestion(name, options)}"
    expected = options[name].expects(value)
    return f"torch._inductor.config expects {expected}, but it is {json.dumps(value, default=str)}." if expected else ""


def _suggestion(name: str, options: Mapping[str, Option]) -> str:
    """Say which option was meant: one that is spelled alike, or one that lacks only its group's name (`cpp.`)."""
    word = name.replace("-", "_")
    near = did_you_mean(word, options)
    same_ending = [option for option in options if option.endswith(f".{word}")]
    if word in options or not same_ending:
        return near
    return " Did you mean " + " or ".join(f'"{option}"' for option in same_ending) + "?"


def _flatten(configs: Mapping[str, Any], options: Mapping[str, Option], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in configs.items():
        name = prefix + key
        if isinstance(value, dict) and name not in options:
            yield from _flatten(value, options, f"{name}.")
        else:
            yield name, value


@functools.cache
def _options_in_file(path: Path) -> Mapping[str, Option]:
    import ast  # only projects with inductor-configs pay for it

    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {name: _merge(options) for name, options in _collect(tree.body, {}).items()}


def _collect(body: Sequence[ast.stmt], inherited: Mapping[str, list[Option]]) -> dict[str, list[Option]]:
    """Return the options that `body` assigns; more than one per name where an `if` decides between definitions.

    The rules are those of `torch.utils._config_module.install_config_module`: every assignment counts, classes are
    groups, and a group with a base class has the options of its base.
    """
    import ast

    options = {name: list(found) for name, found in inherited.items()}
    for statement in body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                options.setdefault(name, []).append(_option(None, value))
            case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation, value=ast.expr() as value):
                options.setdefault(name, []).append(_option(annotation, value))
            case ast.ClassDef(name=name, bases=bases, body=members):
                prefixes = [f"{base.id}." for base in bases if isinstance(base, ast.Name)]
                base = {key.partition(".")[2]: found for key, found in options.items() if key.startswith((*prefixes,))}
                options |= {f"{name}.{key}": found for key, found in _collect(members, base).items()}
            case ast.If(body=then, orelse=otherwise):
                options = _collect(otherwise, _collect(then, options))
            case _:
                pass  # imports and functions define no options
    return options


def _merge(options: Sequence[Option]) -> Option:
    """Return what holds for all definitions of one option; a definition that tells nothing leaves nothing."""
    if not all(option.types for option in options):
        return Option()
    choices = options[0].choices if len(options) == 1 else ()
    return Option(frozenset().union(*(option.types for option in options)), choices)


def _option(annotation: ast.expr | None, value: ast.expr) -> Option:
    return Option(_value_types(value)) if annotation is None else _annotated(annotation)


def _annotated(annotation: ast.expr) -> Option:
    import ast

    match annotation:
        case ast.BinOp(left=left, op=ast.BitOr(), right=ast.Constant(value=None)):
            return _annotated(left)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _merge([_annotated(left), _annotated(right)])
        case ast.Subscript(value=ast.Name(id="Literal"), slice=ast.Tuple(elts=elements)):
            choices = tuple(element.value for element in elements if isinstance(element, ast.Constant))
            return Option(frozenset(type(choice) for choice in choices), choices)
        case ast.Name(id=name) | ast.Subscript(value=ast.Name(id=name)) if name in _TYPES:
            return Option(frozenset([_TYPES[name]]))
        case _:
            return Option()


def _value_types(value: ast.expr) -> frozenset[type]:
    """Return the types that the default of an option without annotation tells; empty when it tells none."""
    import ast

    match value:
        case ast.Constant(value=bool() | int() | float() | str() as constant):
            return frozenset([type(constant)])
        case ast.Compare() | ast.UnaryOp(op=ast.Not()):
            return frozenset([bool])
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return _value_types(operand)
        case ast.Call(func=ast.Name(id="bool" | "int" | "float" | "str" as name)):
            return frozenset([_TYPES[name]])
        case _:
            return frozenset()
