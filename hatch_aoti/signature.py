"""Reading a model's calling contract from its exported program, and getting programs past AOTInductor's serialiser.

`read_signature` answers with the values of `hatch_aoti.accessor.contract`, which the generated accessor checks calls
against. What a program does that no contract can say is refused here, by name: `UnsupportedModelError`.

Facts about torch are from torch 2.13: `torch/export/graph_signature.py`, `torch/_inductor/compile_fx.py`
(`_aoti_flatten_inputs`), `torch/_inductor/fx_passes/joint_graph.py` (`constant_fold_uniform_value`).
"""

from __future__ import annotations

import collections
import dataclasses
import inspect
import operator
import random
import re
import warnings
from typing import TYPE_CHECKING, Any

from hatch_aoti.accessor.contract import (
    Constant,
    Dim,
    Group,
    Omitted,
    Parameter,
    SameAsInput,
    Signature,
    Size,
    TensorInput,
    TensorOutput,
)
from hatch_aoti.errors import AotiError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import torch
    from torch.export import ExportedProgram
    from torch.utils._pytree import TreeSpec

    from hatch_aoti.accessor.contract import Node

__all__ = [
    "Signature",
    "UnsupportedModelError",
    "called_operators",
    "inductor_options",
    "make_serialisable",
    "plain_containers",
    "plain_spec",
    "read_signature",
    "register_output_types",
    "registered_operators",
]

_SCALARS = (bool, int, float, complex, str, type(None))
_KINDS = {
    inspect.Parameter.POSITIONAL_ONLY: "positional",
    inspect.Parameter.POSITIONAL_OR_KEYWORD: "positional or keyword",
    inspect.Parameter.VAR_POSITIONAL: "*args",
    inspect.Parameter.KEYWORD_ONLY: "keyword",
    inspect.Parameter.VAR_KEYWORD: "**kwargs",
}


class UnsupportedModelError(AotiError):
    """The program does something for which a compiled call cannot keep eager's behaviour; the text names it."""


def read_signature(
    program: ExportedProgram,
    *,
    forward: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    output: Any,
    dynamic_shapes: Any = None,
) -> Signature:
    """Return the calling contract of `program`.

    `forward` is the eager module's bound method; `args` and `kwargs` are the example inputs of the export; `output` is
    what eager answered to them; `dynamic_shapes` is what the export was given, from which the dims get their names.
    Raises `UnsupportedModelError` for what compiled code cannot be called with or answer with: dynamic integers, types
    of containers that are not known, inputs whose elements overlap or leave gaps in memory.
    """
    inputs = _Inputs(program, forward, args, kwargs, dynamic_shapes)
    _check_guards(program, inputs)
    state, changed = _mutations(program)
    parameters = tuple(inputs.parameter(parameter, changed) for parameter in inputs.forward.parameters.values())
    signature = Signature(
        parameters=parameters,
        output=_read_output(program, inputs, output),
        dims=inputs.dims(),
        state=state,
    )
    order = tuple(inputs.position[leaf.path] for leaf in signature.inputs)
    return dataclasses.replace(signature, order=() if order == tuple(range(len(order))) else order)


# --- Inputs ---


class _Inputs:
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
            elif not (isinstance(leaf, _SCALARS) and isinstance(spec, ConstantArgument)):
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
            yield from _leaves(value, path)
        for key, value in kwargs.items():
            yield from _leaves(value, self._keyword_path(key))

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
            plain = type(parameter.default) in _SCALARS
            default = Constant(parameter.default, name) if plain else Omitted(name)
        node: Node
        if kind in {"*args", "**kwargs"}:
            value = self.bound.get(name, () if kind == "*args" else {})
            node = dataclasses.replace(_group(value, name, lambda v, p: self._node(v, p, changed)), kind=kind)
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
                dtype=_dtype(value),
                shape=tuple(self._size(size, path) for size in fake.shape),
                order=_memory_order(value, path),
                device=value.device.type,  # which of several GPUs is for the caller to say
                changed=placeholder in changed,
            )
        if type(value) in _SCALARS:
            return Constant(value, path)
        return _group(value, path, lambda v, p: self._node(v, p, changed))

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
        if type(value) in _SCALARS:
            return value
        parts = {key: self.sized(item, item_path, sizes) for key, item, item_path in _items(value, path)}
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
    if not isinstance(spec, (dict, tuple, list)) or isinstance(value, _SCALARS):
        return
    for key, item, item_path in _items(value, path):
        if isinstance(spec, dict):
            yield from _walk_shapes(item, spec.get(key), item_path)
        elif len(spec) > (place := [k for k, _, _ in _items(value, path)].index(key)):
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


