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
