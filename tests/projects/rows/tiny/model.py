import torch


class Rows(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(3, 64).t())

    def forward(self, x):
        return x.flatten(1) @ self.weight
