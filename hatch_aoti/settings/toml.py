"""Reading TOML: tables that collect what is wrong with them, and a parser for each kind of value.

A parser returns the value that it is given, in the form that the settings keep, or raises `WrongValueError`. One that
has to know more, such as a limit, is made by a function. What is accepted, and how the rest is refused, is decided
here; which key takes which kind of value is not.
"""

from __future__ import annotations

import keyword
import math
import re
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, TypeVar

from hatch_aoti.errors import Problem, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

__all__ = [
    "INT64_MAX",
    "Table",
    "WrongValueError",
    "boolean",
    "choice",
    "describe",
    "directory",
    "file_stem",
    "integer",
    "join",
    "mapping",
    "package",
    "platform_tag",
    "program",
    "reference",
    "size",
    "string",
    "target",
    "tolerance",
    "variables",
    "weights",
    "wrong",
]

T = TypeVar("T")
D = TypeVar("D")

_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(?:([kMGT])(i?))?B?\s*", re.IGNORECASE)
INT64_MAX = 2**63 - 1
"""The largest integer that TOML promises, and that torch has for a size."""

_WEIGHTS_SUFFIXES = (".safetensors", ".pt", ".pth")


# --- Tables ---------------------------------------------------------------------------------------------------------


class WrongValueError(Exception):
    """A value that its key does not accept; the text says what was expected and what is there."""


class Table:
    """A TOML table while it is read: gives out values, and collects what is wrong with them in `problems`."""

    def __init__(self, key: str, values: Mapping[str, Any], problems: list[Problem]) -> None:
        self.key, self.values, self.problems = key, values, problems
        self.known: list[str] = []

    def report(self, message: str, name: str = "") -> None:
        """Add a problem with this table, or with what is called `name` in it."""
        self.problems.append(Problem(join(self.key, name) if name else self.key, message))

    def read(self, name: str, parse: Callable[[Any], T], default: D) -> T | D:
        """Return what `parse` makes of the value called `name`; `default` if it is absent, or wrong and reported."""
        self.known.append(name)
        try:
            return parse(self.values[name]) if name in self.values else default
        except WrongValueError as error:
            self.report(str(error), name)
            return default

    def require(self, name: str, parse: Callable[[Any], T], default: D, *, missing: str) -> T | D:
        """Like `read`, but a value that is absent is reported too; `missing` says what to write."""
        if name not in self.values:
            self.report(f"missing; {missing}", name)
        return self.read(name, parse, default)

    def table(self, name: str) -> Table:
        """Return the table called `name`, an empty one if it is absent, or wrong and reported."""
        return Table(join(self.key, name), self.read(name, mapping(), {}), self.problems)

    def tables(self, expected: str) -> dict[str, Table]:
        """Return the tables under the names that the project chose, sorted; `expected` says what each should be."""
        found = {name: self.read(name, mapping(expected), None) for name in sorted(self.values)}
        items = ((name, values) for name, values in found.items() if values is not None)
        return {name: Table(join(self.key, name), values, self.problems) for name, values in items}

    def reject_unknown(self, elsewhere: Mapping[str, str] | None = None) -> None:
        """Report the keys that nobody read; `elsewhere` says of some keys where they would be right."""
        for name in self.values.keys() - set(self.known):
            hint = did_you_mean(name, self.known) or f" Known keys: {', '.join(sorted(self.known))}."
            self.report((elsewhere or {}).get(name) or f"unknown key.{hint}", name)


def join(key: str, name: str) -> str:
    """Return the dotted key of what is called `name` in the table `key`, which is empty for the outermost."""
    name = name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else f'"{name}"'
    return f"{key}.{name}" if key else name


# --- Values ---------------------------------------------------------------------------------------------------------


def describe(value: Any) -> str:
    """Return what a TOML value is, in TOML's own words, such as `the number 3`."""
    match value:
        case bool():
            return f"the boolean {str(value).lower()}"
        case int() | float():
            return f"the number {value}"
        case str():
            return f'the string "{value}"' if value else "an empty string"
        case dict():
            return "a table" if value else "an empty table"
        case list():
            return "a list" if value else "an empty list"
        case _:
            return f"the date or time {value}"


