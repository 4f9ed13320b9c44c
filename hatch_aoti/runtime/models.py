"""Bundled models: which file this machine can run, loading it, and the objects that users call.

Nothing is loaded before it is needed, and `torch` not even imported: a model's first call does both. A model goes
straight to PyTorch's C++ package loader, which takes milliseconds; `load` gives PyTorch's own object, which takes
seconds because it imports the compiler.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import hashlib
import importlib
import json
import logging
import os
import platform
import re
import shutil
import sys
import tempfile
import threading
import time
import weakref
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from hatch_aoti.runtime.calls import apart, caller, check_thread, opaque

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch
    from torch.export.pt2_archive._package import AOTICompiledModel
    from typing_extensions import Self

    from hatch_aoti.runtime.contract import Signature

__all__ = [
    "MODELS",
    "Build",
    "Gpu",
    "LoadError",
    "LoadOptions",
    "Model",
    "Variant",
    "give_constants",
    "load",
    "main",
    "map_constants",
]


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


class Model:
    """A compiled model: call it like the `forward` it was compiled from.

    The first call loads it. Calls may come from several threads; up to `num_runners` of them run at once. Arguments
    are checked against `signature`: TypeError for a wrong type or missing argument, ValueError for a wrong value,
    LoadError (a RuntimeError) if the model cannot be loaded here. Results never track gradients.
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
    folder: ClassVar[Path] = Path(__file__).parent

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
        _check_options(self, options)
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
        return self.folder / self._variant().file

    def load(self) -> Self:
        """Load the model now, which its first call does otherwise, and return it.

        One that follows its inputs from GPU to GPU is still loaded by its first call on each. Raises LoadError.
        """
        with self._lock:
            if not self._loaded:  # another thread may have been faster
                variant = self._variant()
                check_thread(self.name)
                with apart():
                    run = _open(self, variant).boxed_run if self.device == "cpu" else _OnGpus(self, variant)
                if self.operators and not self.options.run_single_threaded:
                    run = self._in_turn(run)
                self._call = _fork_safe(caller(self.name, self.signature, run, self.options.device_index))
                self._loaded = True
        return self

    def verify(self) -> Self:
        """Compare this model's files, byte for byte, with what the build made, and return the model.

        Loading checks that the files are those of this build, and that code is undamaged, but does not read the data of
        external constants. This does, in a second or two for each gigabyte; it loads nothing. Raises LoadError.
        """
        if wrong := _wrong_files([self]):
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

    def _variant(self) -> Variant:
        """Return the best variant that this machine can run; LoadError says what is missing if there is none."""
        built = self.build
        here = (_system(platform.system()), _machine(platform.machine()))
        if here != (_system(built.system), _machine(built.machine)):
            raise LoadError(
                f"{self.name} was compiled for {built.system} on {built.machine}; this is {platform.system()} on "
                f"{platform.machine()}. Install a wheel that was built for this platform."
            )
        torch = _torch(self)
        able = torch.cpu.get_capabilities()
        for variant in self.variants:
            if all(able.get(feature) for feature in variant.features):
                return variant
        least = self.variants[-1]
        missing = ", ".join(feature for feature in least.features if not able.get(feature))
        raise LoadError(
            f"{self.name} needs {least}; this CPU ({able.get('cpu_name') or platform.machine()}) lacks {missing}. "
            f"Use a wheel built for a lower target."
        )

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


def _check_options(model: Model, options: LoadOptions) -> None:
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


class _OnGpus:
    """Runs a model on the GPU that its inputs are on, where its first call there loads it; or on one GPU alone.

    PyTorch's loader takes the GPU that is current when the model is loaded, and the stream that is current when it is
    called, whatever the inputs are on; and loading changes which GPU is current. So the right one is made current here,
    for as long as it takes. A model that keeps state stays where it was first called.
    """

    def __init__(self, model: Model, variant: Variant) -> None:
        self.model, self.variant = model, variant
        self.runs: dict[int, Callable[..., Any]] = {}
        _check_gpu(model, model.options.device_index)

    def __call__(self, flat: list[torch.Tensor]) -> Sequence[Any]:
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
                _check_gpu(model, index)
                self.runs[index] = _open(model, self.variant, index).boxed_run
            return self.runs[index]


