"""Writes the project whose wheel carries the models of `kinds.py`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

from hostile_calls.kinds import KINDS

__all__ = ["build_wheel", "write_project"]

_HEAD = """
[build-system]
requires = ["hatchling", "hatch-aoti", "torch==2.13.0"]
build-backend = "hatchling.build"

[project]
name = "hostile-wheel"
version = "1.0"
dependencies = ["torch>=2.13"]

[tool.hatch.build.targets.wheel.hooks.aoti]

[tool.aoti]
package = "hostile_wheel"
"""


def write_project(root: Path, names: tuple[str, ...] = (), targets: tuple[str, ...] = ()) -> Path:
    """Write it for the kinds `names` (all by default) and `targets` (the portable one by default); return the root."""
    package = root / "hostile_wheel"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    shutil.copy(Path(__file__).parent / "kinds.py", package / "kinds.py")
    toml, entries = [_HEAD + (f"target = {list(targets)}\n" if targets else "")], ["from .kinds import KINDS"]
    for name in names or KINDS:
        kind = KINDS[name]
        entries.append(
            textwrap.dedent(f"""
            def {name}_model():
                return KINDS["{name}"].make().eval()

            def {name}_inputs():
                return KINDS["{name}"].inputs()
            """)
            + (f'\n{name}_shapes = KINDS["{name}"].dynamic\n' if kind.dynamic else "")
        )
        toml += [
            f"[tool.aoti.models.{name}]",
            f'model = "hostile_wheel.entries:{name}_model"',
            f'inputs = "hostile_wheel.entries:{name}_inputs"',
            *([f'dynamic-shapes = "hostile_wheel.entries:{name}_shapes"'] if kind.dynamic else []),
            *kind.settings,
            "",
        ]
    (package / "entries.py").write_text("\n".join(entries))
    (root / "pyproject.toml").write_text("\n".join(toml))
    return root


def build_wheel(root: Path, installed: Path, **environ: str) -> Path:
    """Build the wheel of a project, with variables of the environment, and unpack it into `installed`; return that."""
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--skip-dependency-check", "."]
    subprocess.run(command, cwd=root, check=True, stdout=subprocess.DEVNULL, env={**os.environ, **environ})
    [wheel] = (root / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    return installed
