"""The table: what a call does to its arguments (`CHANGES`), and in what state the thread makes it (`STATES`).

A change takes a kind, the place of a leaf among the call's tensors and that tensor, and returns what is given in its
place; NotImplemented where it does not apply to such a tensor. A state takes a function that makes the call, and
returns what comes of it. The judge (`judge.py`) takes for each combination what eager forward does as the truth.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import signal
import threading
import time
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hostile_calls.kinds import Kind

CHANGES: dict[str, Change] = {}
STATES: dict[str, State] = {}


@dataclasses.dataclass(frozen=True)
class Change:
    """`good` marks what the contract admits: eager's answer, or eager's type of exception, is all that is right."""

    make: Callable[[Kind, int, Tensor], Any]
    good: bool


@dataclasses.dataclass(frozen=True)
class State:
    """`good` as for changes; `refused` where any answer would be wrong; `inside` if eager runs in the state, too."""

    run: Callable[[Callable[[], Any]], Any]
    good: bool
    refused: bool
    inside: bool


def change(make: Callable[[Kind, int, Tensor], Any]) -> Callable[[Kind, int, Tensor], Any]:
    CHANGES[make.__name__] = Change(make, good=False)
    return make


def value(make: Callable[[Kind, int, Tensor], Any]) -> Callable[[Kind, int, Tensor], Any]:
    CHANGES[make.__name__] = Change(make, good=True)
    return make


def state(*, good: bool = False, refused: bool = False, inside: bool = True) -> Callable[[Any], Any]:
    def register(run: Callable[[Callable[[], Any]], Any]) -> Any:
        STATES[run.__name__] = State(run, good, refused, inside)
        return run

    return register


def around(enter: Callable[[], Any]) -> Callable[[Callable[[], Any]], Any]:
    """Return a state that is a context manager."""

    def run(call: Callable[[], Any]) -> Any:
        with enter():
            return call()

    return run


# --- Values: dtype, shape and layout are right ---


@value
def as_is(kind, place, x):
    return x


def filled(numbers: dict[str, float]) -> None:
    def make(number: float) -> Callable[[Kind, int, Tensor], Any]:
        def one(kind, place, x):
            if not x.is_floating_point() or not x.numel():
                return NotImplemented
            y = x.clone()
            y.view(-1)[-1] = number
            return y

        return one

    for name, number in numbers.items():
        CHANGES[f"a_{name}"] = Change(make(number), good=True)


filled({"nan": float("nan"), "inf": float("inf"), "minus_inf": -float("inf"), "denormal": 1e-40, "huge": 3e38})


@value
def all_zero(kind, place, x):
    return NotImplemented if place in kind.indices or not x.is_floating_point() else torch.zeros_like(x)


@value
def all_denormal(kind, place, x):
    return torch.full_like(x, 1e-41) if x.is_floating_point() else NotImplemented


def index(name: str, number: Callable[[Kind], int], *, everywhere: bool = False) -> None:
    def make(kind, place, x):
        if place not in kind.indices:
            return NotImplemented
        y = x.clone()
        if everywhere:
            y.fill_(number(kind))
        else:
            y.view(-1)[-1] = number(kind)
        return y

    CHANGES[f"index_{name}"] = Change(make, good=True)


LOW, HIGH = -(2**63), 2**63 - 1
index("last", lambda kind: kind.high - 1)
index("minus_one", lambda kind: -1)
index("lowest", lambda kind: -kind.high)
index("below", lambda kind: -kind.high - 1)
index("high", lambda kind: kind.high)
index("far", lambda kind: 10**9)
index("min", lambda kind: LOW)
index("max", lambda kind: HIGH)
index("all_high", lambda kind: kind.high, everywhere=True)
index("all_minus_one", lambda kind: -1, everywhere=True)
index("wraps", lambda kind: 2**32)


def integers(name: str, number: Callable[[Tensor], int], which: Callable[[Kind, int], bool], at: int | None) -> None:
    def make(kind, place, x):
        if not kind.divisors or not which(kind, place):
            return NotImplemented
        y = x.clone()
        if at is None:
            y.fill_(number(x))
        else:
            y[at] = number(x)
        return y

    CHANGES[name] = Change(make, good=True)


def is_divisor(kind: Kind, place: int) -> bool:
    return place in kind.divisors


def is_dividend(kind: Kind, place: int) -> bool:
    return place not in kind.divisors


integers("divisor_zero", lambda x: 0, is_divisor, -1)
integers("divisor_zeros", lambda x: 0, is_divisor, None)
integers("divisor_minus_one", lambda x: -1, is_divisor, None)
integers("divisor_min", lambda x: torch.iinfo(x.dtype).min, is_divisor, None)
integers("divisor_max", lambda x: torch.iinfo(x.dtype).max, is_divisor, 0)
integers("dividend_min", lambda x: torch.iinfo(x.dtype).min, is_dividend, None)
integers("dividend_max", lambda x: torch.iinfo(x.dtype).max, is_dividend, 0)


def offsets(name: str, numbers: list[int]) -> None:
    def make(kind, place, x):
        return torch.tensor(numbers) if kind.make.__name__ == "Bag" and place == 1 else NotImplemented

    CHANGES[f"offsets_{name}"] = Change(make, good=True)


offsets("not_from_zero", [1, 2, 4])
offsets("beyond", [0, 2, 7])
offsets("far", [0, 2, 10**9])
offsets("negative", [0, -2, 4])
offsets("falling", [0, 4, 2])
offsets("at_end", [0, 2, 6])
offsets("empty_bags", [0, 0, 0])


# --- Layouts and memory: eager takes them ---


@value
def transposed(kind, place, x):
    return x.transpose(0, -1).contiguous().transpose(0, -1) if x.ndim > 1 else NotImplemented


@value
def every_second(kind, place, x):
    if not x.ndim:
        return NotImplemented
    y = torch.zeros(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype)
    y[..., ::2] = x
    return y[..., ::2]


@value
def offset_memory(kind, place, x):
    y = torch.zeros(x.numel() + 1, dtype=x.dtype)
    y[1:] = x.reshape(-1)
    return y[1:].view(x.shape)


@value
def odd_address(kind, place, x):
    memory = bytearray(x.numel() * x.element_size() + 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        y = torch.frombuffer(memory, dtype=x.dtype, offset=1, count=x.numel()).view(x.shape)
    return y.copy_(x)


@change
def expanded(kind, place, x):
    return x[:1].expand(x.shape) if x.ndim else NotImplemented


@change
def overlapping(kind, place, x):
    return x.as_strided(x.shape, [1] * x.ndim) if x.ndim > 1 and not x.is_complex() else NotImplemented


@change
def huge_stride(kind, place, x):
    return x[:1].as_strided((1, *x.shape[1:]), (2**62, *x.stride()[1:])) if kind.dynamic and x.ndim else NotImplemented


@value
def channels_last(kind, place, x):
    return x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else NotImplemented


@value
def read_only_numpy(kind, place, x):
    array = x.numpy().copy()
    array.setflags(write=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.from_numpy(array)


@value
def shared_memory(kind, place, x):
    return x.clone().share_memory_()


@value
def conj_twice(kind, place, x):
    return x.conj().conj() if x.is_complex() else NotImplemented


@value
def conj_view(kind, place, x):
    return x.conj() if x.is_complex() else NotImplemented


@value
def neg_view(kind, place, x):
    return torch._neg_view(x) if x.is_floating_point() or x.is_complex() else NotImplemented


@value
def imaginary_part(kind, place, x):
    return torch.complex(x, x).conj().imag if x.is_floating_point() else NotImplemented


@change
def requires_grad(kind, place, x):
    return x.clone().requires_grad_() if x.is_floating_point() or x.is_complex() else NotImplemented


@change
def parameter(kind, place, x):
    return torch.nn.Parameter(x.clone(), requires_grad=x.is_floating_point())


@value
def inference_tensor(kind, place, x):
    with torch.inference_mode():
        return x.clone()


# --- What the contract refuses, unless eager answers the same ---


@change
def empty(kind, place, x):
    return x[:0] if x.ndim else NotImplemented


@change
def longer(kind, place, x):
    return torch.cat([x, x], -1) if x.ndim else NotImplemented


@change
def shorter(kind, place, x):
    return x[..., :-1] if x.ndim else NotImplemented


@change
def one_row(kind, place, x):
    return x[:1] if x.ndim else NotImplemented


@change
def too_many_rows(kind, place, x):
    return x[:1].expand(5000, *x.shape[1:]) if x.ndim else NotImplemented


@change
def another_rank(kind, place, x):
    return x.unsqueeze(0)


@change
def rank_0(kind, place, x):
    return x.reshape(-1)[0]


@change
def another_dtype(kind, place, x):
    return x.to(torch.int32 if x.dtype in (torch.int64, torch.bool) else torch.int64)


@change
def half(kind, place, x):
    return x.to(torch.float16)


@change
def double(kind, place, x):
    return NotImplemented if x.dtype == torch.float64 or x.is_complex() else x.to(torch.float64)


@change
def complex_half(kind, place, x):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return x.to(torch.complex32)


@change
def float8(kind, place, x):
    return NotImplemented if x.is_complex() else x.to(torch.float32).to(torch.float8_e4m3fn)


@change
def none(kind, place, x):
    return None


@change
def number(kind, place, x):
    return 1.5


@change
def plain_list(kind, place, x):
    return x.tolist()


@change
def numpy_array(kind, place, x):
    return x.numpy()


@change
def no_storage(kind, place, x):
    y = x.clone()
    y.untyped_storage().resize_(0)
    return y


@change
def short_storage(kind, place, x):
    y = x.clone()
    y.untyped_storage().resize_(x.element_size() * (x.numel() - 1))
    return y


@change
def zero_tensor(kind, place, x):
    return torch._efficientzerotensor(x.shape, dtype=x.dtype)


@change
def meta(kind, place, x):
    return x.to("meta")


@change
def fake(kind, place, x):
    from torch._subclasses import FakeTensorMode

    return FakeTensorMode().from_tensor(x)


@change
def functional(kind, place, x):
    return torch._to_functional_tensor(x)


class Sub(Tensor):
    """A subclass without behaviour of its own."""


class Loud(Tensor):
    """A subclass that changes what operators return."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


