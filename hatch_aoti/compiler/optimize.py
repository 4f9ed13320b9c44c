"""What is done to a model for speed: weights are folded and prepacked, kept outside, or multiplied inline.

All is decided by rules on the exported graph, not by a stopwatch: the same program must give the same wheel on every
builder. `optimize` and `constants` in the settings override them.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import torch

    from hatch_aoti.runtime.contract import Signature
    from hatch_aoti.settings.model import ModelSettings

__all__ = ["Plan", "inline_small_products", "make_plan"]

# Where freezing begins to pay. Packed weights are multiplied by oneDNN: on 2 cores that halved the latency of ResNet-18
# and took a third off a 6-layer BERT, but its call costs some microseconds, which a small product is faster than: a
# 2-layer MLP of a few hundred weights went from 6 to 30 µs.
_LEAST_WEIGHTS = 1 << 16  # elements of the largest weight that a convolution or matrix product reads

# Where external constants begin to pay: every process has its own copy of an embedded constant, and reads it at load.
_MOST_EMBEDDED = 256 << 20  # bytes

# Up to which size a linear layer is multiplied by loops in the generated code, where calling a library takes longer
# than the multiplication. On one core, `relu(linear(x))` with a batch of 8, and of 1024: for 10 to 16 features 3.9
# instead of 8.8 µs, and 16 instead of 20; for 16 to 1 feature 3.3 instead of 6.2 µs, and 7.7 instead of 14; for 64 to
# 64 features 4.6 instead of 7.8 µs, but 320 instead of 86.
_INLINE_WEIGHTS = 1 << 8  # elements, whatever the batch
_INLINE_MULTIPLICATIONS = 1 << 15  # for larger weights, those of the largest batch
_VECTOR = 8  # float32 elements in a register of the least targets

_PRODUCTS = ("conv", "linear", "addmm", "mm", "bmm", "matmul", "baddbmm", "lstm", "gru")


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a model is compiled.

    `freeze` folds and prepacks weights, `external` keeps constants outside the object, `inline` multiplies small
    weights without calling a library.
    """

    freeze: bool
    external: bool
    inline: bool

    def inductor_options(self) -> dict[str, Any]:
        """Return the inductor options for it."""
        if self.external:
            return {
                "freezing": self.freeze,
                "aot_inductor.package_constants_in_so": False,
                # Gives the constants back as tensors, under the names that the object asks for.
                "aot_inductor.package_constants_on_disk_format": "pickle_weights",
            }
        return {"freezing": self.freeze}

    def preferred_options(self) -> dict[str, Any]:
        """Return inductor options that go with it and that a project's own may replace.

        Linear layers with the same input become one: a call of oneDNN costs 40 µs, whatever it computes. That took 5 %
        off a 6-layer BERT, whose attention has three of them.
        """
        return {"cpp.enable_concat_linear": True} if self.freeze else {}


def make_plan(
    program: torch.export.ExportedProgram, signature: Signature, entry: ModelSettings, *, device: str
) -> Plan:
    """Decide for one model, compiled for `device` (`cpu` or `cuda`).

    A model with state is never frozen, since folding takes a buffer for a constant, and neither is one on a GPU, whose
    libraries have no prepacked form.
    """
    size = sum(tensor.untyped_storage().nbytes() for tensor in _distinct({**program.state_dict, **program.constants}))
    freeze, external = entry.optimize, entry.constants
    configured = entry.inductor_configs.get("freezing")
    if configured is not None:
        freeze = bool(configured)
    if external is None:
        external = "external" if size > _MOST_EMBEDDED and not freeze else "embedded"
    if freeze is None:
        freeze = external == "embedded" and _largest_weight(program) >= _LEAST_WEIGHTS
    stateless_on_cpu = device == "cpu" and not signature.state
    return Plan(
        freeze=freeze and stateless_on_cpu,
        external=external == "external",
        inline=entry.optimize is not False and stateless_on_cpu,
    )


def inline_small_products(module: torch.fx.GraphModule) -> None:
    """Replace the linear layers of an exported program's module that are small by elementary operations, in place.

    The compiler makes one loop of these and of what comes before and after, where a library's product would be a call
    of some microseconds. Only float32 and float64, as sums of shorter types are rounded elsewhere.
    """
    import torch

    aten = torch.ops.aten
    for number, node in enumerate(list(module.graph.nodes)):
        if node.target is not aten.linear.default or not _is_small(node, module):
            continue
        x, weight, *bias = node.args
        tensor = operator.attrgetter(weight.target)(module)
        with module.graph.inserting_before(node):
            if tensor.shape[0] >= _VECTOR:  # sum up vectors of results, from a weight that lies that way
                name = f"transposed_{number}"
                module.register_buffer(name, tensor.detach().t().contiguous())
                weight, place = module.graph.get_attr(name), -1
            else:  # sum up within vectors of features
                place = -2
            wide = module.graph.call_function(aten.unsqueeze.default, (x, place))
            product = module.graph.call_function(aten.mul.Tensor, (wide, weight))
            result = module.graph.call_function(aten.sum.dim_IntList, (product, [-3 - place]))
            if bias and bias[0] is not None:
                result = module.graph.call_function(aten.add.Tensor, (result, bias[0]))
        node.replace_all_uses_with(result)
        module.graph.erase_node(node)
    module.graph.eliminate_dead_code()
    module.recompile()


def _is_small(linear: torch.fx.Node, module: torch.fx.GraphModule) -> bool:
    import torch

    x, weight = linear.args[:2]
    value = x.meta.get("val") if isinstance(x, torch.fx.Node) else None
    if not isinstance(weight, torch.fx.Node) or weight.op != "get_attr" or value is None:
        return False
    tensor = operator.attrgetter(str(weight.target))(module)
    if tensor.dtype not in {torch.float32, torch.float64} or value.dtype != tensor.dtype:
        return False
    rows = math.prod(map(_largest, value.shape[:-1]))
    return bool(tensor.numel() <= _INLINE_WEIGHTS or rows * tensor.numel() <= _INLINE_MULTIPLICATIONS)


def _largest(size: Any) -> Any:
    """Return the largest value of a size: a number, or infinity."""
    return size if isinstance(size, int) else size.node.shape_env.bound_sympy(size.node.expr).upper


def _distinct(tensors: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors that do not share memory with an earlier one."""
    import torch

    seen = set()
    for tensor in tensors.values():
        if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in seen:
            seen.add(tensor.untyped_storage().data_ptr())
            yield tensor


def _largest_weight(program: torch.export.ExportedProgram) -> int:
    """Return the number of elements of the largest weight that a convolution or matrix product reads.

    It is a parameter, a buffer, persistent or not, or a tensor that forward makes or finds elsewhere.
    """
    signature = program.graph_signature
    names = {
        **signature.inputs_to_parameters,
        **signature.inputs_to_buffers,
        **signature.inputs_to_lifted_tensor_constants,
    }
    tensors = {**program.constants, **program.state_dict}
    largest = 0
    for node in program.graph.nodes:
        if node.op != "call_function" or not _is_product(node.target):
            continue
        for source in node.all_input_nodes:
            parameter = source
            while parameter.op == "call_function" and len(parameter.all_input_nodes) == 1:  # a transposed weight, say
                [parameter] = parameter.all_input_nodes
            if parameter.name in names:
                largest = max(largest, tensors[names[parameter.name]].numel())
    return largest


def _is_product(target: Any) -> bool:
    name = str(target)
    return name.startswith("aten.") and name.split(".")[1].strip("_").startswith(_PRODUCTS)