def wrong(expected: str, value: Any, hint: str = "") -> WrongValueError:
    """Return the error for a `value` that is not what was `expected`; `hint` is a sentence after a space."""
    return WrongValueError(f"expected {expected}, but it is {describe(value)}.{hint}")


def mapping(expected: str = "a table") -> Callable[[Any], Mapping[str, Any]]:
    """Return a parser of a table; `expected` says what it holds."""

    def parse(value: Any) -> Mapping[str, Any]:
        if not isinstance(value, dict):
            raise wrong(expected, value)
        return value

    return parse


def boolean(value: Any) -> bool:
    """Accept true and false, and no number that stands for them."""
    if not isinstance(value, bool):
        raise wrong("true or false", value)
    return value


def integer(minimum: int) -> Callable[[Any], int]:
    """Return a parser of an integer from `minimum` to `INT64_MAX`, both included."""

    def parse(value: Any) -> int:
        # TOML has booleans, Python takes them for integers.
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise wrong(f"an integer of at least {minimum}", value)
        if value > INT64_MAX:
            raise wrong(f"an integer of at most {INT64_MAX}", value)
        return value

    return parse


def tolerance(value: Any) -> float:
    """Accept a finite number of at least 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise wrong("a finite number of at least 0", value)
    return float(value)


def size(value: Any) -> int:
    """Accept a number of bytes, or a text such as "10 GB" (powers of 1000) or "512 MiB" (of 1024)."""
    expected = 'a size such as "10 GB" or "512 MiB"'
    if isinstance(value, str):
        match = _SIZE.fullmatch(value)
        if match is None:
            raise wrong(expected, value)
        number, prefix, binary = match.groups()
        return int(float(number) * (1024 if binary else 1000) ** " kMGT".upper().index((prefix or " ").upper()))
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise wrong(expected, value)
    return value


def string(value: Any, expected: str = "a string") -> str:
    """Accept a string that is not empty; `expected` says what it should hold."""
    if not isinstance(value, str) or not value:
        raise wrong(expected, value)
    return value


def choice(choices: Iterable[str]) -> Callable[[Any], str]:
    """Return a parser of a string that is one of `choices`."""
    choices = list(choices)
    expected = "one of " + ", ".join(f'"{name}"' for name in choices)

    def parse(value: Any) -> str:
        text = string(value, expected)
        if text not in choices:
            raise wrong(expected, value, did_you_mean(text, choices))
        return text

    return parse


def _is_dotted_name(text: str) -> bool:
    return all(part.isidentifier() and not keyword.iskeyword(part) for part in text.split("."))


def package(value: Any) -> str:
    """Accept the dotted import name of a package."""
    expected = 'the import name of a package, such as "example_project" or "example_project.sub"'
    text = string(value, expected)
    if not _is_dotted_name(text):
        name = text.replace("-", "_").replace("/", ".")
        raise wrong(expected, value, f' Did you mean "{name}"?' if _is_dotted_name(name) else "")
    return text


def target(value: Any) -> tuple[str, ...]:
    """Accept the name of a CPU baseline or a list of different ones; whether they exist is not checked here."""
    expected = 'a CPU baseline such as "x86-64-v3", or a list of them'
    names = [string(name, expected) for name in (value if isinstance(value, list) else [value])]
    if not names:
        raise wrong(f"{expected} with at least one entry", value)
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise WrongValueError(f'expected each baseline once, but "{twice[0]}" is there twice.')
    return tuple(names)


def variables(is_settled: Callable[[str], bool]) -> Callable[[Any], tuple[str, ...]]:
    """Return a parser of a list of environment variables, names or globs; `is_settled` says which cannot be given."""
    expected = 'a list of names of environment variables, such as ["MODEL_VARIANT", "HF_*"]'

    def parse(value: Any) -> tuple[str, ...]:
        if not isinstance(value, list):
            raise wrong(expected, value)
        for name in value:
            if not re.fullmatch(r"[A-Za-z0-9_*?]*[A-Za-z][A-Za-z0-9_*?]*", string(name, expected)):
                raise wrong(f"{expected}, in which * and ? stand for other characters", name)
            if is_settled(name):
                raise WrongValueError(
                    f'"{name}" cannot be let through: hatch-aoti sets it itself, or it has options of the compiler, '
                    "which belong into `inductor-configs`."
                )
        return tuple(sorted(set(value)))

    return parse


def directory(root: Path) -> Callable[[Any], Path]:
    """Return a parser of a folder, existing or not, that becomes absolute: it starts at `root`, or at `~`."""

    def parse(value: Any) -> Path:
        text = string(value, "the path of a folder")
        try:
            return root.absolute() / Path(text).expanduser()
        except RuntimeError:
            raise WrongValueError(f'"{text}" starts at a home folder that this system does not know.') from None

    return parse


def file_stem(example: str) -> Callable[[Any], str]:
    """Return a parser of a file's name without its suffix, of characters that every system and tool takes."""
    expected = f'a name such as "{example}": letters a-z, digits and _, a letter first'

    def parse(value: Any) -> str:
        text = string(value, expected)
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", text):
            instead = re.sub(r"\W", "_", text.removesuffix(".pt2"), flags=re.ASCII).strip("_")
            raise wrong(expected, value, f' Did you mean "{instead}"?' if instead[:1].isalpha() else "")
        return text

    return parse


