"""Says where two wheels differ: which file, which member of an archive, which section of a shared object."""

from __future__ import annotations

import difflib
import io
import zipfile
from typing import TYPE_CHECKING, Any

from elftools.elf.elffile import ELFFile

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

__all__ = ["explain_difference"]


def explain_difference(left: Path, right: Path) -> str:
    """Return what differs between two wheels, a line for each difference; an empty string if the bytes are equal."""
    return "\n".join(_compare(left.read_bytes(), right.read_bytes(), left.name))


def _compare(left: bytes, right: bytes, where: str) -> Iterator[str]:
    if left == right:
        return
    if left[:4] == right[:4] == b"PK\x03\x04":
        findings = list(_compare_archives(left, right, where))
    elif left[:4] == right[:4] == b"\x7fELF":
        findings = list(_compare_objects(left, right, where))
    else:
        findings = list(_compare_contents(left, right, where))
    # What no part explains is between the parts: padding, tables of a container.
    yield from findings or [f"{where}: {_first_difference(left, right)}"]


def _compare_archives(left: bytes, right: bytes, where: str) -> Iterator[str]:
    with zipfile.ZipFile(io.BytesIO(left)) as one, zipfile.ZipFile(io.BytesIO(right)) as two:
        before = {entry.filename: entry for entry in one.infolist()}
        after = {entry.filename: entry for entry in two.infolist()}
        yield from _only_in_one(before, after, f"{where}: member")
        shared = [name for name in before if name in after]
        if shared != [name for name in after if name in before]:
            yield f"{where}: the members are in another order"
        for name in shared:
            fields = ("date_time", "external_attr", "create_system", "compress_type", "extra", "flag_bits")
            for field in fields:
                values = getattr(before[name], field), getattr(after[name], field)
                if values[0] != values[1]:
                    yield f"{where}: member {name}: {field} is {values[0]!r} and {values[1]!r}"
            yield from _compare(one.read(name), two.read(name), f"{where}: member {name}")


def _compare_objects(left: bytes, right: bytes, where: str) -> Iterator[str]:
    before, after = _sections(left), _sections(right)
    yield from _only_in_one(before, after, f"{where}: section")
    for name in before:
        if name in after:
            header = {
                key: (value, after[name][0][key])
                for key, value in before[name][0].items()
                if value != after[name][0][key]
            }
            if header:
                fields = ", ".join(f"{key} is {one} and {two}" for key, (one, two) in header.items())
                yield f"{where}: section {name}: {fields}"
            yield from _compare_contents(before[name][1], after[name][1], f"{where}: section {name}")


def _sections(data: bytes) -> dict[str, tuple[dict[str, Any], bytes]]:
    """Return the header and the contents of each section by name; a name that occurs again gets a number."""
    sections: dict[str, tuple[dict[str, Any], bytes]] = {}
    for index, section in enumerate(ELFFile(io.BytesIO(data)).iter_sections()):
        name = f"{section.name}#{index}" if section.name in sections else section.name
        contents = b"" if section["sh_type"] == "SHT_NOBITS" else section.data()
        sections[name] = (dict(section.header), contents)
    return sections


def _only_in_one(before: Mapping[str, Any], after: Mapping[str, Any], what: str) -> Iterator[str]:
    for name in before.keys() - after.keys():
        yield f"{what} {name} is only in the first"
    for name in after.keys() - before.keys():
        yield f"{what} {name} is only in the second"


def _compare_contents(left: bytes, right: bytes, where: str) -> Iterator[str]:
    if left == right:
        return
    try:
        before, after = left.decode("utf-8").splitlines(), right.decode("utf-8").splitlines()
    except UnicodeDecodeError:
        yield f"{where}: {_first_difference(left, right)}"
        return
    changes = difflib.unified_diff(before, after, lineterm="", n=0)
    changed = [line for line in changes if not line.startswith(("---", "+++"))]
    if not changed or any("\0" in line for line in changed):
        yield f"{where}: {_first_difference(left, right)}"
    for line in changed[:12]:
        yield f"{where}: {line[:300]}"


def _first_difference(left: bytes, right: bytes) -> str:
    at = next((index for index, (one, two) in enumerate(zip(left, right, strict=False)) if one != two), None)
    sizes = "" if len(left) == len(right) else f"{len(left)} and {len(right)} bytes; "
    if at is None:
        return f"{sizes}one begins with the other"
    start = max(0, at - 24)
    return f"{sizes}from byte {at} on: {left[start : at + 40]!r} and {right[start : at + 40]!r}"
