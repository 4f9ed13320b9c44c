"""Random graphs of operators, compiled, on random values: `hatch run fuzz [--seconds N] [--seed N] [--graphs N]`.

A graph combines a dozen of the operators below, integer indexing and division among them, and returns everything that
it computes. Graphs are compiled several to a wheel, and each is called with many values, the ends of their range among
them: the compiled graph must answer as eager does, or raise if eager raises. A graph is given by its number, so what is
printed repeats a finding: `hatch run fuzz --seed N --graphs 1`.

Where floats have been rounded, nothing follows that has steps (floor division, argmax), since there a difference in the
last bit is as large as a step; and what rounds takes numbers from -8 to 8, NaN and infinities, so that no sum cancels.
"""

from __future__ import annotations

import argparse
import importlib
import os
import random
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

SHAPE = (3, 4)
_LEAST, _MOST = -(2**63), 2**63 - 1


def small(x):
    return x.clamp(-8, 8)


def divisible(i):
    return i.clamp(min=_LEAST + 1)  # the least by -1 has no answer, and ends the process in eager


def normal(x):
    """Return `x` with 1 for denormals: eager's `remainder` by them is right up to 15 elements, and NaN from 16 on."""
    return torch.where((x != 0) & (x.abs() < torch.finfo(x.dtype).tiny), torch.ones_like(x), x)


# name -> (kinds of arguments, kind of result, function). E: exact floats, F: floats, I: integers, N: indices.
OPERATORS: dict[str, tuple[str, str, Callable[..., Any]]] = {
    "abs": ("E", "E", torch.abs),
    "neg": ("E", "E", torch.neg),
    "relu": ("E", "E", torch.relu),
    "maximum": ("EE", "E", torch.maximum),
    "where": ("EEI", "E", lambda x, y, i: torch.where(i > 0, x, y)),
    "flip": ("E", "E", lambda x: x.flip(1)),
    "add": ("FF", "F", torch.add),
    "product": ("FF", "F", lambda x, y: small(x) * small(y)),
    "exp": ("F", "F", lambda x: torch.exp(small(x))),
    "tanh": ("F", "F", torch.tanh),
    "sqrt": ("E", "F", torch.sqrt),
    "divide": ("EE", "F", lambda x, y: small(x) / y),
    "softmax": ("F", "F", lambda x: torch.softmax(small(x), -1)),
    "sum": ("F", "F", lambda x: small(x).sum(1, keepdim=True).expand(SHAPE)),
    "matmul": ("FF", "F", lambda x, y: small(x) @ small(y).t() @ small(y)),
    "floor_divide_float": ("EE", "F", torch.floor_divide),
    "remainder_float": ("EE", "F", lambda x, y: torch.remainder(x, normal(y))),
    "argmax": ("E", "I", lambda x: x.argmax(1, keepdim=True).expand(SHAPE)),
    "isnan": ("E", "I", lambda x: x.isnan().to(torch.int64)),
    "to_float": ("I", "E", lambda i: i.to(torch.float32)),
    "int_add": ("II", "I", torch.add),
    "int_mul": ("II", "I", torch.mul),
    "int_abs": ("I", "I", torch.abs),
    "int_and": ("II", "I", torch.bitwise_and),
    "int_cumsum": ("I", "I", lambda i: i.cumsum(1)),
    "int_sort": ("I", "I", lambda i: i.sort(1).values),
    "int_shift": ("II", "I", lambda i, j: i >> (j % 64)),
    "div_trunc": ("II", "I", lambda i, j: torch.div(divisible(i), j, rounding_mode="trunc")),
    "div_floor": ("II", "I", lambda i, j: torch.div(divisible(i), j, rounding_mode="floor")),
    "remainder": ("II", "I", lambda i, j: torch.remainder(divisible(i), j)),
    "fmod": ("II", "I", lambda i, j: torch.fmod(divisible(i), j)),
    "index_select": ("EN", "E", lambda x, n: torch.index_select(x, 0, n)),
    "index": ("IN", "I", lambda i, n: i[n]),
    "gather": ("EN", "E", lambda x, n: torch.gather(x, 0, n.unsqueeze(1).expand(SHAPE))),
    "take": ("IN", "I", lambda i, n: torch.take(i, n).unsqueeze(1).expand(SHAPE)),
    "scatter_add": ("IN", "I", lambda i, n: i.scatter_add(0, n.unsqueeze(1).expand(SHAPE), i)),
    "index_put": ("IN", "I", lambda i, n: i.index_put((n,), i[:1])),
    "embedding": ("EN", "E", lambda x, n: torch.nn.functional.embedding(n, x)),
}