@change
def subclass(kind, place, x):
    return x.as_subclass(Sub)


@change
def loud_subclass(kind, place, x):
    return x.as_subclass(Loud)


@change
def wrapper_subclass(kind, place, x):
    from torch.testing._internal.two_tensor import TwoTensor

    return TwoTensor(x, x)


def quietly(make: Callable[[Tensor], Any]) -> Callable[[Kind, int, Tensor], Any]:
    def one(kind, place, x):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return make(x)
        except (RuntimeError, TypeError, ValueError, IndexError):  # no such tensor of this dtype or rank
            return NotImplemented

    return one


CHANGES |= {
    name: Change(quietly(make), good=False)
    for name, make in {
        "nested": lambda x: torch.nested.nested_tensor(list(x.unbind(0))),
        "jagged": lambda x: torch.nested.nested_tensor(list(x.unbind(0)), layout=torch.jagged),
        "sparse_coo": lambda x: x.to_sparse(),
        "sparse_csr": lambda x: x.to_sparse_csr(),
        "mkldnn": lambda x: x.to_mkldnn(),
        "quantised": lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
    }.items()
}


@change
def dual(kind, place, x):
    from torch.autograd import forward_ad

    if not x.is_floating_point():
        return NotImplemented
    if forward_ad._current_level < 0:
        forward_ad.enter_dual_level()
    return forward_ad.make_dual(x, torch.ones_like(x))


