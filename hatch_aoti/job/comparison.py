"""Whether compiled code gives eager's results: numbers within tolerances, all else equal."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from hatch_aoti.job.samples import is_tensor, kind

if TYPE_CHECKING:
    import torch

    from hatch_aoti.settings.model import ModelSettings

__all__ = ["Comparison", "equal", "tolerances"]

# How far compiled may be from eager, element by element: |got - want| <= atol + rtol * |want|. Compiled code sums in
# another order and fuses operations; what is not floating point must be equal.
_TOLERANCES = {
    "float64": (1e-7, 1e-8),
    "complex128": (1e-7, 1e-8),
    "float32": (1e-3, 1e-4),
    "complex64": (1e-3, 1e-4),
    "float16": (2e-2, 1e-2),
    "bfloat16": (2e-2, 1e-2),
}
_COARSE = (0.25, 0.25)  # 8-bit floating point


class Comparison:
    """Compares results with eager's, and keeps what was seen: the largest error, and calls without a defined result."""

    def __init__(self, entry: ModelSettings) -> None:
        self.entry = entry
        self.max_error: float | None = None
        self.undefined_on: list[str] = []
        self._seen: dict[str, _Seen] = {}

    def remember(self, want: Any) -> None:
        """Note which numbers eager gives on one of the points that are compared."""
        import torch
        from torch.utils import _pytree

        for path, value in _pytree.tree_flatten_with_path(want)[0]:
            if isinstance(value, torch.Tensor) and value.numel() and value.dtype is not torch.bool:
                numbers = value.detach().cpu()
                numbers = (torch.view_as_real(numbers) if numbers.is_complex() else numbers).to(torch.float64)
                atol = tolerances(value.dtype, self.entry)[1] if value.is_floating_point() else None
                self._seen.setdefault(_pytree.keystr(path), _Seen(atol)).add(numbers[numbers.isfinite()])

    def vacuous(self) -> tuple[str, ...]:
        """Return what is true of outputs for which a wrong answer could have passed."""
        said = {path: seen.says() for path, seen in self._seen.items()}
        return tuple(f"output{path} {text}" for path, text in said.items() if text)

    def difference(self, got: Any, want: Any, on: str, *, finite: bool = True) -> str:
        """Return where and how `got` is not what eager gives on the inputs `on`, or an empty string.

        Unless the inputs are `finite`, NaN of eager's and integers do not count, but are noted in `undefined_on`: what
        is fused computes some functions in another way, and -inf * 0 may come out as 0; an integer that is made of
        infinity or NaN is anything.
        """
        from torch.utils import _pytree

        got_leaves, got_spec = _pytree.tree_flatten_with_path(got)
        want_leaves, want_spec = _pytree.tree_flatten_with_path(want)
        if got_spec != want_spec:
            return f" has another structure than eager's: {got_spec} against {want_spec}"
        for (path, a), (_, b) in zip(got_leaves, want_leaves, strict=True):
            if not finite and _undefined(a, b):
                self.undefined_on += [on] if on not in self.undefined_on else []
                if not b.is_floating_point():
                    continue
                a = a.masked_fill(b.isnan(), math.nan)  # noqa: PLW2901
            fault = self._compare_leaf(a, b)
            if fault:
                return f"{_pytree.keystr(path)} {fault}"
        return ""

    def _compare_leaf(self, got: Any, want: Any) -> str:
        """Return how `got` falls short of `want`, or an empty string."""
        import torch

        if not isinstance(want, torch.Tensor):
            same = type(got) is type(want) and (got == want or (got != got and want != want))  # noqa: PLR0124
            return "" if same else f"is {got!r}, eager gives {want!r}"
        if not isinstance(got, torch.Tensor) or got.dtype != want.dtype or got.shape != want.shape:
            return f"is {kind(got)}, eager gives {kind(want)}"
        if got.device != want.device:
            return f"is on {got.device}, eager gives it on {want.device}"
        got, want = got.detach().cpu(), want.detach().cpu()
        if not (want.is_floating_point() or want.is_complex()):
            wrong = int((got != want).sum())
            return f"differs from eager in {wrong} of {want.numel()} elements" if wrong else ""
        rtol, atol = tolerances(want.dtype, self.entry)
        wide = torch.complex128 if want.is_complex() else torch.float64
        got, want = got.to(wide), want.to(wide)
        error = (got - want).abs()
        same = (got == want) | (got.isnan() & want.isnan())  # infinities and NaN have no difference
        wrong = ~same & ~((error <= atol + rtol * want.abs()) & error.isfinite())  # infinity allows for all else
        finite = error[~same & error.isfinite()]
        largest = float(finite.max()) if finite.numel() else 0.0
        self.max_error = max(self.max_error or 0.0, largest)
        if not bool(wrong.any()):
            return ""
        return (
            f"differs from eager in {int(wrong.sum())} of {want.numel()} elements, by up to {largest:.3g} "
            f"(allowed: {atol:g} + {rtol:g} * |eager|)"
        )


class _Seen:
    """The range of the numbers in one output, over the points that are compared."""

    def __init__(self, atol: float | None) -> None:
        self.atol, self.count, self.low, self.high = atol, 0, math.inf, -math.inf

    def add(self, finite: torch.Tensor) -> None:
        if finite.numel():
            self.count += finite.numel()
            self.low, self.high = min(self.low, float(finite.min())), max(self.high, float(finite.max()))

    def says(self) -> str:
        largest = max(abs(self.low), abs(self.high))
        if not self.count:
            return "is NaN or infinite wherever it was compared"
        if self.low == self.high and (self.count > 1 or not largest):
            return f"is {self.low:g} wherever it was compared"
        if self.atol is not None and largest <= self.atol:
            return f"is at most {largest:.2g}, less than the difference of {self.atol:g} that `atol` allows"
        return ""


def tolerances(dtype: torch.dtype, entry: ModelSettings) -> tuple[float, float]:
    """Return (rtol, atol) for a floating point dtype: the model's own settings, or else what fits the dtype."""
    rtol, atol = _TOLERANCES.get(str(dtype).removeprefix("torch."), _COARSE)
    return (rtol if entry.rtol is None else entry.rtol, atol if entry.atol is None else entry.atol)


def equal(first: Any, second: Any) -> bool:
    """Whether two results of eager are the same to the last bit; NaN equals NaN."""
    import torch
    from torch.utils import _pytree

    return all(
        a.shape == b.shape and torch.equal(_nan_free(a), _nan_free(b))
        for a, b in zip(_pytree.tree_leaves(first), _pytree.tree_leaves(second), strict=True)
        if isinstance(a, torch.Tensor)
    )


def _undefined(got: Any, want: Any) -> bool:
    """Whether eager gives NaN where compiled code gives a number, or they give different integers."""
    if not (is_tensor(got) and is_tensor(want)) or got.dtype != want.dtype or got.shape != want.shape:
        return False
    if want.is_floating_point():
        return bool((want.isnan() & ~got.isnan()).any())
    return not want.is_complex() and str(want.dtype) != "torch.bool" and bool((got != want).any())


def _nan_free(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.nan_to_num() if tensor.is_floating_point() else tensor
