"""Where two wheels differ: which file, member of an archive, section of an object, key of a JSON text, line of another.

Either may be made to do harm: nothing of them is executed, what is shown is escaped, and what cannot be taken apart is
compared as bytes.
"""

from __future__ import annotations

import dataclasses
import difflib
import io
import itertools
import zipfile
from typing import TYPE_CHECKING, Any, Final

from elftools.elf.elffile import ELFFile

from hatch_aoti.artifact.shared_object import check_tables
from hatch_aoti.artifact.untrusted import open_wheel, parse_json, printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from hatch_aoti.artifact.untrusted import WheelFile

__all__ = ["MemberDifference", "compare_wheels", "explain_difference"]

_FIELDS: Final = ("date_time", "external_attr", "create_system", "compress_type", "extra", "flag_bits")
_MOST_LINES: Final = 12  # of one text, one object or one archive; the first ones tell the reason
_LARGEST_PART: Final = 1 << 30  # bytes that are held in memory to be taken apart


@dataclasses.dataclass(frozen=True)
class MemberDifference:
    """A file of a wheel that is another one, or missing, in another wheel, and what differs in it, line by line."""

    name: str
    state: str
    details: tuple[str, ...] = ()


def explain_difference(left: Path, right: Path) -> str:
    """Return what differs between two wheels, a line for each difference; an empty string if the bytes are equal."""
    found = compare_wheels(left, right)
    return "\n".join(
        f"{left.name}: {f'member {item.name}' if item.name else 'the archive'}: {detail}"
        for item in found
        for detail in item.details or (item.state,)
    )


def compare_wheels(left: Path, right: Path) -> tuple[MemberDifference, ...]:
    """Return the files that differ between two wheels; empty if, and only if, the bytes are equal.

    What is about the archives as such has the name "". Raises `AotiError` for a wheel that cannot be read.
    """
    if _equal_files(left, right):
        return ()
    with open_wheel(left) as one, open_wheel(right) as two:
        found = tuple(_compare_members(one, two))
    # What no part explains is between the parts: another compression, padding, tables of a container.
    return found or (MemberDifference("", "differs", (_container_difference(left, right),)),)


def _equal_files(left: Path, right: Path) -> bool:
    if left.stat().st_size != right.stat().st_size:
        return False
    with left.open("rb") as one, right.open("rb") as two:
        while chunk := one.read(1 << 20):
            if chunk != two.read(len(chunk)):
                return False
    return True


def _container_difference(left: Path, right: Path) -> str:
    with zipfile.ZipFile(left) as one, zipfile.ZipFile(right) as two:
        sizes = [[entry.compress_size for entry in archive.infolist()] for archive in (one, two)]
    if sizes[0] != sizes[1]:
        return "every file is the same, but compressed to another size: by another zlib, or another level of it"
    return f"every file is the same: {_first_difference(left.read_bytes(), right.read_bytes())}"


def _compare_members(one: WheelFile, two: WheelFile) -> Iterator[MemberDifference]:
    whole = [f"only the first: {text}" for text in one.problems if text not in two.problems]
    whole += [f"only the second: {text}" for text in two.problems if text not in one.problems]
    before, after = one.members, two.members
    if [name for name in before if name in after] != [name for name in after if name in before]:
        whole.append("the members are in another order")
    if whole:
        yield MemberDifference("", "differs", tuple(whole))
    for name in sorted(before.keys() | after.keys()):
        if name not in after:
            yield MemberDifference(name, "is only in the first")
        elif name not in before:
            yield MemberDifference(name, "is only in the second")
        else:
            details = [
                f"{field} is {values[0]!r} and {values[1]!r}"
                for field in _FIELDS
                if (values := (getattr(before[name], field), getattr(after[name], field)))[0] != values[1]
            ]
            details += _compare_streams(one, two, name)
            if details:
                yield MemberDifference(name, "differs", tuple(details))


def _compare_streams(one: WheelFile, two: WheelFile, name: str) -> Iterator[str]:
    """Yield what differs in a member; those that are equal, as most are, are not held in memory."""
    with one.open(name) as left, two.open(name) as right:
        while (chunk := left.read(1 << 20)) == right.read(1 << 20):
            if not chunk:
                return
    sizes = [wheel.members[name].file_size for wheel in (one, two)]
    if max(sizes) > _LARGEST_PART:
        yield f"{sizes[0]} and {sizes[1]} bytes, too many to say more"
        return
    for line in _compare(one.read(name, _LARGEST_PART), two.read(name, _LARGEST_PART), ""):
        yield line.removeprefix(": ")


