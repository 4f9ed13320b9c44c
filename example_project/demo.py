"""Build the example's wheel with `python -m build`, install it in a fresh environment, and predict with it.

Run it from anywhere: `python example_project/demo.py [directory]`. The wheel and the environment are left in
`directory` (default: a temporary one that is removed afterwards).
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parent
REPOSITORY = EXAMPLE.parent


def step(title: str, *command: str | os.PathLike[str], environ: dict[str, str], cwd: Path = EXAMPLE) -> None:
    """Run a command in `cwd`, after saying what it is for."""
    print(f"\n=== {title}\n$ {' '.join(map(os.fspath, command))}", flush=True)
    subprocess.run(command, check=True, env=environ, cwd=cwd)


def main(directory: Path) -> None:
    """Do the whole way from source to prediction below `directory`."""
    wheelhouse, environment = directory / "wheelhouse", directory / "environment"
    wheelhouse.mkdir(parents=True, exist_ok=True)
    # hatch-aoti is taken from this checkout: isolated builds find its wheel through PIP_FIND_LINKS.
    links = [link for link in (os.environ.get("PIP_FIND_LINKS"), os.fspath(wheelhouse)) if link]
    environ = {**os.environ, "PIP_FIND_LINKS": " ".join(links), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    pip = [sys.executable, "-m", "pip", "--quiet"]
    step("Build hatch-aoti itself", *pip, "wheel", "--no-deps", "-w", wheelhouse, REPOSITORY, environ=environ)
    step("Build the example", sys.executable, "-m", "build", "--outdir", directory / "dist", EXAMPLE, environ=environ)
    [wheel] = (directory / "dist").glob("*.whl")

    venv.create(environment, with_pip=True, clear=True)
    python = environment / "bin" / "python"
    # The wheel asks for torch>=2.13; the exact version keeps pip from fetching the newest CUDA build for a demo.
    step("Install it", python, "-m", "pip", "install", "--quiet", "torch==2.13.0", wheel, environ=environ)
    # No compiler on PATH: the wheel needs none. Not in the source tree, whose package would be found first.
    bare = {**environ, "PATH": os.fspath(python.parent)}
    step("List its models", python, "-m", "example_project._models", environ=bare, cwd=directory)
    step("Predict", python, "-m", "example_project", environ=bare, cwd=directory)


if __name__ == "__main__":
    with contextlib.ExitStack() as stack:
        if len(sys.argv) > 1:
            main(Path(sys.argv[1]).resolve())
        else:
            main(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hatch-aoti-demo-"))))
