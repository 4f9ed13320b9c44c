"""Run the example on a GPU: `python tests/cuda_check.py [--device cpu]`. Status 1 if anything is wrong, or no GPU there.

Builds the example's wheel for `cuda` (with torch's own cache of kernels and an artifact cache of its own), unpacks it,
and compares its answers with eager's on each GPU, with each of the options at load. `--device cpu` runs what does not
need a GPU, which shows that this script works and nothing about CUDA.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import tomllib
import zipfile
from pathlib import Path

import torch
from conftest import EXAMPLE, copy_project, run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    device = parser.parse_args().device
    if device == "cuda" and not torch.cuda.is_available():
        print(f"torch {torch.__version__} finds no GPU here: nothing was checked")
        return 1
    with tempfile.TemporaryDirectory() as directory:
        site = build(Path(directory), device)
        sys.path.insert(0, os.fspath(site))
        check(device)
    return 0


def build(directory: Path, device: str) -> Path:
    """Build the example for a device; return the folder with the unpacked wheel."""
    root = copy_project(EXAMPLE, directory / "example")
    text = (root / "pyproject.toml").read_text(encoding="utf-8")
    for name in ("digits", "ranker"):
        head = f"[tool.aoti.models.{name}]\n"
        assert head in text, head
        text = text.replace(head, f'{head}device = "{device}"\n')
    (root / "pyproject.toml").write_text(text, encoding="utf-8")
    command = (sys.executable, "-m", "build", "--wheel", "--no-isolation", "--skip-dependency-check")
    environ = {"HATCH_AOTI_CACHE_DIR": os.fspath(directory / "cache"), **os.environ}
    print(run(*command, cwd=root, environ=environ).check().output)
    [wheel] = (root / "dist").glob("*.whl")
    print(run(sys.executable, "-m", "hatch_aoti", "inspect", wheel).check().output)
    with zipfile.ZipFile(wheel) as archive:
        said = [name for name in archive.namelist() if name.endswith("extra_metadata/hatch_aoti/devices.json")]
        assert len(said) == (device == "cuda"), said
        archive.extractall(directory / "site")
    return directory / "site"


def check(device: str) -> None:
    """Compare with eager on every device, and try the options at load."""
    from example_project._models import load, ranker

    from example_project import ranker as ranker_source  # type: ignore[attr-defined]

    places = [f"cuda:{index}" for index in range(torch.cuda.device_count())] if device == "cuda" else ["cpu"]
    settings = tomllib.loads((EXAMPLE / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["aoti"]["models"][
        "ranker"
    ]
    torch.manual_seed(settings.get("seed", 0))
    eager = ranker_source.build().eval()
    x = torch.randn(8, 10)
    with torch.no_grad():
        want = eager(x)
    for place in places:
        index = torch.device(place).index
        models = {"default": ranker, "single": ranker.with_options(run_single_threaded=True)}
        if index is not None:
            models["index"] = ranker.with_options(device_index=index)
        for name, model in models.items():
            got = model(x.to(place))
            assert got.device == torch.device(place), (got.device, place)
            torch.testing.assert_close(got.cpu(), want, rtol=1e-3, atol=1e-4)
            print(f"{place}, {name}: as eager")
        for single in (False, True):
            got = load("ranker", -1 if index is None else index, single)(x.to(place))
            torch.testing.assert_close(got.cpu(), want, rtol=1e-3, atol=1e-4)
            print(f"{place}, load(run_single_threaded={single}): as eager")
    other = "cpu" if device == "cuda" else "meta"
    try:
        ranker(x.to(other))
    except ValueError as error:
        print(f"refused: {error}")
    else:
        raise AssertionError(f"a tensor on {other} was accepted")
    if device == "cuda":
        assert torch.cuda.current_device() == 0, "loading changed the current GPU"
    print("all right")


if __name__ == "__main__":
    sys.exit(main())
