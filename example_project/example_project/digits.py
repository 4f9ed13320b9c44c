"""The digits classifier, as it is trained and exported; a user of the wheel calls `_models.digits` instead."""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["DigitsNet"]

PIXEL_MAX = 16.0  # each pixel counts the dark dots in a 4x4 block of the scan


class DigitsNet(nn.Module):
    """Two convolutions and a linear layer over 8x8 images: 9,930 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.classify = nn.Linear(32 * 4 * 4, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Score each of the ten digits for each image.

        `image` is float32 `[batch, 1, 8, 8]` with pixels from 0 (paper) to 16 (ink), as the dataset has them: the
        model does the scaling. The result is float32 `[batch, 10]`, one logit for each digit from 0 to 9.
        """
        features = self.features(image / PIXEL_MAX)
        logits: torch.Tensor = self.classify(features.flatten(1))
        return logits
