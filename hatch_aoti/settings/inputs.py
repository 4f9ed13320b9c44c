"""How a project declares a model's inputs: the keys `inputs`, `dims` and `dynamic-shapes`, checked together."""

from __future__ import annotations

import keyword
import re
from typing import TYPE_CHECKING, Any

from hatch_aoti.errors import Problem, did_you_mean
from hatch_aoti.settings import toml
from hatch_aoti.settings.declaration import Setting, declared, read_declared
from hatch_aoti.settings.model import Dim, ModelSettings, TensorInput
from hatch_aoti.settings.values import string, upper_bound

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

__all__ = ["read_inputs"]

_SETTINGS: Mapping[str, Setting] = {item.field: item for item in declared(ModelSettings)}


def read_inputs(model: toml.Table, root: Path) -> tuple[str | dict[str, TensorInput], dict[str, Dim], Any]:
    """Return `inputs`, `dims` and `dynamic-shapes` of a model, in the forms that `ModelSettings` documents.

    `root` is the project's folder. What is wrong with one of them, or between them, is added to the problems of the
    table `model`.
    """
    problems_before = len(model.problems)
    dim_tables = model.table("dims").tables("a table such as { min = 1, max = 1024 }")
    dims = {name: _dim(name, table, root) for name, table in dim_tables.items()}
    inputs = _inputs(model, dims, root)
    dynamic_shapes = _dynamic_shapes(model, dims)
    if not isinstance(inputs, str) and dynamic_shapes is not None:
        model.report(
            'declared inputs say this in their shapes, as in shape = ["batch", 8]. Remove this key, or write a '
            "callable as `inputs`.",
            "dynamic-shapes",
        )
    # A dim may seem unused because of another mistake, and code that makes the shapes may use any of them.
    if len(model.problems) == problems_before and not isinstance(dynamic_shapes, str):
        used = _dims_in(dynamic_shapes)
        used |= {size for item in inputs.values() for size in item.shape} if isinstance(inputs, dict) else set()
        place = "`dynamic-shapes`" if isinstance(inputs, str) else "the shape of an input"
        for name in dims.keys() - used:
            dim_tables[name].report(f'nothing uses this dim. Write "{name}" in {place}, or remove it.')
    return inputs, dims, dynamic_shapes


def _dim(name: str, table: toml.Table, root: Path) -> Dim:
    _check_identifier(name, table, "dim")
    dim = Dim(**read_declared(table, Dim, root))
    low, high = dim.min, dim.max
    table.reject_unknown()
    if high is not None and low > high:
        table.report(f"the smallest size, {low}, is above the largest, which is {high}.", "min")
    elif low == high:
        table.report(f"min and max are both {low}. For a size that never changes write the number in the shape.", "min")
    return dim


def _check_identifier(name: str, table: toml.Table, noun: str) -> None:
    if not name.isidentifier() or keyword.iskeyword(name):
        table.report(f"the name of this {noun} must be a Python identifier.")


def _inputs(model: toml.Table, dims: Mapping[str, Dim], root: Path) -> str | dict[str, TensorInput]:
    if isinstance(model.values.get("inputs"), dict):
        tables = model.table("inputs").tables('a table such as { shape = ["batch", 8], dtype = "float32" }')
        return {name: _tensor_input(name, table, dims, root) for name, table in tables.items()}
    item = _SETTINGS["inputs"]
    if item.key not in model.values:
        model.report(f"missing; {item.missing}", item.key)
    return model.read(item.key, item.kind.parse, "")


def _tensor_input(name: str, table: toml.Table, dims: Mapping[str, Dim], root: Path) -> TensorInput:
    _check_identifier(name, table, "input")
    found = TensorInput(**read_declared(table, TensorInput, root))
    table.reject_unknown()
    for size in found.shape or ():
        if isinstance(size, str) and size not in dims:
            table.report(_undeclared(size, dims), "shape")
            break
    limit = upper_bound(found.dtype)
    if "high" in table.values and limit is None:
        table.report(f"only integer inputs have an upper bound, and this one is {found.dtype}.", "high")
    elif limit is not None and found.high > limit:
        table.report(f"expected at most {limit}, the bound of {found.dtype}, but it is {found.high}.", "high")
    return found


def _undeclared(name: str, dims: Mapping[str, Dim]) -> str:
    hint = did_you_mean(name, dims) or f" Declare it, as in dims = {{ {name} = {{ min = 1, max = 1024 }} }}."
    return f'"{name}" is not in the `dims` of this model.{hint}'


def _dynamic_shapes(model: toml.Table, dims: Mapping[str, Dim]) -> str | dict[str, Any] | list[Any] | None:
    value = model.values.get("dynamic-shapes")
    if not isinstance(value, dict | list):
        return model.read("dynamic-shapes", _SETTINGS["dynamic_shapes"].kind.parse, None)
    model.known.append("dynamic-shapes")
    if _is_leaf(value):
        model.report('name the argument first, as in { image = { 0 = "batch" } }.', "dynamic-shapes")
        return None
    shapes: dict[str, Any] | list[Any] | None
    shapes = _dynamic_shape(toml.join(model.key, "dynamic-shapes"), value, dims, model.problems)
    return shapes


def _is_leaf(value: Any) -> bool:
    """Whether `value` describes one tensor: by the index of a dimension, where containers have names."""
    return isinstance(value, dict) and bool(value) and all(re.fullmatch("0|[1-9][0-9]*", key) for key in value)


def _dynamic_shape(key: str, value: Any, dims: Mapping[str, Dim], problems: list[Problem]) -> Any:
    if isinstance(value, list):
        return [_dynamic_shape(f"{key}[{index}]", item, dims, problems) for index, item in enumerate(value)]
    if _is_leaf(value):
        table = toml.Table(key, value, problems)
        return {index: table.read(index, _dim_name(dims), "") for index in sorted(value)}
    if isinstance(value, dict):
        return {name: _dynamic_shape(toml.join(key, name), value[name], dims, problems) for name in sorted(value)}
    expected = 'a table from the index of a dimension to a dim, such as { 0 = "batch" }'
    problems.append(Problem(key, str(toml.wrong(expected, value, " A tensor without dynamic dimensions is {}."))))
    return None


def _dim_name(dims: Mapping[str, Dim]) -> Callable[[Any], str]:
    def parse(value: Any) -> str:
        name = string(value, "the name of a dim")
        if name not in dims:
            raise toml.WrongValueError(_undeclared(name, dims))
        return name

    return parse


def _dims_in(dynamic_shapes: Any) -> set[Any]:
    if isinstance(dynamic_shapes, dict | list):
        items = dynamic_shapes.values() if isinstance(dynamic_shapes, dict) else dynamic_shapes
        return set().union(*(_dims_in(item) for item in items))
    return {dynamic_shapes}
