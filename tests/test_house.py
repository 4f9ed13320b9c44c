"""The house stays as it is drawn: a folder for each stage, imports that point one way, modules that fit one's head."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

from conftest import REPOSITORY

import hatch_aoti

HOME = Path(hatch_aoti.__file__).parent

EVERYWHERE = {"errors", "__init__"}
# What each folder, or module at the top, may import besides itself.
MAY_IMPORT = {
    "errors": set(),
    "stages": set(),
    "own_code": set(),
    "layout": set(),
    "codec": set(),
    "runtime": set(),
    "settings": set(),
    "artifact": set(),
    "compiler": {"artifact", "codec", "runtime", "settings"},
    "export": {"artifact", "runtime", "settings", "stages"},
    "job": {"artifact", "codec", "compiler", "export", "own_code", "runtime", "settings", "stages"},
    "wheel": {"artifact", "codec", "compiler", "job", "own_code", "runtime", "settings"},
    "build": {"artifact", "codec", "compiler", "job", "layout", "own_code", "runtime", "settings", "stages", "wheel"},
    "plugin": {"artifact", "build", "layout", "settings", "wheel"},
    "benchmark": {"artifact", "build", "codec", "export", "job", "plugin", "runtime", "settings", "stages", "wheel"},
    "cli": {"artifact", "benchmark", "build", "plugin", "settings", "wheel"},
    "__main__": {"cli"},
}
MOST_LINES = 400


def modules() -> list[Path]:
    return sorted(HOME.rglob("*.py"))


def room(path: Path) -> str:
    """Return the folder that a module lives in, or its own name at the top."""
    first, *rest = path.relative_to(HOME).parts
    return first if rest else first.removesuffix(".py")


def imports(path: Path) -> set[str]:
    """Return what a module imports from the package by the names of rooms, types and functions' imports included."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            assert room(path) == "runtime", f"{path}: only what is copied into wheels imports relatively"
        names = []
        if isinstance(node, ast.ImportFrom) and node.module == "hatch_aoti":
            names = [f"hatch_aoti.{alias.name}" for alias in node.names if alias.name != "__version__"]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        found |= {name.split(".")[1] for name in names if name.startswith("hatch_aoti.")}
    return found


def test_imports_point_one_way():
    wrong = [
        f"{path.relative_to(HOME)} imports {other}"
        for path in modules()
        if room(path) != "__init__"
        for other in sorted(imports(path) - MAY_IMPORT[room(path)] - EVERYWHERE - {room(path)})
    ]
    assert wrong == []


def test_the_table_has_no_circle_and_no_room_that_is_not_there():
    assert set(MAY_IMPORT) == {room(path) for path in modules()} - {"__init__"}
    order: list[str] = []
    while len(order) < len(MAY_IMPORT):
        free = [name for name, others in MAY_IMPORT.items() if name not in order and others <= set(order)]
        assert free, f"a circle among {sorted(set(MAY_IMPORT) - set(order))}"
        order += free


def test_no_module_is_long():
    long = {
        str(path.relative_to(HOME)): lines
        for path in modules()
        if (lines := len(path.read_text().splitlines())) > MOST_LINES
    }
    assert long == {}


def test_no_module_imports_torch_when_it_is_imported():
    names = [".".join(("hatch_aoti", *path.relative_to(HOME).with_suffix("").parts)) for path in modules()]
    names = [name.removesuffix(".__init__") for name in names if not name.endswith("__main__")]
    code = f"import importlib, sys; [importlib.import_module(name) for name in {names}]; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_the_documents_draw_the_same_house():
    text = (REPOSITORY / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("| `") and line.count("|") == 4]
    drawn = {name.strip(" `"): set(re.findall(r"`(\w+)`", others)) for name, _, others in rows}
    assert drawn == {name: others for name, others in MAY_IMPORT.items() if (HOME / name).is_dir()}