def _compare(left: bytes, right: bytes, where: str) -> Iterator[str]:
    if left == right:
        return
    compare = _compare_contents
    if left[:4] == right[:4] == b"PK\x03\x04":
        compare = _compare_archives
    elif left[:4] == right[:4] == b"\x7fELF":
        compare = _compare_objects
    elif left[:1] == right[:1] == b"{":
        compare = _compare_json
    try:
        findings = list(itertools.islice(compare(left, right, where), 10 * _MOST_LINES))
    except Exception:  # noqa: BLE001 - damaged bytes surface in zipfile and pyelftools as nearly any exception
        findings = []
    # What no part explains is between the parts: padding, tables of a container.
    yield from findings or [f"{where}: {_first_difference(left, right)}"]


def _compare_archives(left: bytes, right: bytes, where: str) -> Iterator[str]:
    with zipfile.ZipFile(io.BytesIO(left)) as one, zipfile.ZipFile(io.BytesIO(right)) as two:
        before = {entry.filename: entry for entry in one.infolist()}
        after = {entry.filename: entry for entry in two.infolist()}
        if sum(entry.file_size for entry in (*before.values(), *after.values())) > len(left) + len(right):
            return  # torch compresses nothing, so this is no `.pt2`, and may be a bomb
        yield from _only_in_one(before, after, f"{where}: member")
        shared = [name for name in before if name in after]
        if shared != [name for name in after if name in before]:
            yield f"{where}: the members are in another order"
        for name in shared:
            for field in _FIELDS:
                values = getattr(before[name], field), getattr(after[name], field)
                if values[0] != values[1]:
                    yield f"{where}: member {printable(name)}: {field} is {values[0]!r} and {values[1]!r}"
            yield from _compare(one.read(name), two.read(name), f"{where}: member {printable(name)}")


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
                yield f"{where}: section {printable(name)}: {fields}"
            yield from _compare_contents(before[name][1], after[name][1], f"{where}: section {printable(name)}")


def _sections(data: bytes) -> dict[str, tuple[dict[str, Any], bytes]]:
    """Return the header and the contents of each section by name; a name that occurs again gets a number."""
    sections: dict[str, tuple[dict[str, Any], bytes]] = {}
    elf = ELFFile(io.BytesIO(data))
    check_tables(elf, len(data))
    for index, section in enumerate(elf.iter_sections()):
        name = f"{section.name}#{index}" if section.name in sections else section.name
        contents = b"" if section["sh_type"] == "SHT_NOBITS" else section.data()
        sections[name] = (dict(section.header), contents)
    return sections


def _only_in_one(before: Mapping[str, Any], after: Mapping[str, Any], what: str) -> Iterator[str]:
    for name in sorted(before.keys() - after.keys()):
        yield f"{what} {printable(name)} is only in the first"
    for name in sorted(after.keys() - before.keys()):
        yield f"{what} {printable(name)} is only in the second"


def _compare_json(left: bytes, right: bytes, where: str) -> Iterator[str]:
    before, after = dict(_leaves(parse_json(left))), dict(_leaves(parse_json(right)))
    yield from _only_in_one(before, after, f"{where}: key")
    for key, value in before.items():
        if key in after and value != after[key]:
            yield f"{where}: {printable(key)} is {value!r:.200} and {after[key]!r:.200}"


def _leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield what is in JSON data, and the way to it: `models.digits.artifacts[0].sha256`."""
    children: Iterable[tuple[str, Any]] = ()
    if isinstance(value, dict):
        children = ((f"{key}.{name}".removeprefix("."), item) for name, item in value.items())
    elif isinstance(value, list):
        children = ((f"{key}[{index}]", item) for index, item in enumerate(value))
    if not value or not isinstance(value, (dict, list)):
        yield key, value
    for name, item in children:
        yield from _leaves(item, name)


def _compare_contents(left: bytes, right: bytes, where: str) -> Iterator[str]:
    if left == right:
        return
    try:
        before, after = left.decode("utf-8").splitlines(), right.decode("utf-8").splitlines()
    except UnicodeDecodeError:
        yield f"{where}: {_first_difference(left, right)}"
        return
    # Comparing takes the product of the numbers of lines, where they are unlike.
    changes = difflib.unified_diff(before[:20_000], after[:20_000], lineterm="", n=0)
    changed = [line for line in changes if not line.startswith(("---", "+++"))]
    if not changed or any("\0" in line for line in changed):
        yield f"{where}: {_first_difference(left, right)}"
        return
    for line in changed[:_MOST_LINES]:
        yield f"{where}: {printable(line[:300])}"
    if len(changed) > _MOST_LINES:
        yield f"{where}: and {len(changed) - _MOST_LINES} lines more"


def _first_difference(left: bytes, right: bytes) -> str:
    at = next((index for index, (one, two) in enumerate(zip(left, right, strict=False)) if one != two), None)
    sizes = "" if len(left) == len(right) else f"{len(left)} and {len(right)} bytes; "
    if at is None:
        return f"{sizes}one begins with the other"
    start = max(0, at - 24)
    return f"{sizes}from byte {at} on: {left[start : at + 40]!r} and {right[start : at + 40]!r}"
