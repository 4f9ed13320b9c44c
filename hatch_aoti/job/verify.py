"""Compiled against eager, over the declared ranges: the check that a model passes before it may ship.

It calls the compiled model the way users will, through the accessor's checks, on the example inputs, at both ends of
every dynamic range and at random points between, each twice in a row, so that state shows.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import itertools
import math
import random
from typing import TYPE_CHECKING, Any

from hatch_aoti.artifact.archive import ENTRY
from hatch_aoti.errors import ModelError
from hatch_aoti.export.operators import reading_operators
from hatch_aoti.runtime.arguments import DEFAULT
from hatch_aoti.runtime.calls import make_call
from hatch_aoti.runtime.constants import give_constants, map_constants
from hatch_aoti.runtime.contract import Constant
from hatch_aoti.stages import report_stage

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    import torch

    from hatch_aoti.export.program import ExportedModel
    from hatch_aoti.runtime.contract import Signature, TensorInput
    from hatch_aoti.settings.model import ModelSettings

__all__ = ["Verification", "tolerances", "verify_artifact"]

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

# The largest example that is tried, in elements of all inputs together: activations are a multiple of it, and the
# check must not need more memory than using the model does.
_MOST_ELEMENTS = 1 << 22

_RANDOM_POINTS = 2

# How many calls with special values a model gets.
_MOST_SPECIAL = 32


@dataclasses.dataclass(frozen=True)
class Verification:
    """What was checked (`record`, for the manifest: the same on every machine), and the largest error seen there.

    `undefined_on` are the calls with infinity or NaN in them for which compiled code gives numbers where eager gives
    NaN, or other integers: which of these comes of them may depend on the CPU.
    """

    record: dict[str, Any]
    max_error: float | None
    undefined_on: tuple[str, ...] = ()


def verify_artifact(
    package: Path,
    constants: Path | None,
    source: ExportedModel,
    signature: Signature,
    entry: ModelSettings,
    *,
    device: str,
) -> Verification:
    """Compare the compiled `package`, with its external `constants` if it has any, with the module it was made from.

    `device` is what it was compiled for, `cpu` or `cuda`.

    Raises `ModelError` at stage `verify`, saying which output differs, how far, and on which input.
    """
    import torch

    if not entry.verify:
        return Verification({"enabled": False}, None)
    report_stage("verify")
    check = _Check(package, constants, source, signature, entry, device)
    try:
        with torch.no_grad():
            for sizes in _points(signature, check.example, entry.seed):
                check.compare(sizes)
            check.compare_special_values()
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(
            entry.name,
            "verify",
            f"the compiled model raises {type(error).__name__}: {str(error).partition(chr(10))[0]}",
            hint="eager forward() works on the same inputs, so this is a fault of the compiled model; "
            "`inductor-configs` may get around it",
        ) from error
    record = {"enabled": True, "calls": check.calls, "rtol": entry.rtol, "atol": entry.atol}
    return Verification(record, check.max_error, tuple(check.undefined_on))


def tolerances(dtype: torch.dtype, entry: ModelSettings) -> tuple[float, float]:
    """Return (rtol, atol) for a floating point dtype: the model's own settings, or else what fits the dtype."""
    rtol, atol = _TOLERANCES.get(str(dtype).removeprefix("torch."), _COARSE)
    return (rtol if entry.rtol is None else entry.rtol, atol if entry.atol is None else entry.atol)


