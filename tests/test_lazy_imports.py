"""What must not be imported, and when: torch costs seconds, and is not even installed at a build's first steps."""

from __future__ import annotations

import json
import textwrap
from typing import TYPE_CHECKING, Any

import pytest
from conftest import EXAMPLE, run_python

if TYPE_CHECKING:
    from pathlib import Path

HEAVY = ("numpy", "pydantic", "rich", "safetensors", "sympy", "torch")

REPORT = f"""
import json, sys
print(json.dumps([name for name in {HEAVY} if name in sys.modules]))
"""


def imported(code: str, *paths: Path, **options: Any) -> list[str]:
    """Return which of the heavy modules are imported after `code` has run."""
    ran = run_python(f"{code}\n{REPORT}", *paths, **options).check()
    return json.loads(ran.output.splitlines()[-1])


def test_importing_the_generated_module_imports_nothing_heavy(installed_example: Path):
    assert imported("import example_project._models", installed_example) == []


def test_listing_and_describing_models_does_not_import_torch(installed_example: Path):
    code = """
    from example_project import _models
    assert "digits" in repr(_models.digits) and str(_models.digits.signature) and _models.digits.path.is_file()
    """
    assert "torch" not in imported(textwrap.dedent(code), installed_example)


def test_a_module_that_imports_models_stays_light_until_one_is_called(installed_example: Path):
    code = "from example_project._models import digits, ranker, load"
    assert imported(code, installed_example) == []


def test_importing_the_build_hook_imports_nothing_heavy():
    assert imported("import hatch_aoti.plugin.build_hook") == []


@pytest.mark.parametrize(
    "hook",
    [
        "get_requires_for_build_wheel()",
        "get_requires_for_build_sdist()",
        "get_requires_for_build_editable()",
        "prepare_metadata_for_build_wheel({out!r})",
        "prepare_metadata_for_build_editable({out!r})",
    ],
)
def test_backend_hooks_before_the_build_import_nothing_heavy(hook: str, tmp_path: Path):
    code = f"import hatchling.build as backend; backend.{hook.format(out=str(tmp_path))}"
    assert imported(code, cwd=EXAMPLE) == []


def test_building_an_sdist_imports_nothing_heavy(tmp_path: Path):
    code = f"import hatchling.build as backend; backend.build_sdist({str(tmp_path)!r})"
    assert imported(code, cwd=EXAMPLE) == []


def test_the_build_process_itself_never_imports_torch(tiny: Path, environ: dict[str, str]):
    code = "import hatchling.build as backend; backend.build_wheel('dist')"
    assert "torch" not in imported(code, cwd=tiny, environ=environ)
