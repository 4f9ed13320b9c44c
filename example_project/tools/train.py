"""Train DigitsNet, and choose the images that ship with the package.

Run in the project's folder, with torch, safetensors and scikit-learn installed (under half a minute on one core):

    python -m tools.train

Writes `weights/digits.safetensors` and `example_project/samples.json`, and prints the accuracy on the test images.
The same versions on the same kind of processor give the same files. Neither a build nor a user of the wheel needs
this script.

Data: E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository, 1998,
https://doi.org/10.24432/C50P49, licensed under CC BY 4.0. `sklearn.datasets.load_digits` has a copy of its test part:
1,797 images of 8x8 pixels with values from 0 to 16.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from example_project.digits import DigitsNet
from safetensors.torch import save_file
from sklearn.datasets import load_digits  # type: ignore[import-untyped]
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
WEIGHTS = ROOT / "weights" / "digits.safetensors"
SAMPLES = ROOT / "example_project" / "samples.json"

SEED = 0
EPOCHS = 60
BATCH = 64
LEARNING_RATE = 3e-3
TEST_SHARE = 0.2
SAMPLES_PER_DIGIT = 2


def load_data() -> tuple[torch.Tensor, torch.Tensor]:
    """Return images, float32 `[1797, 1, 8, 8]` with pixels from 0 to 16, and labels, int64 `[1797]`."""
    dataset = load_digits()
    images = torch.from_numpy(dataset.images).to(torch.float32).unsqueeze(1)
    return images, torch.from_numpy(dataset.target).to(torch.int64)


def shifted(images: torch.Tensor) -> torch.Tensor:
    """Move each image by -1, 0 or 1 pixels in both directions, so that the model does not depend on exact framing."""
    padded = nn.functional.pad(images, (1, 1, 1, 1))
    offsets = torch.randint(0, 3, (len(images), 2)).tolist()
    return torch.stack([image[:, y : y + 8, x : x + 8] for image, (y, x) in zip(padded, offsets, strict=True)])


def train(images: torch.Tensor, labels: torch.Tensor) -> DigitsNet:
    """Return a model trained for a fixed number of epochs: nothing is chosen by looking at test images."""
    model = DigitsNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=1e-2)
    steps = EPOCHS * -(-len(images) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=LEARNING_RATE, total_steps=steps)
    for _ in range(EPOCHS):
        for chosen in torch.split(torch.randperm(len(images)), BATCH):
            loss = nn.functional.cross_entropy(model(shifted(images[chosen])), labels[chosen], label_smoothing=0.05)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
    return model.eval()


def count_right(model: DigitsNet, images: torch.Tensor, labels: torch.Tensor) -> int:
    """Return how many of the images the model classifies as their labels say."""
    with torch.no_grad():
        return int((model(images).argmax(dim=1) == labels).sum())


def write_samples(images: torch.Tensor, labels: torch.Tensor, first: int) -> None:
    """Write the first images of each digit at or after position `first` of the dataset, in its order."""
    chosen = sorted(
        index
        for digit in range(10)
        for index in [i for i in range(first, len(labels)) if labels[i] == digit][:SAMPLES_PER_DIGIT]
    )
    entries = [
        {"index": index, "label": int(labels[index]), "pixels": images[index, 0].to(torch.int64).tolist()}
        for index in chosen
    ]
    source = (
        "E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning Repository, 1998, "
        "https://doi.org/10.24432/C50P49, CC BY 4.0"
    )
    lines = ",\n".join(json.dumps(entry) for entry in entries)
    SAMPLES.write_text(f'{{"source": {json.dumps(source)},\n"samples": [\n{lines}\n]}}\n', encoding="utf-8")


def main() -> None:
    """Train on the first four fifths of the dataset and test on the rest, in the dataset's own order.

    No shuffling: images by one writer lie next to each other, and a random split would test on writers already seen.
    """
    torch.manual_seed(SEED)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(mode=True)
    images, labels = load_data()
    first_test = len(images) - round(len(images) * TEST_SHARE)
    model = train(images[:first_test], labels[:first_test])

    for name, part in (("training", slice(first_test)), ("test", slice(first_test, None))):
        right, total = count_right(model, images[part], labels[part]), len(labels[part])
        print(f"{name}: {right} of {total} right, {right / total:.2%}")
    WEIGHTS.parent.mkdir(exist_ok=True)
    save_file(model.state_dict(), WEIGHTS)
    write_samples(images, labels, first_test)
    print(f"{WEIGHTS.name}: {WEIGHTS.stat().st_size} bytes, {SAMPLES.name}: {SAMPLES.stat().st_size} bytes")


if __name__ == "__main__":
    main()
