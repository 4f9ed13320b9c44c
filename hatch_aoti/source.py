"""How an entry of `[tool.aoti.models]` becomes an `ExportedProgram`: import, build, load weights, inputs, export.

Every failure on the way is a `ModelError` with the stage it happened in and, where user code raised, the user's own
part of the traceback. Knows nothing of how a program is compiled.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import os
import random
import re
import sys
import sysconfig
import tempfile
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hatch_aoti.errors import AotiError, ModelError, did_you_mean
from hatch_aoti.signature import register_output_types
from hatch_aoti.workers import report_stage

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence
    from types import ModuleType

    import torch

    from hatch_aoti.settings import ModelSettings, TensorInput

__all__ = [
    "ImportRoots",
    "Prepared",
    "Source",
    "build_module",
    "export_model",
    "load_program",
    "pick_sizes",
    "prepare_model",
    "raised",
    "user_traceback",
]


@dataclasses.dataclass(frozen=True)
class ImportRoots:
    """Where the project's modules are before they are installed.

    `paths` are directories for `sys.path`; `packages` maps an import name to the directory that the wheel's `sources`
    option renames to it.
    """

    paths: tuple[str, ...]
    packages: Mapping[str, str]

    def install(self) -> None:
        """Put the roots on this process's import path: before what is installed, behind Python's own modules.

        As for an installed project: a `json.py` next to its packages is not what others get that import `json`.
        """
        own = {os.path.realpath(path) for path in sysconfig.get_paths().values() if "site-packages" not in path}
        first = [path for path in sys.path if path and _is_pythons(path, own)]
        rest = [path for path in sys.path if path not in {*first, *self.paths}]
        sys.path[:] = [*first, *self.paths, *rest]
        if self.packages:
            sys.meta_path.insert(0, _RenamedPackages(dict(self.packages)))


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A module in eval mode, on its device, with its weights, and the example inputs to call it with.

    `dynamic_shapes` is in the form of `torch.export.export`, and None for the module of a saved program.
    """

    module: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    dynamic_shapes: Any


@dataclasses.dataclass(frozen=True)
class Source:
    """A model ready to be compiled, with what eager answers on the example inputs."""

    module: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    dynamic_shapes: Any
    output: Any
    program: torch.export.ExportedProgram


def _is_pythons(path: str, homes: Collection[str]) -> bool:
    """Whether an entry of `sys.path` has modules of Python itself: one of `homes`, or its archive or `lib-dynload`."""
    path = os.path.realpath(path)
    return (
        path in homes
        or path.endswith(f"python{sys.version_info.major}{sys.version_info.minor}.zip")
        or (
            os.path.basename(path) == "lib-dynload" and os.path.dirname(path) in homes  # noqa: PTH119, PTH120
        )
    )


class _RenamedPackages(importlib.abc.MetaPathFinder):
    """Finds packages under the names that the wheel gives them, where the tree has others."""

    def __init__(self, packages: dict[str, str]) -> None:
        self.packages = packages

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        del path, target
        directory = self.packages.get(fullname)
        if directory is not None:
            init = Path(directory) / "__init__.py"
            if init.is_file():
                return importlib.util.spec_from_file_location(fullname, init, submodule_search_locations=[directory])
            return _namespace(fullname, [directory])
        if any(name.startswith(f"{fullname}.") for name in self.packages):
            return _namespace(fullname, [])
        return None


def _namespace(name: str, locations: list[str]) -> importlib.machinery.ModuleSpec:
    spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
    spec.submodule_search_locations = locations
    return spec


def build_module(entry: ModelSettings, *, root: Path, device: str) -> torch.nn.Module:
    """Import and build one model, or load the program that it was saved as; the module is in eval mode, with weights.

    `root` is the project directory that `entry.weights` and `entry.exported` are relative to, `device` a torch device
    such as `"cpu"`. All random state is seeded. Raises `ModelError`.
    """
    if entry.exported is not None:
        return _prepare_program(_read_program(entry, root / entry.exported, device)).module
    report_stage("import")
    _seed(entry.seed)
    target = _import_object(entry.name, "import", "model", entry.model)

    report_stage("build")
    module = _build(entry, target)

    if entry.weights is not None:
        report_stage("weights")
        _load_weights(entry, module, root / entry.weights)
    return module.eval().to(device)


