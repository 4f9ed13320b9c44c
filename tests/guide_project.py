"""A project with every kind of model that PyTorch's guide to AOTInductor shows: plain, saved, and several in one file.

`digits`, `ranker` and `scale` are those of the example and of `tiny`: a test run compiles them only once.
"""

from __future__ import annotations

import runpy
import shutil
from typing import TYPE_CHECKING

import torch
from conftest import EXAMPLE, TINY_MODULE, write_files
from support_models import export

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["BUNDLED", "write_guide"]

BUNDLED = ("columns", "digits", "rows")
"""The models in `vision.pt2`. `columns` is a saved program; it has the weight of `rows`, outside of the compiled code."""

_FILES = {
    "guide/__init__.py": "",
    "guide/scale.py": TINY_MODULE,
    "guide/rows.py": """
        import torch

        class Rows(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = torch.nn.Parameter(torch.randn(64, 3))

            def forward(self, x):
                return x.flatten(1) @ self.weight

        class Columns(Rows):
            def forward(self, x):
                return x.transpose(2, 3).flatten(1) @ self.weight - 1
    """,
    "pyproject.toml": """
        [build-system]
        requires = ["hatchling", "hatch-aoti", "torch==2.13.0"]
        build-backend = "hatchling.build"

        [project]
        name = "guide"
        version = "1.0"
        dependencies = ["torch>=2.13"]

        [tool.hatch.build.targets.wheel.hooks.aoti]

        [tool.aoti.models.digits]
        model = "guide.digits:DigitsNet"
        weights = "weights/digits.safetensors"
        inputs = { image = { shape = ["batch", 1, 8, 8], dtype = "float32" } }
        dims = { batch = { min = 1, max = 1024 } }
        bundle = "vision"

        [tool.aoti.models.rows]
        model = "guide.rows:Rows"
        inputs = { x = { shape = ["n", 1, 8, 8] } }
        dims = { n = { min = 1, max = 16 } }
        constants = "external"
        bundle = "vision"

        [tool.aoti.models.columns]
        exported = "programs/columns.pt2"
        constants = "external"
        bundle = "vision"

        [tool.aoti.models.ranker]
        model = "guide.ranker:build"
        inputs = "guide.ranker:example_inputs"
        dynamic-shapes = { x = { 0 = "batch" } }
        dims = { batch = { min = 1, max = 1024 } }
        seed = 0

        [tool.aoti.models.scale]
        model = "guide.scale:Scale"
        inputs = { x = { shape = ["n", 4] } }
        dims = { n = { min = 1, max = 16 } }
    """,
}


def write_guide(root: Path) -> Path:
    """Write the project into a new directory and return that."""
    write_files(root, _FILES)
    for name in ("digits.py", "ranker.py"):
        shutil.copy(EXAMPLE / "example_project" / name, root / "guide" / name)
    shutil.copytree(EXAMPLE / "weights", root / "weights")
    torch.manual_seed(0)  # as in a build
    columns = runpy.run_path(str(root / "guide" / "rows.py"))["Columns"]()
    shapes = {"x": {0: torch.export.Dim("n", min=1, max=16)}}
    program, _, _ = export(columns, (torch.ones(4, 1, 8, 8),), dynamic_shapes=shapes)
    (root / "programs").mkdir()
    torch.export.save(program, root / "programs" / "columns.pt2")
    return root
