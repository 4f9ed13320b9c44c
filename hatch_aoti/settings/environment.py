"""The environment that models are built and compiled in: composed from what is known to be needed, not inherited.

A compiler, torch, oneDNN and OpenMP each read variables that nobody thinks of when a wheel differs (`CPATH`,
`ONEDNN_MAX_CPU_ISA`, …). So a worker gets three kinds of variables, and no others:

- those by which programs, files and networks are found and reached (`_NEEDED`), which no artifact depends on;
- those that the setting `pass-environment` names, and Apple's for the compiler (`_FOR_THE_COMPILER`);
- a few with fixed values (`_FIXED`).

Of the second kind, those that a tool reads (`_OF_TOOLS`) are part of every cache key, and of the manifest, with hashes
of their values, which may be paths of the builder. The others are for the project's own code; what that makes of them
shows in the program that it exports.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from hatch_aoti.settings.debugging import is_torch_option, without_debugging
from hatch_aoti.settings.declaration import ENVIRONMENT_PREFIX, variable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = ["WorkerEnvironment", "compose", "is_settled", "tool_variables"]

_NEEDED = (
    # Who and where
    "HOME", "USER", "LOGNAME", "TMPDIR", "XDG_*",
    # Programs and shared libraries; what sandboxes and clocks of their own preload
    "PATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "DYLD_*", "FAKETIME*", "FAKEROOTKEY", "VIRTUAL_ENV", "CONDA_PREFIX",
    "PYTHONPATH", "PYTHONHOME", "PYTHONPYCACHEPREFIX",
    # The compiler, by the command that is recorded, and the caches and farms that it may be wrapped in
    "CXX", "CCACHE_*", "SCCACHE_*", "DISTCC_*",
    # Network, for project code that downloads weights
    "*_proxy", "*_PROXY", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE",
    "HF_*", "HUGGINGFACE_*", "HUGGING_FACE_*", "TRANSFORMERS_*", "TORCH_HOME",
    # GPUs: which, and where their toolkit is
    "CUDA_HOME", "CUDA_PATH", "CUDACXX", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER",
    "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES",
    # Whether a cache is trusted, which a worker checks, too
    variable("trust-cache"),
)  # fmt: skip

# Without these, Apple's compiler finds no headers, or builds for another system than the wheel's tag says.
_FOR_THE_COMPILER = ("SDKROOT", "DEVELOPER_DIR", "MACOSX_DEPLOYMENT_TARGET")

# Read by compilers, linkers and their wrappers; by torch, and the libraries that it computes with; by the C library.
_OF_TOOLS = (
    *_FOR_THE_COMPILER,
    "CPATH", "*_INCLUDE_PATH", "LIBRARY_PATH", "COMPILER_PATH", "GCC_*", "COLLECT_*", "DEPENDENCIES_OUTPUT",
    "SUNPRO_DEPENDENCIES", "LD_*", "LDEMULATION", "GNUTARGET", "COLLECT_NO_DEMANGLE", "CC", "CCC_*", "CL", "NIX_*",
    "*FLAGS", "CONDA_BUILD_SYSROOT", "ZERO_AR_DATE", "IPHONEOS_DEPLOYMENT_TARGET",
    "TORCH_*", "PYTORCH_*", "ATEN_*", "TRITON_*", "CUBLAS*", "CUDNN_*", "CUDA_*", "NVIDIA_*",
    "ONEDNN_*", "DNNL_*", "MKL_*", "MKLDNN_*", "OPENBLAS_*", "BLIS_*", "VECLIB_*", "NUMEXPR_*", "NPY_*",
    "OMP_*", "KMP_*", "GOMP_*", "GLIBC_TUNABLES", "MALLOC_*", "PYTHON*",
)  # fmt: skip

_FIXED = {
    "PYTHONHASHSEED": "0",
    "PYTHONUNBUFFERED": "1",
    "LC_ALL": "C.UTF-8",  # compiler messages in English, whatever the user's language
    "TZ": "UTC",
    "SOURCE_DATE_EPOCH": "315532800",  # for __DATE__ and __TIME__; 1980-01-01, as in the archives
}
_OF_EACH_JOB = ("TMPDIR", "TORCHINDUCTOR_CACHE_DIR")  # swept away with it

# Looked up by whatever prints, on import; that they are held back is worth no word.
_OF_TERMINALS = frozenset({
    "TERM", "COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "COLORTERM", "DISPLAY", "PAGER", "EDITOR", "SHELL",
    "LANG", "LANGUAGE", "CI", "PWD", "OLDPWD", "HOSTNAME",
})  # fmt: skip


@dataclasses.dataclass(frozen=True)
class WorkerEnvironment:
    """What all workers of a build have in common, and the names of what is set for the build and kept from them."""

    variables: Mapping[str, str]
    held_back: frozenset[str]

    def for_job(self, *, temporary: str, inductor: str) -> dict[str, str]:
        """Return the variables for one job: everything that it writes goes where it is swept away."""
        return {**self.variables, **dict(zip(_OF_EACH_JOB, (temporary, inductor), strict=True))}

    def advice(self, looked_up: Iterable[str]) -> str:
        """Say which of the variables that a model looked up are set and held back; nothing if none is."""
        names = sorted(self.held_back.intersection(looked_up) - _OF_TERMINALS)
        if not names:
            return ""
        are, quoted = "it is" if len(names) == 1 else "they are", ", ".join(f'"{name}"' for name in names)
        return (
            f"the model looks up {_listed(names)} in the environment, where {are} set, but kept from models so that "
            f"builds are reproducible; write `pass-environment = [{quoted}]` under [tool.aoti] to let it through"
        )

    def advice_for_the_compiler(self) -> str:
        """Say which variables of compilers are held back, for when a compilation fails; nothing if none is."""
        names = [name for name in sorted(self.held_back) if _matches(name, _OF_COMPILERS)]
        if not names:
            return ""
        return (
            f"the compiler does not see {_listed(names)}, so that builds are reproducible; if it needs what is set "
            "there, write the name into `pass-environment` under [tool.aoti]"
        )


_OF_COMPILERS = (
    "CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH", "COMPILER_PATH", "GCC_EXEC_PREFIX", "LD_RUN_PATH",
    "NIX_*", "CONDA_BUILD_SYSROOT",
)  # fmt: skip


def compose(environ: Mapping[str, str], passed: Sequence[str] = ()) -> WorkerEnvironment:
    """Return the environment of workers, of a build that has `environ`; `passed` are names and globs to let through.

    torch's variables for debugging, and those that hold its options, are no part of either (see `debugging`).
    """
    known = {name: value for name, value in without_debugging(environ).items() if name not in _FIXED}
    admitted = (*_NEEDED, *_FOR_THE_COMPILER, *passed)
    variables = {name: value for name, value in known.items() if _matches(name, admitted)}
    ours = frozenset(name for name in known if name.startswith(ENVIRONMENT_PREFIX))
    return WorkerEnvironment({**variables, **_FIXED}, frozenset(known) - variables.keys() - ours)


def tool_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return which variables of a worker's `environ` tools read, by name, with the SHA-256 of each value."""
    return {
        name: hashlib.sha256(os.fsencode(value)).hexdigest()
        for name, value in sorted(environ.items())
        if _matches(name, _OF_TOOLS) and not _matches(name, _NEEDED) and not is_settled(name)
    }


def is_settled(name: str) -> bool:
    """Whether a variable is no one's to pass on: hatch-aoti sets it for workers, or reads it itself."""
    return name in _FIXED or name in _OF_EACH_JOB or name.startswith(ENVIRONMENT_PREFIX) or is_torch_option(name)


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _listed(names: Sequence[str]) -> str:
    quoted = [f"`{name}`" for name in names]
    return quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} and {quoted[-1]}"