def prepare_model(entry: ModelSettings, *, root: Path, device: str) -> Prepared:
    """Return what `build_module` does, with example inputs for it; export nothing. Raises `ModelError`."""
    import torch

    if entry.exported is not None:
        return _prepare_program(_read_program(entry, root / entry.exported, device))
    module = build_module(entry, root=root, device=device)

    report_stage("inputs")
    _seed(entry.seed)
    dims = {name: torch.export.Dim(name, min=dim.min, max=dim.max) for name, dim in entry.dims.items()}
    args, kwargs, dynamic_shapes = _inputs(entry, module, dims)
    register_output_types((args, kwargs))
    args, kwargs = _to_device((args, kwargs), device)
    return Prepared(module, args, kwargs, dynamic_shapes)


def export_model(entry: ModelSettings, *, root: Path, device: str) -> Source:
    """Import, build and export one model, in eval mode and under `no_grad`, with all random state seeded.

    `root` is the project directory that `entry.weights` is relative to, `device` a torch device such as `"cpu"`.
    Raises `ModelError`.
    """
    import torch

    prepared = prepare_model(entry, root=root, device=device)
    module, args, kwargs = prepared.module, prepared.args, prepared.kwargs

    report_stage("export")
    with torch.no_grad():
        _seed(entry.seed)
        try:
            output = _try(module, args, kwargs)
        except BaseException as error:
            raise ModelError(
                entry.name,
                "export",
                f"forward() {raised(error, ' on the example inputs')}",
                hint="call the model on these inputs in plain PyTorch first; `inputs` and the model must agree",
                details=user_traceback(error),
            ) from error
        register_output_types(output)
        program = _export(entry, module, args, kwargs, prepared.dynamic_shapes)
    return Source(module, args, kwargs, prepared.dynamic_shapes, output, program)


