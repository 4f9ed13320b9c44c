"""The model of PyTorch's AOTInductor guide."""

from __future__ import annotations

import torch
from torch import nn


class MLP(nn.Module):
    """Two linear layers, 10 to 16 to 1."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(10, 16)
        self.fc2 = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a number between 0 and 1 for each row."""
        return torch.sigmoid(self.fc2(torch.relu(self.fc1(x))))
