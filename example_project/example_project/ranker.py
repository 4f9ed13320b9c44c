"""A two-layer perceptron without a weights file: what it scores is up to the seed in `pyproject.toml`."""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["Ranker", "build", "example_inputs"]


class Ranker(nn.Module):
    """Ten features in, a score between 0 and 1 out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 1), nn.Sigmoid())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Score each row of `x`, float32 `[batch, 10]`; the result is float32 `[batch, 1]`, from 0 to 1."""
        scores: torch.Tensor = self.layers(x)
        return scores


def build() -> Ranker:
    """Return the model to compile; its weights are drawn from torch's random state, which the build seeds."""
    return Ranker()


def example_inputs() -> tuple[torch.Tensor]:
    """Return the positional arguments that the model is exported with: one batch of eight rows."""
    return (torch.randn(8, 10),)
