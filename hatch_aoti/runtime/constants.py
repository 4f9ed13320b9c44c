"""Constants in a file of their own: mapped into memory once, and handed to the models that use them."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from .declarations import LoadError
from .integrity import another_file

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import torch

    from .declarations import Declaration

__all__ = ["give_constants", "give_own_constants", "map_constants"]


def give_own_constants(model: Declaration, load_constants: Callable[..., None]) -> None:
    """Hand a loaded model its constants, if they are in a file of their own: mapped into memory, not copied.

    So loading takes the same time whatever their size, and all processes share them. A model that writes into its
    constants, or runs on another device, gets a copy.
    """
    if not model.constants:
        return
    tensors = map_constants(model.folder / model.constants, model.name, model.constants_id)
    give_constants(load_constants, tensors, shared=model.device == "cpu" and not model.signature.state)


def give_constants(load_constants: Callable[..., None], tensors: dict[str, torch.Tensor], *, shared: bool) -> None:
    """Call PyTorch's `load_constants` on tensors of the CPU, which it uses where they are, or copies to the device."""
    load_constants(tensors, False, True, shared, not shared)


def map_constants(path: Path, model: str, header_id: str = "") -> dict[str, torch.Tensor]:
    """Return a model's constants from a `.safetensors` file of several models', by the names its compiled code has.

    The file's metadata has an index for each model; see `artifact/constants_file.py` for its format. The tensors are
    views of the file and stay valid as long as the process lives. `header_id` is the SHA-256 of the file's header,
    which names each tensor by a hash of its content. Raises LoadError if the file is missing, damaged or another one;
    what the tensors hold is not read here, but by `verify`.
    """
    import torch

    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            text = file.read(size)
        header = json.loads(text)
        if header_id and hashlib.sha256(text).hexdigest() != header_id:
            raise LoadError(another_file(model, path))
        index = json.loads(header["__metadata__"][model])
        bytes_needed = (
            8
            + size
            + max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
        )
        if path.stat().st_size < bytes_needed:
            raise ValueError("it is shorter than it should be")
    except FileNotFoundError:
        raise LoadError(f"{model}: {path} is missing. Reinstall the package that contains it.") from None
    except (ValueError, KeyError, OSError, MemoryError, OverflowError) as error:
        raise LoadError(f"{model}: {path} is damaged ({error}). Reinstall the package.") from error
    if path not in _mapped:
        # Private to the process as soon as it is written to, and shared as long as it is not.
        storage: Any = torch.UntypedStorage.from_file(str(path), shared=False, nbytes=path.stat().st_size)
        _mapped.setdefault(path, storage)  # another thread may have been faster
    tensors = {}
    for name, entry in index.items():
        dtype = getattr(torch, entry["dtype"])
        start = 8 + size + header[entry["tensor"]]["data_offsets"][0]
        shape, order = entry["shape"], entry["order"]
        flat = torch.empty(0, dtype=dtype, device="cpu").set_(  # type: ignore[call-overload]
            _mapped[path], start // dtype.itemsize, [shape[dim] for dim in order]
        )
        tensors[name] = flat.permute([order.index(dim) for dim in range(len(order))])
    return tensors


_mapped: dict[Path, torch.UntypedStorage] = {}  # files that are in use: constants point into them
