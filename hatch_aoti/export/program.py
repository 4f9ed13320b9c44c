"""How an entry of `[tool.aoti.models]` becomes an `ExportedProgram`: import, build, load weights, inputs, export.

Every failure on the way is a `ModelError` with the stage it happened in and, where user code raised, the user's own
part of the traceback. Knows nothing of how a program is compiled.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hatch_aoti.errors import ModelError, SavedProgramError
from hatch_aoti.export.constraints import size_error, sizes_asked_for
from hatch_aoti.export.containers import register_output_types
from hatch_aoti.export.failures import error_name, first_line, first_lines, raised, user_traceback
from hatch_aoti.export.importing import import_object
from hatch_aoti.export.inputs import example_inputs, to_device
from hatch_aoti.export.module import make_module, seed_everything
from hatch_aoti.export.plain_state import PlainState
from hatch_aoti.export.saved_program import copy_checked
from hatch_aoti.export.weights import load_weights
from hatch_aoti.stages import add_note, report_stage

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from hatch_aoti.settings.model import ModelSettings

__all__ = ["EagerModel", "ExportedModel", "build_module", "export_model", "load_program", "prepare_model"]


@dataclasses.dataclass(frozen=True)
class EagerModel:
    """A module in eval mode, on its device, with its weights, and the example inputs to call it with.

    `dynamic_shapes` is in the form of `torch.export.export`, and None for the module of a saved program.
    """

    module: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    dynamic_shapes: Any


@dataclasses.dataclass(frozen=True)
class ExportedModel:
    """A model ready to be compiled, with what eager answers on the example inputs."""

    module: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    dynamic_shapes: Any
    output: Any
    program: torch.export.ExportedProgram


def build_module(entry: ModelSettings, *, root: Path, device: str) -> torch.nn.Module:
    """Import and build one model, or load the program that it was saved as; the module is in eval mode, with weights.

    `root` is the project directory that `entry.weights` and `entry.exported` are relative to, `device` a torch device
    such as `"cpu"`. All random state is seeded. Raises `ModelError`.
    """
    if entry.exported is not None:
        return _prepare_program(_read_program(entry, root / entry.exported, device)).module
    report_stage("import")
    seed_everything(entry.seed)
    target = import_object(entry.name, "import", "model", entry.model)

    report_stage("build")
    module = make_module(entry, target)

    if entry.weights is not None:
        report_stage("weights")
        for note in load_weights(entry, module, root / str(entry.weights_file)):
            add_note(note)
    return module.eval().to(device)


def prepare_model(entry: ModelSettings, *, root: Path, device: str) -> EagerModel:
    """Return what `build_module` does, with example inputs for it; export nothing. Raises `ModelError`."""
    import torch

    if entry.exported is not None:
        return _prepare_program(_read_program(entry, root / entry.exported, device))
    module = build_module(entry, root=root, device=device)

    report_stage("inputs")
    seed_everything(entry.seed)
    dims = {name: torch.export.Dim(name, min=dim.min, max=dim.max) for name, dim in entry.dims.items()}
    args, kwargs, dynamic_shapes = example_inputs(entry, module, dims)
    register_output_types((args, kwargs))
    args, kwargs = to_device((args, kwargs), device)
    return EagerModel(module, args, kwargs, dynamic_shapes)


def export_model(entry: ModelSettings, *, root: Path, device: str) -> ExportedModel:
    """Import, build and export one model, in eval mode and under `no_grad`, with all random state seeded.

    `root` is the project directory that `entry.weights` is relative to, `device` a torch device such as `"cpu"`.
    Raises `ModelError`.
    """
    import torch

    prepared = prepare_model(entry, root=root, device=device)
    module, args, kwargs = prepared.module, prepared.args, prepared.kwargs

    report_stage("export")
    with torch.no_grad():
        seed_everything(entry.seed)
        plain = PlainState(module)
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
        if changed := plain.changed():
            raise ModelError(
                entry.name,
                "export",
                f"forward() changes {', '.join(f'`{path}`' for path in changed)}, in plain attributes: compiled code "
                "would start every call from the values at build",
                hint="register such tensors in __init__, `self.register_buffer(name, tensor)`, and assign or write to "
                "that; or pass them to forward() and return new ones",
            )
        register_output_types(output)
        program = _export(entry, module, args, kwargs, prepared.dynamic_shapes)
    return ExportedModel(module, args, kwargs, prepared.dynamic_shapes, output, program)


def _try(module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return what eager answers, without leaving a trace in a model with state (a buffer that forward changes)."""
    from torch.nn.parameter import is_lazy

    state = {name: buffer.clone() for name, buffer in module.named_buffers() if not is_lazy(buffer)}
    output = module(*copy.deepcopy(args), **copy.deepcopy(kwargs))
    for name, buffer in module.named_buffers():
        if name in state:
            buffer.copy_(state[name])
    return output


