"""Calls of a compiled model from every state that a thread or a tensor of PyTorch's can be in.

Run as a program, it calls `square` of the package named on the command line in each state, before and after an
ordinary call, each in a process of its own, and prints a JSON object: by the name of the state, what came of it.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from support_models import Square
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

ANSWERED: dict[str, Any] = {}
REFUSED: dict[str, Any] = {}
"""The states, by name: functions of (the model, its input). `ANSWERED` must return what eager answers without them;
`REFUSED` comes with what the TypeError or ValueError must say."""


def answered(function):
    ANSWERED[function.__name__] = function
    return function


def refused(text):
    def register(function):
        REFUSED[function.__name__] = (function, text)
        return function

    return register


class SeesFunctions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class SpoilsOperators(TorchDispatchMode):
    """Returns tensors without memory, as a user's mode can."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return torch.empty(8, 8, device="meta")


class Around(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x)


def under(*contexts):
    """Return a state that is entered by context managers, each made by a function."""

    def state(model, x):
        with contextlib.ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context())
            return model(x)

    return state


ANSWERED.update(
    # pytorch/pytorch#194329: operators follow autocast and return bfloat16, which is read as float32
    autocast=under(lambda: torch.autocast("cpu", torch.bfloat16)),
    autocast_of_a_gpu=under(lambda: torch.autocast("cuda", torch.float16)),
    autocast_in_inference_mode=under(torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)),
    no_grad=under(torch.no_grad),
    inference_mode=under(torch.inference_mode),
    default_device=under(lambda: torch.device("meta")),
    function_mode=under(SeesFunctions),
    dispatch_mode=under(SpoilsOperators),
    flop_counter=under(lambda: FlopCounterMode(display=False)),
    profiler=under(torch.profiler.profile),
    anomaly=under(torch.autograd.detect_anomaly),
    saved_tensors_hooks=under(
        lambda: torch.autograd.graph.saved_tensors_hooks(lambda _: 0, lambda _: 0)  # type: ignore[arg-type, return-value]
    ),
    save_on_cpu=under(torch.autograd.graph.save_on_cpu),
    dual_level=under(forward_ad.dual_level),
)


@answered
def several_threads(model, x):
    """The operator is written in Python, whose lock PyTorch holds while it waits for another thread's call to end."""
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: [model(x) for _ in range(200)][-1], range(4)))
    assert all(torch.equal(result, results[0]) for result in results)
    return results[0]


@answered
def default_device_of_the_process(model, x):
    torch.set_default_device("meta")
    return model(x)


@answered
def deterministic_algorithms(model, x):
    torch.use_deterministic_algorithms(True)
    return model(x)


@answered
def flush_denormal(model, x):
    torch.set_flush_denormal(True)
    return model(x)


@answered
def inference_tensor_inside(model, x):
    with torch.inference_mode():
        return model(x.clone())


@answered
def inference_tensor_outside(model, x):
    with torch.inference_mode():
        made = x.clone()
    return model(made)


@answered
def every_kind_in_turn(model, x):
    with torch.inference_mode():
        made = x.clone()
    for _ in range(3):
        for context in (torch.inference_mode, torch.no_grad, torch.enable_grad):
            for value in (x, made, nn.Parameter(x), x.t().contiguous().t()):
                with context():
                    result = model(value)
    return result


@answered
def compiled_around(model, x):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        around = torch.compile(lambda x: model(x * 1.0), backend="eager")
        around(x)
        return around(x)


ANSWERED.update(
    parameter=lambda model, x: model(nn.Parameter(x)),
    requires_grad=lambda model, x: model(x.clone().requires_grad_()),
    with_history=lambda model, x: model(x.clone().requires_grad_() * 1),
    negative=lambda model, x: model(torch._neg_view(-x)),
    imaginary=lambda model, x: model(torch.complex(x, -x).conj().imag),
    transposed=lambda model, x: model(x.t().contiguous().t()),
    from_read_only_memory=lambda model, x: model(torch.frombuffer(x.numpy().tobytes(), dtype=x.dtype).view(8, 8)),
    huge_strides=lambda model, x: model(torch.empty(8 << 20).as_strided((8, 8), (1 << 20, 1)).copy_(x)),
    after_an_offset=lambda model, x: model(torch.cat([x, x])[8:]),
)

