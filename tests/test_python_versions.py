"""Generated code runs on every Python that the named torch supports, and a build says where a project promises more."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from conftest import edit, run, write_files

from hatch_aoti.plugin.requirements import unsupported_pythons
from hatch_aoti.runtime.contract import (
    Constant,
    Dim,
    Group,
    Omitted,
    Parameter,
    Signature,
    Size,
    TensorInput,
    TensorOutput,
)
from hatch_aoti.runtime.declarations import Variant
from hatch_aoti.wheel.accessor import AccessorModel, render, runtime_files

if TYPE_CHECKING:
    from conftest import Builder

# One of each kind that a contract can have in it.
X = TensorInput("x", "float32", (Size(((1, "n"),)), Size(plus=4)))
PAIR = TensorInput("pair[0]", "float32", (Size(((2, "n"),), 1),))
SIGNATURE = Signature(
    (
        Parameter("x", "positional or keyword", X),
        Parameter("pair", "positional or keyword", Group("tuple", (PAIR, Constant(2.5, "pair[1]")), path="pair")),
        Parameter("extra", "keyword", Omitted("extra"), Omitted("extra")),
        Parameter("options", "**kwargs", Group("**kwargs", (Constant(None, "flag"),), ("flag",), path="options")),
    ),
    Group("dict", (TensorOutput(0, "float32", ("n", 4)), Size(((1, "n"),))), ("y", "n")),
    (Dim("n", 1, 16),),
)
SIMPLE = Signature(
    (Parameter("x", "positional or keyword", X),), TensorOutput(0, "float32", ("n", 4)), (Dim("n", 1, None),)
)

# As much of torch as checking a call takes.
TORCH = """
import sys
from unittest import mock

class Tensor:
    pass

C, ops = mock.MagicMock(), mock.MagicMock()
for ask in (C._functorch.peek_interpreter_stack, C._get_tracing_state, C._get_dispatch_mode):
    ask.return_value = None
for count in (C._len_torch_dispatch_stack, ops._len_torch_dispatch_stack_pre_dispatch, C._is_torch_function_mode_enabled):
    count.return_value = 0
_C, _ops, autograd, no_grad = C, ops, mock.MagicMock(), mock.MagicMock()
nn, get_num_threads, strided = mock.MagicMock(), mock.MagicMock(), "strided"
autograd.forward_ad._current_level = -1
sys.modules["torch.autograd"] = autograd
no_grad.return_value.__exit__.return_value = C._DisableAutocast.return_value.__exit__.return_value = False
for mode in (C.DisableTorchFunction, C._DisableTorchDispatch):
    mode.return_value.__exit__.return_value = False
"""

USE = """
import copy, json, pickle, sys
from wheel import _aoti, _models

from wheel._aoti import Signature, calls
from wheel._models import MODELS, everything, simple

assert "torch" not in sys.modules
assert str(everything.signature).startswith("(x: float32[n, 4], pair: (")
assert Signature.from_json(json.loads(json.dumps(everything.signature.to_json()))) == everything.signature
assert pickle.loads(pickle.dumps(simple)) is copy.copy(simple) is simple
assert simple.with_options(num_runners=2) is not simple
assert _aoti.main([]) == 0
import torch

x = torch.Tensor()
call = calls.make_call("simple", simple.signature, lambda flat: [("ran", len(flat))])
for wrong in (lambda: call("x"), lambda: everything(x), lambda: simple(x, other=1)):
    try:
        wrong()
    except TypeError as error:
        print(error)
    else:
        raise AssertionError("not refused")
"""


def interpreter(version: str) -> str:
    """Return the path of a Python of this version; the test is skipped where there is none."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [shutil.which(f"python{version}"), *sorted(pyenv.glob(f"{version}.*/bin/python"))]
    for candidate in [path for path in candidates if path]:
        says = subprocess.run(
            [candidate, "-c", "import sys; print(*sys.version_info[:2], sep='.')"],
            capture_output=True,
            text=True,
            check=False,
        )
        if says.stdout.strip() == version:
            return os.fspath(candidate)
    pytest.skip(f"there is no Python {version} here")


@pytest.mark.parametrize("version", ["3.10", "3.11", "3.12", "3.13", "3.14"])
def test_generated_code_runs_on_every_python_of_torch(version: str, tmp_path: Path):
    """`from typing import Self` made every wheel fail on 3.10 (starfederation/datastar-python#5 is the same slip)."""
    variant = (Variant("x86-64-v3", "model.pt2", ("avx2",), "AVX2"),)
    models = [AccessorModel("everything", SIGNATURE, variant, "a:B"), AccessorModel("simple", SIMPLE, variant, "a:C")]
    text = render(
        models, package="wheel", torch_version="2.13.0", system="Linux", machine="x86_64", hatch_aoti_version="1"
    )
    files = {
        "wheel/__init__.py": "",
        "wheel/_models.py": text,
        **{f"wheel/{name}": text for name, text in runtime_files().items()},
        "torch/__init__.py": TORCH,
        "use.py": USE,
    }
    write_files(tmp_path, files)
    ran = run(interpreter(version), "-W", "error", "use.py", cwd=tmp_path).check()
    assert "where n = 1…16" in ran.output
    assert "simple: x" in ran.output
    assert "missing 1 required positional argument: 'pair'" in ran.output


@pytest.mark.parametrize(
    ("project", "torch", "names"),
    [
        (">=3.9", ">=3.10", "3.9"),
        (">=3.8, <4", ">=3.10", "3.8, 3.9"),
        ("~=3.9.5", ">=3.10", "3.9"),
        (">=2.7, !=3.0.*, !=3.1.*, !=3.2.*, !=3.3.*, !=3.4.*, !=3.5.*, !=3.6.*", ">=3.10", "2.7, 3.7, 3.8, 3.9"),
        (">=3.10", ">=3.10", ""),
        (">=3.11", ">=3.10", ""),
        (">=3.10", ">=3.10,<3.15", ""),  # no project has to say which future Pythons a torch will not run on
        ("", ">=3.10", ""),  # says nothing
        (">=3.9", "", ""),
    ],
)
def test_pythons_are_named_that_the_project_admits_and_torch_does_not(project: str, torch: str, names: str):
    assert unsupported_pythons(project, torch) == names


def test_a_build_says_that_the_project_admits_too_old_a_python(tiny: Path, build: Builder):
    edit(tiny, 'version = "1.0"', 'version = "1.0"\nrequires-python = ">=3.9"')
    output = build(tiny).check().output
    assert 'WARNING: `project.requires-python` is ">=3.9", which admits Python 3.9; torch 2.13.0' in output.replace(
        "+cpu", ""
    )
    edit(tiny, ">=3.9", ">=3.10")
    assert "requires-python" not in build(tiny).check().output
