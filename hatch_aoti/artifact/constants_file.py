"""Constants outside the compiled objects: `.safetensors` files that hold every distinct tensor once.

A tensor's name in such a file is a hash of its content, so equal tensors of several models, and of all CPU variants of
a model, are one. The file's metadata has an index for each model, from the names that its compiled code uses to these
tensors, with the `dtype`, `shape` and memory `order` of dimensions that the code expects. Every tensor starts at a
multiple of 64 bytes, as compiled code likes it, so that it can be used right where the file is mapped into memory;
`padding.N` fills the gaps, since the format allows none.

The format: https://github.com/huggingface/safetensors, "Format".
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
from typing import TYPE_CHECKING, Any

from hatch_aoti.artifact.atomic_files import appearing_file

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    import torch

__all__ = ["ALIGNMENT", "header_digest", "merge_constants", "write_constants"]

ALIGNMENT = 64

_DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "uint16": "U16", "uint32": "U32", "uint64": "U64", "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "complex64": "C64",
}  # fmt: skip
_CHUNK = 1 << 24


def write_constants(path: Path, model: str, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write the constants of one model.

    `tensors` maps the names that the compiled code uses to dense tensors, in any order of strides; that order is kept.
    """
    blobs: dict[str, tuple[str, list[int], memoryview | bytes]] = {}
    index: dict[str, Any] = {}
    kept = []  # the views below point into these
    for name, tensor in sorted(tensors.items()):
        # Memory order: a transposed weight is stored as it lies in memory, and transposed again when it is mapped.
        order = sorted(range(tensor.ndim), key=[-stride for stride in tensor.stride()].__getitem__)
        flat = tensor.detach().cpu().permute(order).contiguous()
        kept.append(flat)
        size = flat.numel() * flat.element_size()
        data: memoryview | bytes = b""
        if size:
            data = memoryview((ctypes.c_char * size).from_address(flat.data_ptr())).cast("B")
        dtype = str(tensor.dtype).removeprefix("torch.")
        shape = list(flat.shape) if dtype in _DTYPES else [size]
        digest = hashlib.sha256(f"{dtype}{shape}".encode())
        digest.update(data)
        key = digest.hexdigest()[:32]
        blobs[key] = (_DTYPES.get(dtype, "U8"), shape, data)
        index[name] = {"tensor": key, "dtype": dtype, "shape": list(tensor.shape), "order": order}
    with appearing_file(path) as file:
        header = _Header(
            ((key, kind, shape, len(data)) for key, (kind, shape, data) in sorted(blobs.items())),
            {model: json.dumps(index, sort_keys=True)},
        )
        file.write(header.text)
        for key, (_, _, data) in sorted(blobs.items()):
            file.seek(header.start(key))
            file.write(data)
        file.truncate(header.end)


def merge_constants(path: Path, files: Iterable[Path]) -> None:
    """Write one file with the constants of several models, each distinct tensor once."""
    sources: dict[str, tuple[Path, int, dict[str, Any]]] = {}
    indexes: dict[str, str] = {}
    for source in files:
        header, start = _read_header(source)
        indexes.update(header.pop("__metadata__", {}))
        for key, entry in header.items():
            if not key.startswith("padding."):
                sources.setdefault(key, (source, start, entry))
    with appearing_file(path) as out:
        merged = _Header(
            (
                (key, entry["dtype"], entry["shape"], entry["data_offsets"][1] - entry["data_offsets"][0])
                for key, (_, _, entry) in sorted(sources.items())
            ),
            indexes,
        )
        out.write(merged.text)
        for key, (source, start, entry) in sorted(sources.items()):
            begin, end = entry["data_offsets"]
            out.seek(merged.start(key))
            with source.open("rb") as file:
                file.seek(start + begin)
                left = end - begin
                while left:
                    block = file.read(min(left, _CHUNK))
                    out.write(block)
                    left -= len(block)
        out.truncate(merged.end)


def header_digest(path: Path) -> str:
    """Return the SHA-256 of a file's header, which names every tensor by a hash of its content."""
    with path.open("rb") as file:
        return hashlib.sha256(file.read(int.from_bytes(file.read(8), "little"))).hexdigest()


class _Header:
    """The header of a file with the given tensors (name, dtype, shape, bytes), in this order, and where they go."""

    def __init__(self, tensors: Iterable[tuple[str, str, list[int], int]], metadata: Mapping[str, str]) -> None:
        entries: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))}
        position = 0
        self._offsets: dict[str, int] = {}
        for number, (key, dtype, shape, size) in enumerate(tensors):
            self._offsets[key] = position
            entries[key] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + size]}
            padded = math.ceil((position + size) / ALIGNMENT) * ALIGNMENT
            gap = padded - position - size
            if gap:
                entries[f"padding.{number}"] = {
                    "dtype": "U8", "shape": [gap], "data_offsets": [position + size, padded]
                }  # fmt: skip
            position = padded
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-(len(text) + 8) % ALIGNMENT)  # the format allows spaces at the end
        self.text = len(text).to_bytes(8, "little") + text
        self.end = len(self.text) + position

    def start(self, key: str) -> int:
        """Return a tensor's position in the file, in bytes."""
        return len(self.text) + self._offsets[key]


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Return a file's header and the position where its data starts."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        return json.loads(file.read(size)), 8 + size
