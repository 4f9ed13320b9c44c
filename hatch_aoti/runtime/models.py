"""The models that users call.

Nothing is loaded before it is needed, and `torch` not even imported: a model's first call does both.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from typing import TYPE_CHECKING, Any

from .calls import make_call
from .declarations import Declaration, LoadError, LoadOptions
from .forks import after_fork, fork_safe
from .gpu import OnGpus
from .integrity import wrong_files
from .loading import open_loader
from .machine import choose_variant
from .thread_state import apart, check_thread

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import torch
    from typing_extensions import Self

__all__ = ["MODELS", "Model", "check_options"]


class Model(Declaration):
    """A compiled model: call it like the `forward` it was compiled from.

    The first call loads it. Calls may come from several threads; up to `num_runners` of them run at once. Arguments
    are checked against `signature`: TypeError for a wrong type or missing argument, ValueError for a wrong value,
    LoadError (a RuntimeError) if the model cannot be loaded here. Results never track gradients.
    """

    def __init_subclass__(cls) -> None:
        vars(cls)["__call__"].__qualname__ = cls.name  # Python names it when arguments are missing or too many

    def __init__(self) -> None:
        self.options = LoadOptions(num_runners=self.num_runners)
        # This model by the options it is loaded with; the module's own object comes first.
        self._family: dict[LoadOptions, Any] = {self.options: self}
        self._call: Callable[..., Any] = self._first_call
        self._loaded = False
        self._lock = threading.RLock()
        self._turns = threading.Semaphore(self.num_runners)
        _alive.add(self)

    def with_options(
        self,
        *,
        device_index: int | None = None,
        run_single_threaded: bool | None = None,
        num_runners: int | None = None,
    ) -> Self:
        """Return this model loaded with other options (see `LoadOptions`); those that are left out stay as they are.

        It is the same object for the same options. Its memory is its own: buffers that forward changes start from
        their values at build time. Nothing is loaded before it is called. Raises TypeError or ValueError.
        """
        now = self.options
        options = LoadOptions(
            now.device_index if device_index is None else device_index,
            now.run_single_threaded if run_single_threaded is None else run_single_threaded,
            now.num_runners if num_runners is None else num_runners,
        )
        check_options(self, options)
        own: Model = next(iter(self._family.values()))
        with own._lock:
            if options not in self._family:
                other = type(self)()
                other.options, other._family = options, self._family  # noqa: SLF001
                self._family[options] = other
            return self._family[options]  # type: ignore[no-any-return]

    @property
    def path(self) -> Path:
        """The compiled file that this CPU would load; the models of a bundle share one."""
        if len(self.variants) == 1:
            return self.folder / self.variants[0].file
        return self.folder / choose_variant(self).file

    def load(self) -> Self:
        """Load the model now, which its first call does otherwise, and return it.

        One that follows its inputs from GPU to GPU is still loaded by its first call on each. Raises LoadError.
        """
        with self._lock:
            if not self._loaded:  # another thread may have been faster
                variant = choose_variant(self)
                check_thread(self.name)
                with apart():
                    run = open_loader(self, variant).boxed_run if self.device == "cpu" else OnGpus(self, variant)
                if self.operators and not self.options.run_single_threaded:
                    run = self._in_turn(run)
                self._call = fork_safe(make_call(self.name, self.signature, run, self.options.device_index))
                self._loaded = True
        return self

    def verify(self) -> Self:
        """Compare this model's files, byte for byte, with what the build made, and return the model.

        Loading checks that the files are those of this build, and that code is undamaged, but does not read the data of
        external constants. This does, in a second or two for each gigabyte; it loads nothing. Raises LoadError.
        """
        if wrong := wrong_files([self]):
            raise LoadError("\n".join(wrong))
        return self

    def _in_turn(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return `run`, entered by `num_runners` threads at a time.

        PyTorch waits for a free runner with Python's lock held, which an operator that is written in Python needs to
        come to its end.
        """
        self._turns = threading.Semaphore(self.options.num_runners)  # which `with_options` has set since

        def run_in_turn(flat: list[torch.Tensor]) -> Any:
            with self._turns:
                return run(flat)

        return run_in_turn

    def _first_call(self, *values: Any) -> Any:
        self.load()
        return self._call(*values)

    def __reduce__(self) -> str | tuple[Any, ...]:
        """Pickle and copy by name and options: the other process loads its own."""
        own = next(iter(self._family.values()))
        return self.name if self is own else (_with_options, (own, self.options))

    def __repr__(self) -> str:
        own = dataclasses.asdict(next(iter(self._family)))
        other = [f"{name}={value}" for name, value in dataclasses.asdict(self.options).items() if value != own[name]]
        loaded = f".with_options({', '.join(other)})" if other else ""
        return f"<{self.name}{loaded}{self.signature}>"


def _with_options(model: Model, options: LoadOptions) -> Model:
    return model.with_options(**dataclasses.asdict(options))


def check_options(model: Model, options: LoadOptions) -> None:
    """Refuse options that PyTorch would misunderstand, or answer with a message that does not name them."""
    name, index = model.name, options.device_index
    if type(options.run_single_threaded) is not bool:
        raise TypeError(f"{name}: run_single_threaded must be True or False, got {options.run_single_threaded!r}")
    if type(options.num_runners) is not int:
        raise TypeError(f"{name}: num_runners must be an int, got {options.num_runners!r}")
    if options.num_runners < 1:
        raise ValueError(f"{name}: num_runners must be at least 1, got {options.num_runners}")
    if type(index) is not int:
        raise TypeError(f"{name}: device_index must be an int, got {index!r}")
    if model.device == "cpu" and index != -1:
        raise ValueError(f"{name}: device_index must be -1, since the model was compiled for the CPU; got {index}")
    if index < -1:
        raise ValueError(f"{name}: device_index must be the number of a GPU, or -1 for the default; got {index}")


_alive: weakref.WeakSet[Model] = weakref.WeakSet()


def _renew() -> None:
    for model in list(_alive):
        model._lock = threading.RLock()  # noqa: SLF001
        model._turns = threading.Semaphore(model.options.num_runners)  # noqa: SLF001
        if model._loaded:  # noqa: SLF001
            model._call = fork_safe(model._call)  # noqa: SLF001


after_fork(_renew)

MODELS: dict[str, Model] = {}
"""Every model in this package, by name."""
