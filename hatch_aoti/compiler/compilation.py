"""`ExportedProgram` and target → compiled files. The only package that calls `torch._inductor`.

What a torch release can break is here: the options that make AOTInductor's output portable and reproducible, and
a few functions that are replaced while it compiles (see `_patched_inductor`).
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from hatch_aoti.compiler.checks import value_checks
from hatch_aoti.compiler.headers import PrecompiledHeaders
from hatch_aoti.compiler.names import operator_names
from hatch_aoti.compiler.operators import keep_semantics
from hatch_aoti.compiler.optimize import inline_small_products
from hatch_aoti.compiler.options import check_options, whole_tables
from hatch_aoti.compiler.script import compiler_script
from hatch_aoti.compiler.serialise import make_serialisable, plain_containers
from hatch_aoti.compiler.target import TORCH_PICKS
from hatch_aoti.compiler.threads import thread_policy
from hatch_aoti.errors import MAKE_ROOM, CompileError, full_disk

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import torch

    from hatch_aoti.artifact.cache import Cache
    from hatch_aoti.compiler.target import Target
    from hatch_aoti.compiler.toolchain import Toolchain

__all__ = ["Compiled", "all_options", "compile_program", "one_thread", "preload"]

# The stem of all generated files. Fixed, because torch's own choice hashes paths of the builder.
_STEM = "model"


# How many threads torch assumes when it decides which loops to make parallel. The number itself does not get into
# the code (`cpp.dynamic_threads`), but the decisions would otherwise follow the builder's cores.
_ASSUMED_THREADS = 8

# The cache sizes, in bytes, that the C++ GEMM template of `max_autotune` gets for a portable target, where torch would
# compile those of the builder into the code. First level: what every x86-64-v3 CPU has, 32 KiB or more; second level:
# between a desktop's (256 KiB) and a server's (2 MiB).
_ASSUMED_CACHES = {"l1d_cache_size": 32 << 10, "l2_cache_size": 1 << 20}

# What torch notes about the builder in an artifact's metadata.
_BUILDER_METADATA = frozenset({"AOTI_CPU_ISA", "AOTI_PLATFORM", "AOTI_MACHINE", "AOTI_COMPUTE_CAPABILITY"})


# The line in a generated source after which there are only the commands that compile it.
_COMPILE_COMMENT = "\n// Compile cmd\n"


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What a compilation gives: the files that a `.pt2` needs, by name (a path, or the content), and the constants.

    `constants` are those that the object does not have in it (`aot_inductor.package_constants_in_so` is off), under
    the names by which it asks for them.
    """

    files: dict[str, Path | bytes]
    constants: dict[str, torch.Tensor]


def preload() -> None:
    """Import torch's exporter and compiler, and set up what compiling for CPUs needs in any case (6 s in all).

    Only what no option changes, and nothing that initialises a GPU's driver, which does not survive a fork.
    """
    import torch._inductor.package
    import torch.export._trace
    import torch.utils.cpp_extension
    from torch._inductor import compile_fx  # noqa: F401
    from torch._inductor.codegen import common
    from torch._inductor.fx_passes import joint_graph, post_grad

    common.init_backend_registration()
    joint_graph.lazy_init(torch.device("cpu"))
    post_grad.lazy_init()


