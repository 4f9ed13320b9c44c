"""`python -m <package>._models`: the models for people, and paths for build scripts."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from .declarations import LoadError
from .integrity import wrong_files
from .models import MODELS, Model

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """List the models for people, or print one of the paths that build scripts need; return the exit status.

    Imports torch only for `--path` of a model that was compiled for several CPU baselines.
    """
    import argparse

    about = "Without an option: list the compiled models, their signatures, files and targets."
    parser = argparse.ArgumentParser(prog=f"python {sys.argv[0]}", description=about, allow_abbrev=False)
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--path", metavar="NAME", choices=tuple(MODELS), help="print the file that this CPU would load")
    choice.add_argument("--verify", action="store_true", help="compare every file with what the build made")
    choice.add_argument("--cmake-dir", action="store_true", help="print the folder with the CMake package")
    options = parser.parse_args(arguments)
    if options.verify:
        wrong = wrong_files(list(MODELS.values()))
        _print("\n".join(wrong or ["All files are as they were built."]))
        return 1 if wrong else 0
    try:
        text = (
            str(Model.folder / "cmake")
            if options.cmake_dir
            else str(MODELS[options.path].path)
            if options.path
            else _listing()
        )
    except LoadError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    _print(text)
    return 0


def _print(text: str) -> None:
    """Print a line, with escapes for what the encoding of the output does not have."""
    try:
        sys.stdout.write(f"{text}\n")
    except UnicodeEncodeError:
        encoding = sys.stdout.encoding
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")


def _listing() -> str:
    """Describe the models for people: signature, files, sizes, targets."""
    built = Model.build
    blocks = [f"Compiled with torch {built.torch} for {built.system} {built.machine} by hatch-aoti {built.hatch_aoti}."]
    if built.debug:
        blocks.append(f"A DEBUG BUILD ({', '.join(built.debug)}), not for release.")
    for model in MODELS.values():
        lines = [f"{model.name}{model.signature}"]
        for variant in model.variants:
            path = model.folder / variant.file
            size = f"{path.stat().st_size / 1e6:.2f} MB" if path.is_file() else "MISSING"
            inside = "" if variant.entry == "model" else f" ({variant.entry} in it)"
            lines.append(f"  {path}{inside}: {size}, {variant}, {model.device}")
        if model.gpu is not None:
            lines.append(f"  GPU: CUDA {model.gpu.cuda}, kernels for {', '.join(model.gpu.architectures)}")
        lines += [f"  constants: {model.folder / model.constants}"] if model.constants else []
        lines.append(f"  source: {model.source}")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)
