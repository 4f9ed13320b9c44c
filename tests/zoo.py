"""Small models, one per kind, each with calls to make after compilation.

A case is a function that returns `Case(module, args, kwargs, dynamic_shapes, calls, bad)`:
`args` and `kwargs` are the example inputs of the export, `calls` are calls `(args, kwargs)` whose result
must equal eager, `bad` are calls that must raise TypeError or ValueError (eager may well accept them).
Seed torch with 0 right before calling a case to get the weights that a build with `seed = 0` gets.

`test_zoo.py` puts all of them into one wheel. Reports behind some of the kinds are cited at the cases.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Callable

CASES: dict[str, Callable[[], Case]] = {}


@dataclasses.dataclass
class Case:
    module: nn.Module
    args: tuple = ()
    kwargs: dict = dataclasses.field(default_factory=dict)
    dynamic_shapes: Any = None
    calls: list = dataclasses.field(default_factory=list)  # [(args, kwargs)]
    bad: list = dataclasses.field(default_factory=list)


def case(fn):
    CASES[fn.__name__] = fn
    return fn


def r(*s, **k):
    return torch.randn(*s, **k)


def B(mx=64, mn=1, n="batch"):
    return torch.export.Dim(n, min=mn, max=mx)


class Pair(NamedTuple):
    a: Tensor
    b: Tensor


@case
def pointwise_static():
    class M(nn.Module):
        def forward(self, x):
            return torch.relu(x) * 2 + 1

    return Case(
        M(),
        (r(16),),
        calls=[((r(16),), {})],
        bad=[
            ((r(8),), {}),
            ((r(32),), {}),
            ((torch.ones(16, dtype=torch.int64),), {}),
            ((torch.ones(16, dtype=torch.float64),), {}),
            ((r(4, 4),), {}),
            ((r(2, 16),), {}),
        ],
    )


@case
def strided_input():
    class M(nn.Module):
        def forward(self, x):
            return x * 2 + 1

    return Case(M(), (r(8, 8),), calls=[((r(8, 8).t(),), {}), ((r(8, 16)[:, ::2],), {}), ((r(1, 8).expand(8, 8),), {})])


@case
def flag_and_scale():
    class M(nn.Module):
        def forward(self, x, flag: bool = True, scale: float = 2.0):
            return x * scale if flag else -x

    return Case(
        M(),
        (r(4), True, 2.0),
        calls=[((r(4), True, 2.0), {}), ((r(4),), {}), ((r(4),), {"flag": True})],
        bad=[((r(4), False, 2.0), {}), ((r(4), True, 3.0), {})],
    )


@case
def call_conventions():
    class M(nn.Module):
        def forward(self, x, y, *, z):
            return x + 2 * y + 3 * z

    return Case(
        M(),
        (r(4), r(4)),
        {"z": r(4)},
        calls=[((r(4),), {"y": r(4), "z": r(4)}), ((), {"z": r(4), "y": r(4), "x": r(4)})],
        bad=[((r(4),), {"z": r(4)}), ((r(4), r(4), r(4)), {}), ((r(4), r(4)), {"z": r(4), "w": r(4)})],
    )


@case
def dict_input():
    class M(nn.Module):
        def forward(self, batch):
            return batch["a"] @ batch["b"]

    a = {"a": r(3, 4), "b": r(4, 5)}
    return Case(
        M(),
        (a,),
        calls=[(({"b": r(4, 5), "a": r(3, 4)},), {})],
        bad=[(({"a": r(3, 4)},), {}), (({"a": r(3, 4), "b": r(4, 5), "c": r(1)},), {}), ((r(3, 4),), {})],
    )


@case
def nested_list_input():
    class M(nn.Module):
        def forward(self, xs, pair):
            return sum(xs) + pair[0] * pair[1]

    return Case(
        M(),
        ([r(3), r(3)], (r(3), r(3))),
        calls=[(([r(3), r(3)], (r(3), r(3))), {})],
        bad=[(([r(3)], (r(3), r(3))), {}), (([r(3), r(3), r(3)], (r(3), r(3))), {})],
    )


@case
def none_optional():
    class M(nn.Module):
        def forward(self, x, mask: Tensor | None = None):
            return x if mask is None else x * mask

    return Case(M(), (r(4),), calls=[((r(4),), {}), ((r(4), None), {})], bad=[((r(4), torch.ones(4)), {})])


@case
def namedtuple_output():
    class M(nn.Module):
        def forward(self, x):
            return Pair(x + 1, x * 2)

    return Case(M(), (r(4),), calls=[((r(4),), {})])


@case
def topk_output():
    class M(nn.Module):
        def forward(self, x):
            return torch.topk(x, 3)

    return Case(M(), (r(4, 10),), calls=[((r(4, 10),), {})])


@case
def dynamic_batch():
    m = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 1), nn.Sigmoid())
    return Case(
        m,
        (r(8, 10),),
        dynamic_shapes=({0: B()},),
        calls=[((r(n, 10),), {}) for n in (1, 2, 3, 17, 64)],
        bad=[((r(65, 10),), {}), ((r(8, 11),), {}), ((r(10),), {})],
    )


@case
def two_inputs_same_dim():
    class M(nn.Module):
        def forward(self, x, y):
            return x + y

    b = B()
    return Case(
        M(),
        (r(8, 4), r(8, 4)),
        dynamic_shapes=({0: b}, {0: b}),
        calls=[((r(5, 4), r(5, 4)), {}), ((r(1, 4), r(1, 4)), {})],
        bad=[((r(5, 4), r(6, 4)), {}), ((r(5, 4), r(1, 4)), {})],
    )


@case
def derived_dim():
    class M(nn.Module):
        def forward(self, x, y):
            return x + y[1:]

    d = torch.export.Dim("d", min=3, max=32)
    return Case(
        M(),
        (r(5), r(6)),
        dynamic_shapes=({0: d}, {0: d + 1}),
        calls=[((r(9), r(10)), {})],
        bad=[((r(9), r(9)), {}), ((r(9), r(11)), {})],
    )


@case
def two_dynamic_dims():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.c = nn.Conv2d(3, 4, 3, padding=1)

        def forward(self, x):
            return F.adaptive_avg_pool2d(self.c(x), 1).flatten(1)

    return Case(
        M(),
        (r(2, 3, 16, 20),),
        dynamic_shapes=({0: B(8), 2: B(64, 4, "h"), 3: B(64, 4, "w")},),
        calls=[((r(1, 3, 32, 8),), {}), ((r(3, 3, 5, 64),), {})],
    )


@case
def mutated_buffer():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(1))

        def forward(self, x):
            self.count.add_(1)
            return x + self.count

    return Case(M(), (r(4),), calls=[((torch.ones(4),), {}), ((torch.ones(4),), {}), ((torch.ones(4),), {})])


@case
def inplace_input():
    class M(nn.Module):
        def forward(self, x):
            x.mul_(2)
            return x + 1

    return Case(M(), (r(4),), calls=[((r(4),), {})])


@case
def output_is_input():
    class M(nn.Module):
        def forward(self, x, y):
            return x, x + y, y

    return Case(M(), (r(4), r(4)), calls=[((r(4), r(4)), {})])


@case
def output_constant():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(r(3))
            self.c = torch.arange(3.0)

        def forward(self, x):
            return x * self.c, self.w, 7, None

    return Case(M(), (r(3),), calls=[((r(3),), {})])


@case
def no_inputs():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(r(3))

        def forward(self):
            return self.w.exp()

    return Case(M(), (), calls=[((), {})], bad=[((r(3),), {})])


@case
def scalar_tensor_input():
    class M(nn.Module):
        def forward(self, x, t):
            return x * t

    return Case(
        M(),
        (r(4), torch.tensor(2.0)),
        calls=[((r(4), torch.tensor(3.0)), {})],
        bad=[((r(4), torch.tensor(3)), {}), ((r(4), r(3)), {}), ((r(4), 3.0), {})],
    )


@case
def int_input_embedding():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.e = nn.Embedding(100, 8)

        def forward(self, ids):
            return self.e(ids).mean(1)

    return Case(
        M(),
        (torch.randint(0, 100, (2, 5)),),
        dynamic_shapes=({0: B(), 1: B(64, 1, "seq")},),
        calls=[((torch.randint(0, 100, (3, 9)),), {})],
        bad=[((torch.randint(0, 100, (3, 9), dtype=torch.int32),), {})],
    )


@case
def lstm():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.LSTM(8, 16, 2, batch_first=True)

        def forward(self, x):
            o, (h, _c) = self.l(x)
            return o[:, -1], h

    return Case(M(), (r(2, 6, 8),), calls=[((r(2, 6, 8),), {})])


@case
def conv_bn_training_mode():
    m = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.5))
    m[1].running_mean.normal_()
    m[1].running_var.uniform_(0.5, 2)
    return Case(m.train(), (r(2, 3, 12, 12),), calls=[((r(2, 3, 12, 12),), {})])


@case
def attention_sdpa():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.q = nn.Linear(32, 96)

        def forward(self, x):
            q, k, v = self.q(x).view(x.shape[0], x.shape[1], 3, 4, 8).permute(2, 0, 3, 1, 4).unbind(0)
            return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)

    return Case(M(), (r(2, 10, 32),), dynamic_shapes=({1: B(64, 2, "seq")},), calls=[((r(2, 17, 32),), {})])


@case
def bf16_model():
    m = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)).to(torch.bfloat16)
    return Case(
        m, (r(4, 16, dtype=torch.bfloat16),), calls=[((r(4, 16, dtype=torch.bfloat16),), {})], bad=[((r(4, 16),), {})]
    )


@case
def complex_io():
    class M(nn.Module):
        def forward(self, x):
            return x * 1j + x.conj()

    return Case(M(), (r(4, dtype=torch.complex64),), calls=[((r(4, dtype=torch.complex64),), {})], bad=[((r(4),), {})])


@case
def empty_batch():
    class M(nn.Module):
        def forward(self, x):
            return (x * 2).sum(1)

    return Case(
        M(),
        (r(8, 4),),
        dynamic_shapes=({0: torch.export.Dim("b", min=0, max=64)},),
        calls=[((r(0, 4),), {}), ((r(1, 4),), {}), ((r(7, 4),), {})],
    )


@case
def control_flow_cond():
    class M(nn.Module):
        def forward(self, x):
            return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))

    return Case(M(), (torch.ones(4),), calls=[((torch.ones(4),), {}), ((-torch.ones(4),), {})])


@case
def tied_weights():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.e = nn.Embedding(20, 8)
            self.o = nn.Linear(8, 20, bias=False)
            self.o.weight = self.e.weight

        def forward(self, i):
            return self.o(self.e(i))

    return Case(M(), (torch.arange(4),), calls=[((torch.arange(4) + 3,), {})])


@case
def requires_grad_input():
    m = nn.Linear(4, 4)
    return Case(m, (r(2, 4),), calls=[((r(2, 4).requires_grad_(),), {})])


@case
def channels_last_input():
    m = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
    return Case(
        m,
        (r(2, 3, 8, 8),),
        calls=[
            ((r(2, 3, 8, 8).to(memory_format=torch.channels_last),), {}),
            ((r(2, 8, 8, 3).permute(0, 3, 1, 2),), {}),
        ],
    )


# --- More kinds, most of them from reports ---


@case
def max_output():  # pytorch/pytorch#197104: torch.return_types do not serialise
    class M(nn.Module):
        def forward(self, x):
            return {"max": torch.max(x, 0), "sorted": torch.sort(x, 1)}

    return Case(M(), (r(4, 5),), calls=[((r(4, 5),), {})])


@dataclasses.dataclass
class Scores:
    best: Tensor
    index: Tensor
    note: str = "fixed"


@case
def dataclass_output():  # pytorch/pytorch#140615
    class M(nn.Module):
        def forward(self, x):
            return Scores(x.max(-1).values, x.argmax(-1))

    return Case(M(), (r(4, 5),), calls=[((r(4, 5),), {})])


@torch.library.custom_op("hatch_aoti_zoo::triple", mutates_args=())
def triple(x: Tensor) -> Tensor:
    return x * 3


@triple.register_fake
def _(x):
    return torch.empty_like(x)


@case
def custom_operator():  # pytorch/pytorch#145394
    class M(nn.Module):
        def forward(self, x):
            return triple(x) + 1

    return Case(M(), (r(4),), calls=[((r(4),), {})], bad=[((r(5),), {})])


@case
def conv_and_batch_norm():  # pytorch/pytorch#174467
    m = nn.Sequential(nn.Conv2d(32, 64, 5, bias=False), nn.BatchNorm2d(64), nn.ReLU())
    m[1].running_mean.normal_()
    m[1].running_var.uniform_(0.5, 2)
    return Case(
        m,
        (r(2, 32, 9, 9),),
        dynamic_shapes=({0: B(8)},),
        calls=[((r(n, 32, 9, 9),), {}) for n in (1, 5, 8)],
        bad=[((r(9, 32, 9, 9),), {})],
    )


@case
def key_value_cache():  # pytorch/pytorch#165444, #169118, #120424: buffers that forward changes
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("cache", torch.zeros(4, 3))
            self.register_buffer("length", torch.zeros((), dtype=torch.int64))

        def forward(self, x):
            self.cache.copy_(torch.cat([self.cache[1:], x]))
            self.length += 1
            return self.cache.sum(0), self.length

    return Case(M(), (r(1, 3),), calls=[((r(1, 3),), {}) for _ in range(4)])


@case
def numbers_beside_tensors():  # pytorch/pytorch#130152: non-tensor inputs were dropped without a word
    class M(nn.Module):
        def forward(self, x, mode: str = "sum", *, power: int = 2, bias: Tensor | None = None):
            return getattr(x**power, mode)(-1)

    return Case(
        M(),
        (r(4, 5), "mean"),
        calls=[((r(4, 5), "mean"), {}), ((r(4, 5),), {"mode": "mean", "power": 2})],
        bad=[
            ((r(4, 5),), {}),
            ((r(4, 5), "mean"), {"power": 3}),
            ((r(4, 5), "mean"), {"power": 2.0}),
            ((r(4, 5), "mean"), {"bias": r(4)}),
        ],
    )
