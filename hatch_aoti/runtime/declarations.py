"""What `_models.py` declares: each model, its compiled files, what these need; and the error when that is missing."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from .contract import Signature

__all__ = ["Build", "Declaration", "Gpu", "LoadError", "LoadOptions", "Variant"]


class LoadError(RuntimeError):
    """A bundled model cannot be loaded here. The text says why and what to do."""


@dataclasses.dataclass(frozen=True)
class Build:
    """What the models were compiled with and for; `debug` has the variables that made it a debug build."""

    torch: str
    system: str
    machine: str
    hatch_aoti: str
    debug: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Variant:
    """A model compiled for one CPU baseline, in a file that may have other models, too; `entry` is its name in there.

    `id` is the `.data/serialization_id` in that file, a hash of what is in it; empty if it is not known.
    `features` are the names under which `torch.cpu.get_capabilities()` reports what the baseline needs; `description`
    says it for people ("AVX2").
    """

    target: str
    file: str
    features: tuple[str, ...] = ()
    description: str = ""
    entry: str = "model"
    id: str = ""

    def __str__(self) -> str:
        return f"{self.target} ({self.description})" if self.description else self.target


@dataclasses.dataclass(frozen=True)
class Gpu:
    """What code for a GPU needs: the CUDA version of the torch that compiled it, and what its kernels are for.

    `architectures` are in the words of `torch.cuda.get_arch_list()`: `sm_80` is for compute capability 8.0 and later
    ones of 8; `compute_80` is compiled by the driver, for 8.0 and everything newer; a final `a` means just this one.
    """

    cuda: str
    architectures: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class LoadOptions:
    """How a model is loaded; PyTorch's own terms.

    `device_index` is the GPU, -1 for the one that the inputs of each call are on. `run_single_threaded` leaves out the
    synchronisation between threads, as capturing a CUDA graph asks for: then only one thread may call at a time.
    `num_runners` is how many calls may run at once.
    """

    device_index: int = -1
    run_single_threaded: bool = False
    num_runners: int = 1


class Declaration:
    """A compiled model as its class declares it, and how this object of it is loaded.

    `variants` are its files, the best CPU baseline first; `source` is where the model comes from
    (`example_project.digits:DigitsNet`); `constants` is the file with its constants if the compiled files have none,
    and `constants_id` the SHA-256 of that file's header; `operators` are those that it calls and torch alone does not
    have; `folder` has the files.
    """

    name: ClassVar[str]
    source: ClassVar[str]
    signature: ClassVar[Signature]
    variants: ClassVar[tuple[Variant, ...]]
    device: ClassVar[str] = "cpu"
    gpu: ClassVar[Gpu | None] = None
    num_runners: ClassVar[int] = 1
    constants: ClassVar[str] = ""
    constants_id: ClassVar[str] = ""
    operators: ClassVar[tuple[str, ...]] = ()
    build: ClassVar[Build]
    folder: ClassVar[Path] = Path(__file__).parents[1]  # the package that has `_models.py`, and this folder

    options: LoadOptions
    _lock: Any  # one thread at a time loads it