class Graph(torch.nn.Module):
    """The graph with this number, of `size` operators on two float tensors, two of integers and one of indices."""

    def __init__(self, number, size=12):
        super().__init__()
        chance = random.Random(number)
        kinds = ["E", "E", "I", "I", "N"]
        self.steps: list[tuple[str, list[int]]] = []
        values = list(example())
        while len(self.steps) < size:
            name = chance.choice(sorted(OPERATORS))
            wants, gives, _ = OPERATORS[name]
            places = []
            for want in wants:
                fitting = [at for at, kind in enumerate(kinds) if kind == want or (want == "F" and kind == "E")]
                places.append(chance.choice(fitting))
            try:
                values.append(OPERATORS[name][2](*(values[place] for place in places)))
            except RuntimeError:  # a division by zero, with which the graph could not be exported
                continue
            self.steps.append((name, places))
            kinds.append(gives)

    def forward(self, x, y, i, j, n):
        values = [x, y, i, j, n]
        for name, places in self.steps:
            values.append(OPERATORS[name][2](*(values[place] for place in places)))
        return tuple(value + 0 for value in values[5:])


def example():
    """Return inputs on which no graph raises."""
    x = torch.linspace(-2, 2, 12).reshape(SHAPE)
    i = torch.arange(1, 13).reshape(SHAPE)
    return x, x.flip(0) + 0.1, i, i.flip(0) + 2, torch.tensor([0, 2, 1])


_FLOATS = [0.0, -0.0, 1.0, -1.0, 0.1, float("inf"), -float("inf"), float("nan"), 1e-40, -1e-45, 1e15, 7.5]
_INTEGERS = [0, 1, -1, 2, -3, 7, _LEAST, _MOST, 2**31, -(2**31) - 1, 2**53 + 1]
_INDICES = [0, 1, 2, -1, -3, -4, 3, 100, _LEAST, _MOST]


def strategy():
    """Return what draws inputs for a graph with Hypothesis: mostly harmless, with some ends among them."""
    from hypothesis import strategies as st

    def tensor(ordinary, ends, dtype, shape):
        count = torch.Size(shape).numel()
        element = st.one_of(ordinary, ordinary, ordinary, st.sampled_from(ends))
        harmless = st.lists(ordinary, min_size=count, max_size=count)
        mixed = st.lists(element, min_size=count, max_size=count)
        return st.one_of(harmless, mixed).map(lambda values: torch.tensor(values, dtype=dtype).reshape(shape))

    floats = tensor(st.floats(-8, 8, width=32), _FLOATS, torch.float32, SHAPE)
    integers = tensor(st.integers(1, 50), _INTEGERS, torch.int64, SHAPE)
    indices = tensor(st.integers(0, 2), _INDICES, torch.int64, SHAPE[:1])
    return st.tuples(floats, floats, integers, integers, indices)


def outcome(call, args):
    try:
        return call(*(arg.clone() for arg in args)), None
    except (RuntimeError, IndexError, ValueError, TypeError) as error:
        return None, error


def told(error):
    """Return an exception in one line, without torch's stack of C++."""
    return "an answer" if error is None else f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def compare(number, model, args):
    """Raise AssertionError if the compiled graph does not do what eager does."""
    graph = Graph(number)
    with torch.no_grad():
        want, error = outcome(graph, args)
    got, raised = outcome(model, args)
    if error is not None or raised is not None:
        assert (error is None) == (raised is None), f"eager: {told(error)}; compiled: {told(raised)}"
        # Of several faults in the values, eager finds the first operator's, and compiled code that of its first loop.
        assert isinstance(raised, IndexError | RuntimeError), f"eager: {told(error)}; compiled: {told(raised)}"
        assert model.name in str(raised), f"does not name the model: {told(raised)}"
        return
    for (name, places), a, b in zip(graph.steps, got, want, strict=True):
        assert a.dtype == b.dtype, f"{name}{places}: {a.dtype} for {b.dtype}"
        fits = torch.allclose(a, b, rtol=1e-3, atol=1e-3, equal_nan=True) if a.is_floating_point() else a.equal(b)
        assert fits, f"{name}{places}: {a.tolist()} for {b.tolist()} in {graph.steps}"