# --- States of the thread ---


@state(good=True)
def plain(call):
    return call()


CONTEXTS: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "enable_grad": torch.enable_grad,
    "anomaly": lambda: torch.autograd.set_detect_anomaly(True, check_nan=False),
}
for context, enter in CONTEXTS.items():
    STATES[context] = State(around(enter), good=True, refused=False, inside=True)


@state(good=True, inside=False)
def autocast(call):
    with torch.autocast("cpu", torch.bfloat16):
        return call()


@state(good=True, inside=False)
def autocast_half(call):
    with torch.autocast("cpu", torch.float16):
        return call()


@state(good=True)
def deterministic(call):
    torch.use_deterministic_algorithms(True)
    try:
        return call()
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


STATES["default_float64"] = State(around(default_dtype), good=True, refused=False, inside=False)
STATES["default_meta"] = State(around(lambda: torch.device("meta")), good=True, refused=False, inside=False)


@state(good=True, inside=False)
def default_cuda(call):
    torch.set_default_device("cuda")
    try:
        return call()
    finally:
        torch.set_default_device(None)


@state(good=True)
def function_mode(call):
    from torch.overrides import TorchFunctionMode

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    with Mode():
        return call()


@state(good=True, inside=False)
def hostile_function_mode(call):
    from torch.overrides import TorchFunctionMode

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return 7

    with Mode():
        return call()


