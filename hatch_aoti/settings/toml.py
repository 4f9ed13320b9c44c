"""Reading TOML: tables that collect what is wrong with them, and the words for what is in them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, TypeVar

from hatch_aoti.errors import Problem, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["Table", "WrongValueError", "describe", "join", "mapping", "wrong"]

T = TypeVar("T")
D = TypeVar("D")


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
