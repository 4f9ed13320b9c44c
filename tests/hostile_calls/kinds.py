"""One small model of each kind, with a call that is right: the rows of the table in `table.py`.

Copied into the project that `test_hostile_calls.py` builds, so it imports nothing but torch. `KINDS` maps a name to a
`Kind`; weights follow from the seed 0, as in a build.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable

KINDS: dict[str, Kind] = {}


@dataclasses.dataclass(frozen=True)
class Kind:
    """A model: `make` returns the module, `inputs` the arguments of a good call.

    `dynamic` maps an argument's place to its dynamic dimensions, `settings` are lines of the model's table.
    `indices` are places of integer inputs that must lie within -`high` or 0 and `high`, `divisors` of those that must
    not be 0.
    """

    make: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Any, ...]]
    dynamic: Any = None
    settings: tuple[str, ...] = ()
    indices: tuple[int, ...] = ()
    high: int = 0
    divisors: tuple[int, ...] = ()


def kind(inputs: Callable[[], tuple[Any, ...]], **options: Any) -> Callable[[type[nn.Module]], type[nn.Module]]:
    def register(cls: type[nn.Module]) -> type[nn.Module]:
        KINDS[cls.__name__.lower()] = Kind(cls, inputs, **options)
        return cls

    return register


def dim(name: str, low: int = 1, high: int = 4096) -> Any:
    return torch.export.Dim(name, min=low, max=high)


def ramp(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return different numbers between -1 and 1, without the generator's state."""
    count = 1
    for size in shape:
        count *= size
    return torch.sin(torch.arange(count, dtype=torch.float64) * 1.7 + 0.3).to(dtype).reshape(shape)


def indices(*values: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


@kind(lambda: (ramp(5, 4),), dynamic=({0: dim("n")},))
class Elementwise(nn.Module):
    def forward(self, x):
        return torch.relu(x) * 2 + torch.exp(-x.abs())


@kind(lambda: (ramp(4, 16),), dynamic=({0: dim("n")},), settings=('constants = "external"',))
class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))

    def forward(self, x):
        return self.layers(x)


@kind(lambda: (indices(0, 3, 99, 5),), dynamic=({0: dim("n")},), indices=(0,), high=100)
class Embedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(100, 16)

    def forward(self, i):
        return self.table(i)


@kind(
    lambda: (indices(0, 3, 49, 5, 7, 9), indices(0, 2, 4)),
    settings=('constants = "external"',), indices=(0,), high=50,
)  # fmt: skip
class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.EmbeddingBag(50, 8, mode="sum")

    def forward(self, i, offsets):
        return self.table(i, offsets)


@kind(lambda: (ramp(2, 3, 8, 8),), dynamic=({0: dim("n", 1, 8)},), settings=('bundle = "vision"',))
class Conv(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1))

    def forward(self, x):
        return self.layers(x).flatten(1)


@kind(lambda: (ramp(2, 4, 16), ramp(2, 6, 16)), settings=('bundle = "vision"', 'constants = "external"'))
class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(16, 16)

    def forward(self, q, k):
        return self.out(F.scaled_dot_product_attention(q, k, k))