def _try(module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return what eager answers, without leaving a trace in a model with state (a buffer that forward changes)."""
    state = {name: buffer.clone() for name, buffer in module.named_buffers()}
    output = module(*copy.deepcopy(args), **copy.deepcopy(kwargs))
    for name, buffer in module.named_buffers():
        if name in state:
            buffer.copy_(state[name])
    return output


def load_program(entry: ModelSettings, *, root: Path, device: str) -> Source:
    """Load the program that `torch.export.save` wrote to `root / entry.exported`, with the example inputs in it.

    What is known of the original forward is the names of the arguments that the example passes, and which of them go by
    keyword: no defaults, and no names of dims. Raises `ModelError`.
    """
    import torch

    program = _read_program(entry, root / str(entry.exported), device)
    prepared = _prepare_program(program)
    module, args, kwargs = prepared.module, prepared.args, prepared.kwargs
    with torch.no_grad():
        _seed(entry.seed)
        try:
            output = _try(module, args, kwargs)
        except Exception as error:
            raise ModelError(
                entry.name,
                "load",
                f'`exported = "{entry.exported}"` raises {_name(error)} on its own example inputs: '
                f"{_first_line(error)}",
                hint="call `torch.export.load(path).module()` on them where it was saved",
            ) from error
    return Source(module, args, kwargs, None, output, program)


def _prepare_program(program: torch.export.ExportedProgram) -> Prepared:
    from torch.export._tree_utils import reorder_kwargs

    # As `export_model` has it: the order in which the program's inputs come.
    args, kwargs = program.example_inputs
    kwargs = reorder_kwargs(kwargs, program.call_spec.in_spec)
    module = program.module(check_guards=False)
    _sign_forward(module, args, kwargs)
    return Prepared(module, tuple(args), kwargs, None)


def _read_program(entry: ModelSettings, path: Path, device: str) -> torch.export.ExportedProgram:
    import torch

    # What `torch.export.load` calls, without its way back to formats of older torch, which read the file anew.
    from torch.export.pt2_archive._package import load_pt2

    from hatch_aoti.saved_program import SavedProgramError, copy_checked

    report_stage("load")
    plain_load = torch.load

    def load_tensors(*args: Any, **kwargs: Any) -> Any:
        return plain_load(*args, **{**kwargs, "weights_only": True})

    with tempfile.TemporaryDirectory() as directory:
        copied = Path(directory, "program.pt2")
        try:
            copy_checked(path, copied, device=device)
            torch.load = load_tensors  # torch asks for weights_only=False, at the latest when True has failed
            return load_pt2(str(copied)).exported_programs["model"]
        except SavedProgramError as error:
            raise ModelError(
                entry.name, "load", f'`exported = "{entry.exported}"` {error.reason}', hint=error.hint
            ) from error
        except Exception as error:
            raise ModelError(
                entry.name,
                "load",
                f'`exported = "{entry.exported}"` cannot be loaded by torch {torch.__version__}: {_name(error)}: '
                f"{_first_line(error)}",
                hint="save it again, with the torch of this build, and check that `torch.export.load` reads it there",
                details=_first_lines(str(error), 12),
            ) from error
        finally:
            torch.load = plain_load


def _sign_forward(module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Give forward the signature that the program can be called with: torch generates one without keywords."""
    function = type(module).forward  # a class of this module's own
    names = [name for name in inspect.signature(function).parameters if name not in kwargs]
    kind = inspect.Parameter
    parameters = [kind(name, kind.POSITIONAL_OR_KEYWORD) for name in names[: len(args) + 1]]
    parameters += [kind(name, kind.KEYWORD_ONLY) for name in kwargs]
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]


def _import_object(model: str, stage: str, key: str, reference: str) -> Any:
    """Import `module:attribute`; raise `ModelError` at `stage` that names the key it comes from."""
    module_name, _, attribute = reference.partition(":")
    try:
        value: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise ModelError(
                model,
                stage,
                f'`{key} = "{reference}"` names the module `{module_name}`, but there is no module `{error.name}`',
                hint="check the spelling, and that the file is part of the package that this wheel ships",
            ) from error
        raise ModelError(
            model,
            stage,
            f"importing `{module_name}` needs the module `{error.name}`, which is not installed in the build "
            "environment",
            hint="add the distribution that provides it to `build-system.requires`, next to torch",
            details=user_traceback(error),
        ) from error
    except BaseException as error:
        raise ModelError(
            model,
            stage,
            f"importing `{module_name}` {raised(error)}",
            hint=f"make `python -c 'import {module_name}'` work",
            details=user_traceback(error),
        ) from error
    for part in attribute.split("."):
        try:
            value = getattr(value, part)
        except AttributeError as error:
            raise ModelError(
                model,
                stage,
                f'`{key} = "{reference}"`: `{module_name}` has no attribute `{attribute}`.'
                f"{did_you_mean(part, [name for name in dir(value) if not name.startswith('__')])}",
                hint="write the name of a class, an instance or a function that the module defines",
            ) from error
    return value


def _build(entry: ModelSettings, target: Any) -> torch.nn.Module:
    import torch

    module = target
    if not isinstance(target, torch.nn.Module):
        if not callable(target):
            raise ModelError(
                entry.name,
                "build",
                f'`model = "{entry.model}"` is a {type(target).__name__}, not an nn.Module class, an nn.Module '
                "instance or a function that returns one",
                hint="point `model` at one of these",
            )
        _seed(entry.seed)
        try:
            module = target()
        except BaseException as error:
            raise ModelError(
                entry.name,
                "build",
                f"calling `{entry.model}` without arguments {raised(error)}",
                hint="a class or factory is called without arguments; write a factory that supplies them",
                details=user_traceback(error),
            ) from error
    if not isinstance(module, torch.nn.Module):
        raise ModelError(
            entry.name,
            "build",
            f"`{entry.model}` returned a {type(module).__name__}, not an nn.Module",
            hint="return the module from the factory",
        )
    if isinstance(module, torch.jit.ScriptModule):
        raise ModelError(
            entry.name,
            "build",
            f"`{entry.model}` is a TorchScript module, which torch.export cannot trace",
            hint="use the nn.Module it was scripted from",
        )
    return module


