"""Predict the images that ship with the package: `python -m example_project`.

The output is the same on every run, so that two machines can be compared line by line.
"""

from __future__ import annotations

import torch

from example_project._models import digits, ranker
from example_project.samples import Sample, as_batch, load_samples

INK = " .:-=+*#%@"  # from paper (pixel 0) to full ink (pixel 16)
COLUMNS = 5


def picture(sample: Sample, predicted: int) -> list[str]:
    """Return one image as nine lines of equal width: eight rows of pixels and what was made of them."""
    rows = ["".join(INK[pixel * (len(INK) - 1) // 16] * 2 for pixel in row) for row in sample.pixels]
    verdict = "ok" if predicted == sample.label else "WRONG"
    return [*rows, f"{sample.label} -> {predicted} {verdict}".ljust(len(rows[0]))]


def main() -> None:
    """Print each image with its prediction, the accuracy, some logits, and scores from the ranker."""
    samples = load_samples()
    logits = digits(as_batch(samples))
    predictions = [int(digit) for digit in logits.argmax(dim=1)]

    pictures = [picture(sample, predicted) for sample, predicted in zip(samples, predictions, strict=True)]
    print("Held-out images: written digit -> prediction\n")
    for start in range(0, len(pictures), COLUMNS):
        for lines in zip(*pictures[start : start + COLUMNS], strict=True):
            print("  ".join(lines).rstrip())
        print()

    right = sum(predicted == sample.label for sample, predicted in zip(samples, predictions, strict=True))
    print(f"digits: {right} of {len(samples)} right, accuracy {right / len(samples):.1%}")
    print(f"digits: logits of the first image, 0 to 9: {numbers(logits[0])}")

    features = torch.linspace(-1, 1, 30).reshape(3, 10)
    print(f"ranker: scores of three rows: {numbers(ranker(features)[:, 0])}")


def numbers(values: torch.Tensor) -> str:
    """Write a one-dimensional tensor with four decimals."""
    return " ".join(f"{value:.4f}" for value in values.tolist())


if __name__ == "__main__":
    main()
