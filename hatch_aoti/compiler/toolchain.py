"""The C++ compiler and the torch that models are compiled with, found without importing torch."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hatch_aoti.errors import CompileError
from hatch_aoti.settings.environment import tool_variables

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Toolchain", "ToolchainRecord", "find_toolchain"]

_ASSIGNMENT = re.compile(r"""^(\w+)(?:\s*:[^=]*)? = ["']([^"']*)["']""", re.MULTILINE)

_PATIENCE = 60.0  # seconds that a compiler gets to say its version: a compiler cache may start a server first


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToolchainRecord:
    """What the manifest says about a toolchain; the compiler's path stays out of it."""

    compiler: str
    compiler_arguments: str = ""
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    torch: str
    torch_git: str


@dataclasses.dataclass(frozen=True)
class Toolchain:
    """What the compiled bytes depend on besides the program: recorded in the manifest and part of every cache key."""

    command: tuple[str, ...]  # the compiler's path and the arguments that CXX adds
    compiler: str  # the first line of `--version`
    torch: str  # version with its local part
    torch_git: str
    environment: Mapping[str, str]  # variables that its tools read, with hashes of their values

    def record(self) -> ToolchainRecord:
        """Return what the manifest says about it."""
        return ToolchainRecord(
            compiler=self.compiler,
            compiler_arguments=shlex.join(self.command[1:]),
            environment=dict(self.environment),
            torch=self.torch,
            torch_git=self.torch_git,
        )


def find_toolchain(environ: Mapping[str, str], *, patience: float = _PATIENCE) -> Toolchain:
    """Find the C++ compiler: the environment variable `CXX` (a command, arguments allowed), or `g++`/`clang++`.

    `environ` is that of a worker (see `environment`); the compiler has `patience` seconds to say its version. Raises
    `CompileError` when there is none, or when it does not run.
    """
    named = environ.get("CXX", "")
    try:
        command = shlex.split(named) or ["clang++" if sys.platform == "darwin" else "g++"]
    except ValueError as error:
        raise CompileError(
            f"the environment variable CXX is no command: `{named}` has {str(error)[:1].lower()}{str(error)[1:]}",
            hint="write the compiler and its arguments as in a shell, every quote in a pair",
        ) from error
    path = shutil.which(command[0], path=environ.get("PATH", os.defpath))
    if path is None:
        raise CompileError(
            f"there is no C++ compiler `{command[0]}` on PATH",
            hint="install one (Debian and Ubuntu: `apt-get install g++`; Fedora: `dnf install gcc-c++`; macOS: "
            "`xcode-select --install`), or name another in the environment variable CXX",
        )
    try:
        said = _said([path, *command[1:], "--version"], environ, patience)
    except (OSError, subprocess.SubprocessError) as error:
        slow = isinstance(error, subprocess.TimeoutExpired)
        what = f"does not answer `--version` within {patience:.0f} s" if slow else f"does not run: {error}"
        raise CompileError(
            f"the C++ compiler `{shlex.join(command)}` {what}",
            hint="make `$CXX --version` work, or name another compiler in the environment variable CXX",
        ) from error
    version, git = _installed_torch()
    first = said.partition("\n")[0].strip()
    return Toolchain((path, *command[1:]), first, version, git, tool_variables(environ))


def _said(command: list[str], environ: Mapping[str, str], patience: float) -> str:
    """Return what a command prints. Raises `OSError` or `subprocess.SubprocessError`.

    When it takes too long, all that it started is killed with it: a child would keep the pipe open.
    """
    with subprocess.Popen(
        command,
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
        encoding="utf-8",
        errors="replace",
    ) as process:
        try:
            output, _ = process.communicate(timeout=patience)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return output


def _installed_torch() -> tuple[str, str]:
    """Return torch's version and commit from its own `version.py`, read as text: importing torch takes seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise CompileError("torch is not installed", hint="add `torch` to `build-system.requires`")
    text = (Path(spec.submodule_search_locations[0]) / "version.py").read_text(encoding="utf-8")
    values = dict(_ASSIGNMENT.findall(text))
    return values.get("__version__", "unknown"), values.get("git_version", "unknown")
