"""Values that cannot be computed with end as eager's exceptions; others are computed as eager does.

One model has all operators, each with inputs of its own, so that one of them can be wrong at a time.
"""

from __future__ import annotations

import os
import textwrap
import threading
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional

from hatch_aoti.artifact.archive import ENTRY, write_package
from hatch_aoti.artifact.cache import Cache
from hatch_aoti.compiler.checks import guard_kernels
from hatch_aoti.compiler.compilation import compile_program
from hatch_aoti.compiler.target import builder_cpu_features, resolve_targets
from hatch_aoti.compiler.toolchain import find_toolchain
from hatch_aoti.export.operators import random_operators
from hatch_aoti.export.signature import read_signature
from hatch_aoti.runtime.calls import make_call


class Everything(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(100, 16)

    def forward(self, rows, a, b, mode, divisor, select, added, taken, item, x):
        return {
            "rows": self.table(rows) + 1,
            "quotient": a // b,
            "remainder": a % b,
            "truncated": torch.div(mode, divisor, rounding_mode="trunc"),
            "joined": torch.cat([torch.div(mode, divisor, rounding_mode="trunc"), mode]),
            "padded": functional.pad(mode // divisor, (1, 1)),
            "power": 2**select,
            "select": torch.index_select(x, 0, select),
            "added": x.index_add(0, added, x[:3]),
            "taken": torch.gather(x, 0, taken[:, None]),
            "item": x[item[0]],
        }


def inputs(batch=4):
    generator = torch.Generator().manual_seed(0)
    return {
        "rows": torch.randint(0, 100, (batch, 8), generator=generator),
        "a": torch.cat([torch.tensor([1.0, 5.3, -1.0, 0.0, torch.inf]), torch.randn(60, generator=generator) * 1e4]),
        "b": torch.cat([torch.tensor([0.1, 0.1, 0.3, 0.0, 2.0]), torch.randn(60, generator=generator)]),
        "mode": torch.randint(-50, 50, (19,), generator=generator),
        "divisor": torch.randint(1, 5, (19,), generator=generator),
        "select": torch.tensor([0, 4, 2]),
        "added": torch.tensor([3, 0, 3]),
        "taken": torch.tensor([1, 2, 0]),
        "item": torch.tensor([1]),
        "x": torch.randn(5, 4, generator=generator),
    }


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Return the model as compiled, behind the accessor, and the eager one; both take keyword arguments."""
    folder, module = tmp_path_factory.mktemp("values"), Everything().eval()
    dims = dict.fromkeys(inputs()) | {"rows": {0: torch.export.Dim("batch", min=1, max=1024)}}
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(module, (), inputs(), dynamic_shapes=dims, strict=False)
        output = module(**inputs())
        signature = read_signature(
            program, forward=module.forward, args=(), kwargs=inputs(), output=output, dynamic_shapes=dims
        )
        [target] = resolve_targets([], system="Linux", machine="x86_64", builder_features=builder_cpu_features())
        made = compile_program(
            program,
            target,
            find_toolchain(os.environ),
            options={},
            directory=folder,
            cache=Cache(folder / "cache"),
            seed=0,
        )
    write_package(folder / "model.pt2", {ENTRY: made.files})
    loader = torch._C._aoti.AOTIModelPackageLoader(str(folder / "model.pt2"), ENTRY, False, 1, -1)
    call = make_call("values", signature, loader.boxed_run)

    def run(**given):
        return call(*(given[name] for name in inputs()))

    return run, module


def raised(call, given):
    with torch.no_grad(), pytest.raises((IndexError, RuntimeError)) as caught:
        call(**given)
    return caught.value


@pytest.mark.parametrize("batch", [1, 4, 1024])
def test_good_values_are_computed_as_eager_computes_them(compiled, batch):
    """pytorch/pytorch#197895: 1.0 // 0.1 is 9, not 10."""
    run, module = compiled
    with torch.no_grad():
        want = module(**inputs(batch))
    got = run(**inputs(batch))
    assert want["quotient"][0] == 9
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(
    ("name", "value", "named"),
    [
        ("rows", 100, "an index of `rows` is out of range"),  # pytorch/pytorch#195402
        ("rows", -1, "an index of `rows` is out of range"),
        ("divisor", 0, "ZeroDivisionError"),  # pytorch/pytorch#143649
        ("select", -1, "an index of `select` is out of range"),  # pytorch/pytorch#169779
        ("select", 5, "an index of `select` is out of range"),
        ("added", -1, "an index of `added` is out of range"),
        ("taken", -1, "an index of `taken` is out of range"),
    ],
)
@pytest.mark.parametrize("batch", [1, 1024])
def test_values_that_cannot_be_computed_with_raise_as_in_eager(compiled, capfd, name, value, named, batch):
    run, module = compiled
    given = inputs(batch)
    given[name].view(-1)[-1] = value
    got, want = raised(run, given), raised(module, given)
    if name != "added":  # eager's `index_add` has code of several kinds, which raise different types
        assert type(got) is type(want)
    assert str(got).startswith(f"values: {named}")
    assert capfd.readouterr().err == ""
    run(**inputs(batch))  # and the model goes on


@pytest.mark.parametrize("index", [5, -6, 1 << 40])
def test_an_index_that_is_computed_is_checked(compiled, index):
    run, module = compiled
    given = inputs() | {"item": torch.tensor([index])}
    assert isinstance(raised(module, given), IndexError)
    assert str(raised(run, given)).startswith("values: Expected ")


def test_threads_that_wait_for_a_model_go_on_after_another_ones_call_has_raised(compiled):
    run, _ = compiled
    outcomes = []

    def work(thread):
        for turn in range(30):
            given = inputs(1 + turn * 30)
            bad = (turn + thread) % 3 == 0
            if bad:
                given["rows"][-1] = 100
            try:
                run(**given)
                outcomes.append(not bad)
            except IndexError:
                outcomes.append(bad)

    threads = [threading.Thread(target=work, args=(thread,), daemon=True) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert outcomes == [True] * 120


def test_the_smallest_integer_divided_by_minus_one_wraps(compiled):
    """Eager ends the process (SIGFPE)."""
    run, _ = compiled
    given = inputs()
    given["mode"][3], given["divisor"][3] = torch.iinfo(torch.int64).min, -1
    assert run(**given)["truncated"][3] == torch.iinfo(torch.int64).min


def test_dropout_draws_where_it_trains():
    class Dropout(nn.Module):
        def forward(self, x):
            return functional.dropout(x, 0.5, training=True) + functional.dropout(x, 0.5, training=False)

    x = torch.ones(2, 3, 4, 8)
    found = random_operators(torch.export.export(Dropout(), (x,)))
    assert found == ["aten.dropout.default"]
    assert random_operators(torch.export.export(nn.Dropout2d().eval(), (x,))) == []

    class Attention(nn.Module):
        def forward(self, x):
            return functional.scaled_dot_product_attention(x, x, x, dropout_p=0.3)

    assert random_operators(torch.export.export(Attention(), (x,))) == ["aten.scaled_dot_product_attention.default"]


def test_loops_without_checks_stay_as_they_are():
    kernel = """
#pragma omp parallel
{
    #pragma omp for
    for(long x=0; x<9; x+=1)
    {
        out[x] = in[x] + 1;
    }
}
"""
    assert guard_kernels(kernel) == kernel


def test_the_bodies_of_collapsed_loops_and_blocks_of_one_thread_are_guarded():
    kernel = textwrap.dedent("""
        #pragma omp parallel if(n)
        {
            #pragma omp for collapse(2)
            for(long x=0; x<9; x+=1)
            {
                for(long y=0; y<9; y+=1)
                {
                    AOTI_TORCH_CHECK(x < y, "} {");
                }
            }
            #pragma omp single
            {
                mod(a, b);
            }
        }
    """)
    guarded = guard_kernels(kernel)
    inner = guarded.partition("y+=1)")[2]
    assert inner.split()[:4] == ["{", "if", "(!failure.seen())", "try"]
    assert guarded.count("catch (...) { failure.keep(); }") == 2
    assert guarded.partition("for(long x")[0].count("try") == 0
    assert guarded.rstrip().endswith("failure.raise(); }")