def try_values(folder, number, count):
    """Call one graph of an installed wheel with `count` inputs; the last is in `args.txt`, should the process end."""
    from hypothesis import HealthCheck, Phase, given, settings

    sys.path.insert(0, folder)
    model = getattr(importlib.import_module("fuzz_wheel._models"), f"graph_{number}")
    compare(number, model, example())

    @settings(
        max_examples=count,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )
    @given(strategy())
    def check(args):
        Path(folder, "args.txt").write_text(repr(args))
        compare(number, model, args)

    check()


_HEAD = """
[build-system]
requires = ["hatchling", "hatch-aoti", "torch==2.13.0"]
build-backend = "hatchling.build"

[project]
name = "fuzz-wheel"
version = "1.0"
dependencies = ["torch>=2.13"]

[tool.hatch.build.targets.wheel.hooks.aoti]

[tool.aoti]
package = "fuzz_wheel"
"""


def build(root, numbers):
    """Build a wheel with the graphs of these numbers below `root`; return the folder it is unpacked in."""
    package = root / "fuzz_wheel"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "fuzz.py").write_text(Path(__file__).read_text())
    makers = [f"def graph_{number}():\n    return Graph({number})\n" for number in numbers]
    (package / "graphs.py").write_text("\n".join(["from .fuzz import Graph, example", *makers]))
    # Not verified: what verification would find is to be found, and told, here.
    entries = [
        f'[tool.aoti.models.graph_{number}]\nmodel = "fuzz_wheel.graphs:graph_{number}"\n'
        'inputs = "fuzz_wheel.graphs:example"\nverify = false\n'
        for number in numbers
    ]
    (root / "pyproject.toml").write_text("\n".join([_HEAD, *entries]))
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--skip-dependency-check", "."]
    subprocess.run(command, cwd=root, check=True, stdout=subprocess.DEVNULL)
    [wheel] = (root / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(root / "installed")
    return root / "installed"


def fuzz(folder, numbers, values):
    """Try each graph in a process of its own; return a text for each that is at fault."""
    faults = []
    for number in numbers:
        command = [sys.executable, __file__, "--folder", os.fspath(folder), "--seed", str(number)]
        done = subprocess.run(
            [*command, "--values", str(values)], capture_output=True, text=True, check=False, timeout=1800
        )
        if done.returncode:
            args = (Path(folder) / "args.txt").read_text() if done.returncode < 0 else ""
            words = " ".join(done.stderr.partition("AssertionError")[2].split() or done.stderr[-1500:].split())
            faults.append(f"graph {number}: exit {done.returncode} {args} {words[:1500]}")
    return faults


def main():
    parser = argparse.ArgumentParser(description="Compile random graphs and compare them with eager on random values.")
    parser.add_argument("--seconds", type=int, default=600, help="how long to go on with new graphs")
    parser.add_argument("--seed", type=int, default=1000, help="the number of the first graph")
    parser.add_argument("--graphs", type=int, help="how many graphs, whatever time that takes")
    parser.add_argument("--values", type=int, default=500, help="how many inputs for each graph")
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.folder:
        try_values(options.folder, options.seed, options.values)
        return 0
    end, number, faults = time.monotonic() + options.seconds, options.seed, []
    last = None if options.graphs is None else options.seed + options.graphs
    while number < last if last is not None else time.monotonic() < end:
        numbers = range(number, min(number + 4, last or number + 4))
        with tempfile.TemporaryDirectory() as scratch:
            found = fuzz(build(Path(scratch, "project"), numbers), numbers, options.values)
        for fault in found:
            print(f"FAULT: {fault}", flush=True)
        faults += found
        number = numbers.stop
    print(f"{number - options.seed} graphs, {options.values} inputs each, {len(faults)} graphs at fault")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
