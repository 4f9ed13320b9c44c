"""A script that stands in for the C++ compiler: it adds flags that torch has no option for, and notes what was run."""

from __future__ import annotations

import os
import shlex
import stat
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hatch_aoti.compiler.toolchain import Toolchain

__all__ = ["COMMANDS", "OBJECTS", "compiler_script"]

COMMANDS = "commands.sh"
"""The file, in the directory of a compilation, with the commands of the C++ compiler that were really run."""

OBJECTS = "objects"
"""The file, next to the script, with the paths of objects that are linked to every model."""


def compiler_script(toolchain: Toolchain, directory: Path, symbols_for: Path | None, sanitizers: str = "") -> Path:
    """Write the script that stands in for the compiler, with the flags that keep the builder out of the result.

    With `symbols_for` the builder is kept in, for debuggers. `sanitizers` (`-fsanitize=`) are for what is made in
    `directory`, not for the precompiled headers, which all builds share. The script notes each command that makes
    something in `directory`, in a form that a shell reads.
    """
    import torch

    if symbols_for is None:
        places = {
            os.fspath(directory): ".",
            os.fspath(Path(torch.__file__).parent): "torch",
            sysconfig.get_path("include"): "python",
            sysconfig.get_path("platinclude"): "python",
        }
    else:
        places = {os.fspath(directory): os.fspath(symbols_for)}
    # torch and the compiler resolve symbolic links here and there.
    places = {os.path.realpath(place): token for place, token in places.items()} | places
    # Of several that match, the compiler takes the last: the longest, as a prefix of another must not win.
    maps = [f"-ffile-prefix-map={place}={token}" for place, token in sorted(places.items())]
    if sys.platform == "darwin":
        link = ["-Wl,-x", "-Wl,-S"] if symbols_for is None else []
    else:
        # The assembly file with the weights has no .note.GNU-stack, which makes the whole object ask for an
        # executable stack, and glibc >= 2.41 refuses to load it.
        link = ["-Wl,-z,noexecstack"]
        link += ["-Wl,-s", "-Wl,--build-id=none"] if symbols_for is None else []
    # `vptr` needs type information that torch's headers do not have.
    sanitize = [f"-fsanitize={sanitizers}", "-fno-sanitize=vptr", "-fno-omit-frame-pointer", "-g1"]
    sanitize = sanitize if sanitizers else []
    # torch tells compilers apart by their names.
    script = directory / ("clang++" if "clang" in toolchain.compiler.lower() else "g++")
    here = shlex.quote(os.fspath(directory))
    script.write_text(
        "#!/bin/sh\n"
        "# Stands in for the C++ compiler, see hatch_aoti/compiler/compilation.py.\n"
        "output=\n"
        'for argument in "$@"; do\n'
        '  case "$argument" in\n'
        f'    -shared) set -- "$@" {shlex.join(link)} $(cat {here}/{OBJECTS}) ;;\n'
        f"    {here}/*.o | {here}/*.so) output=$argument ;;\n"
        "  esac\n"
        "done\n"
        f'set -- {shlex.join(toolchain.command)} "$@" {shlex.join(maps)}\n'
        'if [ -n "$output" ]; then\n'
        f'  set -- "$@" {shlex.join(sanitize)}\n'
        '  { printf "\\n# makes %s\\n" "${output##*/}"\n'
        '    for argument in "$@"; do\n'
        '      case "$argument" in\n'
        f"""        *[!A-Za-z0-9_./=+,:@-]*) printf "'%s' " "$(printf %s "$argument" | sed "s/'/'\\\\\\\\''/g")" ;;\n"""
        '        *) printf "%s " "$argument" ;;\n'
        "      esac\n"
        "    done\n"
        f"    echo; }} >> {here}/{COMMANDS}\n"
        "fi\n"
        'exec "$@"\n',
        encoding="utf-8",
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    (directory / OBJECTS).touch()
    return script
