"""Hashes over an exported program: what its compiled form depends on, and nothing else."""

from __future__ import annotations

import ctypes
import hashlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["constants_digest", "program_digest"]


def program_digest(program: torch.export.ExportedProgram) -> str:
    """Return a SHA-256, in hexadecimal, over all of a program that its compiled form depends on.

    That is its graphs with every value's dtype, sizes, strides and device, its constants' bytes, the ranges of its
    dims and its example inputs' metadata; not source locations, which differ from checkout to checkout.
    """
    import torch

    digest = hashlib.sha256()

    def add(*parts: object) -> None:
        for part in parts:
            data = part if isinstance(part, bytes) else str(part).encode()
            digest.update(len(data).to_bytes(8, "little"))
            digest.update(data)

    for name, module in program.graph_module.named_modules():
        if not isinstance(module, torch.fx.GraphModule):
            continue
        add("graph", name)
        for node in module.graph.nodes:
            add(node.op, node.name, node.target if isinstance(node.target, str) else _target_name(node.target))
            add(node.args, node.kwargs, _describe(node.meta.get("val")))
    add("signature", program.graph_signature)
    add("ranges", sorted((str(symbol), str(interval)) for symbol, interval in program.range_constraints.items()))
    add("call", program.call_spec)
    add("inputs", _describe(program.example_inputs))
    add("constants", constants_digest(program))
    return digest.hexdigest()


def constants_digest(program: torch.export.ExportedProgram) -> str:
    """Return a SHA-256, in hexadecimal, over a program's parameters, buffers and other constants.

    Names, dtypes, sizes, strides, devices and bytes, in the order of the names.
    """
    import torch

    digest = hashlib.sha256()
    for name, tensor in sorted({**program.state_dict, **program.constants}.items()):
        for part in (name, _describe(tensor)):
            digest.update(f"{len(part)}:{part}".encode())
        if isinstance(tensor, torch.Tensor):
            _add_bytes(digest, tensor)
    return digest.hexdigest()


def _target_name(target: Any) -> str:
    return (
        str(target)
        if not callable(target) or hasattr(target, "overloadpacket")
        else getattr(target, "__qualname__", str(target))
    )


def _describe(value: Any) -> str:
    import torch
    from torch.utils import _pytree

    leaves, spec = _pytree.tree_flatten(value)
    words = [
        f"{leaf.dtype}{tuple(leaf.shape)}{leaf.stride() if leaf.layout is torch.strided else leaf.layout}{leaf.device}"
        if isinstance(leaf, torch.Tensor)
        else f"{type(leaf).__name__}:{leaf}"
        for leaf in leaves
    ]
    return f"{spec}{words}"


def _add_bytes(digest: Any, tensor: torch.Tensor) -> None:
    flat = tensor.detach().cpu().contiguous()
    size = flat.numel() * flat.element_size()
    if size:
        # The tensor's own memory: neither a copy, which may be gigabytes, nor numpy, which may be absent.
        digest.update((ctypes.c_char * size).from_address(flat.data_ptr()))
