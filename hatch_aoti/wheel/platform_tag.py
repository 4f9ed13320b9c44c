"""The wheel's platform tag, from what its objects need.

Repair tools do not look inside a `.pt2` and public indexes refuse `linux_*` tags (pypa/cibuildwheel#1929), so the tag
has to be right when the wheel is built. A tag is a promise about the system: `manylinux_2_34` says that glibc is at
least 2.34 (PEP 600) and that libstdc++ and libgcc are at least those of the published policy of that name.
"""

from __future__ import annotations

import dataclasses
import re
from importlib import metadata
from typing import TYPE_CHECKING, Final

from hatch_aoti.errors import AotiError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from hatch_aoti.artifact.shared_object import ObjectNeeds

__all__ = ["TagChoice", "choose_tag", "torch_platform_floor"]

_Version = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class TagChoice:
    """The tag, why it is that one (`reason`, one line), and what would lower it (`lower`, empty if nothing would).

    `foreign` are libraries that the objects need and that neither the tag nor torch promises to be there.
    """

    tag: str
    reason: str
    lower: str = ""
    foreign: tuple[str, ...] = ()


def choose_tag(
    objects: Sequence[ObjectNeeds],
    *,
    system: str,
    machine: str,
    torch_floor: str | None = None,
    override: str | None = None,
) -> TagChoice:
    """Return the platform tag of a wheel that holds `objects`.

    `system` and `machine` are those of the builder, as `platform` spells them; `torch_floor` is the tag of the
    installed torch (`torch_platform_floor()`), below which a wheel that requires torch cannot be installed anyway;
    `override` is the `platform-tag` setting. Raises `AotiError` for objects of another machine or of musl, and for an
    override that is no platform tag of this machine or that promises less than the objects need.
    """
    system, machine = system.lower(), machine.lower()
    for needs in objects:
        if needs.machine != machine:
            raise AotiError(
                f"a compiled object is for {needs.machine}, but the wheel is built on {machine}: build the wheel on "
                f"the machine type that its models are compiled for."
            )
    if system == "darwin":
        return _macos(objects, machine, torch_floor, override)
    if system == "linux" and machine in {"x86_64", "aarch64"}:
        return _linux(objects, machine, torch_floor, override)
    raise AotiError(f"no platform tag is known for {system} on {machine}.")


def torch_platform_floor() -> str | None:
    """Return the platform tag of the installed torch, the oldest one it has, or None where it has none.

    Read from the `WHEEL` file of the distribution, without importing torch. A torch that was built from source has a
    `linux_*` tag, which says nothing about other machines and counts as none.
    """
    try:
        text = metadata.distribution("torch").read_text("WHEEL") or ""
    except metadata.PackageNotFoundError:
        return None
    tags = [line.rpartition("-")[2].strip() for line in text.splitlines() if line.startswith("Tag:")]
    return min((tag for tag in tags if _TAG.fullmatch(tag)), key=_tag_version, default=None)


_TAG: Final = re.compile(r"(?P<kind>manylinux|macosx)_(?P<major>\d+)_(?P<minor>\d+)_(?P<machine>\w+)")
# PEP 600, "Legacy manylinux tags"
_LEGACY: Final = {"manylinux2014": "manylinux_2_17", "manylinux2010": "manylinux_2_12", "manylinux1": "manylinux_2_5"}


def _tag_version(tag: str) -> _Version:
    match = _TAG.fullmatch(tag)
    return (int(match["major"]), int(match["minor"])) if match else ()


# --- Linux ---

# Since torch 2.6 its Linux wheels are manylinux_2_28; used where the installed torch does not say.
_DEFAULT_FLOOR: Final = (2, 28)

