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
from typing import TYPE_CHECKING, Any

from hatch_aoti.artifact.archive import ENTRY
from hatch_aoti.errors import ModelError
from hatch_aoti.export.operators import reading_operators
from hatch_aoti.job.comparison import Comparison, equal
from hatch_aoti.job.samples import Samples, special_values, with_value
from hatch_aoti.job.values import Measured, NotVerified, Verified
from hatch_aoti.runtime.arguments import DEFAULT
from hatch_aoti.runtime.calls import make_call
from hatch_aoti.runtime.constants import give_constants, map_constants
from hatch_aoti.runtime.contract import Constant
from hatch_aoti.stages import report_stage

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from hatch_aoti.export.program import ExportedModel
    from hatch_aoti.runtime.contract import Signature
    from hatch_aoti.settings.model import ModelSettings

__all__ = ["Verification", "verify_artifact"]

# How many calls with special values a model gets.
_MOST_SPECIAL = 32


@dataclasses.dataclass(frozen=True)
class Verification:
    """What was checked (`record`, for the manifest: the same on every machine), and what was measured meanwhile."""

    record: Verified | NotVerified
    measured: Measured


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
        return Verification(NotVerified(), Measured(None))
    report_stage("verify")
    check = _Check(package, constants, source, signature, entry, device)
    try:
        with torch.no_grad():
            for sizes in check.samples.points():
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
    record = Verified(check.calls, entry.rtol, entry.atol)
    seen = check.comparison
    return Verification(record, Measured(seen.max_error, tuple(seen.undefined_on), seen.vacuous()))


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

        self.entry, self.source, self.signature = entry, source, signature
        # The eager module's state must not be used up: another target is checked against it, too.
        self.eager = copy.deepcopy(source.module) if signature.state else source.module
        loader = torch._C._aoti.AOTIModelPackageLoader(str(package), ENTRY, False, 1, -1)  # noqa: SLF001
        if constants is not None:
            tensors = map_constants(constants, entry.name)
            give_constants(loader.load_constants, tensors, shared=device == "cpu" and not signature.state)
        self.compiled = make_call(entry.name, signature, loader.boxed_run)
        self.loader = loader  # owns the memory of some results
        self.samples = Samples(source, signature, entry)
        self.comparison = Comparison(entry)
        self.calls = 0

    def compare(self, sizes: Mapping[str, int] | None) -> None:
        """Compare two calls in a row on inputs of the given sizes of dims; None takes the example itself."""
        args, kwargs = self.samples.call(sizes)
        self.comparison.remember(self._compare_once(args, kwargs))
        self._compare_once(args, kwargs)

    def _compare_once(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compare one call; return what eager answers."""
        want_args, want_kwargs = copy.deepcopy((args, kwargs))
        again = copy.deepcopy((args, kwargs))
        got_args, got_kwargs = copy.deepcopy((args, kwargs))
        on = self.samples.describe(args, kwargs)
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
        return want

    def compare_special_values(self) -> None:
        """Compare on the example with single values replaced by what is hard to compute with, and which of both raise.

        Integers get the ends of what the example has, and those next to them, which may be out of range; floating
        point gets zero, infinities, NaN, a denormal and a huge number. A model with state is left out: what it keeps
        after half a call is its own affair.
        """
        if self.signature.state:
            return
        special = special_values(self.samples.leaves, self.samples.declared_bounds())
        for places, value, exact in itertools.islice(special, _MOST_SPECIAL):
            leaves = list(self.samples.leaves)
            for place in places:
                leaves[place] = with_value(leaves[place], value)
            self._compare_special(leaves, places, value, exact=exact)

    def _compare_special(self, leaves: list[Any], places: Sequence[int], value: float, *, exact: bool) -> None:
        args, kwargs = self.samples.unflatten(leaves)
        on = f"{self.samples.names(places)} with {value} in it"
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

    def _demand_repeatable(self, first: Any, second: Any) -> None:
        if not equal(first, second):
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
        difference = self.comparison.difference(got, want, on, finite=finite)
        if difference:
            self._fail(f"{what}{difference}, on {on}")

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


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


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
