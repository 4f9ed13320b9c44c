"""Every build frontend gets the same wheel; those that isolate do so, and find the artifacts in the cache all the same.

An isolated build environment gets torch anew, which takes most of the time here: one build for each frontend.
"""

from __future__ import annotations

import os
import shutil
import sys
import venv
from pathlib import Path

import pytest
from conftest import EXAMPLE, REPOSITORY, Builder, copy_project, names_in, once, run
from test_build import EXAMPLE_FILES

PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
MODELS = ("_models.json", "_models.py", "digits.pt2", "ranker.pt2")


@pytest.fixture(scope="session")
def wheelhouse(shared: Path, environ: dict[str, str]) -> Path:
    """Return a folder with hatch-aoti's own wheel, for isolated builds to find."""

    def make(root: Path) -> None:
        copy_project(REPOSITORY / "hatch_aoti", root / "hatch_aoti")
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(REPOSITORY / name, root)
        Builder(environ).wheel(root)

    return once(shared / "hatch-aoti", make) / "dist"


@pytest.fixture
def frontend(environ: dict[str, str], wheelhouse: Path, shared: Path) -> dict[str, str]:
    """Return an environment in which frontends find hatch-aoti, and torch where pip finds it."""
    (shared / "hatch").mkdir(exist_ok=True)
    (shared / "hatch" / "config.toml").touch()
    links = [*environ.get("PIP_FIND_LINKS", "").split(), os.fspath(wheelhouse)]
    return {
        **environ,
        "PATH": os.pathsep.join([os.fspath(Path(sys.executable).parent), environ["PATH"]]),
        "PIP_FIND_LINKS": " ".join(links),
        "UV_FIND_LINKS": ",".join(links),
        "UV_CACHE_DIR": os.fspath(shared / "uv"),
        "PIP_NO_COMPILE": "1",  # nobody imports the torch of a build whose models are in the cache
        "HATCH_DATA_DIR": os.fspath(shared / "hatch" / "data"),
        "HATCH_CACHE_DIR": os.fspath(shared / "hatch" / "cache"),
        "HATCH_CONFIG": os.fspath(shared / "hatch" / "config.toml"),
    }


@pytest.fixture
def example(tmp_path: Path) -> Path:
    """Return a copy of the example project."""
    return copy_project(EXAMPLE, tmp_path / "example")


def only_wheel(directory: Path) -> Path:
    [wheel] = directory.glob("*.whl")
    return wheel


def environment(directory: Path) -> Path:
    """Make an environment that has this one's packages, torch among them; return its Python."""
    venv.create(directory, with_pip=False)
    python = directory / "bin" / "python"
    site = next((directory / "lib").glob("python3.*")) / "site-packages"
    # addsitedir: hatch-aoti may itself be installed there by way of a .pth file.
    those = [path for path in sys.path if path.endswith("site-packages")]
    lines = [f"import site; site.addsitedir({path!r})\n" for path in those]
    (site / "those_of_the_tests.pth").write_text("".join(lines), encoding="utf-8")
    return python


def test_python_m_build_makes_the_wheel_through_the_sdist(example: Path, example_wheel: Path, frontend: dict[str, str]):
    # uv only makes the build environment: sdist and wheel get one each.
    command = [sys.executable, "-m", "build", "--installer", "uv", "."]
    ran = run(*command, cwd=example, environ=frontend).check()
    assert "from the cache" in ran.output
    wheel = only_wheel(example / "dist")
    assert (wheel.name, names_in(wheel)) == (example_wheel.name, EXAMPLE_FILES)
    assert wheel.read_bytes() == example_wheel.read_bytes()


def test_pip_wheel_makes_the_wheel_in_an_isolated_environment(
    example: Path, example_wheel: Path, frontend: dict[str, str], tmp_path: Path
):
    run(*PIP, "wheel", "--no-deps", "-w", tmp_path / "out", ".", cwd=example, environ=frontend).check()
    wheel = only_wheel(tmp_path / "out")
    assert wheel.name == example_wheel.name
    assert wheel.read_bytes() == example_wheel.read_bytes()


def test_uv_build_makes_the_wheel(example: Path, example_wheel: Path, frontend: dict[str, str]):
    run("uv", "build", "--python", sys.executable, ".", cwd=example, environ=frontend).check()
    wheel = only_wheel(example / "dist")
    assert wheel.name == example_wheel.name
    assert wheel.read_bytes() == example_wheel.read_bytes()


def test_hatch_build_makes_the_wheel(example: Path, example_wheel: Path, frontend: dict[str, str]):
    # hatch's own way to have its environments made by uv.
    (example / "hatch.toml").write_text('[envs.hatch-build]\ninstaller = "uv"\n', encoding="utf-8")
    run("hatch", "build", "-t", "wheel", cwd=example, environ=frontend).check()
    wheel = only_wheel(example / "dist")
    assert wheel.name == example_wheel.name
    assert wheel.read_bytes() == example_wheel.read_bytes()


def test_pip_install_installs_a_working_package(example: Path, frontend: dict[str, str], tmp_path: Path):
    python = environment(tmp_path / "env")
    options = ["--no-deps", "--no-build-isolation"]
    run(*PIP, "--python", python, "install", *options, ".", cwd=example, environ=frontend).check()
    [package] = (tmp_path / "env").glob("lib/python3.*/site-packages/example_project")
    assert all((package / name).is_file() for name in MODELS)
    ran = run(python, "-m", "example_project", cwd=tmp_path, environ=frontend).check()
    assert "right, accuracy" in ran.output
    assert not any((example / "example_project" / name).exists() for name in MODELS)


def test_pip_install_e_puts_the_models_into_the_tree(example: Path, frontend: dict[str, str], tmp_path: Path):
    python = environment(tmp_path / "env")
    options = ["--no-deps", "--no-build-isolation"]
    run(*PIP, "--python", python, "install", *options, "-e", ".", cwd=example, environ=frontend).check()
    package = example / "example_project"
    assert all((package / name).is_file() for name in MODELS)
    assert not list((tmp_path / "env").glob("lib/python3.*/site-packages/example_project"))
    code = "import example_project._models as m; print(m.__file__)"
    assert run(python, "-c", code, environ=frontend).check().output.strip() == os.fspath(package / "_models.py")
    ran = run(python, "-m", "example_project", cwd=tmp_path, environ=frontend).check()
    assert "right, accuracy" in ran.output