def _dtype(value: torch.Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")


def _check_guards(program: ExportedProgram, inputs: _Inputs) -> None:
    """Refuse a program that holds for fewer sizes than ranges and equations say, such as even ones only.

    `_guards_code` are the conditions that the export relied on, as Python about `L`, the arguments by name. Each is
    tried at both ends of the ranges and at random sizes between them.
    """
    chance = random.Random(0)  # noqa: S311
    dims = inputs.dims()
    low = {dim.name: dim.min for dim in dims}
    high = {dim.name: dim.min + 64 if dim.max is None else dim.max for dim in dims}
    points = [low, high, *({name: chance.randint(low[name], high[name]) for name in low} for _ in range(30))]
    for sizes in points if dims else []:
        known = {"L": {name: inputs.sized(value, name, sizes) for name, value in inputs.bound.items()}}
        for guard in program._guards_code:  # noqa: SLF001
            try:
                holds = eval(guard, {}, known)  # noqa: S307  (torch's own text)
            except Exception:  # noqa: BLE001, S112  (about something other than sizes, which the contract fixes anyway)
                continue
            if not holds:
                condition = re.sub(r"L\['(\w+)'\]", r"\1", guard)
                counterexample = ", ".join(f"{name} = {size}" for name, size in sizes.items())
                raise UnsupportedModelError(
                    f"the exported program is right only where {condition}, so not for {counterexample}: write that "
                    'dim as an expression (such as `2*torch.export.Dim("half")`), or change forward()'
                )


@dataclasses.dataclass(frozen=True)
class _Sized:
    """Stands for a tensor of which only the shape is known."""

    shape: tuple[int, ...]

    def size(self) -> tuple[int, ...]:
        return self.shape


# --- Containers ---


def _type_name(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def _container(value: Any) -> tuple[str, tuple[Any, ...] | None]:
    """Return the kind of a container (as in `Group.kind`) and its keys or fields; ("", None) if it is none known."""
    import torch
    from torch.utils import _pytree

    cls = type(value)
    if cls in {tuple, list}:
        return cls.__name__, ()
    if cls in {dict, collections.OrderedDict}:
        return cls.__name__, tuple(value)
    if isinstance(value, tuple) and cls.__module__ == torch.return_types.__name__:
        return "structseq", tuple(cls.__match_args__)
    if isinstance(value, tuple) and hasattr(cls, "_fields"):
        return "namedtuple", tuple(cls._fields)
    if dataclasses.is_dataclass(cls) and cls in _pytree.SUPPORTED_NODES:
        # By the registration, not by the fields: a model output of transformers drops those that are None.
        _, context = _pytree.SUPPORTED_NODES[cls].flatten_fn(value)
        if isinstance(context, (list, tuple)) and context and isinstance(context[0], (list, tuple)):
            return "dataclass", tuple(context[0])
        if isinstance(context, (list, tuple)) and all(isinstance(key, str) for key in context):
            return "dataclass", tuple(context)
    return "", None


def _items(value: Any, path: str) -> Iterator[tuple[Any, Any, str]]:
    """Yield (key or field or place, item, path) of a container, in pytree's order."""
    kind, keys = _container(value)
    if keys is None:
        raise UnsupportedModelError(
            f"{path} is a {type(value).__module__}.{type(value).__qualname__}; compiled models take and give tensors, "
            "None, numbers and strings, in tuples, lists, dicts, named tuples and dataclasses"
        )
    if kind in {"tuple", "list"}:
        for place, item in enumerate(value):
            yield place, item, f"{path}[{place}]"
    elif kind in {"dict", "OrderedDict"}:
        for key in keys:
            if type(key) not in _SCALARS:
                raise UnsupportedModelError(
                    f"{path} has the key {key!r}, a {type(key).__name__}; only strings and numbers can be keys"
                )
            yield key, value[key], f"{path}[{key!r}]"
    else:
        for key in keys:
            yield key, getattr(value, key), f"{path}.{key}"


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    import torch

    if isinstance(value, torch.Tensor) or type(value) in _SCALARS:
        yield path, value
        return
    for _, item, item_path in _items(value, path):
        yield from _leaves(item, item_path)


def _group(value: Any, path: str, node: Callable[[Any, str], Node]) -> Group:
    """Return the contract of a container; `node` gives that of an item."""
    items = list(_items(value, path))
    kind, keys = _container(value)
    named = kind in {"namedtuple", "dataclass", "structseq"}
    return Group(
        kind=kind,
        items=tuple(node(item, item_path) for _, item, item_path in items),
        keys=tuple(keys or ()),
        type=_type_name(type(value)) if named else "",
        path=path,
    )


def register_output_types(output: Any) -> None:
    """Register the dataclasses in `output` with pytree, so that an export can return them (pytorch/pytorch#140615).

    `output` is what eager answered; the same works for inputs. Other containers and known types are left alone.
    """
    import torch
    from torch.utils import _pytree

    items: Sequence[Any]
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        cls = type(output)
        if cls not in _pytree.SUPPORTED_NODES:
            torch.export.register_dataclass(cls, serialized_type_name=_type_name(cls))
        items = [getattr(output, field.name) for field in dataclasses.fields(output)]
    else:
        items = (
            list(output.values()) if isinstance(output, dict) else output if isinstance(output, (tuple, list)) else []
        )
    for item in items:
        register_output_types(item)


# --- Outputs and state ---


def _mutations(program: ExportedProgram) -> tuple[tuple[str, ...], frozenset[str]]:
    """Return the names of the buffers, and the placeholders of the inputs, that the program writes to.

    An exported program keeps in-place operators as they are; its functional form says what they amount to.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch copies a class of its own that it deprecates
        found = program.run_decompositions({}).graph_signature
    state = {**found.buffers_to_mutate, **getattr(found, "parameters_to_mutate", {})}
    return tuple(dict.fromkeys(state.values())), frozenset(found.user_inputs_to_mutate.values())


def _read_output(program: ExportedProgram, inputs: _Inputs, output: Any) -> Node:
    from torch.export.graph_signature import ConstantArgument, OutputKind, TensorArgument

    specs = [spec.arg for spec in program.graph_signature.output_specs if spec.kind == OutputKind.USER_OUTPUT]
    nodes = {node.name: node for node in program.graph.nodes}
    memory = _memory_names(program)
    positions = {path: place for place, (path, _) in enumerate(_leaves(output, "output"))}
    if len(positions) != len(specs):
        raise UnsupportedModelError(
            f"eager answers with {len(positions)} values, the exported program with {len(specs)}: forward() must "
            "return the same structure each time"
        )

    def leaf(value: Any, path: str) -> Node:
        import torch

        if not (isinstance(value, torch.Tensor) or type(value) in _SCALARS):
            return dataclasses.replace(_group(value, path, leaf), path="")
        index = positions[path]
        spec = specs[index]
        if isinstance(spec, ConstantArgument):
            return Constant(spec.value)
        if not isinstance(spec, TensorArgument):
            return inputs.number(nodes[spec.name].meta["val"], path)
        origin, same = _origin(nodes[spec.name])
        if same and origin.name in inputs.paths:
            return SameAsInput(inputs.paths[origin.name])
        fake = nodes[spec.name].meta["val"]
        return TensorOutput(
            index, _dtype(fake), tuple(inputs.text(size) for size in fake.shape), memory.get(origin.name, "")
        )

    return leaf(output, "output")


def _memory_names(program: ExportedProgram) -> dict[str, str]:
    """Return the placeholders that stand for the module's own tensors, with the names of these."""
    from torch.export.graph_signature import InputKind

    own = {InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR}
    return {
        spec.arg.name: spec.target or spec.arg.name for spec in program.graph_signature.input_specs if spec.kind in own
    }


def _origin(node: torch.fx.Node) -> tuple[torch.fx.Node, bool]:
    """Follow views and in-place operators back; return the node whose memory it is, and whether it is the same tensor.

    Operator schemas say so: `mul_(Tensor(a!) self) -> Tensor(a!)` returns its argument, `t(Tensor(a) self) ->
    Tensor(a)` a view of it.
    """
    same = True
    while node.op == "call_function":
        if node.target is operator.getitem:  # one of several views
            source, same = node.args[0], False
        else:
            schema = getattr(node.target, "_schema", None)
            alias = schema.returns[0].alias_info if schema is not None and schema.returns else None
            if schema is None or alias is None:
                break
            place, argument = next(
                (place, argument)
                for place, argument in enumerate(schema.arguments)
                if argument.alias_info is not None
                # A list of views has no names of its own: `unbind(Tensor(a -> *) self) -> Tensor(a)[]`.
                and (argument.alias_info.before_set & alias.before_set or "*" in argument.alias_info.after_set)
            )
            same = same and alias.is_write
            source = node.args[place] if place < len(node.args) else node.kwargs[argument.name]
        if not isinstance(source, type(node)):
            break
        node = source
    return node, same


# --- Compiling ---


def make_serialisable(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Let AOTInductor compile `module`, an exported program's, whatever containers it takes and gives; return it.

    AOTInductor writes the trees of inputs and outputs into the compiled object, and fails for those it has no name for:
    named tuples, `torch.return_types` (pytorch/pytorch#197104), dataclasses. They become tuples; the accessor restores
    them. Results that are no tensors become None, which it can return, unlike strings. Changes `module`. The example
    inputs must go through `plain_containers`.
    """
    output = module.graph.output_node()
    results: Any = output.args[0]
    output.args = (tuple(_tensor_or_none(leaf) for leaf in results),)
    module.recompile()
    code: Any = module.graph._codegen  # noqa: SLF001  (where `torch._inductor.compile_fx` reads them)
    info = code.pytree_info
    code.pytree_info = info._replace(in_spec=plain_spec(info.in_spec), out_spec=plain_spec(info.out_spec))
    return module


def _tensor_or_none(leaf: Any) -> Any:
    import torch

    is_tensor = isinstance(leaf, torch.fx.Node) and isinstance(leaf.meta.get("val"), torch.Tensor)
    return leaf if is_tensor else None


def plain_containers(tree: Any) -> Any:
    """Return `tree` with tuples in place of the containers that `make_serialisable` replaces."""
    from torch.utils import _pytree

    leaves, spec = _pytree.tree_flatten(tree)
    return _pytree.tree_unflatten(leaves, plain_spec(spec))


def called_operators(program: ExportedProgram) -> frozenset[str]:
    """Return the names (`namespace::name`, with the overload) of all operators that a program calls."""
    import torch

    return frozenset(
        str(node.target.name())  # type: ignore[no-untyped-call]
        for module in program.graph_module.modules()
        if isinstance(module, torch.fx.GraphModule)
        for node in module.graph.nodes
        if isinstance(node.target, torch._ops.OpOverload)  # noqa: SLF001
    )


def registered_operators() -> list[str]:
    """Return the names of all operators that this process knows at the moment, in the form of `called_operators`."""
    import torch

    names: list[str] = torch._C._dispatch_get_all_op_names()  # noqa: SLF001
    return names


def plain_spec(spec: TreeSpec) -> TreeSpec:
    """Return `spec` with tuples in place of containers that AOTInductor and `torch.export.save` have no name for."""
    from torch.utils import _pytree

    if spec.is_leaf():
        return spec
    children = [plain_spec(child) for child in spec.children()]
    if spec.type in {tuple, list, dict}:
        return _pytree.TreeSpec(spec.type, spec.context, children)
    return _pytree.TreeSpec(tuple, None, children)


def inductor_options(signature: Signature) -> dict[str, bool]:
    """Return the inductor options without which the compiled code does not do what eager does.

    For a model with state: constant folding takes a buffer for a constant, so `count.add_(1)` always gives 1
    (pytorch/pytorch#165444, #169118, #120424). Freezing folds in the same way.

    For a dimension that may be 0 or 1: `torch.export` takes its lower bound for 2, and with
    `AOTI_RUNTIME_CHECK_INPUTS=1` the compiled code would refuse what it computes correctly.
    """
    state = {"joint_graph_constant_folding": False, "freezing": False} if signature.state else {}
    small = {"aot_inductor.check_lowerbound": False} if any(dim.min < 2 for dim in signature.dims) else {}
    return {**state, **small}