def _check_gpu(model: Model, index: int) -> None:
    """Refuse a machine that has not what the model's code for a GPU needs, before any of it is loaded.

    `index` is the GPU; -1 is the current one. LoadError says what is missing.
    """
    import torch

    name, gpu, here = model.name, model.gpu, f"this torch ({torch.__version__})"
    if torch.version.cuda is None:
        raise LoadError(
            f"{name} was compiled for NVIDIA GPUs, and {here} is built without CUDA. Install a CUDA build of torch "
            f"{_minor(model.build.torch)} or newer."
        )
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        raise LoadError(
            f"{name} was compiled for NVIDIA GPUs, and torch cannot use one here: {_first_line(error)} Check the "
            "driver (nvidia-smi), and CUDA_VISIBLE_DEVICES."
        ) from error
    count = torch.cuda.device_count()
    if index >= count:
        raise LoadError(f"{name}: there is no cuda:{index}: torch finds {count} GPU{'s' * (count != 1)} here.")
    if gpu is None:
        return
    if _major(torch.version.cuda) != _major(gpu.cuda):
        raise LoadError(
            f"{name} was compiled with CUDA {gpu.cuda}, and {here} is built for CUDA {torch.version.cuda}. Install a "
            f"torch that is built for CUDA {_major(gpu.cuda)}."
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


def _major(version: str) -> str:
    return version.partition(".")[0]


_alive: weakref.WeakSet[Model] = weakref.WeakSet()


class _Forked:
    """What a forked child must not take over from its parent, where other threads ran, which the child lacks.

    `thread` is the one that was forked: the threads that OpenMP had started for it are gone, and a loop that waits for
    them waits for ever (pytorch/pytorch#49555), so compiled code runs in this one alone. Threads that the child starts
    get new ones. Locks are new: a thread that the child lacks may have held the old.
    """

    thread: int | None = None

    @classmethod
    def renew(cls) -> None:
        global _packages_lock  # noqa: PLW0603
        cls.thread = threading.get_ident()
        _packages_lock = threading.RLock()
        for model in list(_alive):
            model._lock = threading.RLock()  # noqa: SLF001
            model._turns = threading.Semaphore(model.options.num_runners)  # noqa: SLF001
            if model._loaded:  # noqa: SLF001
                model._call = _fork_safe(model._call)  # noqa: SLF001


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_Forked.renew)


