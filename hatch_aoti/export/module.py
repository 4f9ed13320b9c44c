"""A module from an entry: made, in eval mode, with its weights."""

from __future__ import annotations

import random
import sys
from typing import TYPE_CHECKING, Any

from hatch_aoti.errors import ModelError
from hatch_aoti.export.failures import first_line, raised, user_traceback
from hatch_aoti.export.input_contract import dtype_name

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import torch

    from hatch_aoti.settings.model import ModelSettings

__all__ = ["load_weights", "make_module", "seed_everything"]


def make_module(entry: ModelSettings, target: Any) -> torch.nn.Module:
    """Return the module that `target`, what the setting `model` names, is or gives when called."""
    import torch

    module = target
    if not isinstance(target, torch.nn.Module):
        if not callable(target):
            raise ModelError(
                entry.name,
                "build",
                f'`model = "{entry.model}"` is a {type(target).__name__}, not an nn.Module class, an nn.Module '
                "instance or a function that returns one",
                hint="point `model` at one of these",
            )
        seed_everything(entry.seed)
        try:
            module = target()
        except BaseException as error:
            raise ModelError(
                entry.name,
                "build",
                f"calling `{entry.model}` without arguments {raised(error)}",
                hint="a class or factory is called without arguments; write a factory that supplies them",
                details=user_traceback(error),
            ) from error
    if not isinstance(module, torch.nn.Module):
        raise ModelError(
            entry.name,
            "build",
            f"`{entry.model}` returned a {type(module).__name__}, not an nn.Module",
            hint="return the module from the factory",
        )
    if isinstance(module, torch.jit.ScriptModule):
        raise ModelError(
            entry.name,
            "build",
            f"`{entry.model}` is a TorchScript module, which torch.export cannot trace",
            hint="use the nn.Module it was scripted from",
        )
    return module


def load_weights(entry: ModelSettings, module: torch.nn.Module, path: Path) -> None:
    """Load the file `path` into `module`, which must have exactly its tensors."""
    import torch

    def fail(reason: str, hint: str) -> ModelError:
        return ModelError(entry.name, "weights", f"`weights = {entry.weights!r}` {reason}", hint=hint)

    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            state = load_file(path)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise fail(
            f"cannot be read: {first_line(error)}",
            "save a state dict with safetensors.torch.save_file, or with torch.save(model.state_dict(), path), "
            "which is loaded with weights_only=True and so may hold nothing but tensors and plain containers",
        ) from error
    if not (isinstance(state, dict) and all(isinstance(value, torch.Tensor) for value in state.values())):
        raise fail(
            "does not hold a state dict (names mapped to tensors)",
            "save `model.state_dict()`, not the model or a checkpoint with more in it",
        )
    if odd := [key for key in state if not isinstance(key, str)]:
        raise fail(
            f"does not hold a state dict: {odd[0]!r} is a key, and no name",
            "save `model.state_dict()`, whose keys are strings",
        )
    for name, tensor in state.items():
        if kind := _unusual(tensor):
            raise fail(f"holds {name} as a {kind} tensor", "save it as an ordinary, dense tensor on the CPU")
    own = module.state_dict()
    # safetensors stores one of several tied tensors only; the others get their values through it.
    missing = sorted(own.keys() - state.keys() - _tied_to_any(own, state))
    unexpected = sorted(state.keys() - own.keys())
    shapes = [
        f"{name} is {tuple(state[name].shape)} in the file and {tuple(own[name].shape)} in the model"
        for name in sorted(own.keys() & state.keys())
        if state[name].shape != own[name].shape
    ]
    kinds = [
        f"{name} is {dtype_name(state[name])} in the file and {dtype_name(own[name])} in the model"
        for name in sorted(own.keys() & state.keys())
        if state[name].dtype != own[name].dtype
    ]
    mistakes = [
        f"{label}: {', '.join(names[:8])}{f' and {len(names) - 8} more' if len(names) > 8 else ''}"
        for label, names in (
            ("missing tensors", missing),
            ("unexpected tensors", unexpected),
            ("other shapes", shapes),
            ("other dtypes", kinds),
        )
        if names
    ]
    if mistakes:
        raise fail(
            f"does not fit the model `{entry.model}`: {'; '.join(mistakes)}",
            "save the state dict of this very model, with the same configuration and dtype",
        )
    module.load_state_dict(state, strict=False)


def _unusual(tensor: torch.Tensor) -> str:
    """Say in which form a tensor is that no parameter can be filled from; nothing for a dense one with memory."""
    import torch

    if tensor.is_nested:
        return "nested"
    if tensor.is_quantized:
        return "quantised"
    if tensor.layout is not torch.strided:
        return str(tensor.layout).removeprefix("torch.")
    return "meta" if tensor.is_meta else ""


def _tied_to_any(own: Mapping[str, torch.Tensor], state: Mapping[str, Any]) -> set[str]:
    def place(tensor: torch.Tensor) -> tuple[object, ...]:
        return (tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride())

    given = {place(own[name]) for name in own.keys() & state.keys() if own[name].numel()}
    return {name for name, tensor in own.items() if tensor.numel() and place(tensor) in given}


def seed_everything(seed: int) -> None:
    """Seed every source of random numbers that model code commonly draws from."""
    import torch

    random.seed(seed)
    torch.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
