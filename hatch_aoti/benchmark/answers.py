"""A contender's answer against eager's, inside the contender's process: nothing of hatch-aoti's compiler is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["compare_answers", "leaves"]


def compare_answers(got: Any, answers: str) -> dict[str, Any]:
    """Compare a result with the expected one, leaf by leaf; say how far they are apart, and where too far."""
    import torch

    # Weights-only: the file has tensors, numbers and lists.
    expected, tolerances = torch.load(answers)
    found, largest = leaves(got), 0.0
    if len(found) != len(expected):
        return {"difference": f"{len(found)} tensors instead of {len(expected)}", "max_error": None}
    for number, (a, b, (rtol, atol)) in enumerate(zip(found, expected, tolerances, strict=True)):
        which = f"output {number}: " if len(expected) > 1 else ""
        if a.dtype != b.dtype or a.shape != b.shape:
            kinds = [f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}" for x in (a, b)]
            return {"difference": f"{which}{kinds[0]} instead of {kinds[1]}", "max_error": None}
        wide = torch.complex128 if b.is_complex() else torch.float64
        a, b = a.detach().to(wide), b.to(wide)  # noqa: PLW2901
        error = (a - b).abs()
        same = (a == b) | (a.isnan() & b.isnan())
        finite = error[~same & error.isfinite()]
        largest = max(largest, float(finite.max()) if finite.numel() else 0.0)
        wrong = int((~same & ~(error <= atol + rtol * b.abs())).sum())
        if wrong:
            return {
                "difference": f"{which}{wrong} of {b.numel()} elements differ, by up to {largest:.3g}",
                "max_error": largest,
            }
    return {"difference": "", "max_error": largest}


def leaves(value: Any) -> list[torch.Tensor]:
    """Return the tensors in a result, arrays included, in order; values of other types are left out."""
    import torch

    if isinstance(value, torch.Tensor):
        return [value]
    if hasattr(value, "__array_interface__"):
        return [torch.from_numpy(value)]
    if isinstance(value, dict):
        value = list(value.values())
    elif hasattr(value, "__dataclass_fields__"):
        value = [getattr(value, name) for name in value.__dataclass_fields__]
    return [leaf for item in value for leaf in leaves(item)] if isinstance(value, (list, tuple)) else []
