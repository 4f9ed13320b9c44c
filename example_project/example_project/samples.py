"""Held-out images that ship with the package, so that there is something real to predict after an install."""

from __future__ import annotations

import dataclasses
import json
from importlib import resources

import torch

__all__ = ["Sample", "as_batch", "load_samples"]


@dataclasses.dataclass(frozen=True)
class Sample:
    """One image: its place in the dataset, the digit that was written, and 8 rows of 8 pixels from 0 to 16."""

    index: int
    label: int
    pixels: tuple[tuple[int, ...], ...]


def load_samples() -> list[Sample]:
    """Read `samples.json`: two images of each digit, none of which the model was trained on."""
    text = resources.files(__package__).joinpath("samples.json").read_text(encoding="utf-8")
    return [
        Sample(index=entry["index"], label=entry["label"], pixels=tuple(tuple(row) for row in entry["pixels"]))
        for entry in json.loads(text)["samples"]
    ]


def as_batch(samples: list[Sample]) -> torch.Tensor:
    """Return the images as `digits` takes them: float32 `[len(samples), 1, 8, 8]`, pixels from 0 to 16."""
    return torch.tensor([[sample.pixels] for sample in samples], dtype=torch.float32)
