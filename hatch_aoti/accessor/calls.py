"""A call of a compiled model: arguments are checked against the contract and laid out, results take eager's structure.

Compiled code reads memory as it was told at build time, whatever it is given: a tensor of another size, dtype or
layout gives wrong numbers without an error (pytorch/pytorch#141115, #153992, #130152). So nothing reaches it here
that the contract does not admit. A call pays for that once: `caller` prepares a short check which passes the ordinary
call; whatever that does not recognise goes through the full one, which lays tensors out or says what is wrong.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import importlib
import sys
from typing import TYPE_CHECKING, Any, NoReturn

from hatch_aoti.accessor.contract import (
    Constant,
    Group,
    Omitted,
    SameAsInput,
    Size,
    TensorInput,
    TensorOutput,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from hatch_aoti.accessor.contract import Node, Signature

__all__ = ["DEFAULT", "Default", "caller"]


class Default:
    """Stands for a default that cannot be written down here (a tensor, an object): leave the argument out."""

    def __repr__(self) -> str:
        return "…"


DEFAULT = Default()

_SEEN = 1024  # sizes of inputs that a model remembers to have passed


def caller(
    name: str,
    signature: Signature,
    run: Callable[[list[torch.Tensor]], Sequence[Any]],
    device_index: int = -1,
) -> Callable[..., Any]:
    """Return a function that takes one value for each parameter of `signature` and answers as eager forward would.

    `run` takes the input tensors as a list and returns the compiled results, one for each leaf of the output.
    `device_index` is the GPU that inputs for a GPU must be on; -1 admits any, as long as they are on the same.
    The function raises TypeError for a wrong type or container and ValueError for a wrong value, naming the argument,
    and what eager raises for values in tensors that cannot be computed with, naming the model.
    """
    import torch

    tensor, strided = torch.Tensor, torch.strided
    inputs = signature.inputs
    if signature.order:
        compiled, places = run, sorted(range(len(inputs)), key=signature.order.__getitem__)

        def run(flat: list[torch.Tensor]) -> Sequence[Any]:
            return compiled([flat[place] for place in places])

    nodes = tuple(parameter.node for parameter in signature.parameters)
    only_tensors = all(isinstance(node, TensorInput) for node in nodes)
    returns_inputs = any(isinstance(leaf, (SameAsInput, Size)) for leaf in signature.outputs)
    rebuild = _rebuilder(signature.output, inputs)
    full = functools.partial(_full_call, name, signature, device_index, run, rebuild)
    ordinary = _ordinary(signature)
    if ordinary is None:

        def call(*values: Any) -> Any:
            flat: list[Any] = []
            for node, value in zip(nodes, values, strict=True):
                _flatten(name, node, value, flat)
            return full(flat)

        return call

    checks, equal = ordinary
    output = signature.output
    plain, result = (True, output.index) if isinstance(output, TensorOutput) and not output.state else (False, 0)
    quickest = only_tensors and len(checks) == 1 and plain
    seen: set[Any] = set()  # sizes that passed before

    def sizes_fit(flat: list[Any], shapes: list[Any]) -> bool:
        for shape, (_, bounds) in zip(shapes, checks, strict=True):
            if len(shape) != len(bounds):
                return False
            for size, (low, high) in zip(shape, bounds, strict=True):
                if size < low or size > high:
                    return False
        for one, dimension, other, its_dimension in equal:
            if flat[one].shape[dimension] != flat[other].shape[its_dimension]:
                return False
        if len(seen) < _SEEN:
            seen.add(shapes[0] if quickest else tuple(shapes))
        return True

    if quickest:
        [(dtype, _)] = checks

        # One tensor in, one out. The same conditions as below: sharing them would cost a call.
        def quickest_call(x: Any) -> Any:
            if (
                type(x) is not tensor
                or x.dtype is not dtype
                or x.layout is not strided
                or not x.is_cpu
                or not x.is_contiguous()
                or x.requires_grad
                or x.is_neg()
                or ((shape := x.shape) not in seen and not sizes_fit([x], [shape]))
            ):
                return full([x])
            try:
                return run([x])[result]
            except RuntimeError as error:
                raise _as_eager(name, error) from None

        return quickest_call

    def quick_call(*values: Any) -> Any:
        if only_tensors:
            flat = list(values)
        else:
            flat = []
            for node, value in zip(nodes, values, strict=True):
                _flatten(name, node, value, flat)
        shapes = []
        for x, (dtype, _) in zip(flat, checks):  # noqa: B905  (strict costs time; lengths are equal)
            if (
                type(x) is not tensor
                or x.dtype is not dtype
                or x.layout is not strided
                or not x.is_cpu
                or not x.is_contiguous()
                or x.requires_grad
                or x.is_neg()
            ):
                return full(flat)
            shapes.append(x.shape)
        if tuple(shapes) not in seen and not sizes_fit(flat, shapes):
            return full(flat)
        given = flat.copy() if returns_inputs else ()  # `run` empties its list
        try:
            results = run(flat)
        except RuntimeError as error:
            raise _as_eager(name, error) from None
        return results[result] if plain else rebuild(results, given)

    return quick_call


def _ordinary(
    signature: Signature,
) -> tuple[tuple[tuple[Any, tuple[tuple[int, int], ...]], ...], tuple[tuple[int, int, int, int], ...]] | None:
    """Return what an ordinary call satisfies, or None if each call of this model needs the full check.

    First (dtype, smallest and largest size of each dimension) of each input; then the sizes that must be equal,
    as (input, dimension, input, dimension). The full check is for models with an input that forward changes, that is
    complex (it may be a lazy conjugate), lives on another device or in another layout than row-major, or whose size is
    an expression.
    """
    import torch

    ranges = {dim.name: (dim.min, sys.maxsize if dim.max is None else dim.max) for dim in signature.dims}
    first: dict[str, tuple[int, int]] = {}
    checks, equal = [], []
    for place, leaf in enumerate(signature.inputs):
        dtype = getattr(torch, leaf.dtype)
        if leaf.changed or dtype.is_complex or leaf.device != "cpu" or leaf.order:
            return None
        bounds = []
        for dimension, size in enumerate(leaf.shape):
            match size.terms:
                case ():
                    bounds.append((size.plus, size.plus))
                case ((1, dim),) if size.plus == 0:
                    bounds.append(ranges[dim])
                    if dim in first:
                        equal.append((place, dimension, *first[dim]))
                    first.setdefault(dim, (place, dimension))
                case _:
                    return None
        checks.append((dtype, tuple(bounds)))
    return tuple(checks), tuple(equal)


def _full_call(
    name: str,
    signature: Signature,
    device_index: int,
    run: Callable[[list[torch.Tensor]], Sequence[Any]],
    rebuild: Callable[[Sequence[Any], Sequence[Any]], Any],
    given: list[Any],
) -> Any:
    """Check every tensor, lay it out as the compiled code reads it, run, write back what forward changed."""
    import torch

    leaves = signature.inputs
    for leaf, value in zip(leaves, given, strict=True):
        _check_tensor(name, leaf, value)
    _check_places(name, leaves, given, device_index)
    _check_sizes(name, signature, given)
    _check_memory(name, leaves, given)
    with torch.no_grad():
        laid_out = [_lay_out(leaf, value) for leaf, value in zip(leaves, given, strict=True)]
        try:
            results = run(laid_out.copy())
        except RuntimeError as error:
            raise _as_eager(name, error) from None
        for leaf, value, used in zip(leaves, given, laid_out, strict=True):
            if leaf.changed and used.data_ptr() != value.data_ptr():
                value.copy_(used)
        return rebuild(results, given)


def _as_eager(name: str, error: RuntimeError) -> Exception:
    """Return what eager would raise where compiled code stops: an index out of range, a division by zero.

    Its text begins with the type, where that is not RuntimeError.
    """
    if type(error) is not RuntimeError:  # not from compiled code
        return error
    text = str(error).partition("\n")[0]
    kind: type[Exception] = RuntimeError
    for other in (IndexError, RuntimeError):
        if text.startswith(f"{other.__name__}: "):
            text, kind = text.removeprefix(f"{other.__name__}: "), other
    return kind(f"{name}: {text}")


# --- Arguments ---


def _flatten(name: str, node: Node, value: Any, flat: list[Any]) -> None:
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
            _flatten(name, item, part, flat)


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


def _check_tensor(name: str, leaf: TensorInput, value: Any) -> None:
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
    if torch._C._functorch.is_functorch_wrapped_tensor(value):  # noqa: SLF001
        raise TypeError(f"{name}: {path} {needed}; compiled code does not run under torch.func transforms such as vmap")
    if value.layout is not torch.strided:
        kind = str(value.layout).removeprefix("torch.")
        raise TypeError(f"{name}: {path} {needed}, stored densely, got a {kind} tensor")
    if str(value.dtype) != f"torch.{leaf.dtype}":
        raise TypeError(f"{name}: {path} {needed}, got {_described(value)} (convert it: {path}.to(torch.{leaf.dtype}))")
    if value.device.type != leaf.device:
        raise ValueError(f"{name}: {path} must be on {leaf.device}, got {_described(value)} on {value.device}")
    if value.ndim != len(leaf.shape):
        raise ValueError(
            f"{name}: {path} {needed}, got {_described(value)}: {_counted(value.ndim)} instead of {len(leaf.shape)}"
        )


def _check_places(name: str, leaves: Sequence[TensorInput], values: Sequence[torch.Tensor], index: int) -> None:
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
                f"{name}: {leaf.path} must be on {leaf.device}:{index}{why}, got {_described(value)} on {value.device}"
            )


def _described(value: torch.Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')}[{', '.join(map(str, value.shape))}]"


def _counted(rank: int) -> str:
    return f"{rank} dimension{'s' * (rank != 1)}"


def _check_sizes(name: str, signature: Signature, values: Sequence[torch.Tensor]) -> None:
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
            f"{name}: {leaf.path} must be {leaf}, got {_described(value)}: "
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


def _check_memory(name: str, leaves: Sequence[TensorInput], values: Sequence[torch.Tensor]) -> None:
    """Refuse shared memory where forward writes: compiled code assumes that each input has its own."""
    import torch

    for leaf, value in zip(leaves, values, strict=True):
        if not leaf.changed:
            continue
        if torch._debug_has_internal_overlap(value) == 1:  # noqa: SLF001  (what in-place operators ask)
            raise ValueError(
                f"{name}: {leaf.path} is changed in place, but its elements share memory (an expanded view): "
                f"pass {leaf.path}.clone()"
            )
        for other, another in zip(leaves, values, strict=True):
            if other is not leaf and _overlap(value, another):
                raise ValueError(
                    f"{name}: {leaf.path} is changed in place, but shares memory with {other.path}: "
                    f"pass {other.path}.clone()"
                )


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    (a_start, a_end), (b_start, b_end) = (_span(x) for x in (a, b))
    return a_start < b_end and b_start < a_end


def _span(x: torch.Tensor) -> tuple[int, int]:
    """Return the addresses of the first byte that `x` uses and of the one after the last."""
    if x.numel() == 0:
        return 0, 0
    reach = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (reach + 1) * x.element_size()


def _lay_out(leaf: TensorInput, value: torch.Tensor) -> torch.Tensor:
    """Return `value` as the compiled code reads it: no graph, no lazy conjugate or sign, dimensions in order."""
    plain = value.detach().resolve_conj().resolve_neg()
    if not leaf.order:
        plain = plain.contiguous()
    else:
        back = sorted(range(len(leaf.order)), key=leaf.order.__getitem__)
        plain = plain.permute(leaf.order).contiguous().permute(back)
    # Kernels for GPUs read 16 bytes at a time; a view can start anywhere.
    return plain.clone() if plain.device.type != "cpu" and plain.data_ptr() % 16 else plain


# --- Results ---


def _rebuilder(node: Node, inputs: Sequence[TensorInput]) -> Callable[[Sequence[Any], Sequence[Any]], Any]:
    """Return a function of (compiled results, the input tensors as given) that answers in eager's structure."""
    if isinstance(node, TensorOutput):
        index = node.index
        if node.state:  # the result is the model's own memory: it would change under the caller, and go with the model
            return lambda results, _given: results[index].clone()
        return lambda results, _given: results[index]
    if isinstance(node, SameAsInput):
        place = next(place for place, leaf in enumerate(inputs) if leaf.path == node.path)
        return lambda _results, given: given[place]
    if isinstance(node, Constant):
        value = node.value
        return lambda _results, _given: value
    if isinstance(node, Size):
        spots = {
            leaf_size.terms: (place, dimension)
            for place, leaf in enumerate(inputs)
            for dimension, leaf_size in enumerate(leaf.shape)
            if leaf_size.plus == 0
        }
        terms, plus = [(factor, *spots[((1, dim),)]) for factor, dim in node.terms], node.plus
        return lambda _results, given: plus + sum(factor * given[place].shape[at] for factor, place, at in terms)
    if isinstance(node, Omitted | TensorInput):
        raise TypeError(f"a {type(node).__name__} is no result")
    parts = [_rebuilder(item, inputs) for item in node.items]
    keys = node.keys
    match node.kind:
        case "tuple":
            return lambda results, given: tuple([part(results, given) for part in parts])
        case "list":
            return lambda results, given: [part(results, given) for part in parts]
        case "dict":
            return lambda results, given: {key: part(results, given) for key, part in zip(keys, parts)}  # noqa: B905
        case "OrderedDict":
            return lambda results, given: collections.OrderedDict(
                (key, part(results, given)) for key, part in zip(keys, parts, strict=True)
            )
        case "structseq":
            cls = _class_of(node)
            return lambda results, given: cls([part(results, given) for part in parts])
        case _:
            cls = _class_of(node)
            return lambda results, given: cls(
                **{str(key): part(results, given) for key, part in zip(keys, parts, strict=True)}
            )


def _class_of(group: Group) -> Callable[..., Any]:
    """Return the class of a result: the model's own where its module can be imported, else an equal one."""
    module, _, qualname = group.type.partition(":")
    found: Any
    try:
        found = functools.reduce(getattr, qualname.split("."), importlib.import_module(module))
    except Exception:  # noqa: BLE001  (the wheel need not carry the model's source, nor what that imports)
        fields = [str(key) for key in group.keys]
        name = qualname.rpartition(".")[2]
        make: Any = dataclasses.make_dataclass if group.kind == "dataclass" else collections.namedtuple
        found = make(name, fields)
    return found  # type: ignore[no-any-return]  # whatever stands there is what eager returned
