"""A project with every kind of model that PyTorch's guide to AOTInductor shows: plain, saved, and several in one file.

`digits`, `ranker` and `scale` are those of the example and of `tiny`: a test run compiles them only once.
"""

from __future__ import annotations

import runpy
import shutil
from typing import TYPE_CHECKING

import torch
from conftest import EXAMPLE, make_project
from support_models import export

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["BUNDLED", "write_guide"]

BUNDLED = ("columns", "digits", "rows")
"""The models in `vision.pt2`. `columns` is a saved program; it has the weight of `rows`, outside of the compiled code."""


def write_guide(root: Path) -> Path:
    """Write the project into a new directory and return that."""
    make_project("guide", root)
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
