"""Checkpoints: the tensors in a file of weights, and loading them into a module as strict `load_state_dict` does.

Files are read as data: safetensors, or `torch.load` with `weights_only=True`.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from hatch_aoti.errors import ModelError
from hatch_aoti.export.failures import first_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    import torch

    from hatch_aoti.settings.model import ModelSettings

__all__ = ["load_weights"]

_POINTER = b"version https://git-lfs.github.com/spec/"  # how a Git LFS pointer begins, as its specification says
_MOST_NAMES = 8  # in a message
_EXTRA = "_extra_state"  # PyTorch's own name for what `get_extra_state` adds to a state dict


class _UnfitError(Exception):
    """What is wrong with a file, and what to do."""

    def __init__(self, reason: str, hint: str) -> None:
        super().__init__(reason)
        self.reason, self.hint = reason, hint


def load_weights(entry: ModelSettings, module: torch.nn.Module, path: Path) -> tuple[str, ...]:
    """Load the file `path` into `module`; return what is worth a note.

    `weights = "file.pt#key"` takes the state dict that the file has under that key. A file whose only state dict is
    nested, or whose names all have a prefix that the model's have not, is understood. Everything else is for
    `load_state_dict(strict=True)` to accept or not; besides, safetensors has one of several tied tensors only, and the
    others get their values through it. Raises `ModelError`.
    """
    notes: list[str] = []
    try:
        state = _state_dict(_read(path), entry.weights_key, path.name, notes)
        _load(module, state, entry, notes)
    except _UnfitError as error:
        raise ModelError(
            entry.name, "weights", f'`weights = "{entry.weights}"` {error.reason}', hint=error.hint
        ) from error
    return tuple(notes)


# --- Files ----------------------------------------------------------------------------------------------------------


def _read(path: Path) -> Any:
    """Return what a file holds."""
    import torch

    with path.open("rb") as file:
        if file.read(len(_POINTER)) == _POINTER:
            raise _UnfitError(
                "is a Git LFS pointer, not the file itself",
                "run `git lfs pull` in the project; where CI checks it out, ask for LFS files (`lfs: true`)",
            )
    try:
        if path.name.endswith(".index.json"):
            return _read_shards(path)
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except _UnfitError:
        raise
    except Exception as error:
        raise _UnfitError(
            f"cannot be read: {first_line(error)}",
            "save a state dict with safetensors.torch.save_file, or with torch.save(model.state_dict(), path), "
            "which is loaded with weights_only=True and so may hold nothing but tensors and plain containers",
        ) from error


def _read_shards(path: Path) -> dict[str, Any]:
    """Return the tensors of a checkpoint in several files, of which Hugging Face's index lists the names."""
    index = json.loads(path.read_text(encoding="utf-8"))
    names = index.get("weight_map") if isinstance(index, dict) else None
    if not (isinstance(names, dict) and names and all(isinstance(name, str) for name in names.values())):
        raise _UnfitError("is no index of a checkpoint: it has no `weight_map`", "name the file that has the tensors")
    state: dict[str, Any] = {}
    for name in sorted(set(names.values())):
        if "/" in name or "\\" in name or name in {"", ".", ".."}:
            raise _UnfitError(f'lists the file "{name}", which is not beside it', "save the checkpoint again")
        if not (path.parent / name).is_file():
            raise _UnfitError(f'lists the file "{name}", which is missing', "put all files of the checkpoint beside it")
        state |= _read(path.parent / name)
    return state


# --- State dicts ----------------------------------------------------------------------------------------------------


def _state_dict(found: Any, key: str, file: str, notes: list[str]) -> dict[str, Any]:
    """Return the state dict in what a file holds: all of it, what is under `key`, or the only one inside."""
    nested = _nested(found)
    choices = ", ".join(f'`weights = "…/{file}#{name}"`' for name in nested)
    if key:
        if key not in nested:
            raise _UnfitError(
                f"has no state dict under that key; it has {_listed(nested) or 'none inside'}",
                f"write {choices}" if nested else "leave out what follows the #, if the file itself is a state dict",
            )
        return nested[key]
    if _is_state_dict(found):
        whole: dict[str, Any] = found
        return whole
    if len(nested) == 1:
        [(name, state)] = nested.items()
        notes.append(f"the weights are those under the key {name!r} in {file}")
        return state
    if nested:
        raise _UnfitError(f"holds several state dicts: {_listed(nested)}", f"choose one of them: {choices}")
    if isinstance(found, dict) and (odd := [name for name in found if not isinstance(name, str)]):
        raise _UnfitError(
            f"does not hold a state dict: {odd[0]!r} is a key, and no name",
            "save `model.state_dict()`, whose keys are strings",
        )
    raise _UnfitError(
        "does not hold a state dict (names mapped to tensors)", "save `model.state_dict()`, not the model itself"
    )


def _is_state_dict(value: Any) -> bool:
    import torch

    return isinstance(value, dict) and all(
        isinstance(name, str) and (isinstance(item, torch.Tensor) or name.endswith(_EXTRA))
        for name, item in value.items()
    )


