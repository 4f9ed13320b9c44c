"""What it takes to compile a model again without hatch-aoti: its program, the options, and a script for plain torch.

For people who look into a failure, or report it to PyTorch. Whatever goes wrong here is printed, into the model's log,
and does not get into the way of the compilation.
"""

from __future__ import annotations

import contextlib
import json
import os
import traceback
from typing import TYPE_CHECKING, Any

from hatch_aoti.compiler.serialise import plain_containers, plain_spec

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    import torch

    from hatch_aoti.compiler.toolchain import Toolchain

__all__ = ["PROGRAM", "SCRIPT", "dump_minifier", "save_program", "write_script"]

PROGRAM = "program.pt2"
SCRIPT = "reproduce.py"
_OPTIONS = "options.json"


def save_program(program: torch.export.ExportedProgram, folder: Path) -> None:
    """Write the program to `folder`, with `torch.export.save`."""
    import torch

    with _never_in_the_way("the program could not be kept"):
        path, partial = folder / PROGRAM, folder / f"partial-{PROGRAM}"
        try:
            torch.export.save(program, partial)
        except Exception:  # noqa: BLE001 - named tuples and the like: torch has no one type for what it cannot write
            torch.export.save(_with_plain_containers(program), partial)
        partial.rename(path)


def write_script(
    folder: Path,
    *,
    model: str,
    options: Mapping[str, Any],
    seed: int,
    toolchain: Toolchain,
    operators_from: str,
    import_from: Sequence[Path],
) -> None:
    """Write a script that compiles the program one level above `folder` in plain torch, as hatch-aoti does.

    `options` are those of `torch._inductor.config`; `operators_from` is the module that registers the custom operators
    of the program, empty if it has none, and `import_from` is where that is found.
    """
    compiler, *arguments = toolchain.command
    operators = (
        f"sys.path[:0] = {[os.fspath(path) for path in import_from]!r}\n"
        f"importlib.import_module({operators_from!r})  # registers the custom operators of the program\n"
        if operators_from
        else ""
    )
    # What torch writes into CXX cannot have arguments; the script next to this one passes them on.
    cxx = 'os.fspath(here / "g++")' if arguments else repr(compiler)
    text = f'''"""Compile the model `{model}` in plain torch, as it was compiled with torch {toolchain.torch}.

`python {SCRIPT}` writes reproduced.pt2, or fails. It needs nothing but torch and the C++ compiler.
"""

import importlib
import json
import os
import sys
from pathlib import Path

here = Path(__file__).resolve().parent
os.environ.setdefault("CXX", {cxx})

import torch
import torch._inductor

{operators}program = torch.export.load(here.parent / "{PROGRAM}")
options = json.loads((here / "{_OPTIONS}").read_text(encoding="utf-8"))
torch.manual_seed({seed})
with torch.no_grad():
    path = torch._inductor.aoti_compile_and_package(
        program, package_path=str(here / "reproduced.pt2"), inductor_configs=options
    )
print("compiled", path)
'''
    with _never_in_the_way("the script that compiles the program in plain torch could not be written"):
        plain = {name: value for name, value in options.items() if name not in _OURS}
        (folder / _OPTIONS).write_text(json.dumps(plain, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        (folder / SCRIPT).write_text(text, encoding="utf-8")


# What `aoti_compile_and_package` sets itself, or packs in its own way.
_OURS = frozenset({
    "aot_inductor.package",
    "aot_inductor.package_constants_in_so",
    "aot_inductor.package_constants_on_disk_format",
})  # fmt: skip


def dump_minifier(program: torch.export.ExportedProgram, options: Mapping[str, Any], when: str, folder: Path) -> None:
    """Have torch write its minifier for AOTInductor, if the environment asks for it (`DUMP_AOTI_MINIFIER=1`).

    It goes into `folder`. `when` is `"before"` compiling, or what failed: `"compile"` or `"verify"`. torch does this in
    `aoti_compile_and_package` (`torch/_inductor/debug.py`), which is not what compiles here. The meaning of
    AOTINDUCTOR_REPRO_LEVEL is torch's: 1 writes a script without a search, 3 always writes one, before compiling. That
    results are compared, its level 4, is always so here.
    """
    from torch._inductor import config

    if not config.aot_inductor.dump_aoti_minifier:
        return
    level = config.aot_inductor.repro_level
    if (when == "before") != (level == 3):
        return
    # Level 1 writes into the current directory, which is the project's.
    with _never_in_the_way("torch could not write its minifier"), contextlib.chdir(folder):
        from torch._dynamo.repro.aoti import dump_to_minify

        plain = {name: value for name, value in options.items() if name not in _OURS}
        name = "aot_inductor_accuracy" if when == "verify" else "aot_inductor"
        dump_to_minify(program, name, command="run" if level == 1 else "minify", options=plain)


def _with_plain_containers(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Return a program that takes and gives tuples where this one has containers that torch cannot write down."""
    import dataclasses

    import torch

    [first, *rest] = program.module_call_graph
    if first.signature is not None:
        signature = dataclasses.replace(
            first.signature, in_spec=plain_spec(first.signature.in_spec), out_spec=plain_spec(first.signature.out_spec)
        )
        first = dataclasses.replace(first, signature=signature)
    return torch.export.ExportedProgram(
        root=program.graph_module,
        graph=program.graph,
        graph_signature=program.graph_signature,
        state_dict=program.state_dict,
        range_constraints=program.range_constraints,
        module_call_graph=[first, *rest],
        example_inputs=plain_containers(program.example_inputs),
        constants=program.constants,
        verifiers=program.verifiers,
    )


@contextlib.contextmanager
def _never_in_the_way(what: str) -> Iterator[None]:
    try:
        yield
    except Exception:  # noqa: BLE001 - whatever torch raises: the compilation is what matters
        print(f"hatch-aoti: {what}:")  # noqa: T201 - goes to the log
        traceback.print_exc()
