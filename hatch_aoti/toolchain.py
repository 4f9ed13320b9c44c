"""The C++ compiler and the torch that models are compiled with, found without importing torch."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hatch_aoti.errors import CompileError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Toolchain", "find_toolchain"]

_ASSIGNMENT = re.compile(r"""^(\w+)(?:\s*:[^=]*)? = ["']([^"']*)["']""", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Toolchain:
    """What the compiled bytes depend on besides the program: recorded in the manifest and part of every cache key."""

    command: tuple[str, ...]  # the compiler's path and the arguments that CXX adds
    compiler: str  # the first line of `--version`
    torch: str  # version with its local part
    torch_git: str

    def record(self) -> dict[str, str]:
        """Return what the manifest says about the toolchain; the compiler's path stays out of it."""
        return {
            "compiler": self.compiler,
            "compiler_arguments": shlex.join(self.command[1:]),
            "torch": self.torch,
            "torch_git": self.torch_git,
        }


def find_toolchain(environ: Mapping[str, str] = os.environ) -> Toolchain:
    """Find the C++ compiler: the environment variable `CXX` (a command, arguments allowed), or `g++`/`clang++`.

    Raises `CompileError` when there is none, or when it does not run.
    """
    default = "clang++" if sys.platform == "darwin" else "g++"
    command = shlex.split(environ.get("CXX", "")) or [default]
    path = shutil.which(command[0], path=environ.get("PATH", os.defpath))
    if path is None:
        raise CompileError(
            f"there is no C++ compiler `{command[0]}` on PATH",
            hint="install one (Debian and Ubuntu: `apt-get install g++`; Fedora: `dnf install gcc-c++`; macOS: "
            "`xcode-select --install`), or name another in the environment variable CXX",
        )
    try:
        said = subprocess.run([path, *command[1:], "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise CompileError(
            f"the C++ compiler `{shlex.join(command)}` does not run: {error}",
            hint="make `$CXX --version` work, or name another compiler in the environment variable CXX",
        ) from error
    version, git = _installed_torch()
    return Toolchain((path, *command[1:]), said.partition("\n")[0].strip(), version, git)


def _installed_torch() -> tuple[str, str]:
    """Return torch's version and commit from its own `version.py`, read as text: importing torch takes seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise CompileError("torch is not installed", hint="add `torch` to `build-system.requires`")
    text = (Path(spec.submodule_search_locations[0]) / "version.py").read_text(encoding="utf-8")
    values = dict(_ASSIGNMENT.findall(text))
    return values.get("__version__", "unknown"), values.get("git_version", "unknown")
