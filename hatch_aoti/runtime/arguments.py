"""The arguments of a call, checked against the contract; each refusal names the argument and says what it must be."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NoReturn

from .contract import Constant, Group, Omitted, TensorInput

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from .contract import Node, Signature

__all__ = ["DEFAULT", "Default", "check_places", "check_sizes", "check_tensor", "described", "flatten"]


class Default:
    """Stands for a default that cannot be written down here (a tensor, an object): leave the argument out."""

    def __repr__(self) -> str:
        return "…"


DEFAULT = Default()


def flatten(name: str, node: Node, value: Any, flat: list[Any]) -> None:
    """Append the tensors in `value` to `flat`; refuse a structure or a constant other than `node`."""
    if isinstance(node, TensorInput):
        flat.append(value)
    elif isinstance(node, Constant):
        _check_constant(name, node, value)
    elif isinstance(node, Omitted):
        if value is not DEFAULT:
            _refuse_type(name, node.path, "must be left out: the model was compiled for its default", value)
    elif isinstance(node, Group):
        for item, part in zip(node.items, _parts(name, node, value), strict=True):
            flatten(name, item, part, flat)


def _parts(name: str, group: Group, value: Any) -> list[Any]:
    """Return the items of a container in the order of the contract."""
    path, keys, count = group.path, group.keys, len(group.items)
    match group.kind:
        case "tuple" | "list" | "*args":
            kind = list if group.kind == "list" else tuple
            if not isinstance(value, kind):
                _refuse_type(name, path, f"must be a {kind.__name__} of {count}", value)
            if len(value) != count:
                error = TypeError if group.kind == "*args" else ValueError
                raise error(f"{name}: {path} must have {count} item{'s' * (count != 1)}, got {len(value)}")
            return list(value)
        case "dict" | "OrderedDict" | "**kwargs":
            error = TypeError if group.kind == "**kwargs" else ValueError
            if not isinstance(value, dict):
                _refuse_type(name, path, f"must be a dict with the keys {_listed(keys)}", value)
            if missing := [key for key in keys if key not in value]:
                raise error(f"{name}: {path} lacks {_listed(missing)}; it must have {_listed(keys)}")
            if unknown := [key for key in value if key not in keys]:
                raise error(f"{name}: {path} has unknown {_listed(unknown)}; it must have {_listed(keys)}")
            return [value[key] for key in keys]
        case _:  # by its fields: the class may have been imported under another name
            class_name = group.type.rpartition(":")[2]
            fields = (
                value._fields
                if isinstance(value, tuple) and hasattr(value, "_fields")
                else tuple(field.name for field in dataclasses.fields(value) if field.init)
                if dataclasses.is_dataclass(value) and not isinstance(value, type)
                else keys
                if type(value).__qualname__ == class_name.rpartition(".")[2]
                else None
            )
            if fields != keys:
                _refuse_type(name, path, f"must be a {class_name}({', '.join(map(str, keys))})", value)
            return list(value) if isinstance(value, tuple) else [getattr(value, str(key)) for key in keys]


def _listed(keys: Sequence[Any]) -> str:
    return ", ".join(repr(key) for key in keys) or "none"


def _check_constant(name: str, constant: Constant, value: Any) -> None:
    want = constant.value
    if type(value) is not type(want):
        _refuse_type(name, constant.path, f"must be {want!r}, the value that the model was compiled for", value)
    both_nan = value != value and want != want  # noqa: PLR0124  (that is what nan does)
    if value != want and not both_nan:
        raise ValueError(
            f"{name}: {constant.path} must be {want!r}, the value that the model was compiled for, got {value!r}"
        )


def _refuse_type(name: str, path: str, text: str, value: Any) -> NoReturn:
    got = type(value).__name__
    if value is DEFAULT:
        got = "nothing: its default was not compiled in"
    elif value is None or isinstance(value, (bool, int, float, complex, str)):
        got = f"{value!r}" if value is None else f"the {got} {value!r}"
    raise TypeError(f"{name}: {path} {text}, got {got}")


def check_tensor(name: str, leaf: TensorInput, value: Any) -> None:
    """Refuse everything but an ordinary tensor of the right dtype and rank on the right device."""
    import torch

    path, needed = leaf.path, f"must be a tensor {leaf}"
    if not isinstance(value, torch.Tensor):
        hint = ""
        if type(value).__module__.partition(".")[0] == "numpy":
            hint = f" (convert it: torch.as_tensor({path}, dtype=torch.{leaf.dtype}))"
        elif isinstance(value, (bool, int, float, complex)):
            hint = f" (wrap it: torch.tensor({value!r}, dtype=torch.{leaf.dtype}))"
        _refuse_type(name, path, needed + hint, value)
    if type(value) not in {torch.Tensor, torch.nn.Parameter, torch.nn.Buffer}:
        _refuse_type(name, path, f"{needed}, not a subclass", value)
    if torch._C._functorch.is_functorch_wrapped_tensor(value) or torch._is_functional_tensor(value):  # noqa: SLF001
        raise TypeError(f"{name}: {path} {needed}, got one that a torch.func transform such as vmap has wrapped")
    if value._is_zerotensor():  # noqa: SLF001
        raise TypeError(f"{name}: {path} {needed}, got a zero tensor, which has no memory (pass torch.zeros instead)")
    if value.is_nested:
        raise TypeError(f"{name}: {path} {needed}, got a nested tensor")
    if value.layout is not torch.strided:
        kind = str(value.layout).removeprefix("torch.")
        raise TypeError(f"{name}: {path} {needed}, stored densely, got a {kind} tensor")
    if str(value.dtype) != f"torch.{leaf.dtype}":
        raise TypeError(f"{name}: {path} {needed}, got {described(value)} (convert it: {path}.to(torch.{leaf.dtype}))")
    if value.device.type != leaf.device:
        raise ValueError(f"{name}: {path} must be on {leaf.device}, got {described(value)} on {value.device}")
    if value.ndim != len(leaf.shape):
        raise ValueError(
            f"{name}: {path} {needed}, got {described(value)}: {_counted(value.ndim)} instead of {len(leaf.shape)}"
        )
    if _is_dual(value):
        raise TypeError(f"{name}: {path} {needed}, got a dual tensor: compiled code computes no tangents (forward AD)")


def _is_dual(value: torch.Tensor) -> bool:
    from torch.autograd import forward_ad

    if getattr(forward_ad, "_current_level", 0) < 0:  # no dual level, as nearly always
        return False
    return forward_ad.unpack_dual(value).tangent is not None  # type: ignore[no-untyped-call]


def check_places(name: str, leaves: Sequence[TensorInput], values: Sequence[torch.Tensor], index: int) -> None:
    """Refuse inputs on another GPU than number `index`, or, where that is -1, on different ones.

    PyTorch's loader does not look: kernels would be launched on the GPU that the model was loaded on.
    """
    first = ""
    for leaf, value in zip(leaves, values, strict=True):
        if leaf.device == "cpu":
            continue
        if index < 0:
            index, first = value.device.index, leaf.path
        elif value.device.index != index:
            why = f", since {first} is" if first else ""
            raise ValueError(
                f"{name}: {leaf.path} must be on {leaf.device}:{index}{why}, got {described(value)} on {value.device}"
            )


def described(value: torch.Tensor) -> str:
    """Return the dtype and shape of a tensor for people: `float32[2, 3]`."""
    return f"{str(value.dtype).removeprefix('torch.')}[{', '.join(map(str, value.shape))}]"


def _counted(rank: int) -> str:
    return f"{rank} dimension{'s' * (rank != 1)}"


def check_sizes(name: str, signature: Signature, values: Sequence[torch.Tensor]) -> None:
    """Refuse sizes that are not the compiled ones, out of range, or at odds with each other."""
    dims = {dim.name: dim for dim in signature.dims}
    sizes: dict[str, int] = {}
    origin: dict[str, str] = {}
    spots = [
        (size, got, place, leaf, value)
        for leaf, value in zip(signature.inputs, values, strict=True)
        for place, (size, got) in enumerate(zip(leaf.shape, value.shape, strict=True))
    ]

    def refuse(leaf: TensorInput, value: torch.Tensor, place: int, why: str) -> NoReturn:
        raise ValueError(
            f"{name}: {leaf.path} must be {leaf}, got {described(value)}: "
            f"dimension {place}{f' ({size})' if (size := leaf.shape[place]).terms else ''} {why}"
        )

    # Bare dims define their size for all others, so they come first; then expressions of one dim.
    spots.sort(key=lambda spot: (len(spot[0].terms), spot[0].terms[:1] and spot[0].terms[0][0], spot[0].plus != 0))
    for size, got, place, leaf, value in spots:
        unknown = [(factor, dim) for factor, dim in size.terms if dim not in sizes]
        if len(size.terms) == 1 and unknown:
            [(factor, dim)] = unknown
            solved, rest = divmod(got - size.plus, factor)
            low, high = dims[dim].min, dims[dim].max
            if rest:
                refuse(leaf, value, place, f"is {got}, which is not {size} for any {dim}")
            if solved < low or (high is not None and solved > high):
                refuse(leaf, value, place, f"is {got}, but {dim} must be {_ranged(low, high)}")
            sizes[dim], origin[dim] = solved, leaf.path
        elif got != (want := size.of(sizes)):
            known = ", ".join(f"{origin[dim]} has {dim} = {sizes[dim]}" for _, dim in size.terms)
            refuse(leaf, value, place, f"is {got}, must be {want}" + (f" because {known}" if known else ""))


def _ranged(low: int, high: int | None) -> str:
    return f"at least {low}" if high is None else f"from {low} to {high}"