def _fork_safe(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return `call`, or in a forked child one that computes with one thread where more would never answer."""
    if _Forked.thread is None:
        return call
    import torch

    def call_in_child(*values: Any) -> Any:
        if threading.get_ident() != _Forked.thread or (threads := torch.get_num_threads()) == 1:
            return call(*values)
        torch.set_num_threads(1)
        try:
            return call(*values)
        finally:
            torch.set_num_threads(threads)

    return opaque("a model", call_in_child)


def _system(name: str) -> str:
    return {"macos": "darwin"}.get(name.lower(), name.lower())


def _machine(name: str) -> str:
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(name.lower(), name.lower())


def _torch(model: Model) -> Any:
    """Import torch, and refuse one that is older than the one that compiled the model."""
    built = model.build.torch
    try:
        import torch
    except ImportError as error:
        raise LoadError(
            f"{model.name} needs torch {_minor(built)} or newer, which cannot be imported here ({error}). "
            f'Install it: pip install "torch>={_minor(built)}"'
        ) from error
    if _numbers(torch.__version__) < _numbers(built):
        raise LoadError(
            f"{model.name} was compiled with torch {built} and needs torch {_minor(built)} or newer; this is torch "
            f'{torch.__version__}. Upgrade it: pip install "torch>={_minor(built)}"'
        )
    return torch


def _numbers(version: str) -> tuple[int, int]:
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _minor(version: str) -> str:
    return ".".join(map(str, _numbers(version)))


def _check_present(model: Model, path: Path) -> None:
    if path.is_file():
        return
    if packed := next((parent for parent in path.parents if parent.is_file()), None):
        raise LoadError(
            f"{model.name}: {path.name} is in the zip file {packed}, and compiled code is loaded only from a file of "
            "its own. Unpack it (python -m zipfile -e), or install the package with pip."
        )
    raise LoadError(f"{model.name}: {path} is missing. Reinstall the package that contains it.")


def _open(model: Model, variant: Variant, device_index: int = -1) -> Any:
    """Return PyTorch's C++ loader on a variant's file.

    That loader unpacks archives into TMPDIR, keeps them there while it lives, and leaves them behind when it fails or
    the process is killed (pytorch/pytorch#141772). It also takes an unpacked folder, which may go once the code is
    mapped; so the archive is unpacked here, wherever that works: TMPDIR may be full, read-only or mounted noexec.
    """
    import torch

    path = model.folder / variant.file
    _check_present(model, path)
    _register_operators(model)
    loader_class = getattr(torch._C._aoti, "AOTIModelPackageLoader", None)  # noqa: SLF001
    if loader_class is None:  # a later torch: its own function knows how
        single = model.options.run_single_threaded
        with _alone(model, variant) as alone:
            loader = _aoti_load_package(_utf8_name(alone), run_single_threaded=single, device_index=device_index).loader
        _give_constants(model, loader.load_constants)
        return loader
    options, failures = model.options, []
    for place in dict.fromkeys([_temporary_folder(), _cache_folder(), path.parent]):
        try:
            # Debuggers read the file of the code as long as it runs.
            again, keep = not model.signature.state, model.device != "cpu" or bool(model.build.debug)
            with _unpacked(model, variant, place, again=again, keep=keep) as folder:
                loader = loader_class(
                    _utf8_name(folder), variant.entry, options.run_single_threaded, options.num_runners, device_index
                )
            _give_constants(model, loader.load_constants)
        except LoadError:
            raise
        except (zipfile.BadZipFile, EOFError) as error:
            raise LoadError(f"{model.name}: {path} is damaged ({error}). Reinstall the package.") from error
        except OSError as error:
            failures.append(f"{place}: {error.strerror or error}")
        except RuntimeError as error:
            if "failed to map segment" not in str(error):
                raise LoadError(
                    f"{model.name}: torch {torch.__version__} cannot load {path}, which torch {model.build.torch} "
                    f"compiled: {_first_line(error)}"
                ) from error
            failures.append(f"{place}: does not allow to run code (noexec)")
        else:
            return loader
    tried = "\n".join(f"  {failure}" for failure in failures)
    raise LoadError(
        f"{model.name}: no folder to unpack {path.name} in. Set TMPDIR to one that can be written, has room and "
        f"allows to run code. Tried:\n{tried}"
    )


def _register_operators(model: Model) -> None:
    """Import the module that the model came from, if compiled code calls custom operators (pytorch/pytorch#145394).

    They are registered when that module is imported, as they were at build.
    """
    import torch

    module = model.source.partition(":")[0]
    for operator in model.operators:
        if operator in torch._C._dispatch_get_all_op_names():  # noqa: SLF001
            continue
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise LoadError(
                f"{model.name} calls the operator {operator}, which importing {module} registers; that fails: {error}. "
                f"Install what it needs, or import the module that has the operator before calling {model.name}."
            ) from error


def _give_constants(model: Model, load_constants: Callable[..., None]) -> None:
    """Hand a loaded model its constants, if they are in a file of their own: mapped into memory, not copied.

    So loading takes the same time whatever their size, and all processes share them. A model that writes into its
    constants, or runs on another device, gets a copy.
    """
    if not model.constants:
        return
    tensors = map_constants(model.folder / model.constants, model.name, model.constants_id)
    give_constants(load_constants, tensors, shared=model.device == "cpu" and not model.signature.state)


def give_constants(load_constants: Callable[..., None], tensors: dict[str, torch.Tensor], *, shared: bool) -> None:
    """Call PyTorch's `load_constants` on tensors of the CPU, which it uses where they are, or copies to the device."""
    load_constants(tensors, False, True, shared, not shared)


def map_constants(path: Path, model: str, header_id: str = "") -> dict[str, torch.Tensor]:
    """Return a model's constants from a `.safetensors` file of several models', by the names its compiled code has.

    The file's metadata has an index for each model; see `artifact/constants_file.py` for its format. The tensors are
    views of the file and stay valid as long as the process lives. `header_id` is the SHA-256 of the file's header,
    which names each tensor by a hash of its content. Raises LoadError if the file is missing, damaged or another one;
    what the tensors hold is not read here, but by `verify`.
    """
    import torch

    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            text = file.read(size)
        header = json.loads(text)
        if header_id and hashlib.sha256(text).hexdigest() != header_id:
            raise LoadError(_another(model, path))
        index = json.loads(header["__metadata__"][model])
        bytes_needed = (
            8
            + size
            + max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
        )
        if path.stat().st_size < bytes_needed:
            raise ValueError("it is shorter than it should be")
    except FileNotFoundError:
        raise LoadError(f"{model}: {path} is missing. Reinstall the package that contains it.") from None
    except (ValueError, KeyError, OSError, MemoryError, OverflowError) as error:
        raise LoadError(f"{model}: {path} is damaged ({error}). Reinstall the package.") from error
    if path not in _mapped:
        # Private to the process as soon as it is written to, and shared as long as it is not.
        storage: Any = torch.UntypedStorage.from_file(str(path), shared=False, nbytes=path.stat().st_size)
        _mapped.setdefault(path, storage)  # another thread may have been faster
    tensors = {}
    for name, entry in index.items():
        dtype = getattr(torch, entry["dtype"])
        start = 8 + size + header[entry["tensor"]]["data_offsets"][0]
        shape, order = entry["shape"], entry["order"]
        flat = torch.empty(0, dtype=dtype, device="cpu").set_(  # type: ignore[call-overload]
            _mapped[path], start // dtype.itemsize, [shape[dim] for dim in order]
        )
        tensors[name] = flat.permute([order.index(dim) for dim in range(len(order))])
    return tensors


_mapped: dict[Path, torch.UntypedStorage] = {}  # files that are in use: constants point into them


def _wrong_files(models: Sequence[Model]) -> list[str]:
    """Say which files of `models` differ from those that the build made; `_models.json` has the SHA-256 of each."""
    manifest_path = Model.folder / "_models.json"
    expected: dict[str, str] = {}
    seen: set[str] = set()
    wrong = []
    try:
        manifest = json.loads(manifest_path.read_text(encoding="utf-8"))
        for described in manifest["models"].values():
            expected |= {artifact["file"]: artifact["sha256"] for artifact in described["artifacts"]}
        if "constants_file" in manifest:
            expected[manifest["constants_file"]["file"]] = manifest["constants_file"]["sha256"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return [f"{manifest_path} is missing or damaged ({error}). Reinstall the package that contains it."]
    for model in models:
        for file in [*(variant.file for variant in model.variants), *([model.constants] if model.constants else [])]:
            path = model.folder / file
            try:
                _check_present(model, path)
                for variant in model.variants:
                    if variant.file == file:
                        with zipfile.ZipFile(path) as archive:
                            _check_id(model, variant, path, archive)
                if file not in seen and _sha256(path) != expected.get(file):
                    wrong.append(f"{path} is damaged: its SHA-256 is not the build's. Reinstall the package.")
                seen.add(file)
            except LoadError as error:
                wrong.append(str(error))
            except (OSError, EOFError, zipfile.BadZipFile) as error:
                wrong.append(f"{model.name}: {path} is damaged ({error}). Reinstall the package.")
    return wrong


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _another(model: str, path: Path) -> str:
    return (
        f"{model}: {path} is not the file that this _models.py was built with: it is of another build, or of another "
        "model. Reinstall the package."
    )


def _check_id(model: Model, variant: Variant, path: Path, archive: zipfile.ZipFile) -> None:
    """Refuse an archive of another model or build, before any of its code is loaded."""
    found = [archive.read(name) for name in archive.namelist() if name.endswith("/.data/serialization_id")]
    if variant.id and found != [variant.id.encode()]:
        raise LoadError(_another(model.name, path))


def _temporary_folder() -> Path:
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError:  # none is writable; the attempt below says so about this one
        return Path(os.environ.get("TMPDIR") or os.sep + "tmp")


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path(os.path.expanduser("~")) / ".cache")  # noqa: PTH111  (never raises)


def _members(archive: zipfile.ZipFile, entry: str) -> list[str]:
    """Return the names of an archive's members, without those of other models: `<stem>/data/aotinductor/<model>/…`."""
    parts = {name: name.split("/") for name in archive.namelist()}
    return [name for name, part in parts.items() if part[1:3] != ["data", "aotinductor"] or part[3] == entry]


@contextlib.contextmanager
def _alone(model: Model, variant: Variant) -> Iterator[Path]:
    """Yield an archive with one model of a variant's file, under the name that `aoti_load_package` looks for.

    That function, like `load_package` with another name, loads all models of an archive before it returns one.
    """
    path, entry = model.folder / variant.file, variant.entry
    with zipfile.ZipFile(path) as archive:
        _check_id(model, variant, path, archive)
        members = _members(archive, entry)
        if entry == "model" and len(members) == len(archive.namelist()):
            yield path
            return
        with _Folder(_temporary_folder()) as folder:
            alone = folder / path.name
            with zipfile.ZipFile(alone, "w") as copy:
                for name in members:
                    info = zipfile.ZipInfo(name.replace(f"/data/aotinductor/{entry}/", "/data/aotinductor/model/", 1))
                    info.file_size = archive.getinfo(name).file_size  # above 2 GB it takes another header
                    with archive.open(name) as source, copy.open(info, "w") as target:
                        shutil.copyfileobj(source, target)
            yield alone


class _Folder:
    """A folder of this process in `place`, removed on leaving; `path` if that is given and free, else a new one.

    What a killed process left goes when another one makes its first folder in the same place. A folder is locked as
    long as its owner lives: the system drops the lock when the process ends, however it does, and whatever container
    it is in. With `keep` the folder stays until the process ends.
    """

    _PREFIX = "hatch-aoti-"
    _FRESH = 60  # seconds in which a folder may not be locked yet
    _swept: ClassVar[set[Path]] = set()

    def __init__(self, place: Path, path: Path | None = None, *, keep: bool = False) -> None:
        import fcntl

        if place not in self._swept:
            self._swept.add(place)
            self._sweep(place)
        self.keep, self.owner = keep, os.getpid()
        try:
            if path is not None:
                path.mkdir(mode=0o700)
        except FileExistsError:  # not ours any more
            path = None
        self.path = path or Path(tempfile.mkdtemp(prefix=self._PREFIX, dir=place))
        self.lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None and self.keep:
            atexit.register(self._remove)
        else:
            self._remove()

    def _remove(self) -> None:
        if os.getpid() == self.owner:  # a forked child must not remove what its parent uses
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self.lock)

    @classmethod
    def _sweep(cls, place: Path) -> None:
        """Remove what killed processes left in `place`: our own folders, private to this user, that nobody locks."""
        with contextlib.suppress(OSError), os.scandir(place) as found:
            for entry in found:
                if re.fullmatch(cls._PREFIX + r"[a-z0-9_]{8}", entry.name):
                    with contextlib.suppress(OSError):
                        cls._remove_stale(entry.path)

    @classmethod
    def _remove_stale(cls, path: str) -> None:
        import fcntl

        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)  # no link
        try:
            found = os.fstat(descriptor)
            ours = found.st_uid == os.geteuid() and found.st_mode & 0o777 == 0o700
            if ours and found.st_mtime < time.time() - cls._FRESH:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # OSError: its owner lives
                shutil.rmtree(path)
        finally:
            os.close(descriptor)


_unpacked_before: dict[tuple[Path, str, Path, int, int], Path] = {}


@contextlib.contextmanager
def _unpacked(model: Model, variant: Variant, place: Path, *, again: bool, keep: bool) -> Iterator[Path]:
    """Yield a folder in `place` with the content of a variant's file, but for other models than the variant's.

    It is removed on leaving, or, with `keep`, when the process ends: kernels for GPUs are read on their first launch.
    PyTorch never unmaps the code that it loads. With `again` every load of an archive in this process takes the same
    folder: the system then recognises the code by its path, and does not map it once more for each load. Code that has
    state must be mapped anew, as its state lies in it.
    """
    path = model.folder / variant.file
    found = path.stat()
    key = (path, variant.entry, place, found.st_mtime_ns, found.st_size)
    with zipfile.ZipFile(path) as archive:
        _check_id(model, variant, path, archive)
        with _Folder(place, _unpacked_before.get(key) if again else None, keep=keep) as folder:
            _unpacked_before[key] = folder
            archive.extractall(folder, _members(archive, variant.entry))
            yield folder


def _utf8_name(path: Path) -> str:
    """Return a path as a text for PyTorch's C++ code, which takes it for UTF-8. Raises OSError if Python does not."""
    name = str(path)
    if name.encode("utf-8", "surrogatepass") != os.fsencode(name):
        raise OSError(
            f"its name is not ASCII, and Python takes it for {sys.getfilesystemencoding()}, but PyTorch for UTF-8: set "
            "PYTHONUTF8=1, or a UTF-8 locale"
        )
    return name


def _aoti_load_package(path: str, **options: Any) -> AOTICompiledModel:
    """Call `torch._inductor.aoti_load_package` without its false alarms.

    It warns when no compiler is installed and when the CPU can do more than the model needs
    (pytorch/pytorch#191713); neither matters for a compiled file whose CPU baseline has been checked.
    """
    import torch._inductor

    loggers = [
        logging.getLogger(f"torch.{name}") for name in ("_inductor.package.package", "export.pt2_archive._package")
    ]
    for logger in loggers:
        logger.addFilter(_no_false_alarm)
    try:
        return torch._inductor.aoti_load_package(path, **options)  # noqa: SLF001
    finally:
        for logger in loggers:
            logger.removeFilter(_no_false_alarm)


def _no_false_alarm(record: logging.LogRecord) -> bool:
    return not record.msg.startswith(("Loading outdated pt2 file", "Device information mismatch"))


MODELS: dict[str, Model] = {}
"""Every model in this package, by name."""

_packages: dict[tuple[str, int, bool], AOTICompiledModel] = {}
_packages_lock = threading.RLock()  # of its own: it is held for seconds, which first calls of models need not wait


def load(name: str, device_index: int = -1, run_single_threaded: bool = False) -> AOTICompiledModel:
    """Return what `torch._inductor.aoti_load_package` makes of a model's file: PyTorch's own object, and behaviour.

    It is made on the first call for each set of arguments. Named tuples, dataclasses and `torch.return_types` are
    plain tuples here, and nothing is checked: calling a model of this module directly does more and starts faster.
    Raises KeyError for an unknown name, TypeError or ValueError for a wrong option, and LoadError if the model cannot
    be loaded here.
    """
    if name not in MODELS:
        raise KeyError(f"no model {name!r} in this package; there are: {', '.join(MODELS)}")
    _check_options(MODELS[name], LoadOptions(device_index, run_single_threaded))
    key = (name, device_index, run_single_threaded)
    with _packages_lock:
        if key not in _packages:
            _packages[key] = _load_package(MODELS[name], device_index, run_single_threaded)
        return _packages[key]


def _load_package(model: Model, device_index: int, run_single_threaded: bool) -> AOTICompiledModel:
    variant = model._variant()  # noqa: SLF001
    path = model.folder / variant.file
    _check_present(model, path)
    if model.device != "cpu":
        _check_gpu(model, device_index)
    _register_operators(model)
    place = _temporary_folder()
    before = set(place.glob("aotinductor_*"))
    try:
        with _alone(model, variant) as alone:
            file = _utf8_name(alone)
            package = _aoti_load_package(file, run_single_threaded=run_single_threaded, device_index=device_index)
        _give_constants(model, package.loader.load_constants)
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
        raise LoadError(f"{model.name}: PyTorch cannot load {path}: {_first_line(error)}{hint}") from error
    return package


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]


