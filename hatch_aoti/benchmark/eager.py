"""A project's own module and inputs, as contenders that are made from them take them."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from hatch_aoti.benchmark.tasks import ProjectModel
    from hatch_aoti.export.importing import ImportRoots
    from hatch_aoti.export.program import EagerModel

__all__ = ["eager_model", "flattened", "install_roots", "tensors"]


def install_roots(roots: ImportRoots) -> None:
    """Make the project's modules importable before they are installed."""
    sys.dont_write_bytecode = True  # the project's tree is not ours
    roots.install()


def eager_model(model: ProjectModel) -> EagerModel:
    """Return the module and inputs of a project's model."""
    from hatch_aoti.export.program import prepare_model

    return prepare_model(model.entry, root=model.root, device="cpu")


def flattened(prepared: EagerModel) -> tuple[list[torch.Tensor], torch.nn.Module]:
    """Return the tensors among the inputs, and a module that takes them as they are and has the rest built in."""
    import torch
    from torch.utils import _pytree

    leaves, spec = _pytree.tree_flatten((prepared.args, prepared.kwargs))

    class Flat(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = prepared.module

        def forward(self, *inputs: torch.Tensor) -> Any:
            given = iter(inputs)
            args, kwargs = _pytree.tree_unflatten(
                [next(given) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], spec
            )
            return self.module(*args, **kwargs)

    return tensors((prepared.args, prepared.kwargs)), Flat().eval()


def tensors(call: Any) -> list[torch.Tensor]:
    """Return the tensors among the inputs of a call, in order."""
    import torch
    from torch.utils import _pytree

    return [leaf for leaf in _pytree.tree_leaves(call) if isinstance(leaf, torch.Tensor)]