TRANSFORM = "square cannot be called under a torch.func transform"
REFUSED.update(
    vmap=(lambda model, x: torch.func.vmap(model)(torch.stack([x, x])), f"{TRANSFORM} (vmap)"),
    vmap_beside=(lambda model, x: torch.func.vmap(lambda _: model(x))(x), f"{TRANSFORM} (vmap)"),
    grad=(lambda model, x: torch.func.grad(lambda x: model(x).sum())(x), f"{TRANSFORM} (grad)"),
    grad_beside=(lambda model, x: torch.func.grad(lambda y: (model(x) + y).sum())(x), f"{TRANSFORM} (grad)"),
    jvp=(lambda model, x: torch.func.jvp(model, (x,), (x,)), f"{TRANSFORM} (jvp)"),
    functionalize=(lambda model, x: torch.func.functionalize(model)(x), f"{TRANSFORM} (functionalize)"),
    nested_transforms=(lambda model, x: torch.func.hessian(lambda x: model(x).sum())(x), TRANSFORM),
    jit_trace=(
        lambda model, x: torch.jit.trace(lambda x: model(x) + 1, x),
        "square cannot be called under torch.jit.trace",
    ),
    jit_trace_module=(
        lambda model, x: torch.jit.trace(Around(model), x),
        "square cannot be called under torch.jit.trace",
    ),
    make_fx=(lambda model, x: make_fx(model)(x), "square cannot be called under torch.export or make_fx"),
    make_fx_fake=(
        lambda model, x: make_fx(model, tracing_mode="symbolic")(x),
        "square cannot be called under torch.export or make_fx",
    ),
    make_fx_pre_dispatch=(
        lambda model, x: make_fx(model, pre_dispatch=True)(x),
        "square cannot be called under torch.export or make_fx",
    ),
    export=(lambda model, x: torch.export.export(Around(model), (x,)), "square cannot be called under torch.export"),
    symbolic_trace=(lambda model, _: torch.fx.symbolic_trace(Around(model)), "square: x must be a tensor"),
    fake_mode=(under(FakeTensorMode), "square cannot be called under FakeTensorMode"),
    zero_tensor=(lambda model, _: model(torch._efficientzerotensor(8, 8)), "square: x must be a tensor"),
    nested_strided=(lambda model, x: model(torch.nested.nested_tensor([x, x])), "got a nested tensor"),
    nested_jagged=(
        lambda model, x: model(torch.nested.nested_tensor([x, x], layout=torch.jagged)),
        "not a subclass, got NestedTensor",
    ),
    quantised=(lambda model, x: model(torch.quantize_per_tensor(x, 0.1, 0, torch.quint8)), "got quint8[8, 8]"),
    mkldnn=(lambda model, x: model(x.to_mkldnn()), "got a _mkldnn tensor"),
    sparse=(lambda model, x: model(x.to_sparse()), "got a sparse_coo tensor"),
    sparse_csr=(lambda model, x: model(x.to_sparse_csr()), "got a sparse_csr tensor"),
    meta=(lambda model, x: model(x.to("meta")), "square: x must be on cpu"),
    subclass=(lambda model, x: model(x.as_subclass(type("Mine", (torch.Tensor,), {}))), "not a subclass, got Mine"),
    functional=(lambda model, x: model(torch._to_functional_tensor(x)), "got one that a torch.func transform"),
)


@refused("square: x must be a tensor float32[8, 8], got a dual tensor")
def dual(model, x):
    with forward_ad.dual_level():
        model(forward_ad.make_dual(x, x))


@refused("not a subclass, got FakeTensor")
def fake_tensor(model, x):
    model(FakeTensorMode().from_tensor(x))


@refused("square: x must be a tensor float32[8, 8], got one that a torch.func transform")
def escaped_from_vmap(model, x):
    kept = []
    torch.func.vmap(lambda row: (kept.append(row), row)[1])(torch.stack([x, x]))  # type: ignore[func-returns-value]
    model(kept[0])


@refused("whose storage has only 0 bytes")
def freed(model, x):
    x.untyped_storage().resize_(0)
    model(x)


def outcome(state, model, x, want):
    """Return what came of a call: `right`, `TypeError: …`, or what is wrong with the answer."""
    try:
        got = state(model, x.clone())
    except (TypeError, ValueError) as error:
        try:
            again = model(x)  # outside of that state
        except Exception as trouble:  # noqa: BLE001
            return f"{trouble!r} after {error!r}"
        return f"{type(error).__name__}: {error}" if torch.equal(again, want) else f"wrong answer after {error!r}"
    except BaseException as error:  # noqa: BLE001
        return f"unexpected {error!r}"
    torch.set_default_device(None)
    right = type(got) is torch.Tensor and not got.requires_grad and torch.equal(got, want)
    return "right" if right else f"wrong: {got}"


def in_a_process(function, *arguments):
    """Return what a function returns in a child, or how that ended."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        signal.alarm(60)  # ends a child that hangs
        os.write(writing, function(*arguments).encode()[:4000])
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        text = pipe.read().decode(errors="replace")
    _, status = os.waitpid(child, 0)
    return text if status == 0 else f"the process ended with {os.waitstatus_to_exitcode(status)}"


def main():
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # nothing of a pool of threads that a child would wait for
    models = importlib.import_module(sys.argv[1])
    x = Square.example()
    with torch.no_grad():
        want = Square()(x)
    states = {**ANSWERED, **{name: function for name, (function, _) in REFUSED.items()}}
    found = {}
    for name, state in states.items():
        found[name, "first"] = in_a_process(outcome, state, models.square, x, want)
    models.square(x)
    for name, state in states.items():
        found[name, "later"] = in_a_process(outcome, state, models.square, x, want)
    print(json.dumps({f"{name}, {when}": text for (name, when), text in found.items()}))


if __name__ == "__main__":
    main()
