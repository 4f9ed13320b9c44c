import torch


class Scale(torch.nn.Module):
    def forward(self, x):
        return x * 2 + 1