class _Check:
    """One compiled model next to its eager module: both see the same calls, so their states go along."""

    def __init__(
        self,
        package: Path,
        constants: Path | None,
        source: ExportedModel,
        signature: Signature,
        entry: ModelSettings,
        device: str,
    ) -> None:
        import torch
        from torch.utils import _pytree

        self.entry, self.source, self.signature = entry, source, signature
        # The eager module's state must not be used up: another target is checked against it, too.
        self.eager = copy.deepcopy(source.module) if signature.state else source.module
        loader = torch._C._aoti.AOTIModelPackageLoader(str(package), ENTRY, False, 1, -1)  # noqa: SLF001
        if constants is not None:
            tensors = map_constants(constants, entry.name)
            give_constants(loader.load_constants, tensors, shared=device == "cpu" and not signature.state)
        self.compiled = make_call(entry.name, signature, loader.boxed_run)
        self.loader = loader  # owns the memory of some results
        self.leaves, self.spec = _pytree.tree_flatten((source.args, source.kwargs))
        self.example = [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]
        self.generator = torch.Generator().manual_seed(entry.seed)
        self.calls = 0
        self.max_error: float | None = None
        self.undefined_on: list[str] = []

    def compare(self, sizes: Mapping[str, int] | None) -> None:
        """Compare two calls in a row on inputs of the given sizes of dims; None takes the example itself."""
        args, kwargs = self._inputs(sizes)
        for _ in range(2):
            self._compare_once(args, kwargs)

    def _compare_once(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        want_args, want_kwargs = copy.deepcopy((args, kwargs))
        again = copy.deepcopy((args, kwargs))
        got_args, got_kwargs = copy.deepcopy((args, kwargs))
        on = self._describe(args, kwargs)
        try:
            with _seeded(self.entry.seed):
                want = self.eager(*want_args, **want_kwargs)
        except Exception as error:
            raise ModelError(
                self.entry.name,
                "verify",
                f"eager rejects the sampled input: {_said(error)}, on {on}",
                hint="bound its values with `high`, its sizes with `dims`, or give `inputs` as a function that returns "
                "inputs which forward() takes at all sizes",
            ) from error
        if not self.signature.state:
            with _seeded(self.entry.seed):
                self._demand_repeatable(want, self.eager(*again[0], **again[1]))
        with _seeded(self.entry.seed):
            got = self.compiled(*_values(self.signature, self.source.module.forward, got_args, got_kwargs))
        self.calls += 1
        self._demand_equal("output", got, want, on)
        self._demand_equal("input after the call:", (got_args, got_kwargs), (want_args, want_kwargs), on)

    def compare_special_values(self) -> None:
        """Compare on the example with single values replaced by what is hard to compute with, and which of both raise.

        Integers get the ends of what the example has, and those next to them, which may be out of range; floating
        point gets zero, infinities, NaN, a denormal and a huge number. A model with state is left out: what it keeps
        after half a call is its own affair.
        """
        if self.signature.state:
            return
        special = _special_values(self.leaves, self._declared_bounds())
        for places, value, exact in itertools.islice(special, _MOST_SPECIAL):
            leaves = list(self.leaves)
            for place in places:
                leaves[place] = _with_value(leaves[place], value)
            self._compare_special(leaves, places, value, exact=exact)

    def _declared_bounds(self) -> dict[int, int]:
        """Return the `high` that the settings have for inputs, by their places among the leaves."""
        declared = {} if isinstance(self.entry.inputs, str) else dict(self.entry.inputs or {})
        tensors = [place for place, leaf in enumerate(self.leaves) if _is_tensor(leaf)]
        return {
            place: declared[spec.path].high
            for place, spec in zip(tensors, self._inputs_in_order(), strict=True)
            if spec.path in declared
        }

    def _compare_special(self, leaves: list[Any], places: Sequence[int], value: float, *, exact: bool) -> None:
        from torch.utils import _pytree

        args, kwargs = _pytree.tree_unflatten(leaves, self.spec)
        tensors = [place for place, leaf in enumerate(self.leaves) if _is_tensor(leaf)]
        names = [spec.path for spec in self._inputs_in_order()]
        on = f"{', '.join(names[tensors.index(place)] for place in places)} with {value} in it"
        report_stage(f"verify: {on}")  # should the process end here, the build says what ended it
        want, want_error = self._answer(self.eager, *copy.deepcopy((args, kwargs)))
        call_args, call_kwargs = copy.deepcopy((args, kwargs))
        values = _values(self.signature, self.source.module.forward, call_args, call_kwargs)
        got, got_error = self._answer(self.compiled, values, {})
        self.calls += 1
        if want_error is None and got_error is None:
            if exact:
                self._demand_equal("output", got, want, on, finite=math.isfinite(value))
        elif want_error is None or got_error is None:
            said = [
                f"{who} {'answers' if error is None else 'raises ' + _said(error)}"
                for who, error in (("eager", want_error), ("the compiled model", got_error))
            ]
            self._fail(f"{', '.join(said)}, on {on}")

    def _answer(self, call: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Exception | None]:
        try:
            with _seeded(self.entry.seed):
                return call(*args, **kwargs), None
        except Exception as error:  # noqa: BLE001 - that is what is compared
            return None, error

    def _inputs(self, sizes: Mapping[str, int] | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
        import torch
        from torch.utils import _pytree

        if sizes is None:
            return self.source.args, self.source.kwargs
        inputs = iter(self._inputs_in_order())
        leaves = [
            self._sample(leaf, [size.of(dict(sizes)) for size in next(inputs).shape])
            if isinstance(leaf, torch.Tensor)
            else leaf
            for leaf in self.leaves
        ]
        args, kwargs = _pytree.tree_unflatten(leaves, self.spec)
        return args, kwargs

    def _inputs_in_order(self) -> list[TensorInput]:
        """Return the contract's inputs in the order in which the example's leaves come."""
        inputs = self.signature.inputs
        order = self.signature.order or range(len(inputs))
        return [leaf for _, leaf in sorted(zip(order, inputs, strict=True), key=lambda pair: pair[0])]

    def _sample(self, example: torch.Tensor, shape: list[int]) -> torch.Tensor:
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
            values = torch.randn(count, generator=self.generator, dtype=wide).to(flat.dtype)
        elif flat.numel() == 0:
            values = torch.zeros(count, dtype=flat.dtype)
        else:
            values = flat[torch.randint(0, flat.numel(), (count,), generator=self.generator)]
        return values.reshape(shape).to(example.device)

    def _demand_repeatable(self, first: Any, second: Any) -> None:
        import torch
        from torch.utils import _pytree

        for a, b in zip(_pytree.tree_leaves(first), _pytree.tree_leaves(second), strict=True):
            if isinstance(a, torch.Tensor) and not (a.shape == b.shape and torch.equal(_nan_free(a), _nan_free(b))):
                raise ModelError(
                    self.entry.name,
                    "verify",
                    "eager forward() gives two different answers to the same inputs, with the same random seed"
                    f"{self._suspects()}",
                    hint="make forward() a function of its inputs; or, if this is meant, write `verify = false` for "
                    "this model, and nothing is promised about its answers",
                )

    def _suspects(self) -> str:
        operators = reading_operators(self.source.program)
        return f"; it reads memory that nothing has written ({', '.join(operators)})" if operators else ""

    def _demand_equal(self, what: str, got: Any, want: Any, on: str, *, finite: bool = True) -> None:
        """Fail where `got` is not what eager gives; unless the inputs are `finite`, its NaN and integers do not count.

        What is fused computes some functions in another way, and -inf * 0 may come out as 0; an integer that is made of
        infinity or NaN is anything.
        """
        from torch.utils import _pytree

        got_leaves, got_spec = _pytree.tree_flatten_with_path(got)
        want_leaves, want_spec = _pytree.tree_flatten_with_path(want)
        if got_spec != want_spec:
            self._fail(f"{what} has another structure than eager's: {got_spec} against {want_spec}, on {on}")
        for (path, a), (_, b) in zip(got_leaves, want_leaves, strict=True):
            if not finite and _undefined(a, b):
                self.undefined_on += [on] if on not in self.undefined_on else []
                if not b.is_floating_point():
                    continue
                a = a.masked_fill(b.isnan(), math.nan)  # noqa: PLW2901
            fault = self._compare_leaf(a, b)
            if fault:
                self._fail(f"{what}{_pytree.keystr(path)} {fault}, on {on}")

    def _compare_leaf(self, got: Any, want: Any) -> str:
        """Return how `got` falls short of `want`, or an empty string."""
        import torch

        if not isinstance(want, torch.Tensor):
            same = type(got) is type(want) and (got == want or (got != got and want != want))  # noqa: PLR0124
            return "" if same else f"is {got!r}, eager gives {want!r}"
        if not isinstance(got, torch.Tensor) or got.dtype != want.dtype or got.shape != want.shape:
            return f"is {_kind(got)}, eager gives {_kind(want)}"
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

    def _fail(self, reason: str) -> None:
        state = ", ".join(f"`{name}`" for name in self.signature.state)
        reason += f"; the model keeps state between calls in {state}" if state else ""
        raise ModelError(
            self.entry.name,
            "verify",
            f"the compiled model and eager disagree: {reason}{self._suspects()}",
            hint="if the difference is rounding that you accept, set `rtol` and `atol` for this model; "
            + (
                f"pass what {state} holds as an input and return it as an output; "
                if state
                else "else `inductor-configs` may get around it; "
            )
            + "`verify = false` ships it as it is, and nothing is promised about its answers",
        )

    def _describe(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        import torch
        from torch.utils import _pytree

        tensors = [leaf for leaf in _pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        named = [f"{spec.path}: {_kind(tensor)}" for spec, tensor in zip(self._inputs_in_order(), tensors, strict=True)]
        return ", ".join(named) or "no inputs"


def _is_tensor(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _special_values(leaves: Sequence[Any], bounds: Mapping[int, int]) -> Iterator[tuple[list[int], float, bool]]:
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


def _with_value(tensor: torch.Tensor, value: float) -> torch.Tensor:
    """Return a copy whose first and last elements are `value`: loops treat what is left at their ends in other code."""
    changed = tensor.detach().clone()
    for index in (0, -1):
        changed[tuple(index for _ in range(changed.ndim))] = value
    return changed


def _undefined(got: Any, want: Any) -> bool:
    """Whether eager gives NaN where compiled code gives a number, or they give different integers."""
    if not (_is_tensor(got) and _is_tensor(want)) or got.dtype != want.dtype or got.shape != want.shape:
        return False
    if want.is_floating_point():
        return bool((want.isnan() & ~got.isnan()).any())
    return not want.is_complex() and str(want.dtype) != "torch.bool" and bool((got != want).any())


def _kind(value: Any) -> str:
    import torch

    if not isinstance(value, torch.Tensor):
        return f"a {type(value).__name__}"
    return f"{str(value.dtype).removeprefix('torch.')}[{', '.join(map(str, value.shape))}]"


def _nan_free(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.nan_to_num() if tensor.is_floating_point() else tensor


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Give eager and compiled the same random numbers to draw."""
    import torch

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


def _values(signature: Signature, forward: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return one value for each parameter, as the accessor's own `__call__` passes them on."""
    bound = inspect.signature(forward).bind(*args, **kwargs).arguments
    values = []
    for parameter in signature.parameters:
        default = parameter.default
        left_out: Any = default.value if isinstance(default, Constant) else DEFAULT
        if default is None:  # *args and **kwargs have no default of their own
            left_out = {"*args": (), "**kwargs": {}}.get(parameter.kind, DEFAULT)
        values.append(bound.get(parameter.name, left_out))
    return values


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
