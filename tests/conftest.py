"""Fixtures shared by all tests: small projects, builds of them, and environments with the built wheels installed.

Compiling costs seconds, so every build of a test run uses one artifact cache, and most builds run without isolation.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from filelock import FileLock

if TYPE_CHECKING:
    from collections.abc import Callable

REPOSITORY = Path(__file__).resolve().parent.parent
EXAMPLE = REPOSITORY / "example_project"

PROJECTS = REPOSITORY / "tests" / "projects"

# The smallest model that is worth compiling: everything else in a test project is about something else.
TINY_MODULE = (PROJECTS / "tiny" / "tiny" / "model.py").read_text(encoding="utf-8")


def write_files(root: Path, files: dict[str, str]) -> Path:
    """Write files (path -> text, dedented) below `root`."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text).lstrip("\n"), encoding="utf-8")
    return root


def copy_project(source: Path, target: Path) -> Path:
    """Copy a project without what builds and test runs leave in it; return the copy."""
    leavings = shutil.ignore_patterns("__pycache__", "dist", "_aoti", "_models.*", "*.pt2", "cmake", "include")
    shutil.copytree(source, target, ignore=leavings, dirs_exist_ok=True)
    return target


def edit(root: Path, old: str, new: str, name: str = "pyproject.toml") -> None:
    """Replace a text that has to be in a file of a project, wherever it is there."""
    text = (root / name).read_text(encoding="utf-8")
    assert old in text
    (root / name).write_text(text.replace(old, new), encoding="utf-8")


def make_project(name: str, target: Path, *edits: tuple[str, str]) -> Path:
    """Copy `tests/projects/<name>` to `target`; return the copy.

    `edits` are pairs for `edit`, and replace texts of its `pyproject.toml`.
    """
    root = copy_project(PROJECTS / name, target)
    for old, new in edits:
        edit(root, old, new)
    return root


def once(place: Path, make: Callable[[Path], object]) -> Path:
    """Return `place`, which the first worker of a test run that asks for it makes, by calling `make` with it.

    `make` finds nothing there, and what a worker that was killed has left is removed before.
    """
    made = place.with_name(f"{place.name}.made")
    with FileLock(place.with_name(f"{place.name}.lock")):
        if not made.exists():
            shutil.rmtree(place, ignore_errors=True)
            make(place)
            made.touch()
    return place


@dataclasses.dataclass(frozen=True)
class Ran:
    """A finished command."""

    returncode: int
    output: str

    def check(self) -> Ran:
        assert self.returncode == 0, self.output
        return self


def run(*command: str | os.PathLike[str], cwd: Path | None = None, environ: dict[str, str] | None = None) -> Ran:
    """Run a command; return its status and what it printed, both streams together."""
    done = subprocess.run(
        [os.fspath(part) for part in command],
        cwd=cwd,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
        timeout=900,
    )
    return Ran(done.returncode, done.stdout)


