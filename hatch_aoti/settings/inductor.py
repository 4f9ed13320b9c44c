"""Options of `torch._inductor.config`: their names in a project, and those that hatch-aoti decides itself.

Nothing here asks torch, whose import takes seconds and has no place in the build process: which options there are, and
what they take, is checked where models are compiled (`compiler.options`).
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from hatch_aoti.errors import Problem

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["DECIDED_OPTIONS", "check_inductor_configs", "flatten_inductor_configs", "options_schema", "split_name"]

_TARGET = "the CPU baseline sets it; choose one with `tool.aoti.target`"
_PACKAGING = "hatch-aoti writes the .pt2 file itself, so that it is the same on every build"
_CONSTANTS = "hatch-aoti decides where the weights are stored, because the loader it generates has to find them"
_CALLING = "hatch-aoti records the calling convention itself"
_COMPILER = "hatch-aoti runs the compiler itself, to keep builds reproducible; choose one with the variable CXX"
_THREADS = "a wheel does not know how many cores it will meet, so the number of threads is left to run time"
_LOADABLE = "the result has to load into the torch that the wheel requires"

DECIDED_OPTIONS: Mapping[str, str] = {
    "aot_inductor.aoti_shim_library": _LOADABLE,
    "aot_inductor.aoti_shim_library_path": _LOADABLE,
    "aot_inductor.cross_target_platform": _LOADABLE,
    "aot_inductor.dynamic_linkage": _LOADABLE,
    "aot_inductor.enable_line_tables": "line tables carry paths of the build machine into the wheel",
    "aot_inductor.force_mmap_weights": _CONSTANTS,
    "aot_inductor.link_libtorch": _LOADABLE,
    "aot_inductor.metadata": "hatch-aoti writes it, and keeps in it what the loader needs",
    "aot_inductor.model_name_for_generated_files": _PACKAGING,
    "aot_inductor.output_path": _PACKAGING,
    "aot_inductor.package": _PACKAGING,
    "aot_inductor.package_constants_in_so": _CONSTANTS,
    "aot_inductor.package_constants_on_disk_format": _CONSTANTS,
    "aot_inductor.package_cpp_only": _LOADABLE,
    "aot_inductor.serialized_in_spec": _CALLING,
    "aot_inductor.serialized_out_spec": _CALLING,
    "aot_inductor_mode.compile_standalone": _LOADABLE,
    "compile_threads": "every model is compiled in a process of its own; set how many at once with `tool.aoti.jobs`",
    "cpp.cxx": _COMPILER,
    "cpp.dynamic_threads": _THREADS,
    "cpp.march": _TARGET,
    "cpp.simdlen": _TARGET,
    "cpp.threads": _THREADS,
    "cpp.vec_isa_ok": _TARGET,
    "cpp_wrapper": "AOTInductor always writes a C++ wrapper",
}
"""Options that hatch-aoti sets and a project cannot, each with the reason and, where there is one, the other way."""

_PART = re.compile(r'("(?:[^"\\]|\\.)*"|[^."]+)(?:\.|$)')


def flatten_inductor_configs(configs: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return `configs` as pairs of a dotted name and a value, sorted by name.

    TOML's `cpp.min_chunk_size = 64` arrives as a nested table, and is the option `cpp.min_chunk_size`. What is written
    as a table because the option holds one is taken apart, too, unless it is empty: torch alone knows which is which,
    so `compiler.options` puts it together again. A name comes twice if the project wrote it in both forms.
    """
    return sorted(_flatten(configs, ""), key=lambda pair: pair[0])


def _flatten(configs: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in configs.items():
        # Within a table, a dot is a part of the key.
        name = prefix + (json.dumps(key, ensure_ascii=False) if prefix and not re.fullmatch(r"[^.\"]+", key) else key)
        if isinstance(value, dict) and value:
            yield from _flatten(value, f"{name}.")
        else:
            yield name, value


def split_name(name: str) -> list[str]:
    """Return the parts of a dotted name that `flatten_inductor_configs` made."""
    return [json.loads(part) if part.startswith('"') else part for part in _PART.findall(name)]


def check_inductor_configs(configs: Mapping[str, Any], prefix_key: str) -> list[Problem]:
    """Return a problem for each of `configs`, by dotted names, that is not for a project to set.

    `prefix_key` is the key that holds them, for instance `tool.aoti.models.digits.inductor-configs`.
    """
    found = {name: _reason(name) for name in configs}
    return [
        Problem(f"{prefix_key}.{name}", f"hatch-aoti sets this option itself: {reason}. Remove it.")
        for name, reason in found.items()
        if reason
    ]


def options_schema() -> dict[str, Any]:
    """Return what a JSON schema says of a table of options: values that JSON has, and nothing that is decided."""
    groups: dict[str, list[str]] = {}
    for option in sorted(DECIDED_OPTIONS):
        group, dot, name = option.partition(".")
        if dot:
            groups.setdefault(group, []).append(name)
    return {
        "propertyNames": {"not": {"enum": sorted(DECIDED_OPTIONS)}},
        "properties": {
            group: {"type": "object", "propertyNames": {"not": {"enum": names}}} for group, names in groups.items()
        },
        "additionalProperties": {"type": ["boolean", "number", "string", "array", "object"]},
    }


def _reason(name: str) -> str:
    """Say why a project cannot set what is called `name`, an option or a part of one; empty if it can."""
    parts = split_name(name)
    starts = (".".join(parts[:length]) for length in range(1, len(parts) + 1))
    return next((DECIDED_OPTIONS[start] for start in starts if start in DECIDED_OPTIONS), "")