def _load_weights(entry: ModelSettings, module: torch.nn.Module, path: Path) -> None:
    import torch

    def fail(reason: str, hint: str) -> ModelError:
        return ModelError(entry.name, "weights", f"`weights = {entry.weights!r}` {reason}", hint=hint)

    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            state = load_file(path)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise fail(
            f"cannot be read: {_first_line(error)}",
            "save a state dict with safetensors.torch.save_file, or with torch.save(model.state_dict(), path), "
            "which is loaded with weights_only=True and so may hold nothing but tensors and plain containers",
        ) from error
    if not (isinstance(state, dict) and all(isinstance(value, torch.Tensor) for value in state.values())):
        raise fail(
            "does not hold a state dict (names mapped to tensors)",
            "save `model.state_dict()`, not the model or a checkpoint with more in it",
        )
    if odd := [key for key in state if not isinstance(key, str)]:
        raise fail(
            f"does not hold a state dict: {odd[0]!r} is a key, and no name",
            "save `model.state_dict()`, whose keys are strings",
        )
    for name, tensor in state.items():
        if kind := _unusual(tensor):
            raise fail(f"holds {name} as a {kind} tensor", "save it as an ordinary, dense tensor on the CPU")
    own = module.state_dict()
    # safetensors stores one of several tied tensors only; the others get their values through it.
    missing = sorted(own.keys() - state.keys() - _tied_to_any(own, state))
    unexpected = sorted(state.keys() - own.keys())
    shapes = [
        f"{name} is {tuple(state[name].shape)} in the file and {tuple(own[name].shape)} in the model"
        for name in sorted(own.keys() & state.keys())
        if state[name].shape != own[name].shape
    ]
    kinds = [
        f"{name} is {_dtype(state[name])} in the file and {_dtype(own[name])} in the model"
        for name in sorted(own.keys() & state.keys())
        if state[name].dtype != own[name].dtype
    ]
    mistakes = [
        f"{label}: {', '.join(names[:8])}{f' and {len(names) - 8} more' if len(names) > 8 else ''}"
        for label, names in (
            ("missing tensors", missing),
            ("unexpected tensors", unexpected),
            ("other shapes", shapes),
            ("other dtypes", kinds),
        )
        if names
    ]
    if mistakes:
        raise fail(
            f"does not fit the model `{entry.model}`: {'; '.join(mistakes)}",
            "save the state dict of this very model, with the same configuration and dtype",
        )
    module.load_state_dict(state, strict=False)


def _unusual(tensor: torch.Tensor) -> str:
    """Say in which form a tensor is that no parameter can be filled from; nothing for a dense one with memory."""
    import torch

    if tensor.is_nested:
        return "nested"
    if tensor.is_quantized:
        return "quantised"
    if tensor.layout is not torch.strided:
        return str(tensor.layout).removeprefix("torch.")
    return "meta" if tensor.is_meta else ""


def _tied_to_any(own: Mapping[str, torch.Tensor], state: Mapping[str, Any]) -> set[str]:
    def place(tensor: torch.Tensor) -> tuple[object, ...]:
        return (tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride())

    given = {place(own[name]) for name in own.keys() & state.keys() if own[name].numel()}
    return {name for name, tensor in own.items() if tensor.numel() and place(tensor) in given}


