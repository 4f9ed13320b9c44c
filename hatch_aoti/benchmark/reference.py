"""The inputs that all contenders get, and the answers that they should give: jobs for a worker.

For a project's model both come from the module itself. An installed wheel has neither the module nor its inputs: there
they are made up from the signature, and the answers are the wheel's own.
"""

from __future__ import annotations

import importlib
import math
from typing import TYPE_CHECKING, Any

from hatch_aoti.benchmark.answers import leaves
from hatch_aoti.benchmark.eager import eager_model, install_roots
from hatch_aoti.benchmark.tasks import ReferenceTask
from hatch_aoti.codec import unpack
from hatch_aoti.export.inputs import pick_sizes
from hatch_aoti.job.comparison import tolerances
from hatch_aoti.settings.model import ModelSettings

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from hatch_aoti.runtime.contract import Node, Signature, TensorInput

__all__ = ["ANSWERS", "INPUTS", "from_module", "from_signature", "made_up_inputs"]

INPUTS, ANSWERS = "inputs.pt", "answers.pt"


def from_module(payload: Mapping[str, Any]) -> list[str]:
    """Do a `ReferenceTask` for a project's model: its example inputs, and what eager answers. Describes the inputs.

    The answers come with the tolerances (rtol, atol) of each. Raises `ModelError`.
    """
    import torch

    task = unpack(ReferenceTask, payload)
    if task.project is None:
        raise ValueError(f"{task.model} is no project's")
    install_roots(task.project.roots)
    model = eager_model(task.project)
    torch.save((model.args, model.kwargs), task.directory / INPUTS)
    torch.manual_seed(0)
    with torch.no_grad():
        answers = model.module(*model.args, **model.kwargs)
    return _write(task, (model.args, model.kwargs), answers, task.project.entry)


def from_signature(payload: Mapping[str, Any]) -> list[str]:
    """Do the same for a model of an installed package: made-up inputs, and the answers of the model itself."""
    import torch

    task = unpack(ReferenceTask, payload)
    model = importlib.import_module(f"{task.package}._models").MODELS[task.model]
    torch.manual_seed(0)
    args, kwargs = made_up_inputs(model.signature)
    torch.save((args, kwargs), task.directory / INPUTS)
    torch.manual_seed(0)
    return _write(task, (args, kwargs), model(*args, **kwargs), ModelSettings(task.model, "", {}))


def _write(task: ReferenceTask, call: Any, answers: Any, entry: ModelSettings) -> list[str]:
    import torch

    expected = leaves(answers)
    allowed = [tolerances(x.dtype, entry) if x.is_floating_point() or x.is_complex() else (0.0, 0.0) for x in expected]
    torch.save((expected, allowed), task.directory / ANSWERS)
    return [f"{str(x.dtype).removeprefix('torch.')}[{', '.join(map(str, x.shape))}]" for x in leaves(call)]


def made_up_inputs(signature: Signature) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return args and kwargs that fit a contract.

    Dims get the sizes that an export would take for its example; floats are drawn from a normal distribution, whole
    numbers are 0, which is in range for an index, and flags are False.
    """
    sizes = pick_sizes({dim.name: (dim.min, dim.max) for dim in signature.dims}, [])
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    by_position = True
    for parameter in signature.parameters:
        if type(parameter.node).__name__ == "Omitted":
            by_position = False  # what follows a left-out default goes by keyword
            continue
        value = _made_up(parameter.node, sizes)
        if parameter.kind == "*args":
            args += value
        elif parameter.kind == "**kwargs":
            kwargs |= value
        elif parameter.kind == "keyword" or not (by_position or parameter.kind == "positional"):
            kwargs[parameter.name] = value
        else:
            args.append(value)
    return tuple(args), kwargs


def _made_up(node: Node, sizes: dict[str, int]) -> Any:
    # By name: an installed `_models.py` has classes of its own.
    match type(node).__name__, node:
        case "TensorInput", leaf:
            return _tensor(leaf, sizes)  # type: ignore[arg-type]
        case "Group", group:
            return _container(group, [_made_up(item, sizes) for item in group.items])  # type: ignore[union-attr]
        case _, constant:
            return constant.value  # type: ignore[union-attr]


def _tensor(leaf: TensorInput, sizes: dict[str, int]) -> torch.Tensor:
    import torch

    dtype, order = getattr(torch, leaf.dtype), leaf.order or tuple(range(len(leaf.shape)))
    shape = [size.of(sizes) for size in leaf.shape]
    stored = [shape[dimension] for dimension in order]  # in memory, the outermost first
    if dtype.is_floating_point or dtype.is_complex:
        flat = torch.randn(math.prod(shape), dtype=torch.complex64 if dtype.is_complex else torch.float32).to(dtype)
    else:
        flat = torch.zeros(math.prod(shape), dtype=dtype)
    return flat.reshape(stored).permute([order.index(dimension) for dimension in range(len(order))])


def _container(group: Any, items: Sequence[Any]) -> Any:
    match group.kind:
        case "tuple" | "*args":
            return tuple(items)
        case "list":
            return list(items)
        case "dict" | "**kwargs":
            return dict(zip(group.keys, items, strict=True))
    if group.kind == "OrderedDict":
        from collections import OrderedDict

        return OrderedDict(zip(group.keys, items, strict=True))
    module, _, name = group.type.partition(":")
    value: Any = importlib.import_module(module)
    for part in name.split("."):
        value = getattr(value, part)
    if group.kind == "structseq":
        return value(items)
    return value(**dict(zip(group.keys, items, strict=True)))
