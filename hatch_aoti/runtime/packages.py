"""PyTorch's own objects for the models, as `aoti_load_package` makes them: in seconds, as it imports the compiler."""

from __future__ import annotations

import shutil
import threading
import zipfile
from typing import TYPE_CHECKING

from .constants import give_own_constants
from .declarations import LoadError, LoadOptions
from .forks import after_fork
from .gpu import check_gpu
from .integrity import check_present
from .loading import aoti_load_package, first_line, register_operators
from .machine import choose_variant
from .models import MODELS, check_options
from .unpacking import alone, temporary_folder, utf8_name

if TYPE_CHECKING:
    from torch.export.pt2_archive._package import AOTICompiledModel

    from .declarations import Declaration

__all__ = ["load"]


_packages: dict[tuple[str, int, bool], AOTICompiledModel] = {}
_packages_lock = threading.RLock()  # of its own: it is held for seconds, which first calls of models need not wait


def _renew() -> None:
    global _packages_lock  # noqa: PLW0603
    _packages_lock = threading.RLock()


after_fork(_renew)


def load(name: str, device_index: int = -1, run_single_threaded: bool = False) -> AOTICompiledModel:
    """Return what `torch._inductor.aoti_load_package` makes of a model's file: PyTorch's own object, and behaviour.

    It is made on the first call for each set of arguments. Named tuples, dataclasses and `torch.return_types` are
    plain tuples here, and nothing is checked: calling a model of this module directly does more and starts faster.
    Raises KeyError for an unknown name, TypeError or ValueError for a wrong option, and LoadError if the model cannot
    be loaded here.
    """
    if name not in MODELS:
        raise KeyError(f"no model {name!r} in this package; there are: {', '.join(MODELS)}")
    check_options(MODELS[name], LoadOptions(device_index, run_single_threaded))
    key = (name, device_index, run_single_threaded)
    with _packages_lock:
        if key not in _packages:
            _packages[key] = _load_package(MODELS[name], device_index, run_single_threaded)
        return _packages[key]


def _load_package(model: Declaration, device_index: int, run_single_threaded: bool) -> AOTICompiledModel:
    variant = choose_variant(model)
    path = model.folder / variant.file
    check_present(model, path)
    if model.device != "cpu":
        check_gpu(model, device_index)
    register_operators(model)
    place = temporary_folder()
    before = set(place.glob("aotinductor_*"))
    try:
        with alone(model, variant) as archive:
            file = utf8_name(archive)
            package = aoti_load_package(file, run_single_threaded=run_single_threaded, device_index=device_index)
        give_own_constants(model, package.loader.load_constants)
    except LoadError:
        raise
    except (RuntimeError, OSError, EOFError, zipfile.BadZipFile) as error:
        # The C++ loader leaves the archive behind when it fails (pytorch/pytorch#141772). Others may be loading, too:
        # only what holds this very archive goes.
        for left in set(place.glob("aotinductor_*")) - before:
            if (left / path.stem).is_dir():
                shutil.rmtree(left, ignore_errors=True)
        hint = ""
        if "failed to map segment" in str(error):
            hint = (
                f" {place} does not allow to run code (noexec): set TMPDIR to a folder that does, or call {model.name}"
            )
            hint += " itself, which looks for one."
        raise LoadError(f"{model.name}: PyTorch cannot load {path}: {first_line(error)}{hint}") from error
    return package
