"""Square linear layers, one after another: as many weights as wanted, and every call reads all of them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterator


class Stack(nn.Module):
    """`count` layers of width `width`: 4 * count * width**2 bytes of weights."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(self._weights(width, count))

    @staticmethod
    def _weights(width: int, count: int) -> Iterator[nn.Parameter]:
        for _ in range(count):  # scaled so that values keep their size from layer to layer
            yield nn.Parameter(torch.randn(width, width) * math.sqrt(2 / width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the shape of `x`, [rows, width]."""
        for weight in self.weights:
            x = torch.relu(x @ weight)
        return x


class Small(Stack):
    """10 MB."""

    def __init__(self) -> None:
        super().__init__(1600, 1)


class Medium(Stack):
    """100 MB."""

    def __init__(self) -> None:
        super().__init__(2500, 4)


class Large(Stack):
    """1 GB."""

    def __init__(self) -> None:
        super().__init__(4000, 16)