def _inputs(
    entry: ModelSettings, module: torch.nn.Module, dims: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """Return the example args and kwargs, and `dynamic_shapes` in the form of `torch.export.export`."""
    if not isinstance(entry.inputs, str):
        return _declared_inputs(entry, module, entry.inputs, dims)
    function = _import_object(entry.name, "inputs", "inputs", entry.inputs)
    if callable(function):
        try:
            value = function()
        except BaseException as error:
            raise ModelError(
                entry.name,
                "inputs",
                f"calling `{entry.inputs}` {raised(error)}",
                hint="it is called without arguments and returns a tuple of args, a dict of kwargs, or (args, kwargs)",
                details=user_traceback(error),
            ) from error
    else:
        value = function
    args, kwargs = _as_call(entry, value)
    _check_binding(entry, module, args, kwargs)
    # In forward's order, so that neither the order in which the callable names them nor anything else decides it.
    order = list(inspect.signature(module.forward).parameters)
    kwargs = dict(sorted(kwargs.items(), key=lambda item: order.index(item[0]) if item[0] in order else len(order)))
    return args, kwargs, _dynamic_shapes(entry, dims)


def _as_call(entry: ModelSettings, value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Read what an `inputs` callable returned: (args, kwargs), a tuple of args, or a dict of kwargs."""
    if isinstance(value, tuple):
        if len(value) == 2 and isinstance(value[0], tuple) and isinstance(value[1], dict):  # noqa: SIM102
            if all(isinstance(name, str) for name in value[1]):
                return value[0], value[1]
        return value, {}
    if isinstance(value, dict) and all(isinstance(name, str) for name in value):
        return (), value
    raise ModelError(
        entry.name,
        "inputs",
        f"`{entry.inputs}` returned a {type(value).__name__}",
        hint="return a tuple of positional arguments, a dict of keyword arguments, or (args, kwargs); "
        "for a single tensor write `return (tensor,)`",
    )


def _check_binding(
    entry: ModelSettings, module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    try:
        inspect.signature(module.forward).bind(*args, **kwargs)
    except TypeError as error:
        raise ModelError(
            entry.name,
            "inputs",
            f"the example inputs do not fit forward{inspect.signature(module.forward)}: {error}",
            hint="return a tuple of positional arguments, a dict of keyword arguments, or (args, kwargs)",
        ) from error


def _dynamic_shapes(entry: ModelSettings, dims: Mapping[str, Any]) -> Any:
    """Turn the entry's `dynamic-shapes` into torch's form: names of dims into `Dim` objects."""
    if isinstance(entry.dynamic_shapes, str):
        return _import_object(entry.name, "inputs", "dynamic-shapes", entry.dynamic_shapes)

    def convert(value: Any) -> Any:
        if isinstance(value, str):
            return dims[value]
        if isinstance(value, dict):
            if value and all(str(key).isdigit() for key in value):
                return {int(key): convert(item) for key, item in value.items()}
            # An empty table is torch's None: nothing dynamic in this tensor.
            return {key: convert(item) for key, item in value.items()} or None
        if isinstance(value, (list, tuple)):
            return [convert(item) for item in value]
        return value

    return convert(entry.dynamic_shapes) if entry.dynamic_shapes is not None else None


def _declared_inputs(
    entry: ModelSettings, module: torch.nn.Module, inputs: Mapping[str, TensorInput], dims: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """Make example tensors for declared shapes, in the order of forward's parameters."""
    parameters = inspect.signature(module.forward).parameters
    extra = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    named = {
        name: parameter
        for name, parameter in parameters.items()
        if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    }
    for name in inputs:
        if name not in named and not extra:
            raise ModelError(
                entry.name,
                "inputs",
                f"`inputs.{name}`: forward() of `{entry.model}` has no parameter `{name}`.{did_you_mean(name, named)}",
                hint=f"its parameters are: {', '.join(named) or 'none'}",
            )
    missing = [name for name, parameter in named.items() if parameter.default is parameter.empty and name not in inputs]
    if missing:
        raise ModelError(
            entry.name,
            "inputs",
            f"`inputs` leaves out {', '.join(f'`{name}`' for name in missing)}, which forward() of `{entry.model}` "
            "requires",
            hint="declare every parameter without a default, or give `inputs` as a callable",
        )
    sizes = pick_sizes(
        {name: (dim.min, dim.max) for name, dim in entry.dims.items()},
        [size for tensor in inputs.values() for size in tensor.shape if isinstance(size, int)],
    )
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    shapes: dict[str, Any] = {}
    positional = True
    for name in [*named, *(name for name in sorted(inputs) if name not in named)]:
        parameter = named.get(name)
        if name not in inputs:
            positional = False  # what follows a left-out default goes by keyword
            continue
        tensor = _example_tensor(inputs[name], sizes)
        if positional and parameter is not None and parameter.kind is not parameter.KEYWORD_ONLY:
            args.append(tensor)
        else:
            kwargs[name] = tensor
        named_sizes = {i: dims[size] for i, size in enumerate(inputs[name].shape) if isinstance(size, str)}
        if parameter is None:
            shapes.setdefault(next(p.name for p in parameters.values() if p.kind is p.VAR_KEYWORD), {})[name] = (
                named_sizes or None
            )
        else:
            shapes[name] = named_sizes or None
    return tuple(args), kwargs, shapes if entry.dims else None


def pick_sizes(dims: Mapping[str, tuple[int, int | None]], fixed: Sequence[int]) -> dict[str, int]:
    """Choose example sizes that an export does not specialise on.

    torch.export treats 0 and 1 as constants, and takes equal sizes for the same size; so every dim gets a size of its
    own, at least 2 and none of the `fixed` ones, as far as its range (inclusive, `None` for no upper bound) has any.
    """
    taken = set(fixed)
    sizes: dict[str, int] = {}
    # The narrowest range chooses first, since it has the fewest sizes to choose from.
    for name in sorted(dims, key=lambda name: ((dims[name][1] or 1 << 62) - dims[name][0], name)):
        low, high = dims[name]
        choices = _sizes_of(low, high)
        size = next((size for size in choices if size not in taken), None)
        sizes[name] = next(_sizes_of(low, high), low) if size is None else size
        taken.add(sizes[name])
    return sizes


def _sizes_of(low: int, high: int | None) -> Iterator[int]:
    """Yield the sizes of a range in the order of preference: from 8 upwards, then downwards; never 0 or 1."""
    top = low + 4096 if high is None else high
    start = min(max(low, 8), top)
    yield from range(start, min(top, start + 4096) + 1)
    yield from range(start - 1, max(low, 2) - 1, -1)


def _example_tensor(declared: TensorInput, sizes: Mapping[str, int]) -> torch.Tensor:
    import torch

    shape = [sizes[size] if isinstance(size, str) else size for size in declared.shape]
    dtype = getattr(torch, declared.dtype)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape).to(torch.bool)
    if dtype.is_floating_point or dtype.is_complex:
        wide = torch.complex64 if dtype.is_complex else torch.float32
        return torch.randn(shape, dtype=wide).to(dtype)
    return torch.randint(0, declared.high, shape).to(dtype)


def _to_device(call: Any, device: str) -> Any:
    import torch
    from torch.utils import _pytree

    return _pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), call)


