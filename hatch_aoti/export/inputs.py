"""Example inputs of a model, and which of their sizes may change."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from hatch_aoti.errors import ModelError, did_you_mean
from hatch_aoti.export.failures import raised, user_traceback
from hatch_aoti.export.importing import import_object

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import torch

    from hatch_aoti.settings.model import ModelSettings, TensorInput

__all__ = ["example_inputs", "pick_sizes", "to_device"]


def example_inputs(
    entry: ModelSettings, module: torch.nn.Module, dims: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """Return the example args and kwargs, and `dynamic_shapes` in the form of `torch.export.export`."""
    if not isinstance(entry.inputs, str):
        return _declared_inputs(entry, module, entry.inputs, dims)
    function = import_object(entry.name, "inputs", "inputs", entry.inputs)
    if callable(function):
        try:
            value = function()
        except BaseException as error:
            raise ModelError(
                entry.name,
                "inputs",
                f"calling `{entry.inputs}` {raised(error)}",
                hint="it is called without arguments and returns a tuple of args, a dict of kwargs, or (args, kwargs)",
                details=user_traceback(error),
            ) from error
    else:
        value = function
    args, kwargs = _as_call(entry, value)
    _check_binding(entry, module, args, kwargs)
    # In forward's order, so that neither the order in which the callable names them nor anything else decides it.
    order = list(inspect.signature(module.forward).parameters)
    kwargs = dict(sorted(kwargs.items(), key=lambda item: order.index(item[0]) if item[0] in order else len(order)))
    return args, kwargs, _dynamic_shapes(entry, dims)


def _as_call(entry: ModelSettings, value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Read what an `inputs` callable returned: (args, kwargs), a tuple of args, or a dict of kwargs."""
    if isinstance(value, tuple):
        if len(value) == 2 and isinstance(value[0], tuple) and isinstance(value[1], dict):  # noqa: SIM102
            if all(isinstance(name, str) for name in value[1]):
                return value[0], value[1]
        return value, {}
    if isinstance(value, dict) and all(isinstance(name, str) for name in value):
        return (), value
    raise ModelError(
        entry.name,
        "inputs",
        f"`{entry.inputs}` returned a {type(value).__name__}",
        hint="return a tuple of positional arguments, a dict of keyword arguments, or (args, kwargs); "
        "for a single tensor write `return (tensor,)`",
    )


