"""`ExportedProgram` and target → compiled files. The only module that calls `torch._inductor`.

What a torch release can break is here: the options that make AOTInductor's output portable and reproducible, and
a few functions that are replaced while it compiles (see `_steer`).
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
import ctypes
import dataclasses
import functools
import hashlib
import json
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from filelock import FileLock

from hatch_aoti.errors import CompileError, did_you_mean
from hatch_aoti.optimize import inline_small_products
from hatch_aoti.signature import make_serialisable, plain_containers
from hatch_aoti.target import TORCH_PICKS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import torch

    from hatch_aoti.target import Target
    from hatch_aoti.toolchain import Toolchain

__all__ = [
    "COMMANDS",
    "Compiled",
    "all_options",
    "compile_program",
    "constants_digest",
    "one_thread",
    "preload",
    "program_digest",
]

# The stem of all generated files. Fixed, because torch's own choice hashes paths of the builder.
_STEM = "model"
_HEADER = "header.h"

# A third of the time that the wrapper of a model takes to compile is spent on std::regex, for one line of torch's that
# parses "cpu". Its templates are compiled once for all models: the precompiled header says that they exist elsewhere,
# and an object that has them is linked to each model.
_REGEX = """
#ifdef __GLIBCXX__
#include <regex>
namespace std::__detail {
template class _Compiler<std::regex_traits<char>>;
template class _Scanner<char>;
template class _NFA<std::regex_traits<char>>;
}
#endif
"""
_SHARED_OBJECT = "shared.o"
_OBJECTS = "objects"  # next to the compiler script: what it links to every model

COMMANDS = "commands.sh"
"""The file, in the directory of a compilation, with the commands of the C++ compiler that were really run."""

# How many threads torch assumes when it decides which loops to make parallel. The number itself does not get into
# the code (`cpp.dynamic_threads`), but the decisions would otherwise follow the builder's cores.
_ASSUMED_THREADS = 8

# How many elements of a loop each thread gets at least. torch's own 512 (`cpp.min_chunk_size`) are computed in a tenth
# of a microsecond, and starting a second thread takes some.
_LEAST_PER_THREAD = 4096

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
        **copy.deepcopy(dict(options)),
    }


def compile_program(
    program: torch.export.ExportedProgram,
    target: Target,
    toolchain: Toolchain,
    *,
    options: Mapping[str, Any],
    directory: Path,
    headers: Path,
    seed: int,
    inline_products: bool = True,
    include_sources: bool = False,
    symbols_for: Path | None = None,
) -> Compiled:
    """Compile a program for one target.

    `options` are inductor options over the target's own; `directory` is private to this call and receives everything
    that is generated, and the compiler's commands (`COMMANDS`); `headers` is shared between calls and builds and keeps
    the precompiled headers. Neither path gets into the result. `inline_products` multiplies small weights in loops of
    the generated code. With `include_sources` that code is among the files. `symbols_for` is for debuggers: the result
    keeps its symbols, and they name this place for what is in
    `directory`. Raises `CompileError`.
    """
    import torch
    import torch._inductor

    known = torch._inductor.config.get_config_copy()  # noqa: SLF001
    for option in options:
        if option not in known:
            raise CompileError(
                f"torch {torch.__version__} has no inductor option `{option}`.{did_you_mean(option, known)}",
                hint="see torch/_inductor/config.py for the options of the installed torch",
            )
    merged = {
        "cpp.cxx": (None, os.fspath(_compiler_script(toolchain, directory, symbols_for))),
        # Kernels are compiled in this process's own children, so that they die with it.
        "compile_threads": 1,
        **all_options(target, options),
    }
    try:
        torch.manual_seed(seed)
        args, kwargs = plain_containers(copy.deepcopy(program.example_inputs))
        # One thread, as folded constants must not depend on how many summed them up.
        with torch.no_grad(), one_thread(), _writing_to(directory), _steer(target, headers):
            module = make_serialisable(program.module(check_guards=False))
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
    """Have torch generate its files in `directory`, the one whose path `_compiler_script` keeps out of the result."""
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
def _steer(target: Target, headers: Path) -> Iterator[None]:
    """Make torch compile for `target` rather than for this machine, and share precompiled headers."""
    import torch
    from torch._inductor import codecache, cpu_vec_isa

    replaced: list[tuple[Any, str, Any]] = [
        (codecache, "_precompile_header", _PrecompiledHeaders(headers)),
        *_thread_policy(),
    ]
    if target.vec_isa != TORCH_PICKS:
        isas = [_forced_isa(target.vec_isa)] if target.vec_isa else []
        replaced.append((cpu_vec_isa, "valid_vec_isa_list", lambda: isas))
        capabilities = {**torch.cpu.get_capabilities(), **_ASSUMED_CACHES}
        replaced.append((torch.cpu, "get_capabilities", lambda: capabilities))
    with contextlib.ExitStack() as undo:
        for module, name, replacement in replaced:
            undo.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, replacement)
        yield


def _thread_policy() -> list[tuple[Any, str, Any]]:
    """Return replacements that let small loops run in one thread, although the number of threads is not known.

    torch decides by the size of a loop where the number is known. With `cpp.dynamic_threads` it makes every loop
    parallel, which costs some microseconds each, on many cores more than small models take in all
    (pytorch/pytorch#148937, #154094). Here a loop that is too small for two threads is serial, and any other compares
    its size with the number of threads when it runs.
    """
    from torch._inductor.codegen import cpp as untyped
    from torch._inductor.virtualized import V

    cpp: Any = untyped
    generate, decide, parallel = (
        cpp.CppKernel.codegen_loops_impl,
        cpp.CppKernel.decide_parallel_depth,
        cpp.WorkSharing.parallel,
    )
    conditions = [""]  # of the loops that are being generated

    def generate_loops(kernel: Any, nest: Any, code: Any, regions: Any) -> None:
        size = cpp.cexpr_index(kernel.rename_indexing(cpp.sympy_product(kernel.call_ranges)))
        conditions.append(f"{size} >= {_LEAST_PER_THREAD} * omp_get_max_threads()")
        try:
            generate(kernel, nest, code, regions)
        finally:
            conditions.pop()

    def decide_depth(kernel: Any, deepest: Any, threads: int) -> Any:
        largest = V.graph.sizevars.shape_env.bound_sympy(cpp.sympy_product(kernel.call_ranges)).upper
        if largest < 2 * _LEAST_PER_THREAD:
            return cpp.ParallelDepth(parallel_depth=0, start_depth=deepest.start_depth)
        return decide(kernel, deepest, threads)

    def open_region(regions: Any, threads: int) -> None:
        if regions.in_parallel and regions.condition != conditions[-1]:
            regions.close()
        if not regions.in_parallel:
            code, regions.condition = regions.code, conditions[-1]
            regions.code = _WithCondition(code, conditions[-1])
            parallel(regions, threads)
            regions.code = code

    return [
        (cpp.CppKernel, "codegen_loops_impl", generate_loops),
        (cpp.CppKernel, "decide_parallel_depth", decide_depth),
        (cpp.WorkSharing, "parallel", open_region),
    ]


@dataclasses.dataclass(frozen=True)
class _WithCondition:
    """A buffer of generated code whose parallel regions get a condition."""

    code: Any
    condition: str

    def writeline(self, line: str) -> None:
        opens = line.startswith("#pragma omp parallel")
        self.code.writeline(f"{line} if({self.condition})" if opens else line)

    def indent(self) -> Any:
        return self.code.indent()


def _forced_isa(name: str) -> Any:
    """Return torch's vector ISA of this name as a fact, where torch would find out by six runs of the compiler (7 s).

    A subclass, since asking an ISA for its truth value probes, and for AVX-512 adds bf16 where the builder has it.
    """
    from torch._inductor import cpu_vec_isa

    base = getattr(cpu_vec_isa, name)
    return type(name, (base,), {"__bool__": lambda _self: True, "__hash__": base.__hash__})()


class _PrecompiledHeaders:
    """Stands in for torch's function that precompiles a header: returns its path, next to the precompiled form.

    torch keys its precompiled headers by paths, so that a build in an isolated environment never finds one again
    (10 s each time), preprocesses them to notice changes (1 s each) and can leave a half-written one behind. Here the
    key is the toolchain and the flags without paths, and a header appears when it is whole.

    For a CPU, torch asks for the wrapper's header and then for that of the kernels: the first is made while the second
    is, and both are there when the second call returns.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.wrappers = ThreadPoolExecutor(1)
        self.pending: Future[None] | None = None

    def __call__(self, header: str, hashable_cmd_line: str, **compile_command: Any) -> str:
        import torch
        from torch._inductor import cpp_builder

        del hashable_cmd_line  # names paths of this machine
        compile_command.pop("extra_flags", None)
        is_wrapper = bool(compile_command.get("min_optimize"))
        options = cpp_builder.CppTorchDeviceOptions(**compile_command, precompiling=True)
        script = Path(options.get_compiler())
        with tempfile.TemporaryDirectory() as directory:
            command = _header_builder(Path(directory), options).get_command_line()
        places = {str(Path(torch.__file__).parent): "<torch>", sysconfig.get_path("include"): "<python>"}
        for place, token in {**places, directory: "<work>", str(script): "<compiler>"}.items():
            command = command.replace(place, token)
        identity = [
            header,
            _REGEX,
            command,
            str(torch.__version__),
            str(torch.version.git_version),
            _script_identity(script),
        ]
        final = self.directory / hashlib.sha256("\0".join(identity).encode()).hexdigest()
        self.directory.mkdir(parents=True, exist_ok=True)
        if is_wrapper:
            (script.parent / _OBJECTS).write_text(os.fspath(final / _SHARED_OBJECT), encoding="utf-8")
        if is_wrapper and compile_command["device_type"] == "cpu":
            context = contextvars.copy_context()  # torch's options are in it
            self.pending = self.wrappers.submit(context.run, _make_header, final, header, options, compile_command)
        else:
            _make_header(final, header, options, compile_command)
            if self.pending is not None:
                self.pending.result()
        return str(final / _HEADER)


def _header_builder(directory: Path, options: Any) -> Any:
    from torch._inductor import cpp_builder

    source = os.fspath(directory / _HEADER)
    return cpp_builder.CppBuilder(name=source, sources=source, BuildOption=options)


def _make_header(final: Path, header: str, options: Any, compile_command: Mapping[str, Any]) -> None:
    """Have `header` in the directory `final`, precompiled; for a wrapper's header also the object that goes with it."""
    with FileLock(f"{final}.lock"):  # other workers and builds want the same headers: they wait, and find them
        if not final.is_dir():
            with tempfile.TemporaryDirectory() as directory:
                source = Path(directory) / _HEADER
                is_wrapper = bool(compile_command.get("min_optimize"))
                declarations = _REGEX.replace("template", "extern template") if is_wrapper else ""
                source.write_text(f"#include <{header}>\n{declarations}", encoding="utf-8")
                _header_builder(Path(directory), options).build()
                if is_wrapper:
                    _build_shared_object(source, compile_command)
                with _appearing(final) as new:
                    for path in Path(directory).iterdir():
                        shutil.copyfile(path, new / path.name)
        os.utime(final)  # used now: the cache removes what is not


def _build_shared_object(header: Path, compile_command: Mapping[str, Any]) -> None:
    """Compile what `header` declares and does not define, once for all models, into an object next to it."""
    from torch._inductor import cpp_builder

    source = header.with_name("shared.cpp")
    source.write_text(f'#include "{header.name}"\n{_REGEX}', encoding="utf-8")
    options = cpp_builder.CppTorchDeviceOptions(**compile_command, compile_only=True)
    builder = cpp_builder.CppBuilder(
        name=source.stem, sources=str(source), output_dir=str(source.parent), BuildOption=options
    )
    builder.build()
    Path(builder.get_target_file_path()).rename(source.with_name(_SHARED_OBJECT))


@contextlib.contextmanager
def _appearing(final: Path) -> Iterator[Path]:
    """Yield a new directory that becomes `final`, by a rename, when the block succeeds."""
    new = Path(tempfile.mkdtemp(prefix="new-", dir=final.parent))
    try:
        yield new
        shutil.rmtree(final, ignore_errors=True)
        new.rename(final)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _compiler_script(toolchain: Toolchain, directory: Path, symbols_for: Path | None) -> Path:
    """Write the script that stands in for the compiler, with the flags that keep the builder out of the result.

    With `symbols_for` the builder is kept in, for debuggers. The script notes each command that makes something in
    `directory`, in a form that a shell reads.
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
    # torch tells compilers apart by their names.
    script = directory / ("clang++" if "clang" in toolchain.compiler.lower() else "g++")
    here = shlex.quote(os.fspath(directory))
    script.write_text(
        "#!/bin/sh\n"
        "# Stands in for the C++ compiler, see hatch_aoti/compiler.py.\n"
        "output=\n"
        'for argument in "$@"; do\n'
        '  case "$argument" in\n'
        f'    -shared) set -- "$@" {shlex.join(link)} $(cat {here}/{_OBJECTS}) ;;\n'
        f"    {here}/*.o | {here}/*.so) output=$argument ;;\n"
        "  esac\n"
        "done\n"
        f'set -- {shlex.join(toolchain.command)} "$@" {shlex.join(maps)}\n'
        'if [ -n "$output" ]; then\n'
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
    (directory / _OBJECTS).touch()
    return script


@functools.cache
def _script_identity(script: Path) -> str:
    """Return what the compiler behind `script` says of itself: path-free, and other for another compiler."""
    return subprocess.run([script, "-v"], capture_output=True, text=True, check=False).stderr


_ERROR_LINE = re.compile(r"(error:|undefined reference|cannot find -l|fatal|No space left|Killed)", re.IGNORECASE)


def _explain(error: Exception) -> CompileError:
    """Turn what AOTInductor raised into an error for the person who must act."""
    text = str(error)
    name = type(error).__name__
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


def program_digest(program: torch.export.ExportedProgram) -> str:
    """Return a SHA-256, in hexadecimal, over all of a program that its compiled form depends on.

    That is its graphs with every value's dtype, sizes, strides and device, its constants' bytes, the ranges of its
    dims and its example inputs' metadata; not source locations, which differ from checkout to checkout.
    """
    import torch

    digest = hashlib.sha256()

    def add(*parts: object) -> None:
        for part in parts:
            data = part if isinstance(part, bytes) else str(part).encode()
            digest.update(len(data).to_bytes(8, "little"))
            digest.update(data)

    for name, module in program.graph_module.named_modules():
        if not isinstance(module, torch.fx.GraphModule):
            continue
        add("graph", name)
        for node in module.graph.nodes:
            add(node.op, node.name, node.target if isinstance(node.target, str) else _target_name(node.target))
            add(node.args, node.kwargs, _describe(node.meta.get("val")))
    add("signature", program.graph_signature)
    add("ranges", sorted((str(symbol), str(interval)) for symbol, interval in program.range_constraints.items()))
    add("call", program.call_spec)
    add("inputs", _describe(program.example_inputs))
    add("constants", constants_digest(program))
    return digest.hexdigest()


def constants_digest(program: torch.export.ExportedProgram) -> str:
    """Return a SHA-256, in hexadecimal, over a program's parameters, buffers and other constants.

    Names, dtypes, sizes, strides, devices and bytes, in the order of the names.
    """
    import torch

    digest = hashlib.sha256()
    for name, tensor in sorted({**program.state_dict, **program.constants}.items()):
        for part in (name, _describe(tensor)):
            digest.update(f"{len(part)}:{part}".encode())
        if isinstance(tensor, torch.Tensor):
            _add_bytes(digest, tensor)
    return digest.hexdigest()


def _target_name(target: Any) -> str:
    return (
        str(target)
        if not callable(target) or hasattr(target, "overloadpacket")
        else getattr(target, "__qualname__", str(target))
    )


def _describe(value: Any) -> str:
    import torch
    from torch.utils import _pytree

    leaves, spec = _pytree.tree_flatten(value)
    words = [
        f"{leaf.dtype}{tuple(leaf.shape)}{leaf.stride() if leaf.layout is torch.strided else leaf.layout}{leaf.device}"
        if isinstance(leaf, torch.Tensor)
        else f"{type(leaf).__name__}:{leaf}"
        for leaf in leaves
    ]
    return f"{spec}{words}"


def _add_bytes(digest: Any, tensor: torch.Tensor) -> None:
    flat = tensor.detach().cpu().contiguous()
    size = flat.numel() * flat.element_size()
    if size:
        # The tensor's own memory: neither a copy, which may be gigabytes, nor numpy, which may be absent.
        digest.update((ctypes.c_char * size).from_address(flat.data_ptr()))
