import torch


class Lookup(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(100, 16)

    def forward(self, index):
        return self.table(index)


class Quotient(torch.nn.Module):
    def forward(self, x, y):
        return torch.div(x, y, rounding_mode="trunc")


def pair():
    return torch.full((9, 8), 7), torch.full((9, 8), 2)
