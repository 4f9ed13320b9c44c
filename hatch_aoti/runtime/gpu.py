"""Models for GPUs: what the GPU must be, and running each call where its inputs are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .declarations import LoadError
from .loading import first_line, open_loader
from .machine import major, minor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from .declarations import Declaration, Variant

__all__ = ["OnGpus", "check_gpu"]


class OnGpus:
    """Runs a model on the GPU that its inputs are on, where its first call there loads it; or on one GPU alone.

    PyTorch's loader takes the GPU that is current when the model is loaded, and the stream that is current when it is
    called, whatever the inputs are on; and loading changes which GPU is current. So the right one is made current here,
    for as long as it takes. A model that keeps state stays where it was first called.
    """

    def __init__(self, model: Declaration, variant: Variant) -> None:
        self.model, self.variant = model, variant
        self.runs: dict[int, Callable[..., Any]] = {}
        check_gpu(model, model.options.device_index)

    def __call__(self, flat: list[torch.Tensor]) -> Sequence[Any]:
        """Return what the model answers on the GPU that its inputs are on."""
        import torch

        index = self.model.options.device_index
        if index < 0:
            index = next((x.device.index for x in flat if x.device.type != "cpu"), -1)
        if index < 0:  # nothing to follow
            index = torch.cuda.current_device()
        with torch.cuda.device(index):
            run = self.runs.get(index) or self._load(index)
            return run(flat)  # type: ignore[no-any-return]

    def _load(self, index: int) -> Callable[..., Any]:
        model = self.model
        with model._lock:  # noqa: SLF001
            if index not in self.runs:
                if model.signature.state and self.runs:
                    raise ValueError(
                        f"{model.name} keeps state, which is on cuda:{next(iter(self.runs))}, where it was first "
                        f"called; got inputs on cuda:{index}. {model.name}.with_options(device_index={index}) has a "
                        "state of its own there."
                    )
                check_gpu(model, index)
                self.runs[index] = open_loader(model, self.variant, index).boxed_run
            return self.runs[index]


def check_gpu(model: Declaration, index: int) -> None:
    """Refuse a machine that has not what the model's code for a GPU needs, before any of it is loaded.

    `index` is the GPU; -1 is the current one. LoadError says what is missing.
    """
    import torch

    name, gpu, here = model.name, model.gpu, f"this torch ({torch.__version__})"
    if torch.version.cuda is None:
        raise LoadError(
            f"{name} was compiled for NVIDIA GPUs, and {here} is built without CUDA. Install a CUDA build of torch "
            f"{minor(model.build.torch)} or newer."
        )
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        raise LoadError(
            f"{name} was compiled for NVIDIA GPUs, and torch cannot use one here: {first_line(error)} Check the "
            "driver (nvidia-smi), and CUDA_VISIBLE_DEVICES."
        ) from error
    count = torch.cuda.device_count()
    if index >= count:
        raise LoadError(f"{name}: there is no cuda:{index}: torch finds {count} GPU{'s' * (count != 1)} here.")
    if gpu is None:
        return
    if major(torch.version.cuda) != major(gpu.cuda):
        raise LoadError(
            f"{name} was compiled with CUDA {gpu.cuda}, and {here} is built for CUDA {torch.version.cuda}. Install a "
            f"torch that is built for CUDA {major(gpu.cuda)}."
        )
    capability = torch.cuda.get_device_capability(None if index < 0 else index)
    if not any(_runs_on(architecture, capability) for architecture in gpu.architectures):
        found = f"{torch.cuda.get_device_name(None if index < 0 else index)}, {'.'.join(map(str, capability))}"
        raise LoadError(
            f"{name} has GPU code for {', '.join(gpu.architectures)}, which this GPU ({found}) cannot run. Use a wheel "
            f"that was built for compute capability {'.'.join(map(str, capability))}."
        )


def _runs_on(architecture: str, capability: tuple[int, int]) -> bool:
    """Say whether a GPU runs code for `architecture`; the rules are in the CUDA Programming Guide, "Binary/PTX
    Compatibility".
    """
    kind, _, number = architecture.partition("_")
    digits = number.rstrip("a")
    built = (int(digits[:-1]), int(digits[-1]))
    if digits != number:
        return capability == built
    return capability >= built and (kind == "compute" or capability[0] == built[0])
