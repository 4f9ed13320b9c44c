"""The kinds of values that settings take: how each is read and refused, and what a JSON schema says about it.

Those of files are in `paths`. Which key takes which kind is not decided here, but in `model`.
"""

from __future__ import annotations

import dataclasses
import keyword
import math
import re
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from hatch_aoti.errors import did_you_mean
from hatch_aoti.settings.toml import WrongValueError, describe, mapping, wrong

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

__all__ = [
    "DTYPES",
    "IDENTIFIER",
    "INT64_MAX",
    "PACKAGE",
    "TEXT",
    "Kind",
    "bundle",
    "choice",
    "cpu_baselines",
    "dtype",
    "environment_variables",
    "flag",
    "integer",
    "of_module",
    "parse_size",
    "platform_tag",
    "shape",
    "size",
    "string",
    "table",
    "tolerance",
    "upper_bound",
    "whole",
]

T = TypeVar("T")

INT64_MAX = 2**63 - 1
"""The largest integer that TOML promises, and that torch has for a size."""

DTYPES = (
    "float32", "float64", "float16", "bfloat16", "complex64", "complex128", "complex32",
    "int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64", "bool",
    "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu",
)  # fmt: skip
"""The dtypes an input may have: the attributes of `torch` with these names."""

# Other names of the same dtypes in torch.
_DTYPE_ALIASES = {
    "float": "float32", "double": "float64", "half": "float16", "cfloat": "complex64", "cdouble": "complex128",
    "int": "int32", "long": "int64", "short": "int16",
}  # fmt: skip


def upper_bound(dtype: str) -> int | None:
    """Return the smallest number that is above all of an integer dtype; None for other dtypes."""
    integer = re.fullmatch(r"(u?)int(\d+)", dtype)
    return 2 ** (int(integer[2]) - (not integer[1])) if integer else None


# Patterns mean the same to Python and to ECMAScript, which JSON schemas go by: there \w and \d are ASCII, and no flag
# can be given. An identifier is written as what it is not, so that letters beyond ASCII are let through.
IDENTIFIER = r"[^\x00-@\[-^`{-\x7f][^\x00-/:-@\[-^`{-\x7f]*"
"""A pattern that every Python identifier matches; keywords do, too, and some text beyond ASCII that is none."""

PACKAGE = rf"{IDENTIFIER}(\.{IDENTIFIER})*"
"""A pattern that every dotted name matches."""

_SIZE = r"\s*([0-9]+(?:\.[0-9]+)?)\s*(?:([kKmMgGtT])([iI]?))?[bB]?\s*"
_VARIABLE = r"[A-Za-z0-9_*?]*[A-Za-z][A-Za-z0-9_*?]*"
_STEM = r"[A-Za-z][A-Za-z0-9_]*"
_PLATFORM_TAG = r"[a-z][a-z0-9]*(_[a-z0-9]+)+"


TEXT = {"type": "string", "minLength": 1}
"""What a schema says of a string that is not empty."""


@dataclasses.dataclass(frozen=True)
class Kind(Generic[T]):
    """One kind of value.

    `parse` returns a TOML value in the form that the settings keep, or raises `WrongValueError`. `schema` says the same
    in terms of JSON schema, as far as that can, and `noun` in a word or two. `in_project` finishes a value for the
    project whose root folder it is given, or raises. `from_text` makes the TOML value of an environment variable's
    text; what does not fit is left for `parse` to refuse.
    """

    parse: Callable[[Any], T]
    schema: Mapping[str, Any]
    noun: str
    in_project: Callable[[T, Path], Any] = lambda value, _root: value
    from_text: Callable[[str], Any] = str

    def read(self, value: Any, root: Path) -> Any:
        """Return what the settings keep of a TOML value, in the project in `root`; raises `WrongValueError`."""
        return self.in_project(self.parse(value), root)


def whole(pattern: str) -> dict[str, Any]:
    """Return what a schema says of a string that matches a pattern from its start to its end."""
    return {"type": "string", "pattern": f"^{pattern}$"}


# --- Booleans and numbers -------------------------------------------------------------------------------------------


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise wrong("true or false", value)
    return value


def _flag_text(text: str) -> bool | str:
    words = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    return words.get(text.strip().lower(), text)


flag = Kind(_flag, {"type": "boolean"}, "boolean", from_text=_flag_text)
"""True and false, and no number that stands for them; in a variable the usual words."""