def platform_tag(value: Any) -> str:
    """Accept what has the form of a wheel's platform tag."""
    expected = 'a platform tag such as "manylinux_2_28_x86_64" or "macosx_14_0_arm64"'
    text = string(value, expected)
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)+", text):
        tag = re.sub(r"[.\s]+", "_", text.rpartition("-")[2].lower())
        raise wrong(expected, value, f' Did you mean "{tag}"?' if "_" in tag and tag != text else "")
    return text


def reference(example: str, alternative: str = "") -> Callable[[Any], str]:
    """Return a parser of a `module:attribute`.

    Its refusals show `example`. `alternative` is put before it: what else the key takes, with "or " at its end.
    """
    expected = f'{alternative}"module:attribute", such as "{example}"'

    def parse(value: Any) -> str:
        text = string(value, expected)
        if [_is_dotted_name(part) for part in text.split(":")] == [True, True]:
            return text
        module, _, attribute = text.rpartition(".")
        is_dotted = module and attribute != "py" and _is_dotted_name(text)
        raise wrong(expected, value, f' Did you mean "{module}:{attribute}"?' if is_dotted else "")

    return parse


def weights(root: Path) -> Callable[[Any], str]:
    """Return a parser of a weights file that exists below `root`, given relative to it."""
    return _file(root, "weights/digits.safetensors", _WEIGHTS_SUFFIXES)


def program(root: Path) -> Callable[[Any], str]:
    """Return a parser of a saved program, a file that exists below `root`, given relative to it."""
    return _file(root, "programs/encoder.pt2", (".pt2",))


def _file(root: Path, example: str, suffixes: tuple[str, ...]) -> Callable[[Any], str]:
    expected = f'a file in the project, such as "{example}"'

    def parse(value: Any) -> str:
        text = string(value, expected)
        path = PurePosixPath(text)
        inside = "A wheel that is built from the sdist would lack any other file."
        if path.is_absolute() or ".." in path.parts or text.startswith("~"):
            raise WrongValueError(f'expected a path below the project\'s root folder, but it is "{text}". {inside}')
        file = root / path
        if path.suffix not in suffixes and not file.is_dir():
            ending = f"one of {', '.join(suffixes)}" if len(suffixes) > 1 else suffixes[0]
            raise wrong(f"a file that ends in {ending}", value)
        if file.is_dir():
            raise WrongValueError(f'expected a file, but "{text}" is a folder.')
        if not file.is_file():
            raise WrongValueError(
                f'there is no file "{text}" in {root}. If this build starts from an sdist, the file may be missing '
                "there because .gitignore lists it: add it to `tool.hatch.build.targets.sdist.artifacts`."
            )
        if not file.resolve().is_relative_to(root.resolve()):
            raise WrongValueError(f'"{text}" is a link to a file outside the project\'s root folder. {inside}')
        return str(path)

    return parse
