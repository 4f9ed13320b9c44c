"""A CPU baseline as compiler flags, inductor options and CPU requirements.

Facts about torch are from torch 2.13 (`torch/_inductor/cpp_builder.py`, `cpu_vec_isa.py`), on Linux x86-64 with g++ 12:

- `cpp.march` becomes `-march=<value>` in both compilations of a model, the wrapper (`-O1`) and the kernels (`-O3`).
  `None` means `-march=native` on Linux and no flag on macOS; the empty string means no flag anywhere.
- `cpp.simdlen` is compared with the bit width of the vector ISAs that torch found on the builder; the first that
  matches is used and adds its own `-m` flags, so those must stay within the baseline. A width that none has (1) gives
  scalar code without any `-m` flag.
- Width alone does not name an ISA: 512 finds AMX or VNNI first where the builder has them, `VecAVX512` adds
  `-mavx512bf16` where the builder has that, and a builder with SVE offers nothing else. So `vec_isa` names the class,
  and the compiler offers torch only that one. `VecAVX2` then adds `-mavx2 -mfma -mf16c` (all in v3), `VecAVX512` adds
  `-mavx512f -mavx512dq -mavx512vl -mavx512bw -mfma` (all in v4), `VecNEON` adds nothing.
- No target uses SVE: torch compiles it for one vector length (`-msve-vector-bits=256` or `128`), so the object is wrong
  on every CPU with another length. That is no baseline.
"""

from __future__ import annotations

import dataclasses
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Final

from hatch_aoti.errors import AotiError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

__all__ = [
    "TORCH_PICKS",
    "Target",
    "builder_cpu_features",
    "folding_features",
    "missing_features",
    "parse_cpuinfo",
    "resolve_targets",
]

TORCH_PICKS: Final = "auto"
"""`Target.vec_isa` of `native`: leave the choice to torch, which takes the best ISA of the builder."""

NATIVE: Final = "native"


@dataclasses.dataclass(frozen=True)
class Target:
    """A baseline: what code is generated, and which CPUs may run it.

    `system` is `linux` or `darwin`; `machine` is `x86_64`, `aarch64` (Linux) or `arm64` (macOS); `march` is the value
    of inductor's `cpp.march`; `simdlen` that of `cpp.simdlen`, in bits; `vec_isa` is the name of the class in
    `torch._inductor.cpu_vec_isa` that must be used, `None` for scalar code, `TORCH_PICKS` for torch's own choice;
    `features` are the names in `torch.cpu.get_capabilities()` that must be true on a CPU that runs the code;
    `description` says the same in a few words, for error texts.
    """

    name: str
    system: str
    machine: str
    march: str | None
    simdlen: int | None
    vec_isa: str | None
    features: tuple[str, ...]
    description: str

    def inductor_options(self) -> dict[str, str | int | bool | None]:
        """Return the inductor options of this baseline: architecture, vector width, and threads counted at run time.

        Without `cpp.dynamic_threads` the builder's number of cores is compiled into the kernels.
        """
        return {"cpp.march": self.march, "cpp.simdlen": self.simdlen, "cpp.dynamic_threads": True}


# x86-64 psABI, "Low Level System Information", table of micro-architecture levels. `get_capabilities()` does not report
# CMPXCHG16B, LAHF-SAHF (v2), MOVBE and OSXSAVE (v3); no CPU has the rest of its level without them, and torch's AVX
# entries already mean that the operating system saves the registers.
_V2: Final = ("sse3", "ssse3", "sse4_1", "sse4_2", "popcnt")
_V3: Final = (*_V2, "avx", "avx2", "bmi", "bmi2", "f16c", "fma3", "lzcnt")
_V4: Final = (*_V3, "avx512_f", "avx512_bw", "avx512_cd", "avx512_dq", "avx512_vl")
# Arm Architecture Reference Manual: LSE atomics, RDM and CRC32 are mandatory from Armv8.1 on; FP16 and dot products
# stay optional in Armv8.2 and `-march=armv8.2-a` does not use them.
_ARM82: Final = ("neon", "atomics", "rdm", "crc32")

