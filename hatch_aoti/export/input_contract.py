"""What a program demands of its inputs, read from its placeholders and guards."""

from __future__ import annotations

import dataclasses
import inspect
from typing import TYPE_CHECKING, Any

from hatch_aoti.errors import UnsupportedModelError
from hatch_aoti.export.containers import SCALARS, container_of, leaves, named_items
from hatch_aoti.runtime.contract import Constant, Dim, Omitted, Parameter, Size, TensorInput

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import torch
    from torch.export import ExportedProgram

    from hatch_aoti.runtime.contract import Node

__all__ = ["InputContract", "dtype_name"]


_KINDS = {
    inspect.Parameter.POSITIONAL_ONLY: "positional",
    inspect.Parameter.POSITIONAL_OR_KEYWORD: "positional or keyword",
    inspect.Parameter.VAR_POSITIONAL: "*args",
    inspect.Parameter.KEYWORD_ONLY: "keyword",
    inspect.Parameter.VAR_KEYWORD: "**kwargs",
}


class InputContract:
    """The example inputs next to the placeholders that the export made of them."""

    def __init__(
        self,
        program: ExportedProgram,
        forward: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        dynamic_shapes: Any,
    ) -> None:
        self.program = program
        self.forward = inspect.signature(forward)
        self.bound = self.forward.bind(*args, **kwargs).arguments
        self.placeholders = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
        self.paths: dict[str, str] = {}  # placeholder name → path
        self.position: dict[str, int] = {}  # path → place among the tensors that compiled code takes
        self._match_placeholders(args, kwargs)
        self.names = self._name_dims(dynamic_shapes)

    def _match_placeholders(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Pair the leaves of (args, kwargs), in the order of the export, with the placeholders."""
        import torch
        from torch.export.graph_signature import ConstantArgument, InputKind, TensorArgument

        specs = [spec.arg for spec in self.program.graph_signature.input_specs if spec.kind == InputKind.USER_INPUT]
        leaves = list(self._flatten(args, kwargs))
        if len(specs) != len(leaves):
            raise UnsupportedModelError(
                f"the exported program takes {len(specs)} inputs where the example has {len(leaves)}"
            )
        self.leaf_placeholder: dict[str, str] = {}
        seen: dict[int, str] = {}
        for (path, leaf), spec in zip(leaves, specs, strict=True):
            if isinstance(leaf, torch.Tensor) and seen.setdefault(id(leaf), path) != path:
                raise UnsupportedModelError(
                    f"the example passes the same tensor for {seen[id(leaf)]} and {path}, and an export takes the two "
                    "for one: pass a clone() of it for one of them"
                )
            if isinstance(leaf, torch.Tensor) and isinstance(spec, TensorArgument):
                self.paths[spec.name] = path
                self.leaf_placeholder[path] = spec.name
                self.position[path] = len(self.position)
            elif not (isinstance(leaf, SCALARS) and isinstance(spec, ConstantArgument)):
                raise UnsupportedModelError(
                    f"the input {path} is a {type(leaf).__name__} that is not fixed at export; compiled code takes "
                    "only tensors: pass it as a 0-dimensional tensor, or leave it out of `dynamic-shapes`"
                )

    def _flatten(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """Yield (path, leaf) in the order in which the export flattened them: args, then kwargs as they were given."""
        positional = [
            parameter
            for parameter in self.forward.parameters.values()
            if parameter.kind not in {inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD}
        ]
        collected = 0
        for place, value in enumerate(args):
            parameter = positional[min(place, len(positional) - 1)]
            path = parameter.name
            if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
                path, collected = f"{path}[{collected}]", collected + 1
            yield from leaves(value, path)
        for key, value in kwargs.items():
            yield from leaves(value, self._keyword_path(key))

    def _keyword_path(self, key: str) -> str:
        if key in self.forward.parameters:
            return key
        collector = next(p.name for p in self.forward.parameters.values() if p.kind is inspect.Parameter.VAR_KEYWORD)
        return f"{collector}[{key!r}]"

    def parameter(self, parameter: inspect.Parameter, changed: frozenset[str]) -> Parameter:
        """Return the contract of one parameter of forward; `changed` are the placeholders that it writes to."""
        name, kind = parameter.name, _KINDS[parameter.kind]
        default: Constant | Omitted | None = None
        if parameter.default is not inspect.Parameter.empty:
            plain = type(parameter.default) in SCALARS
            default = Constant(parameter.default, name) if plain else Omitted(name)
        node: Node
        if kind in {"*args", "**kwargs"}:
            value = self.bound.get(name, () if kind == "*args" else {})
            node = dataclasses.replace(container_of(value, name, lambda v, p: self._node(v, p, changed)), kind=kind)
        elif name in self.bound:
            node = self._node(self.bound[name], name, changed)
        elif default is not None:
            node = default
        else:
            raise UnsupportedModelError(f"the example inputs lack the argument {name}")
        return Parameter(name, kind, node, default)

    def _node(self, value: Any, path: str, changed: frozenset[str]) -> Node:
        import torch

        if isinstance(value, torch.Tensor):
            placeholder = self.leaf_placeholder[path]
            fake = self.placeholders[placeholder].meta["val"]
            return TensorInput(
                path=path,
                dtype=dtype_name(value),
                shape=tuple(self._size(size, path) for size in fake.shape),
                order=_memory_order(value, path),
                device=value.device.type,  # which of several GPUs is for the caller to say
                changed=placeholder in changed,
            )
        if type(value) in SCALARS:
            return Constant(value, path)
        return container_of(value, path, lambda v, p: self._node(v, p, changed))

    def _size(self, size: Any, path: str) -> Size:
        terms, plus = _linear(size, path)
        return Size(tuple((factor, self.names[symbol]) for symbol, factor in terms), plus)

    def number(self, value: Any, path: str) -> Size:
        """Return the contract of an output that is a number: a size of an input, or a sum of multiples of them."""
        shapes = [self.placeholders[placeholder].meta["val"].shape for placeholder in self.paths]
        plain = {size.node.expr for shape in shapes for size in shape if not isinstance(size, int)}
        if not value.node.expr.free_symbols <= plain:
            raise UnsupportedModelError(
                f"{path} is a number that is computed from inputs; compiled code answers with tensors: return it as "
                "a tensor, or leave it to the caller"
            )
        return self._size(value, path)

    def text(self, size: Any) -> int | str:
        """Return the size of an output: an int, or an expression in the names of dims."""
        if isinstance(size, int):
            return size
        return str(size.node.expr.subs({symbol: type(symbol)(name) for symbol, name in self.names.items()}))

    def sized(self, value: Any, path: str, sizes: dict[str, int]) -> Any:
        """Return `value` with the shapes that its tensors have for the given sizes of dims, in their place."""
        import torch

        if isinstance(value, torch.Tensor):
            fake = self.placeholders[self.leaf_placeholder[path]].meta["val"]
            return _Sized(tuple(self._size(size, path).of(sizes) for size in fake.shape))
        if type(value) in SCALARS:
            return value
        parts = {key: self.sized(item, item_path, sizes) for key, item, item_path in named_items(value, path)}
        return parts if isinstance(value, dict) else list(parts.values())

    def dims(self) -> tuple[Dim, ...]:
        """Return the dims that inputs have, with the ranges that the export settled on."""
        from torch.utils._sympy.numbers import int_oo

        dims = []
        for symbol, name in self.names.items():
            bounds = self.program.range_constraints[symbol]
            unbounded = bounds.upper == int_oo or int(bounds.upper) >= 2**62
            dims.append(Dim(name, int(bounds.lower), None if unbounded else int(bounds.upper)))
        return tuple(dims)

    def _name_dims(self, dynamic_shapes: Any) -> dict[Any, str]:
        """Return the name of each symbol in the sizes of inputs: the user's, or one made from argument and place."""
        given = dict(self._given_names(dynamic_shapes))
        names: dict[Any, str] = {}
        for path, placeholder in self.leaf_placeholder.items():
            for place, size in enumerate(self.placeholders[placeholder].meta["val"].shape):
                for symbol, _ in _linear(size, path)[0]:
                    name = given.get((path, place)) or f"{path}_{place}"
                    if given.get((path, place)) or symbol not in names:
                        names[symbol] = name
        taken: set[str] = set()
        for symbol, name in names.items():
            unique, number = name, 2
            while unique in taken:
                unique, number = f"{name}_{number}", number + 1
            taken.add(unique)
            names[symbol] = unique
        return names

    def _given_names(self, dynamic_shapes: Any) -> Iterator[tuple[tuple[str, int], str]]:
        """Yield ((path, dimension), name of the dim that the user wrote there)."""
        if not dynamic_shapes or not isinstance(dynamic_shapes, (dict, tuple, list)):
            return
        names = dynamic_shapes if isinstance(dynamic_shapes, dict) else self.bound
        values = dynamic_shapes.values() if isinstance(dynamic_shapes, dict) else dynamic_shapes
        for name, spec in zip(names, values, strict=False):
            yield from _walk_shapes(self.bound.get(name), spec, name)


def _walk_shapes(value: Any, spec: Any, path: str) -> Iterator[tuple[tuple[str, int], str]]:
    """Follow a dynamic shapes spec and the value that it is for, down to the tensors."""
    import torch

    if spec is None or value is None:
        return
    if isinstance(value, torch.Tensor):
        sequence = spec if isinstance(spec, (tuple, list)) else ()
        entries = spec.items() if isinstance(spec, dict) else enumerate(sequence)
        for place, dim in entries:
            root = getattr(dim, "root", dim)  # a derived dim (`2*batch`) is named after the one it comes from
            name = root if isinstance(root, str) else getattr(root, "__name__", None)
            if name and not isinstance(root, int):
                yield (path, place % max(value.ndim, 1)), name
        return
    if not isinstance(spec, (dict, tuple, list)) or isinstance(value, SCALARS):
        return
    for key, item, item_path in named_items(value, path):
        if isinstance(spec, dict):
            yield from _walk_shapes(item, spec.get(key), item_path)
        elif len(spec) > (place := [k for k, _, _ in named_items(value, path)].index(key)):
            yield from _walk_shapes(item, spec[place], item_path)


def _linear(size: Any, path: str) -> tuple[tuple[tuple[Any, int], ...], int]:
    """Return ((symbol, factor), …) and what is added to them, for the size of one dimension of an input."""
    if isinstance(size, int):
        return (), size
    expression = size.node.expr
    terms, plus = [], 0
    for base, factor in expression.as_coefficients_dict().items():
        if base == 1:
            plus = int(factor)
        elif base.is_Symbol and factor == int(factor):
            terms.append((base, int(factor)))
        else:
            raise UnsupportedModelError(
                f"a dimension of {path} has the size {expression}; only sums of multiples of dims can be checked: "
                "declare its dims by name in `dynamic-shapes`"
            )
    return tuple(sorted(terms, key=lambda term: str(term[0]))), plus


def _memory_order(value: torch.Tensor, path: str) -> tuple[int, ...]:
    """Return the dimensions from the outermost to the innermost in memory; empty for row-major."""
    if value.is_contiguous():
        return ()
    order = tuple(sorted(range(value.ndim), key=value.stride().__getitem__, reverse=True))
    if not value.permute(order).is_contiguous():
        raise UnsupportedModelError(
            f"the example input {path} has elements that overlap or leave gaps in memory (shape {tuple(value.shape)}, "
            f"strides {value.stride()}), and code compiled for it would read every input that way: make the example "
            "with .contiguous()"
        )
    return order


def dtype_name(value: torch.Tensor) -> str:
    """Return a tensor's dtype by its name in a contract, as `float32`."""
    return str(value.dtype).removeprefix("torch.")


@dataclasses.dataclass(frozen=True)
class _Sized:
    """Stands for a tensor of which only the shape is known."""

    shape: tuple[int, ...]

    def size(self) -> tuple[int, ...]:
        return self.shape
