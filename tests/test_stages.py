"""Each stage between an entry and its exported program: what goes wrong there, and the error that says so."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import os
import re
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from conftest import make_project, write_files

from hatch_aoti.compiler.optimize import make_plan
from hatch_aoti.errors import ModelError
from hatch_aoti.export.importing import ImportRoots
from hatch_aoti.export.inputs import pick_sizes
from hatch_aoti.export.program import export_model
from hatch_aoti.export.signature import read_signature
from hatch_aoti.settings.model import Dim, ModelSettings, TensorInput

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.filterwarnings("default")  # torch's own, at export

X = {"x": TensorInput(("n", 4))}
SEQUENCES = {"x": TensorInput((2, "t", 4))}
TWO_SIZES = {"x": TensorInput(("n", 8)), "y": TensorInput(("n", "m"))}
DIMS = {"n": Dim(1, 16)}
LINEAR = ModelSettings("net", "stages_models:Linear", {"input": TensorInput(("n", 4))}, dims=DIMS)


def of(model: str, inputs: Any = X, **fields: Any) -> ModelSettings:
    return dataclasses.replace(LINEAR, model=f"stages_models:{model}", inputs=inputs, **fields)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return a project with models that fail; its modules can be imported."""
    directory = write_files(
        make_project("stages", tmp_path_factory.mktemp("stages")),
        {
            "stages_raises.py": "def helper():\n    return 1 / 0\n\nhelper()\n",
            "stages_package/__init__.py": "from ._version import version\n",
            "stages_package/net.py": "from stages_models import Linear\n",
            "stages_says.py": """
                try:
                    raise RuntimeError("operator odd::nms does not exist")
                except RuntimeError as error:
                    raise ModuleNotFoundError("operators are missing") from error
            """,
            "stages_uses/__init__.py": "from stages_uses._models import scorer\n",
            "stages_uses/net.py": "from stages_models import Linear\n",
            "stages_needs.py": "import a_distribution_that_nobody_has\n",
            "stages_quits.py": "raise SystemExit(3)\n",
            "stages_syntax.py": "def broken(:\n",
        },
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(directory)
        patch.setattr("sys.dont_write_bytecode", True)
        yield directory


def error_of(entry: ModelSettings, root: Path) -> ModelError:
    # As in a worker: an empty standard input, and the debugger that Python comes with.
    with pytest.MonkeyPatch.context() as patch, Path(os.devnull).open() as empty:
        patch.setattr("sys.stdin", empty)
        patch.setattr("sys.breakpointhook", sys.__breakpointhook__)
        return error_in(entry, root)


def error_in(entry: ModelSettings, root: Path) -> ModelError:
    with pytest.raises(ModelError) as caught:
        export_model(entry, root=root, device="cpu")
    return caught.value


CASES = {
    "a module that does not exist": (
        dataclasses.replace(LINEAR, model="stages_modls:Linear"),
        "import",
        "names the module `stages_modls`, but there is no module `stages_modls`",
    ),
    "a module inside one that is no package": (
        dataclasses.replace(LINEAR, model="stages_models.nets:Linear"),
        "import",
        "there is no module `stages_models.nets`",
    ),
    "a module that needs another distribution": (
        dataclasses.replace(LINEAR, model="stages_needs:Linear"),
        "import",
        "needs the module `a_distribution_that_nobody_has`, which is not installed in the build environment",
    ),
    # neighpy#13, ofek/hatch-vcs#13
    "a module that another hook writes": (
        dataclasses.replace(LINEAR, model="stages_package.net:Linear"),
        "import",
        "importing `stages_package.net` needs the module `stages_package._version`, which the project itself has not",
    ),
    "a module that is said to be missing": (
        dataclasses.replace(LINEAR, model="stages_says:Linear"),
        "import",
        "raises ModuleNotFoundError: operators are missing (raises RuntimeError: operator odd::nms does not exist)",
    ),
    "a module that raises": (
        dataclasses.replace(LINEAR, model="stages_raises:Linear"),
        "import",
        "importing `stages_raises` raises ZeroDivisionError: division by zero",
    ),
    "a module that exits": (
        dataclasses.replace(LINEAR, model="stages_quits:Linear"),
        "import",
        "importing `stages_quits` ends the process: it calls sys.exit(3)",
    ),
    "a module with a syntax error": (
        dataclasses.replace(LINEAR, model="stages_syntax:Linear"),
        "import",
        "importing `stages_syntax` raises SyntaxError",
    ),
    "an attribute that does not exist": (
        of("Linaer"),
        "import",
        '`stages_models` has no attribute `Linaer`. Did you mean "Linear"?',
    ),
    "something that is no module": (of("NUMBER"), "build", "is a int, not an nn.Module class"),
    "a factory that returns something else": (of("number"), "build", "returned a int, not an nn.Module"),
    "a factory that raises": (of("explodes"), "build", "raises RuntimeError: no such"),
    "a factory that exits": (of("quits"), "build", "ends the process: it calls sys.exit('bye')"),
    "a factory that is interrupted": (
        of("interrupts"),
        "build",
        "without arguments raises KeyboardInterrupt: (no mess",
    ),
    "a factory with an exception of its own kind": (of("stops"), "build", "without arguments raises Stop: enough"),
    "a factory that asks": (of("asks"), "build", "without arguments waits for input, which a build has not"),
    "a factory with a breakpoint": (
        of("halts"),
        "build",
        "waits for input, which a build has not: input() or breakpoi",
    ),
    "a forward that exits": (of("Exits"), "export", "forward() ends the process: it calls sys.exit() on the example"),
    "a class that needs arguments": (of("Needy"), "build", "missing 1 required positional argument: 'width'"),
    "a TorchScript module": (of("scripted"), "build", "is a TorchScript module, which torch.export cannot trace"),
    "an input that forward does not have": (
        of("Two", {"left": TensorInput((2,)), "rihgt": TensorInput((2,))}, dims={}),
        "inputs",
        'has no parameter `rihgt`. Did you mean "right"?',
    ),
    "an input that is left out": (
        of("Two", {"left": TensorInput((2,))}, dims={}),
        "inputs",
        "`inputs` leaves out `right`, which forward() of `stages_models:Two` requires",
    ),
    "an inputs callable that raises": (
        of("Linear", "stages_models:inputs_explode", dims={}),
        "inputs",
        "calling `stages_models:inputs_explode` raises FileNotFoundError",
    ),
    "an inputs callable that does not exist": (
        of("Linear", "stages_models:too_manny", dims={}),
        "inputs",
        'has no attribute `too_manny`. Did you mean "too_many"?',
    ),
    "an inputs callable that returns a list": (
        of("Linear", "stages_models:a_list", dims={}),
        "inputs",
        "`stages_models:a_list` returned a list",
    ),
    "an inputs callable that returns a bare tensor": (
        of("Linear", "stages_models:a_tensor", dims={}),
        "inputs",
        "`stages_models:a_tensor` returned a Tensor",
    ),
    "example inputs that do not fit forward": (
        of("Linear", "stages_models:too_many", dims={}),
        "inputs",
        "the example inputs do not fit forward",
    ),
    "example inputs by another name": (
        of("Linear", "stages_models:other_name", dims={}),
        "inputs",
        "the example inputs do not fit forward",
    ),
    "dynamic shapes that do not exist": (
        of("Linear", "stages_models:one", dims={}, dynamic_shapes="stages_models:SHAPES"),
        "inputs",
        '`dynamic-shapes = "stages_models:SHAPES"`: `stages_models` has no attribute `SHAPES`',
    ),
    "a forward that raises": (of("Broken"), "export", "forward() raises RuntimeError on the example inputs"),
    "control flow that depends on data": (of("Branches"), "export", "torch.export raises"),
    # pytorch/pytorch#150364: a dim that the model specialises is an error, not a silently fixed size.
    "a dim that the model fixes": (
        of("Fixes", {"x": TensorInput(("n", 4))}),
        "export",
        "dim `n` is declared as a range, but the model only works for size 8, the size of the example",
    ),
    "a range with sizes that the model refuses": (
        of("Pairs"),
        "export",
        "the model does not work for all of the declared ranges",
    ),
    # pytorch/pytorch#146315
    "a range with sizes that torch excludes by a condition": (
        of("Strides", TWO_SIZES, dims={"n": Dim(1, 16), "m": Dim(1, 64)}),
        "export",
        "not every size in the range of `m` works: it needs ((1 + m) // 2) != 1 and m != 2",
    ),
    "a tensor in a plain object that forward replaces": (
        of("Replaces"),
        "export",
        "forward() changes `cache.keys`, in",
    ),
    "a tensor in a dict that forward writes to": (of("Writes"), "export", "forward() changes `parts[1]['seen']`, in"),
    "a dict by a dynamic size": (of("ByLength"), "export", "unhashable type: non-nested SymInt"),
    "a factory that lacks a package": (
        of("wants_a_package"),
        "build",
        "raises ModuleNotFoundError: No module named 'a_package_that_nobody_has'",
    ),
}


@pytest.mark.parametrize(("entry", "stage", "reason"), CASES.values(), ids=CASES.keys())
def test_a_failing_stage_says_what_is_wrong_and_what_to_do(entry: ModelSettings, stage: str, reason: str, root: Path):
    error = error_of(entry, root)
    assert (error.model, error.stage) == ("net", stage)
    assert reason in error.reason
    assert error.hint
    assert f"model `net` failed at stage `{stage}`: " in str(error)


@pytest.mark.parametrize(
    ("entry", "hint"),
    [
        (of("Fixes"), 'write 8 in place of "n" in the shapes and drop `n` from `dims`'),
        (of("Loops"), 'write 8 in place of "n" in the shapes and drop `n` from `dims`'),
        (of("Loops"), "stages_models.py:57 asks for its value: a Python loop over it"),
        (
            of("Recurrent", SEQUENCES, dims={"t": Dim(1, 16)}),
            "`steps` is an nn.LSTM, which torch.export unrolls over the sequence",
        ),
        (of("ByLength"), "make what forward() keeps by size once, for the largest one, and take a slice of it"),
        (of("Replaces"), "self.register_buffer(name, tensor)"),
        (of("wants_a_package"), "add the distribution that provides it to `build-system.requires`"),
        (of("Clips"), "write `dims.n = { min = 8, max = 16 }`"),
        (of("Pairs"), "forward() works for `n` = 2*_n only"),
        (
            of(
                "Adds",
                "stages_models:too_many",
                dims={**DIMS, "m": Dim(1, 16)},
                dynamic_shapes={"x": {"0": "n"}, "y": {"0": "m"}},
            ),
            '`m` and `n` must always be equal: write "n" for both in the shapes',
        ),
    ],
)
def test_a_dim_that_does_not_hold_is_answered_with_what_to_write_instead(entry: ModelSettings, hint: str, root: Path):
    """Guards against pytorch/pytorch#150364 and the like: torch's own advice speaks of code, not of the settings."""
    assert hint in error_of(entry, root).hint


def test_a_package_may_import_its_models_before_they_are_built(root: Path, monkeypatch: pytest.MonkeyPatch):
    """pypa/setuptools#4926: `from pkg._models import scorer` in the package's own `__init__.py`."""
    monkeypatch.setattr("sys.meta_path", sys.meta_path[:])
    monkeypatch.setattr("sys.path", sys.path[:])
    ImportRoots((os.fspath(root),), {}).install()
    export_model(dataclasses.replace(LINEAR, model="stages_uses.net:Linear"), root=root, device="cpu")
    scorer = sys.modules["stages_uses"].scorer
    for use in (scorer, lambda: scorer.load, lambda: scorer.signature):
        with pytest.raises(RuntimeError, match=r"^stages_uses\._models\.scorer is not built yet"):
            use()
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("json._models")


@pytest.mark.parametrize("model", ["Remembers", "Lazy", "Rotary", "Force"])
def test_models_that_are_not_as_simple_as_they_could_be_are_exported(model: str, root: Path):
    """pytorch/pytorch#147599, #125984, rotary embeddings; and objects that forward leaves values of a trace in."""
    import torch

    source = export_model(of(model), root=root, device="cpu")
    make_plan(
        source.program,
        read_signature(
            source.program,
            forward=source.module.forward,
            args=source.args,
            kwargs=source.kwargs,
            output=source.output,
            dynamic_shapes=source.dynamic_shapes,
        ),
        of(model),
        device="cpu",
    )
    x = torch.randn(5, 4)
    again = copy.deepcopy(source.module)  # as verification does it
    torch.testing.assert_close(source.program.module()(x), again(x))


def test_example_inputs_that_parameters_made_are_detached(root: Path):
    """pytorch/pytorch#54580"""
    source = export_model(of("Linear", "stages_models:computed", dims={}), root=root, device="cpu")
    assert source.args[0].grad_fn is None
    assert not source.args[0].requires_grad


@pytest.mark.parametrize(
    ("entry", "lines"),
    [
        (dataclasses.replace(LINEAR, model="stages_raises:x"), ["line 4, in <module>", "line 2, in helper"]),
        (of("explodes"), ["in explodes", "RuntimeError: no such"]),
        (of("Broken"), ["in forward", "in helper", "return x @ torch.ones(7, 7)"]),
    ],
)
def test_user_code_that_raises_is_shown_with_its_own_frames_only(entry: ModelSettings, lines: list[str], root: Path):
    details = error_of(entry, root).details
    assert all(line in details for line in lines)
    files = re.findall(r'File "(.+?)"', details)
    assert files
    assert {str(Path(file).parent) for file in files} == {str(root)}


# --- Weights --------------------------------------------------------------------------------------------------------


def save(path: Path, state: Any) -> None:
    import torch
    from safetensors.torch import save_file

    if path.suffix == ".safetensors":
        save_file(state, path)
    else:
        torch.save(state, path)


@pytest.mark.parametrize("name", ["w.safetensors", "w.pt"])
def test_weights_are_loaded(name: str, root: Path):
    import torch

    state = {"weight": torch.full((2, 4), 2.0), "bias": torch.tensor([1.0, -1.0])}
    save(root / name, state)
    source = export_model(dataclasses.replace(LINEAR, weights=name), root=root, device="cpu")
    torch.testing.assert_close(dict(source.module.state_dict()), state)


def weights_error(root: Path, state: object, name: str = "w.safetensors") -> ModelError:
    save(root / name, state)
    error = error_of(dataclasses.replace(LINEAR, weights=name), root)
    assert error.stage == "weights"
    assert name in error.reason
    assert error.hint
    return error


def test_weights_that_do_not_fit_are_named_all_at_once(root: Path):
    import torch

    state = {"weight": torch.ones(2, 5), "bais": torch.ones(2)}
    reason = weights_error(root, state).reason
    assert "missing tensors: bias" in reason
    assert "unexpected tensors: bais" in reason
    assert "other shapes: weight is (2, 5) in the file and (2, 4) in the model" in reason


def test_a_pickled_object_is_not_loaded(root: Path):
    assert "cannot be read" in weights_error(root, {"when": textwrap.TextWrapper()}, "w.pt").reason


def test_a_checkpoint_with_more_than_a_state_dict_is_refused(root: Path):
    import torch

    assert "does not hold a state dict" in weights_error(root, {"step": 3, "model": torch.ones(1)}, "w.pt").reason


@pytest.mark.parametrize("name", ["w.safetensors", "w.pt"])
def test_a_damaged_weights_file_is_refused(name: str, root: Path):
    (root / name).write_bytes(b"\x00garbage" * 9)
    error = error_of(dataclasses.replace(LINEAR, weights=name), root)
    assert error.stage == "weights"
    assert "cannot be read" in error.reason


# --- Example sizes --------------------------------------------------------------------------------------------------


def test_example_sizes_are_not_0_or_1_and_different_for_each_dim_and_from_fixed_sizes():
    sizes = pick_sizes({"batch": (1, 1024), "length": (0, None), "width": (1, 9)}, [8, 10])
    assert len({*sizes.values(), 8, 10}) == 5
    assert min(sizes.values()) >= 2
    assert sizes["width"] <= 9


def test_an_example_size_stays_in_its_range_even_if_that_leaves_no_choice():
    assert pick_sizes({"n": (3, 3), "m": (1, 1)}, [3]) == {"n": 3, "m": 1}