def _nested(found: Any, prefix: str = "") -> dict[str, dict[str, Any]]:
    """Return the state dicts with tensors inside a checkpoint, by their keys, with dots between those of levels."""
    state_dicts: dict[str, dict[str, Any]] = {}
    if isinstance(found, dict) and not (prefix and _is_state_dict(found)):
        for name, value in found.items():
            if isinstance(name, str) and isinstance(value, dict) and value:
                if _is_state_dict(value):
                    state_dicts[prefix + name] = value
                else:
                    state_dicts |= _nested(value, f"{prefix}{name}.")
    return state_dicts


# --- Loading --------------------------------------------------------------------------------------------------------


def _load(module: torch.nn.Module, state: dict[str, Any], entry: ModelSettings, notes: list[str]) -> None:
    import torch

    for name, value in state.items():
        if isinstance(value, torch.Tensor) and (kind := _unusual(value)):
            raise _UnfitError(f"holds {name} as a {kind} tensor", "save it as an ordinary, dense tensor on the CPU")
    own = module.state_dict()
    state, prefix = _without_prefix(state, own)
    if prefix:
        notes.append(f"the names of the weights are taken without the prefix `{prefix}`")
    for name, other in _tied(own, state).items():
        state[name] = state[other]
    converted = sorted(
        f"{name} ({_dtype(state[name])} to {_dtype(own[name])})"
        for name in own.keys() & state.keys()
        if isinstance(own[name], torch.Tensor) and isinstance(state[name], torch.Tensor)
        if state[name].dtype != own[name].dtype
    )
    if converted:
        notes.append(f"weights are converted as they are loaded: {_capped(converted)}")
    shapes: list[str] = []
    missing: list[str] = []
    unexpected: list[str] = []
    try:
        result = module.load_state_dict(state, strict=False)
    except RuntimeError as error:
        shapes = _shapes(str(error))
        if not shapes:
            told = str(error).strip().splitlines()  # the first line says for which module
            raise _UnfitError(
                f"cannot be loaded into `{entry.model}`: {told[min(1, len(told) - 1)].strip() if told else error!r}",
                "save the state dict of this very model",
            ) from error
        missing, unexpected = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
    else:
        missing, unexpected = sorted(result.missing_keys), sorted(result.unexpected_keys)
    mistakes = [
        f"{label}: {_capped(names)}"
        for label, names in (("missing tensors", missing), ("unexpected tensors", unexpected), ("other shapes", shapes))
        if names
    ]
    if mistakes:
        hint = "save the state dict of this very model, with the same configuration"
        if inside := _prefix_of_all(own, state):
            hint = f"among the file's names are all of the model's, behind the prefix `{inside}`: save those alone"
        raise _UnfitError(f"does not fit the model `{entry.model}`: {'; '.join(mistakes)}", hint)


def _without_prefix(state: dict[str, Any], own: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Return the state dict without what wrappers put before all names, and what that is.

    `module.` is DataParallel's, `_orig_mod.` torch.compile's, `model.` Lightning's and many a trainer's.
    """
    before = ""
    names = list(state)
    while names and not own.keys() & set(names):
        first = names[0].partition(".")[0] + "."
        if not all(name.startswith(first) and name != first for name in names):
            return state, ""
        names = [name.removeprefix(first) for name in names]
        before += first
    if not before or not names:
        return state, ""
    return {name.removeprefix(before): value for name, value in state.items()}, before


def _prefix_of_all(own: Mapping[str, Any], state: Mapping[str, Any]) -> str:
    """Return a prefix behind which a file has every name of the model, among others."""
    prefixes = {name.partition(".")[0] + "." for name in state}
    fitting = [prefix for prefix in sorted(prefixes) if own and all(prefix + name in state for name in own)]
    return fitting[0] if fitting else ""


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


def _tied(own: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, str]:
    """Return the names of the model's tensors that the file lacks and that share their memory with one that it has."""
    import torch
    from torch.nn.parameter import is_lazy

    def place(tensor: torch.Tensor) -> tuple[object, ...]:
        return (tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride())

    there = {
        name: tensor
        for name, tensor in own.items()
        if isinstance(tensor, torch.Tensor) and not is_lazy(tensor) and tensor.numel()
    }
    given = {place(tensor): name for name, tensor in there.items() if name in state}
    return {
        name: given[place(tensor)] for name, tensor in there.items() if name not in state and place(tensor) in given
    }


_SIZE_MISMATCH = re.compile(
    r"size mismatch for (\S+): copying a param with shape torch\.Size\(\[(.*?)\]\) from checkpoint, "
    r"the shape in current model is torch\.Size\(\[(.*?)\]\)"
)


def _shapes(text: str) -> list[str]:
    """Return what PyTorch says of shapes that differ, in our words."""
    return [
        f"{name} is ({given}) in the file and ({own}) in the model" for name, given, own in _SIZE_MISMATCH.findall(text)
    ]


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))


def _capped(names: list[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