# Best last: the position is the rank.
_BASELINES: Final = (
    Target("x86-64-v2", "linux", "x86_64", "x86-64-v2", 1, None, _V2, "SSE4.2"),
    Target("x86-64-v3", "linux", "x86_64", "x86-64-v3", 256, "VecAVX2", _V3, "AVX2"),
    Target("x86-64-v4", "linux", "x86_64", "x86-64-v4", 512, "VecAVX512", _V4, "AVX-512"),
    Target("armv8-a", "linux", "aarch64", "armv8-a", 128, "VecNEON", ("neon",), "NEON"),
    Target("armv8.2-a", "linux", "aarch64", "armv8.2-a", 128, "VecNEON", _ARM82, "NEON with LSE atomics"),
    # No flag: clang's own default for arm64-apple-macos is apple-m1, the oldest such machine; every newer one runs it.
    Target("apple-m1", "darwin", "arm64", "", 128, "VecNEON", (), "Apple silicon"),
)
_DEFAULTS: Final = {
    ("linux", "x86_64"): "x86-64-v3",
    ("linux", "aarch64"): "armv8-a",
    ("darwin", "arm64"): "apple-m1",
}


def resolve_targets(
    names: Sequence[str], *, system: str, machine: str, builder_features: Collection[str]
) -> tuple[Target, ...]:
    """Return the targets that `names` asks for, best first, without repetition; no name means the portable default.

    `system` and `machine` are the builder's, as `platform.system()` and `platform.machine()` spell them;
    `builder_features` is what `builder_cpu_features()` returns. `native` stands alone: it is the builder's CPU as it
    is, so nothing can be said about its rank among baselines. Raises `AotiError`, with every mistake in `names`, for a
    machine that has no targets, an unknown name, another machine's target, and a target that this CPU cannot run.
    """
    system, machine = _normalise(system, machine)
    known = _baselines_of(system, machine)
    wanted = dict.fromkeys(names or [_DEFAULTS[system, machine]])
    if NATIVE in wanted and len(wanted) > 1:
        others = ", ".join(f"`{name}`" for name in wanted if name != NATIVE)
        raise AotiError(
            f"target `native` cannot be combined with {others}: it means this very CPU, so there is no order between "
            "them. Write `native` alone, or only baselines."
        )
    if NATIVE in wanted:
        return (_native(system, machine, builder_features),)
    problems = [problem for name in wanted if (problem := _problem(name, known, system, machine, builder_features))]
    if problems:
        raise AotiError("\n".join(problems))
    return tuple(target for target in reversed(known) if target.name in wanted)


def missing_features(target: Target, features: Collection[str]) -> tuple[str, ...]:
    """Return the features that `target` needs and a CPU with `features` lacks, in the order of `target.features`."""
    return tuple(feature for feature in target.features if feature not in features)


def builder_cpu_features() -> frozenset[str]:
    """Return what this machine's CPU can do, in the names of `torch.cpu.get_capabilities()`, without importing torch.

    Read from `/proc/cpuinfo` on Linux. Empty elsewhere: on macOS no target asks for a feature.
    """
    if platform.system() != "Linux":
        return frozenset()
    cpuinfo = Path("/proc/cpuinfo")
    try:
        return parse_cpuinfo(cpuinfo.read_text(encoding="utf-8", errors="replace"))
    except OSError as error:
        raise AotiError(
            f"cannot read {cpuinfo} ({error.strerror}), which says what this CPU can run; make /proc readable where "
            "the wheel is built."
        ) from error


def folding_features() -> tuple[str, ...]:
    """Return what of this machine's CPU decides how weights are folded and prepacked: what oneDNN and ATen ask for."""
    return tuple(sorted(builder_cpu_features() & _DISPATCHED))


# What libraries choose their kernels by, and with them how they pack weights.
_DISPATCHED: Final = frozenset({
    "avx", "avx2", "fma3", "avx_vnni", "avx512_f", "avx512_bw", "avx512_dq", "avx512_vl", "avx512_vnni", "avx512_bf16",
    "avx512_fp16", "amx_tile", "amx_int8", "amx_bf16", "amx_fp16", "neon", "bf16", "i8mm", "sve", "sve2",
})  # fmt: skip