_CONSTANT = re.compile(r"(\w+) was inferred to be a constant \((\d+)\)")
_SUGGESTED = re.compile(r"^\s*(\w+) = (.+)$", re.MULTILINE)


def _export(
    entry: ModelSettings, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: Any
) -> torch.export.ExportedProgram:
    import torch

    try:
        return torch.export.export(module, args, kwargs, dynamic_shapes=dynamic_shapes, strict=False)
    except BaseException as error:
        text = str(error)
        suggested = dict(_SUGGESTED.findall(text.partition("Suggested fixes")[2]))
        constants = {name: value for name, value in suggested.items() if value.isdigit()} | dict(
            _CONSTANT.findall(text)
        )
        if constants:
            raise ModelError(
                entry.name,
                "export",
                " and ".join(
                    f"dim `{name}` is declared as a range, but the model only works for size {size}, the size of the "
                    "example"
                    for name, size in sorted(constants.items())
                ),
                hint="; ".join(
                    f'write {size} in place of "{name}" in the shapes and drop `{name}` from `dims`, or find what '
                    "in forward() fixes it (a reshape to a constant, an `if` on the size, a Python loop over it)"
                    for name, size in sorted(constants.items())
                ),
                details=_first_lines(text, 12),
            ) from error
        if suggested:
            advice = [_advice(name, value) for name, value in suggested.items() if name in entry.dims]
            raise ModelError(
                entry.name,
                "export",
                "the model does not work for all of the declared ranges",
                hint="; ".join(advice) or "change `dims` or the model, as torch suggests",
                details=_first_lines(text, 12),
            ) from error
        raise ModelError(
            entry.name,
            "export",
            f"torch.export raises {_name(error)}: {_first_line(error)}",
            hint="torch.export needs a forward() without data-dependent Python control flow; see the traceback for "
            "the place, and https://docs.pytorch.org/docs/stable/export.html for ways to rewrite it",
            details=user_traceback(error),
        ) from error


