"""Names of operators in the generated code: the same in every process."""

from __future__ import annotations

from typing import Any

__all__ = ["operator_names"]


def operator_names() -> list[tuple[Any, str, Any]]:
    """Return replacements that name an operator in the code's own checks (`assert_size_stride`) by what it is.

    torch prints the target of the graph's node. For what its pattern matcher fused in a frozen model (a linear layer
    or convolution with its activation) that is a `functools.partial`, and its text has the address of a function in
    the builder's memory: every build would give other bytes.
    """
    import torch
    from torch._inductor import ir as untyped

    ir: Any = untyped
    stated = ir.ExternKernel.get_op_name
    # Their text is their name; the text of any other callable may have its address.
    operators = (torch._ops.OperatorBase, torch._ops.OpOverloadPacket)  # noqa: SLF001

    def name(kernel: Any) -> str:
        target = getattr(kernel.fx_node, "target", None)
        if target is None or isinstance(target, (*operators, str)):
            return str(stated(kernel))
        computed_by = kernel.inputs[0] if isinstance(kernel, ir.MultiOutput) else kernel
        operator = getattr(computed_by, "op_overload", None)
        if isinstance(operator, operators):
            return f"torch.ops.{operator}"
        function = getattr(target, "func", target)  # of a `functools.partial`
        module, qualified = (getattr(function, part, None) for part in ("__module__", "__qualname__"))
        return f"{module}.{qualified}" if module and qualified else type(function).__qualname__

    return [(ir.ExternKernel, "get_op_name", name)]