def all_options(target: Target, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return every inductor option that a compilation sets: those of `target`, ours for all, and `options` over them.

    Only what is the same on every builder: paths and what cannot change the result are left to `compile_program`.
    """
    return {
        **target.inductor_options(),
        "aot_inductor.package": True,
        "aot_inductor.model_name_for_generated_files": _STEM,
        # Line tables are -g1: three quarters of the file, and paths of the builder.
        "aot_inductor.enable_line_tables": False,
        "cpp.threads": _ASSUMED_THREADS,
        **copy.deepcopy(whole_tables(options)),
    }


def compile_program(
    program: torch.export.ExportedProgram,
    target: Target,
    toolchain: Toolchain,
    *,
    options: Mapping[str, Any],
    directory: Path,
    cache: Cache,
    seed: int,
    inline_products: bool = True,
    include_sources: bool = False,
    symbols_for: Path | None = None,
    sanitizers: str = "",
) -> Compiled:
    """Compile a program for one target.

    `options` are inductor options over the target's own; `directory` is private to this call and receives
    everything that is generated, and the compiler's commands (`COMMANDS`); `cache` keeps the precompiled headers.
    Neither's path gets into the result. `inline_products` multiplies small weights in loops of the generated code.
    With `include_sources` that code is among the files. `sanitizers` are the C++ compiler's (`-fsanitize=`).
    `symbols_for` is for debuggers: the result keeps its symbols, and they name this place for what is in `directory`.
    Raises `CompileError`.
    """
    import torch
    import torch._inductor

    check_options(whole_tables(options))
    merged = {
        "cpp.cxx": (None, os.fspath(compiler_script(toolchain, directory, symbols_for, sanitizers))),
        # Kernels are compiled in this process's own children, so that they die with it.
        "compile_threads": 1,
        **all_options(target, options),
    }
    try:
        torch.manual_seed(seed)
        args, kwargs = plain_containers(copy.deepcopy(program.example_inputs))
        # One thread, as folded constants must not depend on how many summed them up.
        with (
            torch.no_grad(),
            one_thread(),
            _writing_to(directory),
            _patched_inductor(target, cache, program.graph_signature.user_inputs),
        ):
            module = make_serialisable(program.module(check_guards=False))
            keep_semantics(module)
            if inline_products:
                inline_small_products(module)
            files = torch._inductor.aot_compile(module, args, kwargs, options=merged)  # noqa: SLF001
    except CompileError:
        raise
    except Exception as error:
        raise _explain(error) from error
    outputs = cast("list[Any]", files)
    needed = _needed([Path(file) for file in outputs if isinstance(file, str)], directory if include_sources else None)
    constants = {name: value[0] for item in outputs if isinstance(item, dict) for name, value in item.items()}
    return Compiled(needed, constants)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread inside the block: sums of floats differ in their last bits with the number of threads."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextlib.contextmanager
def _writing_to(directory: Path) -> Iterator[None]:
    """Have torch generate its files in `directory`, the one whose path `compiler_script` keeps out of the result."""
    name = "TORCHINDUCTOR_CACHE_DIR"
    before = os.environ.get(name)
    os.environ[name] = os.fspath(directory)
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _needed(files: list[Path], sources: Path | None) -> dict[str, Path | bytes]:
    """Pick what loading needs: the object, its metadata, and what belongs to custom operators and constants.

    The metadata loses what the builder's CPU put in: PyTorch's loader compares it with the CPU it runs on and warns of
    a mismatch that is none (pytorch/pytorch#191713). `sources`, if given, is the directory whose path is taken out of
    the generated C++, which is then kept.
    """
    kept: dict[str, Path | bytes] = {}
    for path in sorted(files):
        if path.name.endswith("_metadata.json"):
            if path.name.endswith(".wrapper_metadata.json"):
                metadata = json.loads(path.read_text(encoding="utf-8"))
                kept[path.name] = json.dumps(
                    {name: value for name, value in metadata.items() if name not in _BUILDER_METADATA}, sort_keys=True
                ).encode()
        elif path.suffix in {".cpp", ".h"}:
            if sources is not None:
                text = path.read_text(encoding="utf-8").replace(os.fspath(sources), ".")
                # torch appends the commands that it ran, which name paths of the builder.
                kept[path.name] = f"{text.partition(_COMPILE_COMMENT)[0].rstrip()}\n".encode()
        else:
            kept[path.name] = path
    return kept


@contextlib.contextmanager
def _patched_inductor(target: Target, cache: Cache, inputs: Sequence[Any]) -> Iterator[None]:
    """Make torch compile for `target` rather than for this machine, and share precompiled headers."""
    import torch
    from torch._inductor import codecache, cpp_builder, cpu_vec_isa

    replaced: list[tuple[Any, str, Any]] = [
        (codecache, "_precompile_header", PrecompiledHeaders(cache)),
        # torch takes what a compiler prints for UTF-8, and fails with another error where it is not.
        (cpp_builder, "SUBPROCESS_DECODE_ARGS", ("utf-8", "replace")),
        *thread_policy(),
        *operator_names(),
        *value_checks([str(name) for name in inputs]),
    ]
    if target.vec_isa != TORCH_PICKS:
        isas = [_forced_isa(target.vec_isa)] if target.vec_isa else []
        replaced.append((cpu_vec_isa, "valid_vec_isa_list", lambda: isas))
        capabilities = {**torch.cpu.get_capabilities(), **_ASSUMED_CACHES}
        replaced.append((torch.cpu, "get_capabilities", lambda: capabilities))
    with contextlib.ExitStack() as undo:
        for module, name, replacement in replaced:
            undo.callback(setattr, module, name, inspect.getattr_static(module, name))
            setattr(module, name, replacement)
        yield


def _forced_isa(name: str) -> Any:
    """Return torch's vector ISA of this name as a fact, where torch would find out by six runs of the compiler (7 s).

    A subclass, since asking an ISA for its truth value probes, and for AVX-512 adds bf16 where the builder has it.
    """
    from torch._inductor import cpu_vec_isa

    base = getattr(cpu_vec_isa, name)
    return type(name, (base,), {"__bool__": lambda _self: True, "__hash__": base.__hash__})()


_ERROR_LINE = re.compile(r"(error:|undefined reference|cannot find -l|fatal|No space left|Killed)", re.IGNORECASE)


def _explain(error: Exception) -> CompileError:
    """Turn what AOTInductor raised into an error for the person who must act."""
    text = str(error)
    name = type(error).__name__
    if full := full_disk(error):
        return CompileError(full, hint=MAKE_ROOM)
    if "Killed signal terminated program" in text:  # as g++ reports its own child
        return CompileError(
            "the C++ compiler was killed, most likely because the machine ran out of memory",
            hint="close other programs, or compile fewer models at once (`jobs`)",
            killed=True,
        )
    if "InvalidCxxCompiler" in f"{name}: {text}":  # torch wraps it in an error of its own
        return CompileError("the C++ compiler does not run", hint="make `$CXX --version` work")
    if "CppCompileError" in f"{name}: {text}":
        telling = [line.rstrip() for line in text.splitlines() if _ERROR_LINE.search(line)]
        tail = [line.rstrip() for line in text.splitlines() if line.strip()][-12:]
        return CompileError(
            "the C++ compiler rejects the code that AOTInductor generated",
            hint="the log has the full output; an older or newer compiler, or `inductor-configs`, may get around it",
            details="\n".join(telling[:8] or tail),
        )
    first = next((line.strip() for line in text.splitlines() if line.strip()), "(no message)")
    return CompileError(
        f"AOTInductor raises {name}: {first}",
        hint="the log has the whole traceback; if plain `torch._inductor.aoti_compile_and_package` fails the same way, "
        "it is torch's to fix",
        details="\n".join([line.rstrip() for line in text.splitlines() if line.strip()][1:8]),
    )