def integer(minimum: int) -> Kind[int]:
    """Return the kind of integers from `minimum` to `INT64_MAX`, both included."""

    def parse(value: Any) -> int:
        # TOML has booleans, Python takes them for integers.
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise wrong(f"an integer of at least {minimum}", value)
        if value > INT64_MAX:
            raise wrong(f"an integer of at most {INT64_MAX}", value)
        return value

    def from_text(text: str) -> int | str:
        return int(text) if re.fullmatch(r"\s*[+-]?[0-9]{1,19}\s*", text) else text

    schema = {"type": "integer", "minimum": minimum, "maximum": INT64_MAX}
    return Kind(parse, schema, f"integer ≥ {minimum}", from_text=from_text)


def _tolerance(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise wrong("a finite number of at least 0", value)
    return float(value)


tolerance = Kind(_tolerance, {"type": "number", "minimum": 0}, "number ≥ 0")
"""A finite number of at least 0."""


def parse_size(value: Any) -> int:
    """Return a number of bytes, given as that or as a text such as "10 GB" (powers of 1000) or "512 MiB" (of 1024)."""
    expected = 'a size such as "10 GB" or "512 MiB"'
    if isinstance(value, str):
        match = re.fullmatch(_SIZE, value)
        if match is None:
            raise wrong(expected, value)
        number, prefix, binary = match.groups()
        return int(float(number) * (1024 if binary else 1000) ** " kMGT".upper().index((prefix or " ").upper()))
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise wrong(expected, value)
    return value


size = Kind(parse_size, {"anyOf": [{"type": "integer", "minimum": 0}, whole(_SIZE)]}, "bytes, or a string with a unit")
"""A number of bytes."""


# --- Text -----------------------------------------------------------------------------------------------------------


def string(value: Any, expected: str = "a string") -> str:
    """Return a string that is not empty; `expected` says what it should hold."""
    if not isinstance(value, str) or not value:
        raise wrong(expected, value)
    return value


def choice(*choices: str) -> Kind[str]:
    """Return the kind of strings that are one of `choices`."""
    expected = "one of " + ", ".join(f'"{name}"' for name in choices)

    def parse(value: Any) -> str:
        text = string(value, expected)
        if text not in choices:
            raise wrong(expected, value, did_you_mean(text, choices))
        return text

    return Kind(parse, {"enum": list(choices)}, ", ".join(f'`"{name}"`' for name in choices))


def _dtype(value: Any) -> str:
    expected = 'the name of a torch dtype, such as "float32" or "int64"'
    text = string(value, expected)
    if text in DTYPES:
        return text
    name = text.removeprefix("torch.")
    name = _DTYPE_ALIASES.get(name, name)
    raise wrong(expected, value, f' Write "{name}".' if name in DTYPES else did_you_mean(name, DTYPES))


dtype = Kind(_dtype, {"enum": list(DTYPES)}, "name of a torch dtype")
"""One of `DTYPES`."""


def _is_dotted_name(text: str) -> bool:
    return all(part.isidentifier() and not keyword.iskeyword(part) for part in text.split("."))


def _package(value: Any) -> str:
    expected = 'the import name of a package, such as "example_project" or "example_project.sub"'
    text = string(value, expected)
    if not _is_dotted_name(text):
        name = text.replace("-", "_").replace("/", ".")
        raise wrong(expected, value, f' Did you mean "{name}"?' if _is_dotted_name(name) else "")
    return text


package = Kind(_package, whole(PACKAGE), "dotted import name")
"""The dotted import name of a package."""


def of_module(
    example: str, alternative: str = "", noun: str = "", instead: Iterable[Mapping[str, Any]] = ()
) -> Kind[str]:
    """Return the kind of `module:attribute`.

    Its refusals show `example`. What else the key takes is read by others: `alternative` is put before the example,
    with "or " at its end, `noun` before the kind's own, and `instead` has the schemas of it.
    """
    expected = f'{alternative}"module:attribute", such as "{example}"'

    def parse(value: Any) -> str:
        text = string(value, expected)
        if [_is_dotted_name(part) for part in text.split(":")] == [True, True]:
            return text
        module, _, attribute = text.rpartition(".")
        is_dotted = module and attribute != "py" and _is_dotted_name(text)
        raise wrong(expected, value, f' Did you mean "{module}:{attribute}"?' if is_dotted else "")

    schema = whole(f"{PACKAGE}:{PACKAGE}")
    others = list(instead)
    return Kind(parse, {"anyOf": [*others, schema]} if others else schema, f'{noun}`"module:attribute"`')


def _bundle(value: Any) -> str:
    expected = 'a name such as "vision": letters a-z, digits and _, a letter first'
    text = string(value, expected)
    if not re.fullmatch(_STEM, text):
        instead = re.sub(r"\W", "_", text.removesuffix(".pt2"), flags=re.ASCII).strip("_")
        raise wrong(expected, value, f' Did you mean "{instead}"?' if instead[:1].isalpha() else "")
    return text


bundle = Kind(_bundle, whole(_STEM), "name")
"""A file's name without its suffix, of characters that every system and tool takes."""


def _platform_tag(value: Any) -> str:
    expected = 'a platform tag such as "manylinux_2_28_x86_64" or "macosx_14_0_arm64"'
    text = string(value, expected)
    if not re.fullmatch(_PLATFORM_TAG, text):
        tag = re.sub(r"[.\s]+", "_", text.rpartition("-")[2].lower())
        raise wrong(expected, value, f' Did you mean "{tag}"?' if "_" in tag and tag != text else "")
    return text


platform_tag = Kind(_platform_tag, whole(_PLATFORM_TAG), "platform tag")
"""What has the form of a wheel's platform tag."""


# --- Lists and tables -----------------------------------------------------------------------------------------------


def _list_text(text: str) -> list[str]:
    return [item.strip() for item in text.split(",")]


def _cpu_baselines(value: Any) -> tuple[str, ...]:
    expected = 'a CPU baseline such as "x86-64-v3", or a list of them'
    names = [string(name, expected) for name in (value if isinstance(value, list) else [value])]
    if not names:
        raise wrong(f"{expected} with at least one entry", value)
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise WrongValueError(f'expected each baseline once, but "{twice[0]}" is there twice.')
    return tuple(names)


cpu_baselines = Kind(
    _cpu_baselines,
    {"anyOf": [TEXT, {"type": "array", "minItems": 1, "uniqueItems": True, "items": TEXT}]},
    "string, or list of strings",
    from_text=_list_text,
)
"""The name of a CPU baseline or a list of different ones; whether they exist is the compiler's to say."""


def environment_variables(is_settled: Callable[[str], bool]) -> Kind[tuple[str, ...]]:
    """Return the kind of lists of environment variables, names or globs; `is_settled` says which cannot be given."""
    expected = 'a list of names of environment variables, such as ["MODEL_VARIANT", "HF_*"]'

    def parse(value: Any) -> tuple[str, ...]:
        if not isinstance(value, list):
            raise wrong(expected, value)
        for name in value:
            if not re.fullmatch(_VARIABLE, string(name, expected)):
                raise wrong(f"{expected}, in which * and ? stand for other characters", name)
            if is_settled(name):
                raise WrongValueError(
                    f'"{name}" cannot be let through: hatch-aoti sets it itself, or it has options of the compiler, '
                    "which belong into `inductor-configs`."
                )
        return tuple(sorted(set(value)))

    return Kind(parse, {"type": "array", "items": whole(_VARIABLE)}, "list of strings", from_text=_list_text)


def _shape(value: Any) -> tuple[int | str, ...]:
    expected = 'a list of sizes and names of dims, such as ["batch", 3, 224, 224]'
    if not isinstance(value, list):
        raise wrong(expected, value)
    for entry in value:
        if isinstance(entry, int) and not isinstance(entry, bool) and 0 <= entry <= INT64_MAX:
            continue
        if not isinstance(entry, str) or not entry:
            raise WrongValueError(f"expected {expected}, but {describe(entry)} is in it.")
        if entry.isdecimal():
            raise WrongValueError(f'"{entry}" is a string. Write the number {entry} without quotes.')
        if not entry.isidentifier():
            hint = "For a size that depends on others, write a callable as `inputs`."
            raise WrongValueError(f'expected {expected}, but "{entry}" is neither. {hint}')
    return tuple(value)


shape = Kind(
    _shape,
    {"type": "array", "items": {"anyOf": [integer(0).schema, whole(IDENTIFIER)]}},
    "list of integers and names of dims",
)
"""A size or the name of a dim for each dimension."""


def table(schema: Mapping[str, Any], noun: str) -> Kind[Mapping[str, Any]]:
    """Return the kind of tables; others read what is in them, and `schema` says what that is."""
    return Kind(mapping(), {"type": "object", **schema}, noun)
