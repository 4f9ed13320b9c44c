"""Whether a model's weights are folded and prepacked ("freezing"), and whether they lie in the compiled object.

Both are decided by rules on the exported graph, not by a stopwatch: the same program must give the same wheel on every
builder. `optimize` and `constants` in the settings override them.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import torch

    from hatch_aoti.accessor.contract import Signature
    from hatch_aoti.settings import ModelSettings

__all__ = ["Plan", "make_plan"]

# Where freezing begins to pay. Packed weights are multiplied by oneDNN: on 2 cores that halved the latency of ResNet-18
# and took a third off a 6-layer BERT, but its call costs some microseconds, which a small product is faster than: a
# 2-layer MLP of a few hundred weights went from 6 to 30 µs.
_LEAST_WEIGHTS = 1 << 16  # elements of the largest weight that a convolution or matrix product reads

# Where external constants begin to pay: every process has its own copy of an embedded constant, and reads it at load.
_MOST_EMBEDDED = 256 << 20  # bytes

_PRODUCTS = ("conv", "linear", "addmm", "mm", "bmm", "matmul", "baddbmm", "lstm", "gru")


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a model is compiled: `freeze` folds and prepacks weights, `external` keeps constants outside the object."""

    freeze: bool
    external: bool

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
    return Plan(freeze and device == "cpu" and not signature.state, external == "external")


def _distinct(tensors: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors that do not share memory with an earlier one."""
    import torch

    seen = set()
    for tensor in tensors.values():
        if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in seen:
            seen.add(tensor.untyped_storage().data_ptr())
            yield tensor


def _largest_weight(program: torch.export.ExportedProgram) -> int:
    """Return the number of elements of the largest parameter that a convolution or matrix product reads."""
    signature = program.graph_signature
    names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    largest = 0
    for node in program.graph.nodes:
        if node.op != "call_function" or not _is_product(node.target):
            continue
        for source in node.all_input_nodes:
            parameter = source
            while parameter.op == "call_function" and len(parameter.all_input_nodes) == 1:  # a transposed weight, say
                [parameter] = parameter.all_input_nodes
            if parameter.name in names:
                largest = max(largest, program.state_dict[names[parameter.name]].numel())
    return largest


def _is_product(target: Any) -> bool:
    name = str(target)
    return name.startswith("aten.") and name.split(".")[1].strip("_").startswith(_PRODUCTS)