@kind(lambda: (ramp(2, 5, 4),))
class Lstm(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.LSTM(4, 6, batch_first=True)

    def forward(self, x):
        return self.cell(x)[0]


@kind(lambda: (indices(7, -7, 9, 5), indices(2, 2, -4, -1)), dynamic=({0: dim("n")}, {0: dim("n")}), divisors=(1,))
class Truncate(nn.Module):
    def forward(self, x, y):
        return torch.div(x, y, rounding_mode="trunc")


@kind(
    lambda: (indices(7, -7, 9, 5, dtype=torch.int32), indices(2, 2, -4, -1, dtype=torch.int32)),
    dynamic=({0: dim("n")}, {0: dim("n")}), divisors=(1,),
)  # fmt: skip
class Modulo(nn.Module):
    def forward(self, x, y):
        return x // y, x % y, torch.fmod(x, y)


@kind(lambda: (ramp(6, 4), indices(0, 5, 2)), dynamic=({}, {0: dim("n")}), indices=(1,), high=6)
class Select(nn.Module):
    def forward(self, x, i):
        return torch.index_select(x, 0, i) * 2


@kind(lambda: (ramp(3, 6), indices(0, 5, 2, 1, 3, 4).reshape(3, 2)), indices=(1,), high=6)
class Gather(nn.Module):
    def forward(self, x, i):
        return torch.gather(x, 1, i) + 1


@kind(lambda: (ramp(4, 6), indices(0, 5, 2, 1).reshape(4, 1), ramp(4, 1)), indices=(1,), high=6)
class Scatter(nn.Module):
    def forward(self, x, i, source):
        return x.scatter(1, i, source), x.scatter_add(1, i, source)


@kind(lambda: (ramp(6, 4), indices(0, 5, 2), ramp(3, 4)), indices=(1,), high=6)
class Put(nn.Module):
    def forward(self, x, i, values):
        return x.index_put((i,), values), x[i]


@kind(lambda: (ramp(3, 4), indices(0, 11, 5)), dynamic=({}, {0: dim("n")}), indices=(1,), high=12)
class Take(nn.Module):
    def forward(self, x, i):
        return torch.take(x, i)


@kind(lambda: (ramp(8, 16),))
class Dropout(nn.Module):
    def forward(self, x):
        return F.dropout(x, 0.5, training=True)


@torch.library.custom_op("hostile::project", mutates_args=())
def project(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x @ weight


@project.register_fake
def _(x, weight):
    return x.new_empty(x.shape[0], weight.shape[1])


@kind(lambda: (ramp(3, 8),))
class Custom(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 4))

    def forward(self, x):
        return torch.ops.hostile.project(x + 1, self.weight) * 2


@kind(lambda: (ramp(4),))
class Stateful(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x):
        self.total.add_(x)
        return self.total * 2


@kind(lambda: (ramp(4, 3),))
class Mutating(nn.Module):
    def forward(self, x):
        x.mul_(2)
        return x.sum(0)


@kind(
    lambda: (ramp(3, 4), ramp(3, 4), ramp(4)),
    dynamic=({0: dim("n")}, {0: dim("n")}, {}),
)
class Several(nn.Module):
    def forward(self, a, b, c):
        return a * b + c, (a - b).sum()


@kind(lambda: ({"a": ramp(3, 4), "b": ramp(3, 4)},))
class Batch(nn.Module):
    def forward(self, batch):
        return {"sum": batch["a"] + batch["b"], "a": batch["a"]}


@kind(lambda: (ramp(5, 3, dtype=torch.float64),), dynamic=({0: dim("n")},))
class Double(nn.Module):
    def forward(self, x):
        return torch.cumsum(x, 0) / (x * x + 1)


@kind(lambda: (torch.tensor([[True, False], [False, False]]), torch.tensor([[True, True], [False, True]])))
class Logic(nn.Module):
    def forward(self, a, b):
        return a ^ b, a.logical_not() | b, (a & b).any()


@kind(lambda: (torch.complex(ramp(4), ramp(4)),))
class Waves(nn.Module):
    def forward(self, z):
        return z * 2 + 1j, z.abs()


@kind(lambda: (ramp(3, 4),))
class Alias(nn.Module):
    def forward(self, x):
        return x, x.t(), x + 1


@kind(lambda: (torch.tensor(0.75), ramp(3)))
class Scalar(nn.Module):
    def forward(self, s, x):
        return s * x, s + 1


@kind(lambda: (ramp(40, 64),), dynamic=({0: dim("n")},))
class Parallel(nn.Module):
    def forward(self, x):
        return torch.softmax(x, -1), x.sum(-1), x.argmax(-1)