@state()
def dispatch_mode(call):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    with Mode():
        return call()


@state(good=True)
def profiler(call):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True):
        return call()


@state(refused=True)
def fake_mode(call):
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        return call()


@state(refused=True)
def make_fx(call):
    from torch.fx.experimental.proxy_tensor import make_fx as trace

    trace(lambda x: call())(torch.ones(1))


@state(refused=True)
def jit_trace(call):
    def traced(x):
        call()
        return x

    torch.jit.trace(traced, torch.ones(1), check_trace=False)


@state(refused=True)
def export(call):
    class Around(torch.nn.Module):
        def forward(self, x):
            call()
            return x

    torch.export.export(Around(), (torch.ones(1),), strict=False)


@state(good=True)
def compiled(call):
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.compile(call, backend="eager")()


@state(refused=True)
def vmap(call):
    results = []

    def one(x):
        results.append(call())
        return x

    torch.func.vmap(one)(torch.ones(2))
    return results[0]


@state(refused=True)
def grad(call):
    def one(x):
        call()
        return x.sum()

    torch.func.grad(one)(torch.ones(2))


@state(refused=True)
def functionalize(call):
    def one(x):
        call()
        return x

    torch.func.functionalize(one)(torch.ones(2))


@state()
def forward_ad_level(call):
    from torch.autograd import forward_ad

    with forward_ad.dual_level():
        return call()


def in_thread(call: Callable[[], Any]) -> Any:
    """Return what the call gives in a new thread, or raise what it raises there."""
    box: list[tuple[bool, Any]] = []

    def target() -> None:
        try:
            box.append((True, call()))
        except BaseException as error:  # noqa: BLE001
            box.append((False, error))

    thread = threading.Thread(target=target)
    thread.start()
    thread.join()
    [(done, outcome)] = box
    if not done:
        raise outcome
    return outcome


STATES["thread"] = State(in_thread, good=True, refused=False, inside=True)


@state(good=True)
def one_thread(call):
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return in_thread(call)
    finally:
        torch.set_num_threads(before)


@state(good=True)
def small_stack(call):
    before = threading.stack_size(256 << 10)
    try:
        return in_thread(call)
    finally:
        threading.stack_size(before)


@state(good=True, inside=False)
def forked(call):
    """A call in a forked child, whose parent has had OpenMP start threads; eager would hang there (pytorch/pytorch#49555)."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            outcome = (True, pickle.dumps(call()))
        except Exception as error:  # noqa: BLE001
            outcome = (False, pickle.dumps((type(error), str(error))))
        with os.fdopen(writing, "wb") as pipe:
            pickle.dump(outcome, pipe)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        data = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        os.kill(os.getpid(), os.WTERMSIG(status))
    done, text = pickle.loads(data)
    if not done:
        cls, message = pickle.loads(text)
        raise cls(message)
    return pickle.loads(text)


@state(good=True)
def with_signals(call):
    """Signals arrive during the call; their handler runs Python."""
    arrived = []
    before = signal.signal(signal.SIGALRM, lambda *_: arrived.append(time.monotonic()))
    signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
    try:
        return call()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
