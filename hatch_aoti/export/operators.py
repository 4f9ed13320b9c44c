"""The operators that a program calls, and those that there are."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.export import ExportedProgram


__all__ = ["called_operators", "registered_operators"]


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
