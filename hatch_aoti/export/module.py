"""A module from an entry."""

from __future__ import annotations

import inspect
import random
import sys
from typing import TYPE_CHECKING, Any

from hatch_aoti.errors import ModelError
from hatch_aoti.export.failures import raised, user_traceback
from hatch_aoti.export.importing import missing_module

if TYPE_CHECKING:
    import torch

    from hatch_aoti.settings.model import ModelSettings

__all__ = ["make_module", "seed_everything"]


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
                hint=_why_not_made(target, error),
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


def _why_not_made(target: Any, error: BaseException) -> str:
    """Return what to do when a class or factory raises."""
    if isinstance(error, ModuleNotFoundError):
        return missing_module(error, getattr(target, "__module__", None) or "")[1]
    try:
        inspect.signature(target).bind()
    except TypeError:
        return "a class or factory is called without arguments; write a factory that supplies them"
    except ValueError:  # a builtin, of which Python does not know what it takes
        return "a class or factory is called without arguments"
    return "see the traceback: the model's own code raises this, and would in plain PyTorch"


def seed_everything(seed: int) -> None:
    """Seed every source of random numbers that model code commonly draws from."""
    import torch

    random.seed(seed)
    torch.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
