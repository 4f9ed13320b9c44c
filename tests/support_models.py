"""Small models for the tests of the contract and the accessor, and compiling them without a wheel."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from hatch_aoti.compiler.serialise import inductor_options, make_serialisable, plain_containers
from hatch_aoti.export.containers import register_output_types
from hatch_aoti.export.signature import read_signature
from hatch_aoti.runtime.declarations import Variant
from hatch_aoti.wheel.accessor import AccessorModel, runtime_files

if TYPE_CHECKING:
    from pathlib import Path

    from hatch_aoti.runtime.contract import Signature


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass
class Answer:
    scores: Any
    note: Any


class Mlp(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 1), nn.Sigmoid())


class Everything(nn.Module):
    """State in a small buffer, an input changed in place, and results of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))
        self.weight = nn.Parameter(torch.arange(3.0))

    def forward(self, batch, x, flag=True, *, p):
        self.count.add_(1)
        x.mul_(2)
        return {
            "pair": Pair(batch["a"] + self.count, p),
            "answer": Answer(x + 1 if flag else x, "fixed"),
            "max": torch.max(batch["b"], 0),
            "rest": [x, self.weight, self.weight[1:], None, 7, self.count],
        }

    @staticmethod
    def example(size: int = 5) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return ({"a": torch.randn(3), "b": torch.randn(4, 2)}, torch.randn(size, 3)), {"p": torch.randn(2)}

    @staticmethod
    def dynamic_shapes() -> dict[str, Any]:
        return {"batch": {"a": None, "b": None}, "x": {0: torch.export.Dim("n", min=1, max=64)}, "p": None}


def write_accessor(package: Path, text: str) -> None:
    """Write a `_models.py` with what belongs beside it into the folder of a package."""
    files = {"__init__.py": "", "_models.py": text, **runtime_files()}
    for name, content in files.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(content, encoding="utf-8")


def export(module, args=(), kwargs=None, dynamic_shapes=None):
    """Return the exported program, eager's answer, and the signature."""
    module, kwargs = module.eval(), kwargs or {}
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        output = copy.deepcopy(module)(*copy.deepcopy(args), **copy.deepcopy(kwargs))
        register_output_types((args, kwargs, output))
        program = torch.export.export(module, args, kwargs, dynamic_shapes=dynamic_shapes, strict=False)
    signature = read_signature(
        program, forward=module.forward, args=args, kwargs=kwargs, output=output, dynamic_shapes=dynamic_shapes
    )
    return program, output, signature


def signature_of(module, args=(), kwargs=None, dynamic_shapes=None) -> Signature:
    return export(module, args, kwargs, dynamic_shapes)[2]


def compile_model(name: str, module: nn.Module, args, kwargs, dynamic_shapes, directory: Path) -> AccessorModel:
    """Compile to `directory/name.pt2` and return its declaration."""
    import torch._inductor
    from torch._inductor.package import package_aoti

    program, _, signature = export(module, args, kwargs, dynamic_shapes)
    path = directory / f"{name}.pt2"
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        files = torch._inductor.aot_compile(
            make_serialisable(program.module(check_guards=False)),
            *plain_containers(program.example_inputs),
            options={"aot_inductor.package": True, **inductor_options(signature)},
        )
        package_aoti(str(path), files)  # type: ignore[arg-type]
    return AccessorModel(name, signature, (Variant("native", path.name),), f"support_models:{type(module).__name__}")


@torch.library.custom_op("hatch_aoti_tests::square", mutates_args=())
def square(x: torch.Tensor) -> torch.Tensor:
    return (x @ x).mul_(torch.ones(8, 8))


@square.register_fake
def _(x):
    return torch.empty_like(x)


class Square(nn.Module):
    """Calls an operator that is written in Python: what reaches into the operators of compiled code reaches into it."""

    def forward(self, x):
        return torch.ops.hatch_aoti_tests.square(x) + 1

    @staticmethod
    def example() -> torch.Tensor:
        return torch.arange(64.0).reshape(8, 8) / 64
