"""Precompiled headers, shared between models, builds and environments."""

from __future__ import annotations

import contextvars
import functools
import hashlib
import os
import subprocess
import sysconfig
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hatch_aoti.compiler.script import OBJECTS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hatch_aoti.artifact.cache import Cache

__all__ = ["PrecompiledHeaders"]

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


class PrecompiledHeaders:
    """Stands in for torch's function that precompiles a header: returns its path, next to the precompiled form.

    torch keys its precompiled headers by paths, so that a build in an isolated environment never finds one again
    (10 s each time), preprocesses them to notice changes (1 s each) and can leave a half-written one behind. Here the
    key is the toolchain and the flags without paths; a header appears when it is whole, and its checksum is compared
    (0.1 s) before it is used.

    For a CPU, torch asks for the wrapper's header and then for that of the kernels: the first is made while the second
    is, and both are there when the second call returns.
    """

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.wrappers = ThreadPoolExecutor(1)
        self.pending: Future[None] | None = None

    def __call__(self, header: str, hashable_cmd_line: str, **compile_command: Any) -> str:
        """Return the path of a file that includes `header`, precompiled for the options in `compile_command`."""
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
        key = hashlib.sha256("\0".join(identity).encode()).hexdigest()
        final = self.cache.place(key, "headers")
        if is_wrapper:
            (script.parent / OBJECTS).write_text(os.fspath(final / _SHARED_OBJECT), encoding="utf-8")
        make = functools.partial(_make_header, self.cache, key, header, options, compile_command)
        if is_wrapper and compile_command["device_type"] == "cpu":
            context = contextvars.copy_context()  # torch's options are in it
            self.pending = self.wrappers.submit(context.run, make)
        else:
            make()
            if self.pending is not None:
                self.pending.result()
        return str(final / _HEADER)


def _header_builder(directory: Path, options: Any) -> Any:
    from torch._inductor import cpp_builder

    source = os.fspath(directory / _HEADER)
    return cpp_builder.CppBuilder(name=source, sources=source, BuildOption=options)


def _make_header(cache: Cache, key: str, header: str, options: Any, compile_command: Mapping[str, Any]) -> None:
    """Have `header` in the cache, precompiled; for a wrapper's header also the object that goes with it."""
    with cache.lock(key):  # other workers and builds want the same headers: they wait, and find them
        if cache.get(key, "headers") is not None:
            return
        with cache.scratch("header") as scratch:
            source = scratch / "entry" / _HEADER
            source.parent.mkdir()
            is_wrapper = bool(compile_command.get("min_optimize"))
            declarations = _REGEX.replace("template", "extern template") if is_wrapper else ""
            source.write_text(f"#include <{header}>\n{declarations}", encoding="utf-8")
            _header_builder(source.parent, options).build()
            if is_wrapper:
                _build_shared_object(source, compile_command)
            cache.put(key, source.parent, "headers")


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


@functools.cache
def _script_identity(script: Path) -> str:
    """Return what the compiler behind `script` says of itself: path-free, and other for another compiler."""
    return subprocess.run([script, "-v"], capture_output=True, text=True, errors="replace", check=False).stderr