def load_program(entry: ModelSettings, *, root: Path, device: str) -> ExportedModel:
    """Load the program that `torch.export.save` wrote to `root / entry.exported`, with the example inputs in it.

    What is known of the original forward is the names of the arguments that the example passes, and which of them go by
    keyword: no defaults, and no names of dims. Raises `ModelError`.
    """
    import torch

    program = _read_program(entry, root / str(entry.exported), device)
    prepared = _prepare_program(program)
    module, args, kwargs = prepared.module, prepared.args, prepared.kwargs
    with torch.no_grad():
        seed_everything(entry.seed)
        try:
            output = _try(module, args, kwargs)
        except Exception as error:
            raise ModelError(
                entry.name,
                "load",
                f'`exported = "{entry.exported}"` raises {error_name(error)} on its own example inputs: '
                f"{first_line(error)}",
                hint="call `torch.export.load(path).module()` on them where it was saved",
            ) from error
    return ExportedModel(module, args, kwargs, None, output, program)


def _prepare_program(program: torch.export.ExportedProgram) -> EagerModel:
    from torch.export._tree_utils import reorder_kwargs

    # As `export_model` has it: the order in which the program's inputs come.
    args, kwargs = program.example_inputs
    kwargs = reorder_kwargs(kwargs, program.call_spec.in_spec)
    module = program.module(check_guards=False)
    _sign_forward(module, args, kwargs)
    return EagerModel(module, tuple(args), kwargs, None)


def _read_program(entry: ModelSettings, path: Path, device: str) -> torch.export.ExportedProgram:
    import torch

    # What `torch.export.load` calls, without its way back to formats of older torch, which read the file anew.
    from torch.export.pt2_archive._package import load_pt2

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
                f'`exported = "{entry.exported}"` cannot be loaded by torch {torch.__version__}: {error_name(error)}: '
                f"{first_line(error)}",
                hint="save it again, with the torch of this build, and check that `torch.export.load` reads it there",
                details=first_lines(str(error), 12),
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


def _export(
    entry: ModelSettings, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: Any
) -> torch.export.ExportedProgram:
    import torch

    state, where = PlainState(module), []
    try:
        with sizes_asked_for() as where:
            return torch.export.export(module, args, kwargs, dynamic_shapes=dynamic_shapes, strict=False)
    except BaseException as error:
        if (wrong := size_error(entry, module, str(error), where)) is not None:
            raise wrong from error
        raise ModelError(
            entry.name,
            "export",
            f"torch.export raises {error_name(error)}: {first_line(error)}",
            hint=_why_not_exported(error),
            details=user_traceback(error),
        ) from error
    finally:
        state.restore()


def _why_not_exported(error: BaseException) -> str:
    if "unhashable type: non-nested SymInt" in str(error):
        return (
            "a size that is dynamic has no value while torch.export traces, so it cannot be the key of a dict: make "
            "what forward() keeps by size once, for the largest one, and take a slice of it"
        )
    return (
        "torch.export needs a forward() without data-dependent Python control flow; see the traceback for the place, "
        "and https://docs.pytorch.org/docs/stable/export.html for ways to rewrite it"
    )