def _advice(name: str, suggestion: str) -> str:
    """Turn torch's suggestion for a dim (`Dim('n', min=8)`, `m`, `2*_n`) into words about the settings."""
    bounds = re.fullmatch(r"Dim\('\w+'(?:, min=(\d+))?(?:, max=(\d+))?\)", suggestion)
    if bounds is not None:
        pairs = [f"{key} = {value}" for key, value in zip(("min", "max"), bounds.groups(), strict=True) if value]
        return f"write `dims.{name} = {{ {', '.join(pairs)} }}`, or make forward() work for the other sizes"
    if suggestion.isidentifier():
        return f'`{name}` and `{suggestion}` must always be equal: write "{suggestion}" for both in the shapes'
    return (
        f"forward() works for `{name}` = {suggestion} only, where the name with the underscore is any whole number; "
        "make it work for every size of the range (by padding, say)"
    )


def _seed(seed: int) -> None:
    """Seed every source of random numbers that model code commonly draws from."""
    import torch

    random.seed(seed)
    torch.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


def raised(error: BaseException, when: str = "") -> str:
    """Say what user code did, to go on from its name: `raises ValueError: no such file`; `when` follows the error."""
    if isinstance(error, SystemExit):
        return f"ends the process: it calls sys.exit({'' if error.code is None else repr(error.code)}){when}"
    # What input() raises, and breakpoint(), which asks the debugger's user: a build has an empty standard input.
    waits = isinstance(error, EOFError) and "reading a line" in str(error)
    if waits or type(error).__module__ == "bdb":
        return f"waits for input{when}, which a build has not: input() or breakpoint()"
    return f"raises {_name(error)}{when}: {_first_line(error)}"


def _name(error: BaseException) -> str:
    return type(error).__name__


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _first_line(error: BaseException) -> str:
    if isinstance(error, AotiError):
        return str(error)
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "(no message)")


def _first_lines(text: str, count: int) -> str:
    return "\n".join([line.rstrip() for line in text.splitlines() if line.strip()][:count])


def user_traceback(error: BaseException) -> str:
    """Return the part of the traceback that lies in the user's code: no frame of hatch-aoti, importlib or torch."""
    here = str(Path(__file__).parent)
    torch_module = sys.modules.get("torch")
    torch_home = str(Path(torch_module.__file__ or "").parent) if torch_module is not None else here

    importing = str(Path(importlib.__file__ or "").parent)

    def is_users(frame: traceback.FrameSummary) -> bool:
        return not frame.filename.startswith((here, torch_home, importing, "<frozen"))

    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_users(frame)]
    if not frames:
        return ""
    lines = traceback.format_list(frames) + traceback.format_exception_only(error)[:1]
    return "Traceback (most recent call last, the project's own frames):\n" + "".join(lines).rstrip()