# Fixtures of tests that build wheels, or compile. One wheel is not among them: the example's, once in a test run.
_SLOW = {"build", "guide", "watched", "elsewhere", "frontend", "compiled", "states"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests by their fixtures; whoever takes `environ` and not the example's wheel starts builds, too."""
    for item in items:
        names = set(getattr(item, "fixturenames", ()))
        if names & {*_SLOW, "environ"}:
            item.add_marker(pytest.mark.torch)
        if names & _SLOW or ("environ" in names and "example_wheel" not in names):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """Return a directory that all workers of a parallel test run share."""
    base = tmp_path_factory.getbasetemp()
    directory = (base if worker_id == "master" else base.parent) / "shared"
    directory.mkdir(exist_ok=True)
    return directory


@pytest.fixture(scope="session")
def environ(shared: Path) -> dict[str, str]:
    """Return the environment for builds: one artifact cache, and no `HATCH_AOTI_…` or `CXX` of the developer's."""
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("HATCH_AOTI_", "TORCH", "AOT_", "COV_"))
        and name not in {"CXX", "SOURCE_DATE_EPOCH", "PYTHONPATH", "VIRTUAL_ENV"}
    }
    return {**clean, "HATCH_AOTI_CACHE_DIR": os.fspath(shared / "cache"), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


@dataclasses.dataclass(frozen=True)
class Builder:
    """Builds projects without isolation, with the test environment's torch and hatch-aoti."""

    environ: dict[str, str]

    def __call__(self, root: Path, *options: str, **environ: str) -> Ran:
        """Run `python -m build --wheel --no-isolation`; `dist` below the root gets the result."""
        arguments = ["-m", "build", "--no-isolation", "--skip-dependency-check", *(options or ("--wheel",))]
        return run(sys.executable, *arguments, ".", cwd=root, environ={**self.environ, **environ})

    def wheel(self, root: Path, *options: str, **environ: str) -> Path:
        """Build and return the wheel."""
        self(root, *options, **environ).check()
        [wheel] = (root / "dist").glob("*.whl")
        return wheel


@pytest.fixture
def build(environ: dict[str, str]) -> Builder:
    """Return a builder for test projects."""
    return Builder(environ)


@dataclasses.dataclass(frozen=True)
class Projects:
    """Copies projects of `tests/projects` into folders below `directory`."""

    directory: Path

    def __call__(self, name: str, *edits: tuple[str, str], into: str = "") -> Path:
        """Copy one into the folder `into`, by default of its own name, with `edits` as in `make_project`."""
        return make_project(name, self.directory / (into or name), *edits)


@pytest.fixture
def project(tmp_path: Path) -> Projects:
    """Return what copies a project below the test's own folder: `project("tiny", ("min = 1", "min = 2"))`."""
    return Projects(tmp_path)


@pytest.fixture
def tiny(project: Projects) -> Path:
    """Return a project with one small model, in a directory of its own."""
    return project("tiny")


@pytest.fixture(scope="session")
def example_wheel(shared: Path, environ: dict[str, str]) -> Path:
    """Return the example project's wheel, built once in a test run, from a copy of the tree."""
    root = once(shared / "example", lambda root: Builder(environ).wheel(copy_project(EXAMPLE, root)))
    [wheel] = (root / "dist").glob("*.whl")
    return wheel


@pytest.fixture(scope="session")
def installed_example(shared: Path, example_wheel: Path) -> Path:
    """Return a directory with the example's wheel installed, to put on an import path. Leave it as it is."""
    return once(shared / "example-installed", lambda directory: unpack(example_wheel, directory))


@pytest.fixture(scope="session")
def guide(shared: Path, environ: dict[str, str]) -> Path:
    """Return the project of `guide_project.py`, built once in a test run: see `guide_wheel`. Leave it as it is."""
    from guide_project import write_guide  # imports torch, which most test files do not need

    # Not into the tree: a build notes that the folder has changed.
    options = ("--wheel", "--outdir", os.fspath(shared / "guide-dist"))
    return once(shared / "guide", lambda root: Builder(environ)(write_guide(root), *options).check())


@pytest.fixture(scope="session")
def guide_wheel(shared: Path, guide: Path) -> Path:
    """Return the wheel of `guide`."""
    assert guide.is_dir()
    [wheel] = (shared / "guide-dist").glob("*.whl")
    return wheel


@pytest.fixture(scope="session")
def installed_guide(shared: Path, guide_wheel: Path) -> Path:
    """Return a directory with the wheel of `guide` installed, to put on an import path. Leave it as it is."""
    return once(shared / "guide-installed", lambda directory: unpack(guide_wheel, directory))


@dataclasses.dataclass(frozen=True)
class Watched:
    """A project that was built with `variables` in the environment, and the secrets in there and in its files."""

    root: Path
    variables: dict[str, str]
    secrets: dict[str, str]

    @property
    def loaded(self) -> list[str]:
        """The modules of hatch-aoti that its worker had loaded in the end."""
        return json.loads((self.root / "loaded.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def watched(shared: Path, environ: dict[str, str]) -> Watched:
    """Return a project, built once in a test run, whose model looks at everything around it. Leave it as it is."""
    variables = {"DEPLOY_TOKEN": "token-2718281828", "PIP_BUILD_TRACKER": "/tmp/tracker-1"}
    builder = Builder({**environ, **variables})
    root = once(shared / "watched", lambda root: builder.wheel(make_project("watched", root)))
    return Watched(root, variables, {"token": "token-2718281828", "pin": "pin-3141592653"})


def unpack(wheel: Path, directory: Path) -> Path:
    """Unpack a wheel, which is all that installing a pure tree takes; return the directory."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(directory)
    return directory


def read_only(directory: Path) -> list[str]:
    """Return the beginning of a command that sees `directory` read-only; empty where the system has no way to.

    File modes do not stop root, whom many containers run tests as; a read-only mount does.
    """
    script = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && exec "$@"'
    for options in (["-m"], ["-rm"]):
        command = ["unshare", *options, "sh", "-c", script, os.fspath(directory)]
        if shutil.which("unshare") and run(*command, "true").returncode == 0:
            return command
    return []


def snapshot(directory: Path) -> dict[str, bytes | None]:
    """Return the content of every file below `directory`, and None for every folder."""
    return {
        os.fspath(path.relative_to(directory)): path.read_bytes() if path.is_file() else None
        for path in sorted(directory.rglob("*"))
    }


def names_in(wheel: Path) -> list[str]:
    """Return the member names of a wheel, sorted."""
    with zipfile.ZipFile(wheel) as archive:
        return sorted(archive.namelist())


def run_python(code: str, *paths: Path, environ: dict[str, str] | None = None, cwd: Path | None = None) -> Ran:
    """Run a program with `paths` first on its import path."""
    base = environ if environ is not None else dict(os.environ)
    path = os.pathsep.join(map(os.fspath, paths))
    return run(
        sys.executable, "-c", textwrap.dedent(code), cwd=cwd, environ={**base, "PYTHONPATH": path, "PYTHONWARNINGS": ""}
    )