def _check_binding(
    entry: ModelSettings, module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    try:
        inspect.signature(module.forward).bind(*args, **kwargs)
    except TypeError as error:
        raise ModelError(
            entry.name,
            "inputs",
            f"the example inputs do not fit forward{inspect.signature(module.forward)}: {error}",
            hint="return a tuple of positional arguments, a dict of keyword arguments, or (args, kwargs)",
        ) from error


def _dynamic_shapes(entry: ModelSettings, dims: Mapping[str, Any]) -> Any:
    """Turn the entry's `dynamic-shapes` into torch's form: names of dims into `Dim` objects."""
    if isinstance(entry.dynamic_shapes, str):
        return import_object(entry.name, "inputs", "dynamic-shapes", entry.dynamic_shapes)

    def convert(value: Any) -> Any:
        if isinstance(value, str):
            return dims[value]
        if isinstance(value, dict):
            if value and all(str(key).isdigit() for key in value):
                return {int(key): convert(item) for key, item in value.items()}
            # An empty table is torch's None: nothing dynamic in this tensor.
            return {key: convert(item) for key, item in value.items()} or None
        if isinstance(value, (list, tuple)):
            return [convert(item) for item in value]
        return value

    return convert(entry.dynamic_shapes) if entry.dynamic_shapes is not None else None


def _declared_inputs(
    entry: ModelSettings, module: torch.nn.Module, inputs: Mapping[str, TensorInput], dims: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """Make example tensors for declared shapes, in the order of forward's parameters."""
    parameters = inspect.signature(module.forward).parameters
    extra = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    named = {
        name: parameter
        for name, parameter in parameters.items()
        if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    }
    for name in inputs:
        if name not in named and not extra:
            raise ModelError(
                entry.name,
                "inputs",
                f"`inputs.{name}`: forward() of `{entry.model}` has no parameter `{name}`.{did_you_mean(name, named)}",
                hint=f"its parameters are: {', '.join(named) or 'none'}",
            )
    missing = [name for name, parameter in named.items() if parameter.default is parameter.empty and name not in inputs]
    if missing:
        raise ModelError(
            entry.name,
            "inputs",
            f"`inputs` leaves out {', '.join(f'`{name}`' for name in missing)}, which forward() of `{entry.model}` "
            "requires",
            hint="declare every parameter without a default, or give `inputs` as a callable",
        )
    sizes = pick_sizes(
        {name: (dim.min, dim.max) for name, dim in entry.dims.items()},
        [size for tensor in inputs.values() for size in tensor.shape if isinstance(size, int)],
    )
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    shapes: dict[str, Any] = {}
    positional = True
    for name in [*named, *(name for name in sorted(inputs) if name not in named)]:
        parameter = named.get(name)
        if name not in inputs:
            positional = False  # what follows a left-out default goes by keyword
            continue
        tensor = _example_tensor(inputs[name], sizes)
        if positional and parameter is not None and parameter.kind is not parameter.KEYWORD_ONLY:
            args.append(tensor)
        else:
            kwargs[name] = tensor
        named_sizes = {i: dims[size] for i, size in enumerate(inputs[name].shape) if isinstance(size, str)}
        if parameter is None:
            shapes.setdefault(next(p.name for p in parameters.values() if p.kind is p.VAR_KEYWORD), {})[name] = (
                named_sizes or None
            )
        else:
            shapes[name] = named_sizes or None
    return tuple(args), kwargs, shapes if entry.dims else None


def pick_sizes(dims: Mapping[str, tuple[int, int | None]], fixed: Sequence[int]) -> dict[str, int]:
    """Choose example sizes that an export does not specialise on.

    torch.export treats 0 and 1 as constants, and takes equal sizes for the same size; so every dim gets a size of its
    own, at least 2 and none of the `fixed` ones, as far as its range (inclusive, `None` for no upper bound) has any.
    """
    taken = set(fixed)
    sizes: dict[str, int] = {}
    # The narrowest range chooses first, since it has the fewest sizes to choose from.
    for name in sorted(dims, key=lambda name: ((dims[name][1] or 1 << 62) - dims[name][0], name)):
        low, high = dims[name]
        choices = _sizes_of(low, high)
        size = next((size for size in choices if size not in taken), None)
        sizes[name] = next(_sizes_of(low, high), low) if size is None else size
        taken.add(sizes[name])
    return sizes


def _sizes_of(low: int, high: int | None) -> Iterator[int]:
    """Yield the sizes of a range in the order of preference: from 8 upwards, then downwards; never 0 or 1."""
    top = low + 4096 if high is None else high
    start = min(max(low, 8), top)
    yield from range(start, min(top, start + 4096) + 1)
    yield from range(start - 1, max(low, 2) - 1, -1)


def _example_tensor(declared: TensorInput, sizes: Mapping[str, int]) -> torch.Tensor:
    import torch

    shape = [sizes[size] if isinstance(size, str) else size for size in declared.shape]
    dtype = getattr(torch, declared.dtype)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape).to(torch.bool)
    if dtype.is_floating_point or dtype.is_complex:
        wide = torch.complex64 if dtype.is_complex else torch.float32
        return torch.randn(shape, dtype=wide).to(dtype)
    return torch.randint(0, declared.high, shape).to(dtype)


def to_device(call: Any, device: str) -> Any:
    """Return `call`, a tree of arguments, with its tensors on `device` and without the graph that computed them."""
    import torch
    from torch.utils import _pytree

    # What was computed from parameters carries their graph, which can neither be copied nor exported.
    return _pytree.tree_map_only(
        torch.Tensor, lambda tensor: (tensor.detach() if tensor.grad_fn is not None else tensor).to(device), call
    )