# The newest symbol versions that each policy admits, from `manylinux-policy.json` of auditwheel 6.8, which is where the
# policies are published. Policies that admit the same as the row before are left out, as are those below torch's.
_POLICIES: Final[dict[_Version, dict[str, _Version]]] = {
    (2, 28): {"GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)},
    (2, 31): {"GLIBCXX": (3, 4, 28), "CXXABI": (1, 3, 12), "GCC": (7, 0, 0)},
    (2, 34): {"GLIBCXX": (3, 4, 29), "CXXABI": (1, 3, 13), "GCC": (7, 0, 0)},
    (2, 35): {"GLIBCXX": (3, 4, 30), "CXXABI": (1, 3, 13), "GCC": (12, 0, 0)},
    (2, 39): {"GLIBCXX": (3, 4, 33), "CXXABI": (1, 3, 15), "GCC": (14, 0, 0)},
}
# libgcc differs by machine: the same file has these for aarch64.
_POLICIES_GCC_AARCH64: Final[dict[_Version, _Version]] = {(2, 34): (11, 0), (2, 35): (11, 0)}
# Versions without a number: transactional memory and __float128 are in every policy, packed relative relocations need
# glibc 2.36.
_UNNUMBERED: Final[dict[str, _Version]] = {
    "CXXABI_TM_1": (2, 28),
    "CXXABI_FLOAT128": (2, 28),
    "GLIBC_ABI_DT_RELR": (2, 36),
}
_GOVERNED: Final = {"GLIBC", "GLIBCXX", "CXXABI", "GCC"}

# What a manylinux system has (PEP 600 and the policies' library lists), and what torch and the CUDA packages that it
# requires bring along. torch ships libgomp under its plain name, so its versions are torch's business.
_SYSTEM_LIBRARIES: Final = re.compile(
    r"ld-linux-.*|lib(c|m|mvec|dl|rt|pthread|util|stdc\+\+|gcc_s|atomic)\.so\.\d+|libgomp\.so\.1"
    r"|lib(torch|c10|aoti_|shm|cuda|cudart|cublas|cudnn|cufft|curand|cusolver|cusparse|nvrtc|nvToolsExt|nvJitLink).*"
)


@dataclasses.dataclass(frozen=True, order=True)
class _Demand:
    """One version that an object needs; `policy` is the oldest manylinux that has it, empty if none is known."""

    policy: _Version
    version: str
    library: str
    symbols: tuple[str, ...]

    def __str__(self) -> str:
        shown = f"{self.symbols[0]}@{self.version}" if self.symbols else self.version
        return f"{shown} ({self.library})"


def _linux(objects: Sequence[ObjectNeeds], machine: str, torch_floor: str | None, override: str | None) -> TagChoice:
    _refuse_musl(objects)
    demands = sorted(set(_demands(objects, machine)))
    homeless = [demand for demand in demands if not demand.policy]
    floor = _tag_version(torch_floor or "") or _DEFAULT_FLOOR
    highest = max([floor, *(demand.policy for demand in demands)])
    reasons = [demand for demand in demands if demand.policy == highest > floor]
    foreign = tuple(sorted({lib for needs in objects for lib in needs.needed if not _SYSTEM_LIBRARIES.fullmatch(lib)}))
    if override is not None:
        floor_says = f"torch itself needs {torch_floor}" if torch_floor and highest == floor else ""
        needed = None if homeless else highest
        return _linux_override(override, machine, needed, homeless or reasons, floor_says, foreign)
    if homeless:
        return TagChoice(
            f"linux_{machine}",
            f"no published manylinux policy has {homeless[0]}; public indexes refuse this tag",
            f"compile with an older toolchain, as in the manylinux_{floor[0]}_{floor[1]} image",
            foreign,
        )
    tag = _manylinux(highest, machine)
    if not reasons:
        source = "torch's own tag" if torch_floor else "the tag of torch's wheels"
        return TagChoice(tag, f"{source}; the compiled objects need nothing newer", foreign=foreign)
    below = max([floor, *(demand.policy for demand in demands if demand.policy < highest)])
    return TagChoice(
        tag,
        f"the compiled objects need {reasons[0]}",
        f"compile with an older toolchain, as in the manylinux_{floor[0]}_{floor[1]} image; without "
        f"{_listed(reasons)} the tag would be {_manylinux(below, machine)}",
        foreign,
    )


def _linux_override(
    override: str,
    machine: str,
    needed: _Version | None,
    demands: Sequence[_Demand],
    floor_says: str,
    foreign: tuple[str, ...],
) -> TagChoice:
    if override == f"linux_{machine}":
        return TagChoice(override, "set by `platform-tag`; public indexes refuse this tag", foreign=foreign)
    stem, _, rest = override.partition("_")
    promised = _tag_version(f"{_LEGACY[stem]}_{rest}" if stem in _LEGACY else override)
    if not promised or not override.startswith("manylinux") or not override.endswith(f"_{machine}"):
        raise AotiError(
            f"`platform-tag`: `{override}` is no platform tag of a wheel built here; write "
            f"`manylinux_<major>_<minor>_{machine}` or `linux_{machine}`."
        )
    if needed is None or promised < needed:
        why = f"the compiled objects need {_listed(demands)}" if demands else floor_says
        if why:
            least = f"linux_{machine}" if needed is None else _manylinux(needed, machine)
            raise AotiError(
                f"`platform-tag`: `{override}` promises less than the wheel needs: {why}. Write `{least}`, remove the "
                "setting, or compile with an older toolchain."
            )
    return TagChoice(override, "set by `platform-tag`", foreign=foreign)


def _refuse_musl(objects: Iterable[ObjectNeeds]) -> None:
    for needs in objects:
        musl = next((library for library in needs.needed if "musl" in library), None)
        if musl:
            raise AotiError(
                f"a compiled object needs {musl}: it is built against musl, for which torch has no wheels. Build on a "
                "system with glibc, not on Alpine."
            )


def _demands(objects: Iterable[ObjectNeeds], machine: str) -> Iterator[_Demand]:
    for needs in objects:
        for need in needs.versions:
            if need.version.partition("_")[0] in _GOVERNED:
                yield _Demand(_policy_of(need.version, machine), need.version, need.library, need.symbols)


def _policy_of(version: str, machine: str) -> _Version:
    """Return the oldest policy that has this symbol version, or an empty tuple when none is known to have it."""
    if version in _UNNUMBERED:
        return _UNNUMBERED[version]
    family, _, rest = version.partition("_")
    if not re.fullmatch(r"\d+(\.\d+)*", rest):
        return ()
    number = tuple(int(part) for part in rest.split("."))
    if family == "GLIBC":
        return number[:2]
    for policy, admitted in _POLICIES.items():
        newest = admitted[family]
        if family == "GCC" and machine == "aarch64":
            newest = _POLICIES_GCC_AARCH64.get(policy, newest)
        if number <= newest:
            return policy
    return ()


def _manylinux(version: _Version, machine: str) -> str:
    return f"manylinux_{version[0]}_{version[1]}_{machine}"


def _listed(demands: Sequence[_Demand], limit: int = 3) -> str:
    more = len(demands) - limit
    return ", ".join(map(str, demands[:limit])) + (f" and {more} more" if more > 0 else "")


# --- macOS ---

# Apple silicon starts with macOS 11.
_OLDEST_MACOS: Final = (11, 0)


def _macos(objects: Sequence[ObjectNeeds], machine: str, torch_floor: str | None, override: str | None) -> TagChoice:
    deployment = max([_OLDEST_MACOS, *(needs.min_macos for needs in objects if needs.min_macos)])
    # From macOS 11 on installers know major versions only (packaging.tags.mac_platforms): 12.3 has to become 13.0.
    rounded = (deployment[0] + 1, 0) if deployment[1] else deployment
    floor = _tag_version(torch_floor or "") or _OLDEST_MACOS
    needed = max(rounded, floor)
    why = (
        f"the compiled objects have deployment target {deployment[0]}.{deployment[1]}"
        if rounded > floor
        else "torch's own tag; the compiled objects need nothing newer"
    )
    tag = f"macosx_{needed[0]}_{needed[1]}_{machine}"
    if override is None:
        lower = "set MACOSX_DEPLOYMENT_TARGET to an older version and compile again" if rounded > floor else ""
        return TagChoice(tag, why, lower)
    promised = _tag_version(override)
    if not promised or not override.startswith("macosx_") or not override.endswith(f"_{machine}"):
        raise AotiError(
            f"`platform-tag`: `{override}` is no platform tag of a wheel built here; write "
            f"`macosx_<major>_<minor>_{machine}`."
        )
    if promised < needed:
        raise AotiError(
            f"`platform-tag`: `{override}` promises less than the wheel needs ({why}). Write `{tag}`, remove the "
            "setting, or compile with an older MACOSX_DEPLOYMENT_TARGET."
        )
    return TagChoice(override, "set by `platform-tag`")
