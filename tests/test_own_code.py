"""What is made by other code of hatch-aoti is not reused: every module that a job runs counts, wherever it lies."""

from __future__ import annotations

import ast
import importlib.util
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from conftest import write_files

import hatch_aoti
from hatch_aoti import own_code
from hatch_aoti.own_code import code_digest, modules_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from conftest import Watched

HOME = Path(hatch_aoti.__file__).parent
JOB = "hatch_aoti.job.run"


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Have `own_code` read a copy of the package."""
    place = tmp_path / "hatch_aoti"
    shutil.copytree(HOME, place, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(own_code, "_HOME", place)
    forget()
    yield place
    forget()


def forget() -> None:
    modules_of.cache_clear()
    code_digest.cache_clear()


def parsed_imports(module: str, path: Path) -> set[str]:
    """Return what a module imports from the package, but for type checkers, as Python parses it."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    tree.body = [
        node for node in tree.body if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    ]
    found = {module.rpartition(".")[0]}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = module if path.name == "__init__.py" else module.rpartition(".")[0]
            origin = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            found |= {origin, *(f"{origin}.{alias.name}" for alias in node.names)}
    return {name for name in found if name.partition(".")[0] == "hatch_aoti"}


def test_imports_are_found_as_python_parses_them():
    for path in HOME.rglob("*.py"):
        name = ".".join(("hatch_aoti", *path.relative_to(HOME).with_suffix("").parts)).removesuffix(".__init__")
        todo, reached = [name], {}
        while todo:
            module = todo.pop()
            file = own_code._file(module)
            if file is not None and module not in reached:
                reached[module] = file
                todo += parsed_imports(module, file)
        assert dict(modules_of(name)) == reached, name


def test_every_module_that_a_worker_loads_for_a_job_counts(watched: Watched):
    assert {"hatch_aoti.job.verify", "hatch_aoti.compiler.compilation", "hatch_aoti.artifact.archive", JOB} <= set(
        watched.loaded
    )
    # The process that runs the job, which has no part in what comes out of it.
    server = {"hatch_aoti.build", "hatch_aoti.build.fork_server"}
    assert set(watched.loaded) - server <= set(modules_of(JOB))


def test_a_change_of_any_module_that_counts_is_another_digest_and_of_others_is_not(copy: Path):
    before, counted = code_digest(JOB), modules_of(JOB)
    assert {
        "hatch_aoti",
        "hatch_aoti.job.dependencies",
        "hatch_aoti.runtime.calls",
        "hatch_aoti.compiler.threads",
    } <= counted.keys()
    assert not counted.keys() & {
        "hatch_aoti.build.pipeline",
        "hatch_aoti.plugin.build_hook",
        "hatch_aoti.cli",
        "hatch_aoti.build.progress",
    }
    digests = {before}
    for path in counted.values():
        text = path.read_text(encoding="utf-8")
        path.write_text(f"{text}\n# changed\n", encoding="utf-8")
        forget()
        digests.add(code_digest(JOB))
        path.write_text(text, encoding="utf-8")
    assert len(digests) == 1 + len(counted)
    for path in copy.rglob("*.py"):
        if path not in counted.values():
            path.write_text("changed", encoding="utf-8")
    forget()
    assert code_digest(JOB) == before


def test_modules_are_followed_into_folders_and_functions(copy: Path):
    shutil.rmtree(copy)
    files = {
        "__init__.py": "",
        "job/__init__.py": "",
        "job/run.py": """
            from typing import TYPE_CHECKING

            import hatch_aoti.errors
            from hatch_aoti.artifact import archive

            if TYPE_CHECKING:
                from hatch_aoti.plugin import hook

                from hatch_aoti.plugin.other import (
                    Other,
                )


            def run():
                from hatch_aoti.export.program import (  # late
                    export,
                    program,
                )
        """,
        "errors.py": "",
        "artifact/__init__.py": "",
        "artifact/archive.py": "import hatch_aoti.job.run",
        "export/__init__.py": "",
        "export/program.py": "",
        "plugin/__init__.py": "",
        "plugin/hook.py": "",
        "plugin/other.py": "",
    }
    write_files(copy, files)
    found = [f"{path.relative_to(copy)}" for path in modules_of("hatch_aoti.job.run").values()]
    assert sorted(found) == sorted(name for name in files if not name.startswith("plugin/"))
