"""Frozen dataclasses as JSON-ready data, and back: what goes to a worker and comes from it, and what is kept in files.

The type hints of the fields are the schema. `decode` refuses what does not fit them, by the name of the field: data
from a file may be of another version of hatch-aoti, damaged, or made to do harm. `pack` and `unpack` put the version of
this form in front, for what is never read by another version.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import types
import typing
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any, Final, Literal, TypeVar, Union

__all__ = ["LEFT_OUT", "DecodeError", "decode", "encode", "pack", "unpack"]

_VERSION: Final = 1

LEFT_OUT: Final = {"left out": True}
"""Metadata of a field that is not written where it has its default."""

# What annotations name and modules import for type checkers alone.
_NAMES: Final = {"Mapping": Mapping}

_T = TypeVar("_T")


class DecodeError(ValueError):
    """Data that is not what its type says; the text names the place and ends without a full stop."""


def encode(value: Any) -> Any:
    """Return dataclasses as dicts and tuples as lists, all the way down; `to_json` of a class has precedence."""
    if hasattr(value, "to_json"):
        return value.to_json()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: encode(item)
            for field in dataclasses.fields(value)
            if (item := getattr(value, field.name)) != _default(field) or "left out" not in field.metadata
        }
    if isinstance(value, Mapping):
        return {key: encode(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [encode(item) for item in value]
    if isinstance(value, PurePath):
        return os.fspath(value)
    if value is None or isinstance(value, (str, int, float)):
        return value
    raise TypeError(f"{type(value).__name__} has no form in JSON")


def decode(cls: type[_T], data: Any, *, lenient: bool = False) -> _T:
    """Return the object of class `cls` that `encode` turned into `data`.

    Raises `DecodeError`, which names the field, for a wrong type, a missing field and an unknown one. `lenient` is for
    what another version may have written: unknown fields are passed over, and those with a default may be missing.
    """
    return typing.cast("_T", _decode(cls, data, "", lenient))


def pack(value: Any) -> dict[str, Any]:
    """Return `encode(value)` with the version of the form."""
    return {"codec": _VERSION, "value": encode(value)}


def unpack(cls: type[_T], data: Any) -> _T:
    """Return what `pack` was given. Raises `DecodeError`, also for another version."""
    if not isinstance(data, dict) or data.keys() != {"codec", "value"} or data["codec"] != _VERSION:
        raise DecodeError(f"it is not of version {_VERSION} of hatch-aoti's own form")
    return decode(cls, data["value"])


def _decode(hint: Any, data: Any, where: str, lenient: bool) -> Any:
    if hint is Any:
        return data
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in {Union, types.UnionType}:
        return _decode_union(arguments, data, where, lenient)
    if origin is Literal:
        fits = any(type(data) is type(value) and data == value for value in arguments)  # 1 is not True
        return _demand(fits, where, " or ".join(map(repr, arguments)), data)
    if origin is tuple and arguments[1:] == (...,):
        _demand(isinstance(data, list), where, "a list", data)
        return tuple(_decode(arguments[0], item, f"{where}[{index}]", lenient) for index, item in enumerate(data))
    if origin in {dict, Mapping}:
        _demand(isinstance(data, dict), where, "an object", data)
        return {key: _decode(arguments[1], item, f"{where}.{key}".lstrip("."), lenient) for key, item in data.items()}
    if hasattr(hint, "from_json"):
        try:
            return hint.from_json(data)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise DecodeError(f"{where or 'it'} is no {hint.__name__} ({type(error).__name__}: {error})") from error
    if dataclasses.is_dataclass(hint):
        return _decode_dataclass(hint, data, where, lenient)
    if hint is Path:
        return Path(_demand(isinstance(data, str), where, "a path", data))
    if hint not in _SCALARS:
        raise TypeError(f"{hint} is no type that fields of such classes may have")
    # Not `isinstance`: a bool is an int to Python. JSON has one kind of number.
    return _demand(type(data) is hint or (hint is float and type(data) is int), where, _SCALARS[hint], data)


_SCALARS: Final = {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}


def _decode_union(hints: tuple[Any, ...], data: Any, where: str, lenient: bool) -> Any:
    if data is None and type(None) in hints:
        return None
    *others, last = [hint for hint in hints if hint is not type(None)]
    for hint in others:
        with contextlib.suppress(DecodeError):
            return _decode(hint, data, where, lenient)
    return _decode(last, data, where, lenient)


def _decode_dataclass(cls: Any, data: Any, where: str, lenient: bool) -> Any:
    _demand(isinstance(data, dict), where, "an object", data)
    known = _fields(cls)
    unknown = sorted(data.keys() - known.keys())
    if unknown and not lenient:
        raise DecodeError(f"{where or 'it'} has {unknown[0]!r}, which is not known here")
    values = {}
    for name, (field, hint) in known.items():
        if name in data:
            values[name] = _decode(hint, data[name], f"{where}.{name}".lstrip("."), lenient)
        elif _default(field) is dataclasses.MISSING or not (lenient or "left out" in field.metadata):
            raise DecodeError(f"{where or 'it'} has no {name!r}")
    return cls(**values)


@functools.cache
def _fields(cls: type) -> dict[str, tuple[dataclasses.Field[Any], Any]]:
    hints = typing.get_type_hints(cls, localns=_NAMES)
    return {field.name: (field, hints[field.name]) for field in dataclasses.fields(cls)}


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _demand(holds: bool, where: str, what: str, data: Any) -> Any:
    if not holds:
        raise DecodeError(f"{where or 'it'} must be {what}, not {data!r:.60}")
    return data
