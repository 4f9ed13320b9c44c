"""The rules by which weights are prepacked, and kept inside or outside the compiled object."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import nn

from hatch_aoti.artifact.cache import Cache
from hatch_aoti.compiler import optimize
from hatch_aoti.compiler.compilation import compile_program
from hatch_aoti.compiler.optimize import Plan, inline_small_products, make_plan
from hatch_aoti.compiler.target import builder_cpu_features, resolve_targets
from hatch_aoti.compiler.toolchain import find_toolchain
from hatch_aoti.export.signature import read_signature
from hatch_aoti.settings.model import ModelSettings


def plan(module, *args, device="cpu", **settings):
    module = module.eval()
    with torch.no_grad():
        program = torch.export.export(module, args)
        output = module(*args)
    signature = read_signature(program, forward=module.forward, args=args, kwargs={}, output=output)
    entry = ModelSettings(name="m", model="p:M", inputs="p:i", **settings)
    return make_plan(program, signature, entry, device=device)


class Stateful(nn.Linear):
    def __init__(self):
        super().__init__(512, 512)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x):
        self.count.add_(1)
        return super().forward(x) + self.count


LARGE, SMALL = (nn.Linear(512, 512), torch.ones(1, 512)), (nn.Linear(10, 16), torch.ones(1, 10))


@pytest.mark.parametrize(
    ("module", "args", "settings", "want"),
    [
        (*SMALL, {}, Plan(freeze=False, external=False, inline=True)),
        (*LARGE, {}, Plan(freeze=True, external=False, inline=True)),
        (nn.Conv2d(64, 64, 5), torch.ones(1, 64, 8, 8), {}, Plan(freeze=True, external=False, inline=True)),
        (nn.Embedding(1000, 512), torch.tensor([1]), {}, Plan(freeze=False, external=False, inline=True)),
        (*LARGE, {"optimize": False}, Plan(freeze=False, external=False, inline=False)),
        (*SMALL, {"optimize": True}, Plan(freeze=True, external=False, inline=True)),
        (*LARGE, {"inductor_configs": {"freezing": False}}, Plan(freeze=False, external=False, inline=True)),
        (*LARGE, {"constants": "external"}, Plan(freeze=False, external=True, inline=True)),
        (Stateful(), torch.ones(1, 512), {}, Plan(freeze=False, external=False, inline=False)),
        (Stateful(), torch.ones(1, 512), {"optimize": True}, Plan(freeze=False, external=False, inline=False)),
    ],
)
def test_the_rule_follows_from_the_graph_and_the_settings_override_it(module, args, settings, want):
    assert plan(module, args, **settings) == want


def test_large_constants_go_outside(monkeypatch):
    monkeypatch.setattr(optimize, "_MOST_EMBEDDED", 1000)
    assert plan(*LARGE) == Plan(freeze=False, external=True, inline=True)
    assert plan(*LARGE, constants="embedded") == Plan(freeze=True, external=False, inline=True)
    assert plan(*LARGE, optimize=True) == Plan(freeze=True, external=False, inline=True)


def test_shared_weights_are_counted_once(monkeypatch):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.out = nn.Embedding(100, 64), nn.Linear(64, 100, bias=False)
            self.out.weight = self.table.weight

        def forward(self, i):
            return self.out(self.table(i))

    monkeypatch.setattr(optimize, "_MOST_EMBEDDED", 100 * 64 * 4)
    assert not plan(Tied(), torch.tensor([1])).external


def test_layers_with_the_same_input_are_one_where_weights_are_packed():
    assert plan(*LARGE).preferred_options() == {"cpp.enable_concat_linear": True}
    assert plan(*SMALL).preferred_options() == {}


def inlined(module, *args, dynamic_shapes=None):
    with torch.no_grad():
        program = torch.export.export(module.eval(), args, dynamic_shapes=dynamic_shapes)
    graph = program.module(check_guards=False)
    inline_small_products(graph)
    products = [node for node in graph.graph.nodes if node.target is torch.ops.aten.linear.default]
    return graph, not products


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Linear(10, 16), (8, 10)),
        (nn.Linear(16, 1), (3, 16)),
        (nn.Linear(64, 64, bias=False), (2, 64)),
        (nn.Linear(5, 9), (2, 3, 5)),
        (nn.Linear(4, 3), (4,)),
        (nn.Linear(6, 8, dtype=torch.float64), (2, 6)),
    ],
)
def test_small_linear_layers_are_multiplied_inline_and_answer_as_eager(layer, shape):
    x = torch.randn(shape, dtype=layer.weight.dtype)
    graph, all_inlined = inlined(layer, x)
    assert all_inlined
    torch.testing.assert_close(graph(x), layer(x))


@pytest.mark.parametrize("largest", [None, 1024, 8])
def test_layers_are_small_by_their_largest_batch(largest):
    layer, x = nn.Linear(64, 64), torch.randn(4, 64)
    dynamic = ({0: torch.export.Dim("batch", max=largest)},)
    assert inlined(layer, x, dynamic_shapes=dynamic)[1] == (largest == 8)
    assert inlined(nn.Linear(10, 16), torch.randn(4, 10), dynamic_shapes=dynamic)[1], "whatever the batch"


def test_layers_of_other_types_are_left_to_libraries():
    assert not inlined(nn.Linear(10, 16, dtype=torch.bfloat16), torch.randn(8, 10, dtype=torch.bfloat16))[1]


class Loops(nn.Module):
    def forward(self, small, large, some):
        return torch.tanh(small), torch.tanh(large), torch.tanh(some)


@pytest.mark.filterwarnings("ignore")  # torch's own, of what it imports
def test_a_loop_runs_in_parallel_only_if_there_is_enough_for_each_thread(tmp_path, environ):
    # pytorch/pytorch#148937, #134946, #154094: the builder's number of threads, or starting them for nothing
    args = (torch.ones(16), torch.ones(100_000), torch.ones(9))
    with torch.no_grad():
        program = torch.export.export(Loops(), args, dynamic_shapes=({}, {}, {0: torch.export.Dim("n")}))
    [target] = resolve_targets(
        [], system=os.uname().sysname, machine=os.uname().machine, builder_features=builder_cpu_features()
    )
    compiled = compile_program(
        program,
        target,
        find_toolchain(os.environ),
        options={},
        directory=tmp_path,
        cache=Cache(Path(environ["HATCH_AOTI_CACHE_DIR"])),
        seed=0,
        include_sources=True,
    )
    [kernels] = [bytes(text).decode() for name, text in compiled.files.items() if name.endswith("kernel.cpp")]
    conditions = [line.partition(" if(")[2] for line in kernels.splitlines() if "#pragma omp parallel" in line]
    assert len(conditions) == 2, "none for 16 elements"
    for condition, size in zip(conditions, ("100000L", "ks0"), strict=True):
        assert size in condition
        assert condition.endswith(">= 4096 * omp_get_max_threads())")
    assert "num_threads" not in kernels
