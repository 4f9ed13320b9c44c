"""What a shared object needs from the system that loads it, read from its headers without loading it.

Linux objects are ELF; macOS objects are Mach-O, of which only the deployment target and the libraries matter here.
"""

from __future__ import annotations

import dataclasses
import io
import struct
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

from elftools.elf.constants import P_FLAGS
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection, GNUVerSymSection

from hatch_aoti.errors import AotiError

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Iterable, Iterator

__all__ = ["NeededVersion", "ObjectNeeds", "check_tables", "read_object"]


@dataclasses.dataclass(frozen=True, order=True)
class NeededVersion:
    """A symbol version that `library` must define, e.g. `libc.so.6`, `GLIBC_2.34`, and the symbols that ask for it.

    `symbols` is sorted, and empty where the version is needed as such (`GLIBC_ABI_DT_RELR`).
    """

    library: str
    version: str
    symbols: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class ObjectNeeds:
    """What one shared object asks of the system that loads it.

    `machine` is spelled as in platform tags (`x86_64`, `aarch64`, `arm64`); `needed` are the libraries in the order of
    the file; `versions` is sorted; `executable_stack` is true where glibc would make the stack executable, which
    glibc 2.41 and newer refuse to do in `dlopen`; `runpath` is empty where there is none; `stripped` says that there is
    no symbol table beyond the dynamic one; `min_macos` is the deployment target of a Mach-O object.
    """

    machine: str
    needed: tuple[str, ...] = ()
    versions: tuple[NeededVersion, ...] = ()
    executable_stack: bool = False
    runpath: str = ""
    stripped: bool = True
    min_macos: tuple[int, int] | None = None


def read_object(source: bytes | Path, *, name: str = "", symbols: bool = True) -> ObjectNeeds:
    """Read the needs of a 64-bit little-endian shared object, ELF or Mach-O, given as bytes or as a file.

    `name` is what errors call it; by default the path. Without `symbols`, those of the versions are left out: an object
    can be made such that looking for their names takes hours. Raises `AotiError` for a file that cannot be read, that
    is damaged or cut off, or that is something else.
    """
    name = name or (str(source) if isinstance(source, Path) else "the shared object")
    try:
        with _open(source) as stream:
            magic = stream.read(4)
            stream.seek(0)
            if magic == b"\x7fELF":
                return _read_elf(stream, name, symbols=symbols)
            if magic == _MACHO_MAGIC:
                return _read_macho(stream.read(), name)
    except AotiError:
        raise
    except OSError as error:
        raise AotiError(f"cannot read {name}: {error.strerror}.") from error
    except Exception as error:  # damaged bytes surface in pyelftools as nearly any exception
        raise AotiError(f"{name} is damaged or cut off: {error or type(error).__name__}. Build it again.") from error
    raise AotiError(f"{name} is not a 64-bit ELF or Mach-O shared object (it starts with {magic!r}).")


def _open(source: bytes | Path) -> contextlib.AbstractContextManager[IO[bytes]]:
    return source.open("rb") if isinstance(source, Path) else io.BytesIO(source)


_ELF_MACHINES: Final = {"EM_X86_64": "x86_64", "EM_AARCH64": "aarch64"}


# glibc's own limit of what a path may have, and so of what a library's name can be; in all, of one object.
_LONGEST_NAME, _LONGEST_NAMES = 4096, 1 << 20


def _read_elf(stream: IO[bytes], name: str, *, symbols: bool) -> ObjectNeeds:
    elf = ELFFile(stream)
    check_tables(elf, stream.seek(0, io.SEEK_END))
    kind = elf["e_type"]
    if kind != "ET_DYN" or elf.elfclass != 64 or not elf.little_endian:
        raise AotiError(f"{name} is not a 64-bit little-endian shared object, but {kind}, {elf.elfclass} bits.")
    dynamic = next((section for section in elf.iter_sections() if isinstance(section, DynamicSection)), None)
    if dynamic is None:
        raise AotiError(f"{name} has no dynamic section, so it cannot be loaded: it is cut off or badly stripped.")
    tags: list[tuple[str, Any]] = [(tag.entry.d_tag, tag) for tag in _bounded(dynamic.iter_tags())]
    machine = _ELF_MACHINES.get(elf["e_machine"], str(elf["e_machine"]))
    return ObjectNeeds(
        machine=machine,
        needed=tuple(tag.needed for kind, tag in tags if kind == "DT_NEEDED"),
        versions=_needed_versions(elf, symbols=symbols),
        executable_stack=_executable_stack(elf, machine),
        runpath=next((getattr(tag, kind[3:].lower()) for kind, tag in tags if kind in {"DT_RUNPATH", "DT_RPATH"}), ""),
        stripped=elf.get_section_by_name(".symtab") is None,
    )


