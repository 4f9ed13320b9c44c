"""The operators that a program calls, and those that there are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.export import ExportedProgram


__all__ = ["called_operators", "random_operators", "reading_operators", "registered_operators"]


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


def random_operators(program: torch.export.ExportedProgram) -> list[str]:
    """Return the names of the operators in a program that draw random numbers."""
    import torch

    found = set()
    for module in program.graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in module.graph.nodes:
                if (
                    isinstance(node.target, torch._ops.OpOverload)  # noqa: SLF001
                    and torch.Tag.nondeterministic_seeded in node.target.tags
                    and _draws(node)
                ):
                    found.add(str(node.target))
    return sorted(found)


def _draws(node: torch.fx.Node) -> bool:
    """Say whether an operator that can draw random numbers does so: dropout in eval mode is exported, too."""
    target: Any = node.target
    if "dropout" not in str(target) and "scaled_dot_product" not in str(target):
        return True
    given = dict(zip((argument.name for argument in target._schema.arguments), node.args, strict=False))  # noqa: SLF001
    given = {argument.name: argument.default_value for argument in target._schema.arguments} | given | node.kwargs  # noqa: SLF001
    trains = given.get("train", given.get("training", True))
    chance = given.get("p", given.get("dropout_p", 1.0))
    return trains is not False and chance != 0


def reading_operators(program: torch.export.ExportedProgram) -> list[str]:
    """Return the names of the operators in a program that hand out memory as it was left."""
    import torch

    names = {
        str(node.target)
        for module in program.graph_module.modules()
        if isinstance(module, torch.fx.GraphModule)
        for node in module.graph.nodes
        if node.op == "call_function"
    }
    return sorted(
        name for name in names if name.split(".")[1:2] and name.split(".")[1].startswith(("empty", "new_empty"))
    )
