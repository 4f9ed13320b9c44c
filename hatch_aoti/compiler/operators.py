"""Operators that torch's compiler takes apart into something that answers differently for some values."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

__all__ = ["keep_semantics"]

_TO_THE_END = (1 << 63) - 1


def keep_semantics(module: torch.fx.GraphModule) -> None:
    """Rewrite operators of an exported program's module, in place, so that they compile to what eager computes.

    - `index_select`, `index_add` and `index_copy` refuse negative indices; compiled, they would count from the end
      (pytorch/pytorch#169779). They become an index that is out of range of every dimension.
    - `//` and `%` of floating point go by the remainder, as in c10/util/generic_math.h; compiled, they would round the
      quotient first: 1.0 // 0.1 is 9, not 10 (pytorch/pytorch#197895).
    - Offsets of bags that fall are refused; eager's operator, if it has one thread, reads beyond the indices.
    - An index that is computed from values is checked; compiled, `x[index]` would read whatever lies there.
    - A power of integers is an integer for a base that is a number, too.
    """
    import torch

    aten = torch.ops.aten
    rewrite: dict[Any, Callable[[Any, torch.fx.Node], Any]] = {
        aten.index_select.default: _with_checked_index,
        aten.index_add.default: _with_checked_index,
        aten.index_copy.default: _with_checked_index,
        aten.embedding_bag.default: _with_checked_offsets,
        aten.embedding_bag.padding_idx: _with_checked_offsets,
        aten.div.Tensor_mode: _floor_quotient,
        aten.div.Scalar_mode: _floor_quotient,
        aten.floor_divide.default: _floor_quotient,
        aten.remainder.Tensor: _remainder,
        aten.remainder.Scalar: _remainder,
        aten.pow.Scalar: _power,
        aten.select.int: _check_selection,
    }
    for graph_module in module.modules():
        if not isinstance(graph_module, torch.fx.GraphModule):
            continue
        graph = graph_module.graph
        for node in list(graph.nodes):
            if node.op == "call_function" and node.target in rewrite:
                with graph.inserting_before(node):
                    result = rewrite[node.target](graph.call_function, node)
                if result is not None:
                    node.replace_all_uses_with(result)
                    graph.erase_node(node)
        graph_module.recompile()


def _with_checked_index(call: Any, node: torch.fx.Node) -> None:
    import torch

    aten, index = torch.ops.aten, node.args[2]
    assert isinstance(index, torch.fx.Node)  # noqa: S101 - as the operators' schemas have it
    beyond = torch.iinfo(index.meta["val"].dtype).max // 2
    node.update_arg(2, call(aten.masked_fill.Scalar, (index, call(aten.lt.Scalar, (index, 0)), beyond)))


def _with_checked_offsets(call: Any, node: torch.fx.Node) -> None:
    """Let offsets that fall begin with one that the operator refuses: its first bag must begin at 0."""
    import torch

    aten, offsets = torch.ops.aten, node.args[2]
    assert isinstance(offsets, torch.fx.Node)  # noqa: S101 - as the operators' schemas have it
    beyond = torch.iinfo(offsets.meta["val"].dtype).max // 2
    before, after = (call(aten.slice.Tensor, (offsets, 0, *ends)) for ends in ((0, -1), (1, _TO_THE_END)))
    fall = call(aten.any.default, (call(aten.lt.Tensor, (after, before)),))
    node.update_arg(2, call(aten.masked_fill.Scalar, (offsets, fall, beyond)))


def _check_selection(call: Any, node: torch.fx.Node) -> None:
    import torch
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    x, dimension, index = node.args
    if not isinstance(index, torch.fx.Node) or not free_unbacked_symbols(index.meta["val"]):
        return
    aten = torch.ops.aten
    size = call(aten.sym_size.int, (x, dimension))
    for holds in (call(operator.lt, (index, size)), call(operator.ge, (index, call(operator.neg, (size,))))):
        call(aten._assert_scalar.default, (holds, "an index is out of range"))  # noqa: SLF001


def _floor_quotient(call: Any, node: torch.fx.Node) -> Any:
    import torch

    aten, dtype = torch.ops.aten, node.meta["val"].dtype
    if not dtype.is_floating_point or node.kwargs.get("rounding_mode", "floor") != "floor":
        return None
    a, b = _operands(call, node)
    quotient, rest = call(aten.div.Tensor, (a, b)), call(aten.fmod.Tensor, (a, b))
    # Vectors of remainders are not right where the quotient overflows.
    overflown = call(aten.logical_and, (call(aten.isinf, (quotient,)), call(aten.isfinite, (a,))))
    whole = call(aten.where.self, (overflown, a, call(aten.sub.Tensor, (a, rest))))
    whole = call(aten.div.Tensor, (whole, b))
    whole = call(aten.where.self, (_signs_differ(call, rest, b), call(aten.sub.Tensor, (whole, 1.0)), whole))
    floor = call(aten.floor, (whole,))
    above = call(aten.gt.Scalar, (call(aten.sub.Tensor, (whole, floor)), 0.5))
    floor = call(aten.where.self, (above, call(aten.add.Tensor, (floor, 1.0)), floor))
    zero = call(aten.copysign.Tensor, (call(aten.zeros_like, (quotient,)), quotient))
    floor = call(aten.where.self, (call(aten.eq.Scalar, (whole, 0.0)), zero, floor))
    floor = call(aten.where.self, (call(aten.eq.Scalar, (b, 0.0)), quotient, floor))
    return call(aten.to.dtype, (floor, dtype))


def _remainder(call: Any, node: torch.fx.Node) -> Any:
    import torch

    aten, dtype = torch.ops.aten, node.meta["val"].dtype
    if not dtype.is_floating_point:
        return None
    a, b = _operands(call, node)
    rest = call(aten.fmod.Tensor, (a, b))
    rest = call(aten.where.self, (_signs_differ(call, rest, b), call(aten.add.Tensor, (rest, b)), rest))
    return call(aten.to.dtype, (rest, dtype))


def _signs_differ(call: Any, rest: Any, divisor: Any) -> Any:
    """Say where a remainder is on the other side of zero than the divisor."""
    import torch

    aten = torch.ops.aten
    sides = call(aten.ne.Tensor, (call(aten.lt.Scalar, (rest, 0.0)), call(aten.lt.Scalar, (divisor, 0.0))))
    return call(aten.logical_and, (call(aten.ne.Scalar, (rest, 0.0)), sides))


def _operands(call: Any, node: torch.fx.Node) -> list[Any]:
    """Return both operands as tensors of the dtype that eager computes in."""
    import torch

    value = node.meta["val"]
    dtype = value.dtype if value.dtype is torch.float64 else torch.float32
    return [
        call(torch.ops.aten.to.dtype, (operand, dtype))
        if isinstance(operand, torch.fx.Node) and isinstance(operand.meta["val"], torch.Tensor)
        else call(torch.ops.aten.scalar_tensor, (operand,), {"dtype": dtype, "device": value.device})
        for operand in node.args[:2]
    ]


def _power(call: Any, node: torch.fx.Node) -> Any:
    import torch

    base, exponent = node.args
    if node.meta["val"].is_floating_point() or not isinstance(base, int):
        return None
    return call(torch.ops.aten.pow.Tensor_Tensor, (call(torch.ops.aten.full_like, (exponent, base)), exponent))