def check_tables(elf: ELFFile, size: int) -> None:
    """Raise `ValueError` for tables that cannot be in a file of `size` bytes.

    With entries that have no size themselves, there could be 2**64 of them.
    """
    for count, entry, expected in (
        (elf.num_sections(), elf["e_shentsize"], 64),  # sizes of Elf64_Shdr and Elf64_Phdr, elf.h
        (elf.num_segments(), elf["e_phentsize"], 56),
    ):
        if count and (entry != expected or count * entry > size):
            raise ValueError("its tables are larger than the file")


def _bounded(tags: Iterable[Any]) -> Iterator[Any]:
    """Yield the entries of the dynamic section as long as their names do not add up to more than any object has.

    Every entry may name the whole table of strings, so a small file could take all memory there is.
    """
    left = _LONGEST_NAMES
    for tag in tags:
        length = len(getattr(tag, "needed", "") or "")
        left -= length
        if left < 0 or length > _LONGEST_NAME:
            raise ValueError("the names of the libraries do not end")
        yield tag


def _executable_stack(elf: ELFFile, machine: str) -> bool:
    """Say whether glibc would make the stack executable for this object.

    Without the header, glibc's default decides: executable on x86-64 (`sysdeps/x86_64/stackinfo.h`), not on aarch64.
    """
    for segment in elf.iter_segments():
        if segment["p_type"] == "PT_GNU_STACK":
            return bool(segment["p_flags"] & P_FLAGS.PF_X)
    return machine == "x86_64"


def _needed_versions(elf: ELFFile, *, symbols: bool) -> tuple[NeededVersion, ...]:
    needs = _section(elf, GNUVerNeedSection)
    if needs is None:
        return ()
    by_index = dict(_version_entries(needs))
    users: dict[int, list[str]] = {index: [] for index in by_index}
    versym = _section(elf, GNUVerSymSection) if symbols else None
    if versym is not None:
        for symbol in versym.iter_symbols():
            index = symbol.entry["ndx"]
            if index in users:
                users[index].append(symbol.name)
    return tuple(
        sorted(
            NeededVersion(library, version, tuple(sorted(users[index])))
            for index, (library, version) in by_index.items()
        )
    )


def _version_entries(needs: Any) -> Iterator[tuple[int, tuple[str, str]]]:
    # Each record takes 16 bytes, so a damaged count cannot make this run longer than the section is.
    left = min(needs["sh_size"], needs.stream.seek(0, io.SEEK_END)) // 16
    for library, auxiliaries in needs.iter_versions():
        for auxiliary in auxiliaries:
            left -= 1
            if left < 0 or len(library.name) + len(auxiliary.name) > _LONGEST_NAME:
                raise ValueError("the table of needed versions does not end")
            yield auxiliary["vna_other"], (library.name, auxiliary.name)


def _section(elf: ELFFile, kind: type[Any]) -> Any:
    return next((section for section in elf.iter_sections() if isinstance(section, kind)), None)


# mach-o/loader.h
_MACHO_MAGIC: Final = struct.pack("<I", 0xFEEDFACF)
_CPU_TYPES: Final = {0x0100000C: "arm64", 0x01000007: "x86_64"}
_MH_DYLIB, _MH_BUNDLE = 0x6, 0x8
_LC_LOAD_DYLIB, _LC_VERSION_MIN_MACOSX, _LC_BUILD_VERSION = 0xC, 0x24, 0x32


def _read_macho(data: bytes, name: str) -> ObjectNeeds:
    _, cpu, _, kind, count, _, _, _ = struct.unpack_from("<8I", data)
    if kind not in {_MH_DYLIB, _MH_BUNDLE}:
        raise AotiError(f"{name} is not a shared object, but a Mach-O file of type {kind}.")
    needed: list[str] = []
    minimum: tuple[int, int] | None = None
    offset = 32
    for _ in range(count):
        command, size = struct.unpack_from("<2I", data, offset)
        if size < 8:
            raise ValueError("a load command has no size")
        if command == _LC_LOAD_DYLIB:
            (start,) = struct.unpack_from("<I", data, offset + 8)
            needed.append(data[offset + start : offset + size].split(b"\0")[0].decode())
        elif command in {_LC_BUILD_VERSION, _LC_VERSION_MIN_MACOSX}:
            # minos follows the platform number in the newer command; both encode X.Y.Z as xxxx.yy.zz
            (packed,) = struct.unpack_from("<I", data, offset + (12 if command == _LC_BUILD_VERSION else 8))
            minimum = (packed >> 16, packed >> 8 & 0xFF)
        offset += size
    return ObjectNeeds(_CPU_TYPES.get(cpu, hex(cpu)), tuple(needed), min_macos=minimum)
