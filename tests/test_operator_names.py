"""Operators in generated code have names that are the same in every process, whatever torch fuses them with."""

from __future__ import annotations

import functools
import os
import re
import types
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn
from torch._inductor import codecache
from torch.nn import functional

from hatch_aoti.artifact.cache import Cache
from hatch_aoti.compiler.compilation import compile_program
from hatch_aoti.compiler.names import operator_names
from hatch_aoti.compiler.target import builder_cpu_features, resolve_targets
from hatch_aoti.compiler.toolchain import find_toolchain
from hatch_aoti.errors import CompileError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": torch.relu,
    "gelu": functional.gelu,
    "gelu by tanh": functools.partial(functional.gelu, approximate="tanh"),
    "silu": functional.silu,
    "hardswish": functional.hardswish,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "leaky_relu": functools.partial(functional.leaky_relu, negative_slope=0.2),
    "clamp": functools.partial(torch.clamp, min=-1, max=2),
    "add": lambda x: torch.relu(x + 1),
}
PRODUCTS = {
    "linear": (nn.Linear(256, 256), (8, 256), "mkldnn._linear_pointwise"),
    "convolution": (nn.Conv2d(16, 64, 3), (2, 16, 8, 8), "mkldnn._convolution_pointwise"),
    "transposed": (nn.ConvTranspose2d(16, 64, 3), (2, 16, 8, 8), "mkldnn._convolution_transpose_pointwise"),
}


class Followed(nn.Module):
    def __init__(self, product: nn.Module, activation: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.product, self.activation = product, activation

    def forward(self, x):
        return self.activation(self.product(x))


@pytest.fixture
def generate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Return a function that gives the code of a frozen module, which is not compiled."""
    generated = []

    def keep(_graph, wrapper, kernels, *_args, **_kwargs):
        generated.append(f"{getattr(wrapper, 'value', wrapper)}\n{getattr(kernels, 'value', kernels)}")
        raise NotImplementedError

    monkeypatch.setattr(codecache.AotCodeCompiler, "compile", keep)
    system = os.uname()
    [target] = resolve_targets(
        [], system=system.sysname, machine=system.machine, builder_features=builder_cpu_features()
    )  # fmt: skip

    def code_of(module: nn.Module, *args: torch.Tensor) -> str:
        program = torch.export.export(module.eval(), args)
        with pytest.raises(CompileError, match="NotImplementedError"):
            compile_program(
                program,
                target,
                find_toolchain(os.environ),
                options={"freezing": True},
                directory=tmp_path,
                cache=Cache(tmp_path / "cache"),
                seed=0,
            )
        return generated.pop()

    return code_of


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # its own use of torch.jit
@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="nothing is packed without oneDNN")
@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_what_is_fused_with_its_activation_is_called_by_its_operator(product, activation, generate):
    layer, shape, operator = PRODUCTS[product]
    code = generate(Followed(layer, ACTIVATIONS[activation]), torch.ones(shape))
    names = re.findall(r'assert_size_stride\(.*, "(.*)"\)', code)
    assert any(name.startswith(f"torch.ops.{operator}") for name in names), names
    assert not re.findall(r"0x[0-9a-f]{6,}", code)


def test_anything_else_is_called_by_where_it_is_defined():
    def lowering(_match, _x):
        """Stand for what torch defines for a pattern."""

    [(_, _, name)] = operator_names()
    here = f"{__name__}.test_anything_else_is_called_by_where_it_is_defined.<locals>.lowering"
    cases = {
        lowering: here,
        functools.partial(lowering, 1): here,
        functools.wraps(lowering)(functools.partial(lowering, 1)): here,
        torch.ops.aten.mm.default: "torch.ops.aten.mm.default",
        len: "builtins.len",
    }
    for target, want in cases.items():
        assert name(types.SimpleNamespace(fx_node=types.SimpleNamespace(target=target), op_overload=None)) == want
    assert name(types.SimpleNamespace(fx_node=None, op_overload=None)) == "unknown_op"
    fused = types.SimpleNamespace(target=lowering)
    packed = torch.ops.aten.mm.default
    assert name(types.SimpleNamespace(fx_node=fused, op_overload=packed)) == "torch.ops.aten.mm.default"
