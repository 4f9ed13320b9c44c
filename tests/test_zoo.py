"""A model of each kind through one wheel: every call right, or refused by the name of the argument."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from typing import TYPE_CHECKING

from conftest import REPOSITORY, Builder, run, unpack
from zoo import CASES

if TYPE_CHECKING:
    from pathlib import Path

HEAD = """
[build-system]
requires = ["hatchling", "hatch-aoti", "torch==2.13.0"]
build-backend = "hatchling.build"

[project]
name = "zoo-wheel"
version = "1.0"
dependencies = ["torch>=2.13"]

[tool.hatch.build.targets.wheel.hooks.aoti]

[tool.aoti]
package = "zoo_wheel"
"""


def write_project(root: Path) -> Path:
    """Write a project whose wheel carries every case of `zoo.py`."""
    package = root / "zoo_wheel"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    shutil.copy(REPOSITORY / "tests" / "zoo.py", package / "zoo.py")
    entries, toml = ["from .zoo import CASES"], [HEAD]
    for name, case in CASES.items():
        dynamic = case().dynamic_shapes is not None
        entries.append(
            textwrap.dedent(f"""
            def {name}_model():
                return CASES["{name}"]().module

            def {name}_inputs():
                case = CASES["{name}"]()
                return case.args, case.kwargs
            """)
            + (f'\n{name}_shapes = CASES["{name}"]().dynamic_shapes\n' if dynamic else "")
        )
        toml += [
            f"[tool.aoti.models.{name}]",
            f'model = "zoo_wheel.entries:{name}_model"',
            f'inputs = "zoo_wheel.entries:{name}_inputs"',
            *([f'dynamic-shapes = "zoo_wheel.entries:{name}_shapes"'] if dynamic else []),
            "",
        ]
    (package / "entries.py").write_text("\n".join(entries))
    (root / "pyproject.toml").write_text("\n".join(toml))
    return root


def test_every_kind_of_model_answers_as_eager_does_or_refuses_by_name(tmp_path: Path, environ: dict[str, str]) -> None:
    """Stock AOTInductor answers 11 of 42 such models wrongly at least once, without an error."""
    wheel = Builder(environ).wheel(write_project(tmp_path / "project"))
    installed = unpack(wheel, tmp_path / "installed")
    script = REPOSITORY / "tests" / "zoo_check.py"
    checked = run(sys.executable, script, cwd=tmp_path, environ={**environ, "PYTHONPATH": os.fspath(installed)}).check()
    assert f"{len(CASES)} cases, 0 of them at fault" in checked.output
