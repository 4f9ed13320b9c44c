import torch


class Scale(torch.nn.Module):
    def forward(self, x):
        return x * 2 + 1


class Rows(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(64.0))

    def forward(self, x):
        return x * self.weight
