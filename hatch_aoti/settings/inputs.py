"""How a project declares a model's inputs: the keys `inputs`, `dims` and `dynamic-shapes`, checked together."""

from __future__ import annotations

import keyword
import re
from typing import TYPE_CHECKING, Any

from hatch_aoti.errors import Problem, did_you_mean
from hatch_aoti.settings import toml
from hatch_aoti.settings.model import Dim, TensorInput

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["DTYPES", "read_inputs"]

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


def read_inputs(model: toml.Table) -> tuple[str | dict[str, TensorInput], dict[str, Dim], Any]:
    """Return `inputs`, `dims` and `dynamic-shapes` of a model, in the forms that `ModelSettings` documents.

    What is wrong with one of them, or between them, is added to the problems of the table `model`.
    """
    problems_before = len(model.problems)
    dim_tables = model.table("dims").tables("a table such as { min = 1, max = 1024 }")
    dims = {name: _dim(name, table) for name, table in dim_tables.items()}
    inputs = _inputs(model, dims)
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


def _dim(name: str, table: toml.Table) -> Dim:
    _check_identifier(name, table, "dim")
    low = table.read("min", toml.integer(0), 1)
    high = table.read("max", toml.integer(0), None)
    table.reject_unknown()
    if high is not None and low > high:
        table.report(f"the smallest size, {low}, is above the largest, which is {high}.", "min")
    elif low == high:
        table.report(f"min and max are both {low}. For a size that never changes write the number in the shape.", "min")
    return Dim(low, high)


def _check_identifier(name: str, table: toml.Table, noun: str) -> None:
    if not name.isidentifier() or keyword.iskeyword(name):
        table.report(f"the name of this {noun} must be a Python identifier.")


def _inputs(model: toml.Table, dims: Mapping[str, Dim]) -> str | dict[str, TensorInput]:
    if isinstance(model.values.get("inputs"), dict):
        tables = model.table("inputs").tables('a table such as { shape = ["batch", 8], dtype = "float32" }')
        return {name: _tensor_input(name, table, dims) for name, table in tables.items()}
    return model.require(
        "inputs",
        toml.reference(
            "example_project.ranker:example_inputs", "a table of inputs, or the callable that makes them as "
        ),
        "",
        missing='write the inputs of forward, such as inputs = { image = { shape = ["batch", 1, 8, 8] } }, or the '
        'callable that makes them, as "module:attribute".',
    )


def _tensor_input(name: str, table: toml.Table, dims: Mapping[str, Dim]) -> TensorInput:
    _check_identifier(name, table, "input")
    shape = table.require(
        "shape", _shape(dims), (), missing='write its sizes, such as shape = ["batch", 3, 224, 224]; [] is a scalar.'
    )
    dtype = table.read("dtype", _dtype, "float32")
    high = table.read("high", toml.integer(1), TensorInput.high)
    table.reject_unknown()
    integer = re.fullmatch(r"(u?)int(\d+)", dtype)
    if "high" in table.values and integer is None:
        table.report(f"only integer inputs have an upper bound, and this one is {dtype}.", "high")
    elif integer is not None and high > (limit := 2 ** (int(integer[2]) - (not integer[1]))):
        table.report(f"expected at most {limit}, the bound of {dtype}, but it is {high}.", "high")
    return TensorInput(shape, dtype, high)


def _shape(dims: Mapping[str, Dim]) -> Callable[[Any], tuple[int | str, ...]]:
    expected = 'a list of sizes and names of dims, such as ["batch", 3, 224, 224]'

    def parse(value: Any) -> tuple[int | str, ...]:
        if not isinstance(value, list):
            raise toml.wrong(expected, value)
        for size in value:
            is_number = isinstance(size, int) and not isinstance(size, bool)
            if is_number and 0 <= size <= toml.INT64_MAX:
                continue
            if not isinstance(size, str) or not size:
                raise toml.WrongValueError(f"expected {expected}, but {toml.describe(size)} is in it.")
            if size.isdecimal():
                raise toml.WrongValueError(f'"{size}" is a string. Write the number {size} without quotes.')
            if not size.isidentifier():
                hint = "For a size that depends on others, write a callable as `inputs`."
                raise toml.WrongValueError(f'expected {expected}, but "{size}" is neither. {hint}')
            if size not in dims:
                raise _undeclared(size, dims)
        return tuple(value)

    return parse


def _dtype(value: Any) -> str:
    expected = 'the name of a torch dtype, such as "float32" or "int64"'
    text = toml.string(value, expected)
    if text in DTYPES:
        return text
    name = text.removeprefix("torch.")
    name = _DTYPE_ALIASES.get(name, name)
    raise toml.wrong(expected, value, f' Write "{name}".' if name in DTYPES else did_you_mean(name, DTYPES))


def _undeclared(name: str, dims: Mapping[str, Dim]) -> toml.WrongValueError:
    hint = did_you_mean(name, dims) or f" Declare it, as in dims = {{ {name} = {{ min = 1, max = 1024 }} }}."
    return toml.WrongValueError(f'"{name}" is not in the `dims` of this model.{hint}')


def _dynamic_shapes(model: toml.Table, dims: Mapping[str, Dim]) -> str | dict[str, Any] | list[Any] | None:
    value = model.values.get("dynamic-shapes")
    if not isinstance(value, dict | list):
        example = 'a table such as { image = { 0 = "batch" } }, or '
        return model.read("dynamic-shapes", toml.reference("example_project.ranker:dynamic_shapes", example), None)
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
        name = toml.string(value, "the name of a dim")
        if name not in dims:
            raise _undeclared(name, dims)
        return name

    return parse


def _dims_in(dynamic_shapes: Any) -> set[Any]:
    if isinstance(dynamic_shapes, dict | list):
        items = dynamic_shapes.values() if isinstance(dynamic_shapes, dict) else dynamic_shapes
        return set().union(*(_dims_in(item) for item in items))
    return {dynamic_shapes}
