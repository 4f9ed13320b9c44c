"""The inputs that verification calls a model with: the example's, others of the sizes it takes, and hard numbers.

Values come from the example, so that what forward() asks of them holds: indices stay in range, masks stay masks.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import torch

    from hatch_aoti.export.program import ExportedModel
    from hatch_aoti.runtime.contract import Signature, TensorInput
    from hatch_aoti.settings.model import ModelSettings

__all__ = ["Samples", "is_tensor", "kind", "special_values", "with_value"]

# The largest example that is tried, in elements of all inputs together: activations are a multiple of it, and the
# check must not need more memory than using the model does.
_MOST_ELEMENTS = 1 << 22

_RANDOM_POINTS = 2


class Samples:
    """The example inputs of a model, and others like them; `leaves` are the example's values, tensors or not."""

    def __init__(self, source: ExportedModel, signature: Signature, entry: ModelSettings) -> None:
        import torch
        from torch.utils import _pytree

        self.source, self.signature, self.entry = source, signature, entry
        self.leaves, self.spec = _pytree.tree_flatten((source.args, source.kwargs))
        self.generator = torch.Generator().manual_seed(entry.seed)

    def points(self) -> Iterator[dict[str, int] | None]:
        """Yield sizes for the dims: the example's own (None), the smallest, the largest, and random ones between."""
        return _points(self.signature, [leaf for leaf in self.leaves if is_tensor(leaf)], self.entry.seed)

    def call(self, sizes: Mapping[str, int] | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return args and kwargs for the given sizes of dims; None takes the example itself."""
        if sizes is None:
            return self.source.args, self.source.kwargs
        inputs = iter(self._inputs_in_order())
        return self.unflatten(
            [
                _draw(leaf, [size.of(dict(sizes)) for size in next(inputs).shape], self.generator)
                if is_tensor(leaf)
                else leaf
                for leaf in self.leaves
            ]
        )

    def unflatten(self, leaves: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return args and kwargs with other `leaves` than the example's."""
        from torch.utils import _pytree

        args, kwargs = _pytree.tree_unflatten(leaves, self.spec)
        return args, kwargs

    def names(self, places: Sequence[int]) -> str:
        """Return the names of the inputs at some places among the leaves, for an error."""
        tensors = self._tensor_places()
        paths = [spec.path for spec in self._inputs_in_order()]
        return ", ".join(paths[tensors.index(place)] for place in places)

    def describe(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Return the names, dtypes and shapes of the inputs of a call, for an error."""
        from torch.utils import _pytree

        tensors = [leaf for leaf in _pytree.tree_leaves((args, kwargs)) if is_tensor(leaf)]
        named = [f"{spec.path}: {kind(tensor)}" for spec, tensor in zip(self._inputs_in_order(), tensors, strict=True)]
        return ", ".join(named) or "no inputs"

    def declared_bounds(self) -> dict[int, int]:
        """Return the `high` that the settings have for inputs, by their places among the leaves."""
        declared = {} if isinstance(self.entry.inputs, str) else dict(self.entry.inputs or {})
        return {
            place: declared[spec.path].high
            for place, spec in zip(self._tensor_places(), self._inputs_in_order(), strict=True)
            if spec.path in declared
        }

    def _tensor_places(self) -> list[int]:
        return [place for place, leaf in enumerate(self.leaves) if is_tensor(leaf)]

    def _inputs_in_order(self) -> list[TensorInput]:
        """Return the contract's inputs in the order in which the example's leaves come."""
        inputs = self.signature.inputs
        order = self.signature.order or range(len(inputs))
        return [leaf for _, leaf in sorted(zip(order, inputs, strict=True), key=lambda pair: pair[0])]


def special_values(leaves: Sequence[Any], bounds: Mapping[int, int]) -> Iterator[tuple[list[int], float, bool]]:
    """Yield (places in `leaves` that get a value, the value, whether the results must be equal).

    `bounds` has exclusive upper bounds of integers, by place; where it has none, the example's largest value is one.
    Huge numbers overflow earlier or later with the order of operations; there, only who raises is compared.
    """
    import torch

    floating: dict[torch.dtype, list[int]] = {}
    for place, leaf in enumerate(leaves):
        if not isinstance(leaf, torch.Tensor) or leaf.numel() == 0 or leaf.dtype is torch.bool or leaf.is_complex():
            continue
        if leaf.is_floating_point():
            floating.setdefault(leaf.dtype, []).append(place)
            continue
        high, possible = bounds.get(place, int(leaf.max()) + 1), torch.iinfo(leaf.dtype)
        for value in dict.fromkeys((0, high - 1, high, -1)):
            if possible.min <= value <= possible.max:
                yield [place], value, True
    for dtype, places in floating.items():
        numbers = torch.finfo(dtype)
        for number, exact in (
            (0.0, True),
            (torch.inf, True),
            (-torch.inf, True),
            (torch.nan, True),
            (numbers.smallest_normal / 4, True),
            (numbers.max, False),
        ):
            yield places, number, exact


def with_value(tensor: torch.Tensor, value: float) -> torch.Tensor:
    """Return a copy whose first and last elements are `value`: loops treat what is left at their ends in other code."""
    changed = tensor.detach().clone()
    for index in (0, -1):
        changed[tuple(index for _ in range(changed.ndim))] = value
    return changed


def is_tensor(value: Any) -> bool:
    """Whether a value is a tensor."""
    import torch

    return isinstance(value, torch.Tensor)


def kind(value: Any) -> str:
    """Return a tensor's dtype and shape as errors write them, or what else a value is."""
    if not is_tensor(value):
        return f"a {type(value).__name__}"
    return f"{str(value.dtype).removeprefix('torch.')}[{', '.join(map(str, value.shape))}]"


def _draw(example: torch.Tensor, shape: list[int], generator: torch.Generator) -> torch.Tensor:
    """Return a tensor of the given shape whose values are drawn from the example's.

    So indices stay in range, masks stay masks, and positive stays positive. Where the example's floating point
    values are all one (a tensor of zeros, say), they are drawn from a normal distribution instead.
    """
    import torch

    flat = example.detach().resolve_conj().resolve_neg().flatten().cpu()
    count = 1
    for size in shape:
        count *= size
    floating = flat.is_floating_point() or flat.is_complex()
    if floating and (flat.numel() == 0 or bool((flat == flat[0]).all())):
        wide = torch.complex64 if flat.is_complex() else torch.float32
        values = torch.randn(count, generator=generator, dtype=wide).to(flat.dtype)
    elif flat.numel() == 0:
        values = torch.zeros(count, dtype=flat.dtype)
    else:
        values = flat[torch.randint(0, flat.numel(), (count,), generator=generator)]
    return values.reshape(shape).to(example.device)


def _points(signature: Signature, example: Sequence[torch.Tensor], seed: int) -> Iterator[dict[str, int] | None]:
    """Yield sizes for the dims: the example's own (None), the smallest, the largest, and random ones between."""
    yield None
    if not signature.dims:
        return
    low = {dim.name: dim.min for dim in signature.dims}
    bound = max(64, 2 * max((size for tensor in example for size in tensor.shape), default=0))
    high = {dim.name: max(dim.min, bound if dim.max is None else dim.max) for dim in signature.dims}
    while _elements(signature, high) > _MOST_ELEMENTS:
        widest = max(high, key=lambda name: (high[name] / max(low[name], 1), name))
        if high[widest] <= max(low[widest], 1):
            break
        high[widest] = max(low[widest], high[widest] // 2)
    yield low
    yield high
    chance = random.Random(seed)  # noqa: S311
    for _ in range(_RANDOM_POINTS):
        yield {name: chance.randint(low[name], high[name]) for name in low}


def _elements(signature: Signature, sizes: dict[str, int]) -> int:
    total = 0
    for leaf in signature.inputs:
        count = 1
        for size in leaf.shape:
            count *= size.of(sizes)
        total += count
    return total