# Linux' names that differ from torch's (arch/x86/include/asm/cpufeatures.h, arch/arm64/kernel/cpuinfo.c).
_RENAMED: Final = {
    "pni": "sse3",
    "fma": "fma3",
    "abm": "lzcnt",
    "bmi1": "bmi",
    "sha_ni": "sha",
    "avx512f": "avx512_f",
    "avx512bw": "avx512_bw",
    "avx512cd": "avx512_cd",
    "avx512dq": "avx512_dq",
    "avx512vl": "avx512_vl",
    "avx512ifma": "avx512_ifma",
    "avx512vbmi": "avx512_vbmi",
    "asimd": "neon",
    "asimdrdm": "rdm",
    "asimdhp": "fp16_arith",
    "asimddp": "dot",
    "asimdfhm": "fhm",
    "svebf16": "sve_bf16",
}
# Only what the documentation of `torch.cpu.get_capabilities()` lists: `native` records these, and a CPU is later asked
# for each of them by that name.
_REPORTED: Final = frozenset(
    """
    sse sse2 sse3 ssse3 sse4_1 sse4_2 avx avx2 avx_vnni fma3 f16c bmi bmi2 popcnt lzcnt aes sha clflush clflushopt clwb
    avx512_f avx512_cd avx512_dq avx512_bw avx512_vl avx512_ifma avx512_vbmi avx512_vbmi2 avx512_bitalg
    avx512_vpopcntdq avx512_vnni avx512_bf16 avx512_fp16 avx512_vp2intersect amx_tile amx_int8 amx_bf16 amx_fp16
    neon fp16_arith bf16 i8mm dot sve sve2 sve_bf16 sme sme2 atomics fhm rdm crc32 sha1 sha2 pmull
    """.split()  # noqa: SIM905 - as a list this is sixty lines
)


def parse_cpuinfo(text: str) -> frozenset[str]:
    """Return the features in the text of a `/proc/cpuinfo`, in torch's names: those that every processor has."""
    cores = [
        frozenset(_RENAMED.get(word, word) for word in value.split())
        for key, _, value in (line.partition(":") for line in text.splitlines())
        if key.strip() in {"flags", "Features"}
    ]
    return frozenset.intersection(_REPORTED, *cores) if cores else frozenset()


def _normalise(system: str, machine: str) -> tuple[str, str]:
    system, machine = system.lower(), machine.lower()
    machine = {"amd64": "x86_64", "aarch64": "arm64"}.get(machine, machine)
    if system == "linux" and machine == "arm64":
        machine = "aarch64"
    if system in {"windows", "win32"}:
        raise AotiError("hatch-aoti does not support Windows yet: build on Linux, in WSL for example, or on macOS.")
    if (system, machine) not in _DEFAULTS:
        supported = "Linux on x86-64 and aarch64, and macOS on Apple silicon"
        raise AotiError(f"hatch-aoti has no targets for {system} on {machine}: it supports {supported}.")
    return system, machine


def _baselines_of(system: str, machine: str) -> tuple[Target, ...]:
    return tuple(target for target in _BASELINES if (target.system, target.machine) == (system, machine))


def _problem(
    name: str, known: Sequence[Target], system: str, machine: str, builder_features: Collection[str]
) -> str | None:
    target = next((target for target in known if target.name == name), None)
    if target is None:
        return _unknown(name, known, system, machine)
    missing = missing_features(target, builder_features)
    if not missing:
        return None
    runnable = [lower.name for lower in known if not missing_features(lower, builder_features)]
    advice = f", or choose `{runnable[-1]}`, the best that this one can run" if runnable else ""
    return (
        f"target `{name}` ({target.description}) cannot be checked here: this CPU lacks {', '.join(missing)}. "
        f"Build on a machine that has them{advice}."
    )


def _unknown(name: str, known: Sequence[Target], system: str, machine: str) -> str:
    here = [*(target.name for target in known), NATIVE]
    listed = f"Targets for {system} on {machine}: {', '.join(here)}."
    elsewhere = next((target for target in _BASELINES if target.name == name), None)
    if elsewhere:
        return (
            f"target `{name}` is for {elsewhere.system} on {elsewhere.machine}, and this builder is {system} on "
            f"{machine}: cross compiling is not supported, build on such a machine. {listed}"
        )
    return f"unknown target `{name}`.{did_you_mean(name, here)} {listed}"


def _native(system: str, machine: str, builder_features: Collection[str]) -> Target:
    if system == "darwin":
        # `-march=native` is not known to clang on Apple silicon, and torch passes no flag there either.
        return dataclasses.replace(_baselines_of(system, machine)[-1], name=NATIVE)
    features = tuple(sorted(builder_features))
    return Target(NATIVE, system, machine, None, None, TORCH_PICKS, features, "the CPU it was built on")
