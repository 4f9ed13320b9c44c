"""Debugging a build: torch's own variables for it, what they change, and where their output goes.

torch reads these variables while it compiles (`torch/_inductor/config.py`, `torch/_logging/_internal.py`, 2.13). There
are two kinds. Some change the compiled code: a build with one of them is a debug build, and its wheel says so. The
others only make torch write down more. Whatever is set, every model is compiled anew, since a cache would leave nothing
to look at, and what comes of it never takes the place of a release build's artifact (see `job`).

Nothing but `check_logs` imports torch.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hatch_aoti.errors import Problem, did_you_mean
from hatch_aoti.settings.declaration import variable

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["SANITIZERS", "Debugging", "check_logs", "is_torch_option", "read_debugging", "without_debugging"]

_COMPILE = "AOT_INDUCTOR_DEBUG_COMPILE"
_SYMBOLS = "AOT_INDUCTOR_DEBUG_SYMBOLS"
_PRINTER = "AOT_INDUCTOR_DEBUG_INTERMEDIATE_VALUE_PRINTER"
_FILTER = "AOT_INDUCTOR_FILTERED_KERNELS_TO_PRINT"
_SANITIZE = variable("sanitize")
_TRACE = "TORCH_COMPILE_DEBUG"
_TRACE_FOLDER = "TORCH_COMPILE_DEBUG_DIR"
_LOGS = "TORCH_LOGS"
_LOGS_FILE = "TORCH_LOGS_OUT"

SANITIZERS = ("0", "address", "undefined", "address,undefined")
"""What HATCH_AOTI_SANITIZE may be; 0 is none."""

_FLAG = ("0", "1")  # torch takes "1" for yes, and anything else, "true" too, for no
_VALUES = {
    _COMPILE: _FLAG,
    _SYMBOLS: _FLAG,
    _PRINTER: ("0", "1", "2", "3"),
    _TRACE: _FLAG,
    _SANITIZE: SANITIZERS,
    "DUMP_AOTI_MINIFIER": _FLAG,
    "AOTINDUCTOR_REPRO_LEVEL": ("1", "2", "3", "4"),
}

# Those that change the compiled code. TORCH_COMPILE_DEBUG does: it has comments written into the generated C++, which
# move the line numbers of its assertions.
_CHANGING = (_COMPILE, _SYMBOLS, _PRINTER, _FILTER, _TRACE, _SANITIZE)

# Those that make torch write, and those that only say how and where.
_WRITING = (_LOGS, "TORCH_TRACE", "DUMP_AOTI_MINIFIER")
_WHERE = (_LOGS_FILE, "TORCH_LOGS_FORMAT", "AOTINDUCTOR_REPRO_LEVEL", _TRACE_FOLDER)
_PATHS = (_LOGS_FILE, "TORCH_TRACE", _TRACE_FOLDER)

# What torch's compiler takes from the environment beyond that: here options come from the settings, which the cache's
# keys and the manifest know about, and the check of the inputs at run time is no business of the build's.
_KEPT_OUT = ("TORCHINDUCTOR_", "AOT_INDUCTOR_", "AOTINDUCTOR_", "INDUCTOR_", "AOTI_", "TORCH_DTRACE")


@dataclasses.dataclass(frozen=True)
class Debugging:
    """What the environment asks for: variables that change the compiled code (`changes`), and those for output only."""

    changes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    output: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.changes or self.output)

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in sorted({**self.changes, **self.output}.items()))

    @property
    def symbols(self) -> bool:
        """Whether compiled code keeps what a debugger needs."""
        return not self.changes.keys().isdisjoint({_COMPILE, _SYMBOLS, _SANITIZE})

    @property
    def sanitizers(self) -> str:
        """The sanitizers of the C++ compiler (`-fsanitize=`) for compiled code; empty for none.

        Such code only loads in a process that has their run-time library in front, so no worker can verify it.
        """
        return self.changes.get(_SANITIZE, "")

    @property
    def saves_values(self) -> bool:
        """Whether compiled code writes files into the current directory, `tmp/aoti_torch….pt`."""
        return self.changes.get(_PRINTER) == "1"

    def inductor_options(self) -> dict[str, Any]:
        """Return what the variables mean as options of `torch._inductor.config`."""
        options: dict[str, Any] = {}
        if _COMPILE in self.changes:
            options["aot_inductor.debug_compile"] = True
        if _SYMBOLS in self.changes:
            options["aot_inductor.debug_symbols"] = True
        if _PRINTER in self.changes:
            options["aot_inductor.debug_intermediate_value_printer"] = self.changes[_PRINTER]
        if _FILTER in self.changes:
            options["aot_inductor.filtered_kernel_names"] = self.changes[_FILTER]
        return options

    def environ(self, folder: Path) -> dict[str, str]:
        """Return the variables for a worker whose output belongs into `folder`."""
        variables = {name: value for name, value in self.changes.items() if name == _TRACE}
        return {_TRACE_FOLDER: os.fspath(folder), **variables, **self.output}


def read_debugging(environ: Mapping[str, str], root: Path) -> tuple[Debugging, list[Problem]]:
    """Read the variables from `environ`, an empty one and a 0 counting as unset, and what is wrong with them.

    A relative path in one of them starts at `root`.
    """
    given = {name: value for name in (*_CHANGING, *_WRITING, *_WHERE) if (value := environ.get(name, "").strip())}
    problems = [
        Problem(name, f'must be {", ".join(choices[:-1])} or {choices[-1]}, but it is "{given[name]}".')
        for name, choices in _VALUES.items()
        if name in given and given[name] not in choices
    ]
    wanted = {name: value for name, value in given.items() if value != "0"}
    if _PRINTER not in wanted:
        wanted.pop(_FILTER, None)
    for name in _PATHS:
        if name in wanted:
            wanted[name] = os.fspath(root / wanted[name])
    if _LOGS_FILE in wanted and not Path(wanted[_LOGS_FILE]).parent.is_dir():
        problems.append(Problem(_LOGS_FILE, f"there is no folder {Path(wanted[_LOGS_FILE]).parent} for this file."))
    changes = {name: value for name, value in wanted.items() if name in _CHANGING}
    output = {name: value for name, value in wanted.items() if name not in _CHANGING}
    writes = _TRACE in changes or any(name in output for name in _WRITING)
    return Debugging(changes, output if writes else {}), problems


def without_debugging(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of `environ` but those from which torch's compiler takes options or orders to write."""
    return {name: value for name, value in environ.items() if not is_torch_option(name)}


def is_torch_option(name: str) -> bool:
    """Whether torch's compiler takes options, or orders to write, from the variable `name`."""
    return name in {*_CHANGING, *_WRITING, *_WHERE} or name.startswith(_KEPT_OUT)


def check_logs(payload: Mapping[str, str]) -> str:
    """Return what is wrong with a value of TORCH_LOGS, `payload["value"]`; an empty string if nothing is.

    For a worker (see `workers`), as it asks torch, which otherwise says so with a traceback when it is imported.
    """
    from torch._logging import _internal

    def refused(settings: str) -> bool:
        try:
            _internal._parse_log_settings(settings)  # noqa: SLF001
        except (ValueError, ImportError):
            return True
        return False

    value = payload["value"]
    if not refused(value):
        return ""
    words = [word.strip() for word in value.split(",")]
    wrong = next((word for word in words if not word or refused(word)), value).lstrip("+-")
    registry = _internal.log_registry
    names = ["all", *registry.log_alias_to_log_qnames, *registry.visible_artifacts]
    return (
        f'torch knows no log "{wrong}".{did_you_mean(wrong, names)} Write names with commas between them, each with a '
        f"+ in front for more of it or a - for less: modules, as torch._inductor, or {', '.join(sorted(names))}."
    )
