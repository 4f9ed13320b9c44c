import torch
from torch import nn

NUMBER = 3


class Linear(nn.Linear):
    def __init__(self):
        super().__init__(4, 2)


class Needy(nn.Module):
    def __init__(self, width):
        super().__init__()


class Two(nn.Module):
    def forward(self, left, right, *, scale=None):
        return left + right


class Branches(nn.Module):
    def forward(self, x):
        return x + 1 if x.sum() > 0 else x - 1


class Fixes(nn.Module):
    def forward(self, x):
        return x.reshape(8, 4) * 2


class Pairs(nn.Module):
    def forward(self, x):
        return x.reshape(x.shape[0] // 2, 2, 4) * 2


class Broken(nn.Module):
    def forward(self, x):
        return self.helper(x)

    def helper(self, x):
        return x @ torch.ones(7, 7)


class Clips(nn.Module):
    def forward(self, x):
        return x[:7] if x.shape[0] > 7 else x


class Adds(nn.Module):
    def forward(self, x, y):
        return x + y


class Loops(nn.Module):
    def forward(self, x):
        return sum(x[i] for i in range(x.shape[0]))


def number():
    return NUMBER


def scripted():
    return torch.jit.script(Linear())


def explodes():
    raise RuntimeError("no such\ncheckpoint")


def quits():
    raise SystemExit("bye")


def interrupts():
    raise KeyboardInterrupt


class Stop(BaseException):
    pass


def stops():
    raise Stop("enough")


def asks():
    return Linear(int(input("width? ")))


def halts():
    breakpoint()
    return Linear()


class Exits(nn.Module):
    def forward(self, x):
        exit()


def inputs_explode():
    return open("not/there")


def a_list():
    return [torch.ones(2, 4)]


def a_tensor():
    return torch.ones(2, 4)


def too_many():
    return (torch.ones(2, 4), torch.ones(2, 4))


def one():
    return (torch.ones(2, 4),)


def other_name():
    return {"image": torch.ones(2, 4)}


class Strides(nn.Module):
    def forward(self, x, y):
        return x.sum(1, keepdim=True) + y[:, ::2]


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.steps = nn.LSTM(4, 2, batch_first=True)

    def forward(self, x):
        return self.steps(x)[0]


class Plain:
    """Holds a tensor, and is no module."""

    def __init__(self):
        self.keys = torch.zeros(4)


class Replaces(nn.Module):
    def __init__(self):
        super().__init__()
        self.cache = Plain()

    def forward(self, x):
        self.cache.keys = self.cache.keys + x.sum(0)
        return x + self.cache.keys


class Writes(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = [nn.Identity(), {"seen": torch.zeros(4)}]

    def forward(self, x):
        return x + self.parts[1]["seen"].add_(1)


class Remembers(nn.Module):
    """Computes once what does not change, as rotary embeddings do, and leaves what it computed last in a list."""

    def __init__(self):
        super().__init__()
        self.cache, self.last = Plain(), []
        self.cache.table = None

    def forward(self, x):
        if self.cache.table is None:
            self.cache.table = torch.arange(4.0)
        self.last.append(x + self.cache.table)
        return self.last[-1]


class ByLength(nn.Module):
    def __init__(self):
        super().__init__()
        self.tables = {}

    def forward(self, x):
        if x.shape[0] not in self.tables:
            self.tables[x.shape[0]] = torch.ones(x.shape[0], 1)
        return x * self.tables[x.shape[0]]


class Lazy(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.LazyLinear(3), nn.LazyBatchNorm1d()

    def forward(self, x):
        return self.norm(self.linear(x))


class Rotary(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("turn", torch.eye(4), persistent=False)

    def forward(self, x):
        return x @ self.turn


class Force(nn.Module):
    def forward(self, x):
        with torch.enable_grad():
            place = x.detach().requires_grad_(True)
            return -torch.autograd.grad((place**3).sum(), place)[0]


def wants_a_package():
    import a_package_that_nobody_has.part  # noqa: F401


def computed():
    return (nn.Linear(4, 4)(torch.randn(8, 4)),)