def main(arguments: Sequence[str] | None = None) -> int:
    """List the models for people, or print one of the paths that build scripts need; return the exit status.

    Imports torch only for `--path` of a model that was compiled for several CPU baselines.
    """
    import argparse

    about = "Without an option: list the compiled models, their signatures, files and targets."
    parser = argparse.ArgumentParser(prog=f"python {sys.argv[0]}", description=about, allow_abbrev=False)
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--path", metavar="NAME", choices=tuple(MODELS), help="print the file that this CPU would load")
    choice.add_argument("--verify", action="store_true", help="compare every file with what the build made")
    choice.add_argument("--cmake-dir", action="store_true", help="print the folder with the CMake package")
    options = parser.parse_args(arguments)
    if options.verify:
        wrong = _wrong_files(list(MODELS.values()))
        _print("\n".join(wrong or ["All files are as they were built."]))
        return 1 if wrong else 0
    try:
        text = (
            str(Model.folder / "cmake")
            if options.cmake_dir
            else str(MODELS[options.path].path)
            if options.path
            else _listing()
        )
    except LoadError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    _print(text)
    return 0


def _print(text: str) -> None:
    """Print a line, with escapes for what the encoding of the output does not have."""
    try:
        sys.stdout.write(f"{text}\n")
    except UnicodeEncodeError:
        encoding = sys.stdout.encoding
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")


def _listing() -> str:
    """Describe the models for people: signature, files, sizes, targets."""
    built = Model.build
    blocks = [f"Compiled with torch {built.torch} for {built.system} {built.machine} by hatch-aoti {built.hatch_aoti}."]
    if built.debug:
        blocks.append(f"A DEBUG BUILD ({', '.join(built.debug)}), not for release.")
    for model in MODELS.values():
        lines = [f"{model.name}{model.signature}"]
        for variant in model.variants:
            path = model.folder / variant.file
            size = f"{path.stat().st_size / 1e6:.2f} MB" if path.is_file() else "MISSING"
            inside = "" if variant.entry == "model" else f" ({variant.entry} in it)"
            lines.append(f"  {path}{inside}: {size}, {variant}, {model.device}")
        if model.gpu is not None:
            lines.append(f"  GPU: CUDA {model.gpu.cuda}, kernels for {', '.join(model.gpu.architectures)}")
        lines += [f"  constants: {model.folder / model.constants}"] if model.constants else []
        lines.append(f"  source: {model.source}")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)
