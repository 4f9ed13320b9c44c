"""Eight small models of different kinds."""

from __future__ import annotations

import torch
from torch import nn


class Mlp(nn.Sequential):
    """Linear layers."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 1), nn.Sigmoid())


class Gated(nn.Module):
    """A gated linear unit."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Linear(32, 64)
        self.gate = nn.Linear(32, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.value(x) * torch.sigmoid(self.gate(x))


class Convolution(nn.Module):
    """A convolution and a mean over what it found."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3)
        self.out = nn.Linear(8, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.out(torch.relu(self.conv(image)).mean((2, 3)))


class Attention(nn.Module):
    """Self-attention."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


class Normalised(nn.Module):
    """A residual block with layer normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(48)
        self.out = nn.Linear(48, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.gelu(self.out(self.norm(x)))


class Embedded(nn.Module):
    """A bag of embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.EmbeddingBag(1000, 16, mode="mean")
        self.out = nn.Linear(16, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out(self.embedding(tokens)).softmax(-1)


class Filtered(nn.Module):
    """A separable convolution over a signal."""

    def __init__(self) -> None:
        super().__init__()
        self.depthwise = nn.Conv1d(8, 8, 5, groups=8, padding=2)
        self.pointwise = nn.Conv1d(8, 16, 1)

    def forward(self, signal: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.pointwise(self.depthwise(signal))).amax(-1)


class Distances(nn.Module):
    """Probabilities by the distance to some centres."""

    def __init__(self) -> None:
        super().__init__()
        self.centres = nn.Parameter(torch.randn(12, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cdist(x, self.centres).neg().log_softmax(-1)
