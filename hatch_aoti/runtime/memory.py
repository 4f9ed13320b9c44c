"""The memory of tensors: it must be there, must not be shared where forward writes, and is laid out as code reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .arguments import described

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from .contract import TensorInput

__all__ = ["check_memory", "lay_out"]


def check_memory(name: str, leaves: Sequence[TensorInput], values: Sequence[torch.Tensor]) -> None:
    """Refuse memory that is not there, and where forward writes, memory that is shared: compiled code assumes that
    each input, and each of its elements, has its own.
    """
    import torch

    for leaf, value in zip(leaves, values, strict=True):
        start, end = _span(value)
        storage = value.untyped_storage()
        if start != end and (not start or end > storage.data_ptr() + storage.nbytes()):
            raise ValueError(
                f"{name}: {leaf.path} must be {leaf}, got {described(value)} whose storage has only "
                f"{storage.nbytes()} bytes: it was resized, or freed as FSDP does"
            )
    for leaf, value in zip(leaves, values, strict=True):
        if not leaf.changed:
            continue
        changed = f"{name}: {leaf.path} is changed in place, but"
        if value.is_inference() and not torch.is_inference_mode_enabled():
            raise ValueError(
                f"{changed} it comes from torch.inference_mode() and can be changed only in there: "
                f"pass {leaf.path}.clone()"
            )
        if _overlaps_itself(value):
            raise ValueError(f"{changed} its elements share memory (an expanded view): pass {leaf.path}.clone()")
        for other, another in zip(leaves, values, strict=True):
            if other is not leaf and _overlap(value, another):
                raise ValueError(f"{changed} shares memory with {other.path}: pass {other.path}.clone()")


def _overlaps_itself(x: torch.Tensor) -> bool:
    """Say whether two elements share memory. PyTorch's own test gives up where strides interleave."""
    import torch

    known, too_hard = torch._debug_has_internal_overlap(x), 2  # noqa: SLF001
    if known != too_hard:
        return known == 1
    reach = 0  # of the dimensions with smaller strides
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1 and stride <= reach:
            break
        reach += (size - 1) * stride
    else:
        return False
    start, end = _span(x)
    marks = torch.zeros(end - start, dtype=torch.bool, device="cpu")
    _bytes_in(marks, x, start).fill_(True)
    return int(marks.sum()) < x.numel() * x.element_size()


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Say whether two tensors have a byte in common; views of one tensor may lie between each other's elements."""
    import torch

    (a_start, a_end), (b_start, b_end) = (_span(x) for x in (a, b))
    if a_start >= b_end or b_start >= a_end or a.device != b.device:
        return False
    start = min(a_start, b_start)
    marks = torch.zeros(max(a_end, b_end) - start, dtype=torch.bool, device="cpu")
    _bytes_in(marks, a, start).fill_(True)
    return bool(_bytes_in(marks, b, start).any())


def _bytes_in(marks: torch.Tensor, x: torch.Tensor, start: int) -> torch.Tensor:
    """Return the view of `marks`, which stands for the memory from the address `start` on, that `x` is of it."""
    size = x.element_size()
    strides = [stride * size for stride in x.stride()]
    return marks.as_strided((*x.shape, size), (*strides, 1), x.data_ptr() - start)


def _span(x: torch.Tensor) -> tuple[int, int]:
    """Return the addresses of the first byte that `x` uses and of the one after the last; twice the same for none."""
    if x.numel() == 0:
        return 0, 0
    if x.is_contiguous():
        return x.data_ptr(), x.data_ptr() + x.nbytes
    reach = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (reach + 1) * x.element_size()


def lay_out(leaf: TensorInput, value: torch.Tensor) -> torch.Tensor:
    """Return `value` as the compiled code reads it: no graph, no lazy conjugate or sign, dimensions in order."""
    plain = value.detach().resolve_conj().resolve_neg()
    if not leaf.order:
        plain = plain.contiguous()
    else:
        back = sorted(range(len(leaf.order)), key=leaf.order.__getitem__)
        plain = plain.permute(leaf.order).contiguous().permute(back)
    # Kernels for GPUs read 16 bytes at a time; a view can start anywhere.
    return plain.clone() if plain.device.type != "cpu" and plain.data_ptr() % 16 else plain
