"""Getting exported programs past AOTInductor's serialiser."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch.utils._pytree import TreeSpec

    from hatch_aoti.runtime.contract import Signature


__all__ = ["inductor_options", "make_serialisable", "plain_containers", "plain_spec"]


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
