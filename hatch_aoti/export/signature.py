"""Reading a model's calling contract from its exported program, and getting programs past AOTInductor's serialiser.

`read_signature` answers with the values of `hatch_aoti.runtime.contract`, which the generated accessor checks calls
against. What a program does that no contract can say is refused here, by name: `UnsupportedModelError`.

Facts about torch are from torch 2.13: `torch/export/graph_signature.py`, `torch/_inductor/compile_fx.py`
(`_aoti_flatten_inputs`), `torch/_inductor/fx_passes/joint_graph.py` (`constant_fold_uniform_value`).
"""

from __future__ import annotations

import dataclasses
import operator
import random
import re
import warnings
from typing import TYPE_CHECKING, Any

from hatch_aoti.errors import UnsupportedModelError
from hatch_aoti.export.containers import SCALARS, container_of, leaves
from hatch_aoti.export.input_contract import InputContract, dtype_name
from hatch_aoti.runtime.contract import Constant, SameAsInput, Signature, TensorOutput

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch
    from torch.export import ExportedProgram

    from hatch_aoti.runtime.contract import Node

__all__ = ["read_signature"]


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
    inputs = InputContract(program, forward, args, kwargs, dynamic_shapes)
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


def _check_guards(program: ExportedProgram, inputs: InputContract) -> None:
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


# --- Containers ---


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


def _read_output(program: ExportedProgram, inputs: InputContract, output: Any) -> Node:
    from torch.export.graph_signature import ConstantArgument, OutputKind, TensorArgument

    specs = [spec.arg for spec in program.graph_signature.output_specs if spec.kind == OutputKind.USER_OUTPUT]
    nodes = {node.name: node for node in program.graph.nodes}
    memory = _memory_names(program)
    positions = {path: place for place, (path, _) in enumerate(leaves(output, "output"))}
    if len(positions) != len(specs):
        raise UnsupportedModelError(
            f"eager answers with {len(positions)} values, the exported program with {len(specs)}: forward() must "
            "return the same structure each time"
        )

    def leaf(value: Any, path: str) -> Node:
        import torch

        if not (isinstance(value, torch.Tensor) or type(value) in SCALARS):
            return dataclasses.replace(container_of(value, path, leaf), path="")
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
            index, dtype_name(fake), tuple(inputs.text(size) for size in fake.shape), memory.get(origin.name, "")
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
