"""Whether a wheel is what its own records say: every hash and size, the names, the tags, the archives with models.

Nothing is installed, imported or executed. That the records are true as a whole, only building the wheel again
(`rebuild`) can tell.
"""

from __future__ import annotations

import base64
import binascii
import csv
import dataclasses
import hashlib
import re
import tempfile
from email.parser import BytesHeaderParser
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.tags import parse_tag
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from hatch_aoti.artifact.archive import check_identity
from hatch_aoti.artifact.untrusted import DAMAGE, open_wheel, printable
from hatch_aoti.errors import AotiError
from hatch_aoti.wheel.inspection import inspect_wheel
from hatch_aoti.wheel.manifest import MANIFEST, FileRecord, ManifestError, parse_manifest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from email.message import Message

    from hatch_aoti.artifact.untrusted import WheelFile
    from hatch_aoti.wheel.inspection import Report

__all__ = ["CheckedFile", "WheelReport", "check_wheel"]

# What PEP 427 and PEP 376 allow: SHA-256 or better.
_ALGORITHMS = frozenset({"sha256", "sha384", "sha512"})
_UNLISTED = r"[^/]+\.dist-info/RECORD(\.jws|\.p7s)?"
_CHUNK = 1 << 20


@dataclasses.dataclass(frozen=True)
class CheckedFile:
    """A file that the manifest has a hash of; `state` is `as recorded`, `differs` or `missing`."""

    name: str
    bytes: int
    state: str


@dataclasses.dataclass(frozen=True)
class WheelReport:
    """What was checked: `files` against the manifest, `listed` files against RECORD; and what is wrong."""

    source: str
    files: tuple[CheckedFile, ...]
    listed: int
    problems: tuple[str, ...]
    debug: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON-ready data."""
        return dataclasses.asdict(self)


def check_wheel(path: Path) -> WheelReport:
    """Check a wheel that hatch-aoti put models into.

    Raises `AotiError` where it cannot be read, or is no such wheel.
    """
    if path.suffix != ".whl":
        raise AotiError(f"{printable(path)} is not a wheel (.whl).")
    with open_wheel(path) as wheel:
        manifest_name = wheel.the(rf"(.*/)?{re.escape(MANIFEST)}", MANIFEST)
        problems = list(wheel.problems)
        digests = _digests(wheel, problems)
        listed = list(_check_record(wheel, digests, problems))
        problems += _check_names(wheel)
        data = wheel.read(manifest_name)
        accessor = manifest_name.removesuffix("json") + "py"
        text = wheel.read(accessor) if accessor in wheel.members else b""
    try:
        manifest = parse_manifest(data)
        described = manifest.all_files()
    except ManifestError as error:
        problems.append(f"{manifest_name}: {error}")
        return WheelReport(str(path), (), len(listed), tuple(problems))
    inside = manifest_name.removesuffix(MANIFEST)
    files = []
    for name, file in sorted(described.items()):
        found = digests.get(inside + name)
        if found is None:
            files.append(CheckedFile(name, 0, "missing"))
            problems.append(f"{inside}{name}: is in _models.json, and not in the wheel")
            continue
        actual = FileRecord(found["sha256"], wheel.members[inside + name].file_size)
        state = "as recorded" if actual == file else "differs"
        files.append(CheckedFile(name, actual.bytes, state))
        if state == "differs":
            problems.append(f"{inside}{name}: is not the file that _models.json describes (SHA-256 or size)")
    problems += _unrecorded(wheel, inside, described)
    report = _inspected(path, problems)
    if report is not None:
        problems += _check_platform(path, report)
        problems += _check_debug_marks(report, text.decode("utf-8", "replace"))
        problems += _check_archives(path, inside, [file.name for file in files if file.state == "as recorded"])
    debug = {} if report is None else report.debug
    return WheelReport(str(path), tuple(files), len(listed), tuple(problems), debug)


def _digests(wheel: WheelFile, problems: list[str]) -> dict[str, dict[str, str]]:
    """Return the hashes of all members by algorithm, in hexadecimal; empty ones, and a problem, where one is damaged.

    Each is read once, in pieces.
    """
    records = [wheel.read(name) for name in wheel.find(r"[^/]+\.dist-info/RECORD")]
    needed = {"sha256", *(name for name in _ALGORITHMS for record in records if f",{name}=".encode() in record)}
    digests = {}
    for name in wheel.members:
        hashes = {algorithm: hashlib.new(algorithm) for algorithm in sorted(needed)}
        try:
            with wheel.open(name) as member:
                while chunk := member.read(_CHUNK):
                    for state in hashes.values():
                        state.update(chunk)
        except DAMAGE as error:
            problems.append(f"{name}: is damaged: {printable(error)}")
            digests[name] = dict.fromkeys(hashes, "")
        else:
            digests[name] = {algorithm: state.hexdigest() for algorithm, state in hashes.items()}
    return digests


def _check_record(wheel: WheelFile, digests: Mapping[str, Mapping[str, str]], problems: list[str]) -> Iterator[str]:
    """Yield the files that RECORD lists and that are as it says; everything else becomes a problem."""
    records = wheel.find(r"[^/]+\.dist-info/RECORD")
    if len(records) != 1:
        problems.append(f"it has {len(records) or 'no'} RECORD: what is in it cannot be checked")
        return
    try:
        rows = list(csv.reader(wheel.read(records[0]).decode("utf-8").splitlines(), strict=True))
    except (ValueError, csv.Error) as error:
        problems.append(f"{records[0]}: cannot be read: {printable(error)}")
        return
    seen: set[str] = set()
    for row in rows:
        if len(row) != 3:
            problems.append(f"{records[0]}: a line has {len(row)} fields rather than 3: {printable(row)[:200]}")
            continue
        name, digest, size = row
        if name in seen:
            problems.append(f"{printable(name)}: RECORD lists it twice")
        seen.add(name)
        if name not in digests:
            problems.append(f"{printable(name)}: RECORD lists it, and it is not in the wheel")
        elif not re.fullmatch(_UNLISTED, name):
            problem = _record_problem(digest, size, digests[name], wheel.members[name].file_size)
            if problem:
                problems.append(f"{name}: {problem}")
            else:
                yield name
    unlisted = [name for name in digests if name not in seen and not re.fullmatch(_UNLISTED, name)]
    problems += [f"{name}: is not in RECORD" for name in unlisted]


def _record_problem(digest: str, size: str, actual: Mapping[str, str], bytes_: int) -> str:
    algorithm, _, value = digest.partition("=")
    if algorithm not in _ALGORITHMS:
        return f"RECORD has no SHA-256, or better, of it, but {printable(digest)!r}"
    try:
        recorded = base64.b64decode(value + "=" * (-len(value) % 4), altchars=b"-_", validate=True).hex()
    except (ValueError, binascii.Error):
        recorded = ""
    if recorded != actual[algorithm]:
        return "differs from its hash in RECORD"
    if size != str(bytes_):
        return f"has {bytes_} bytes, and RECORD says {printable(size)!r}"
    return ""


def _check_names(wheel: WheelFile) -> Iterator[str]:
    """Yield where the name of the file, METADATA and WHEEL do not say the same."""
    try:
        name, version, build, tags = parse_wheel_filename(wheel.path.name)
    except (InvalidWheelFilename, InvalidVersion, ValueError) as error:
        yield f"the file's name is none of a wheel: {printable(error)}"
        return
    folders = {member.partition("/")[0] for member in wheel.members if member.partition("/")[0].endswith(".dist-info")}
    if len(folders) != 1:
        yield f"it has {len(folders) or 'no'} folders .dist-info rather than one"
        return
    [folder] = folders
    missing = [file for file in ("METADATA", "WHEEL") if f"{folder}/{file}" not in wheel.members]
    yield from (f"{folder}/{file}: is missing" for file in missing)
    if missing:
        return
    metadata = _headers(wheel, f"{folder}/METADATA")
    stated = _stated(metadata.get("Name", ""), metadata.get("Version", ""))
    if stated != (name, version):
        yield f"{folder}/METADATA: is of {printable(metadata.get('Name'))} {printable(metadata.get('Version'))}"
    if _stated(*folder.removesuffix(".dist-info").rpartition("-")[::2]) != (name, version):
        yield f"{folder}: is not named like the wheel"
    headers = _headers(wheel, f"{folder}/WHEEL")
    found = [str(tag).lower() for tag in headers.get_all("Tag", [])]
    expanded = {str(tag) for line in found if line.count("-") == 2 for tag in parse_tag(line)}
    if expanded != {str(tag) for tag in tags}:
        yield f"{folder}/WHEEL: has the tags {printable(', '.join(found)) or 'none'}, unlike the file's name"
    if headers.get("Build", "") != "".join(map(str, build)):
        yield f"{folder}/WHEEL: has the build number {printable(headers.get('Build'))}, unlike the file's name"


def _stated(name: str, version: str) -> tuple[str, Version] | None:
    try:
        return canonicalize_name(name), Version(version)
    except InvalidVersion:
        return None


def _headers(wheel: WheelFile, name: str) -> Message:
    return BytesHeaderParser().parsebytes(wheel.read(name))


def _unrecorded(wheel: WheelFile, inside: str, described: Mapping[str, Any]) -> Iterator[str]:
    """Yield files beside the manifest that a build of hatch-aoti makes and that the manifest does not know."""
    for name in wheel.members:
        file = name.removeprefix(inside)
        in_package = "/" not in file and file.endswith(".pt2")
        ours = in_package or file in {"_models.py", "_models.safetensors"} or file.startswith("_aoti/")
        if name.startswith(inside) and ours and file not in described:
            yield f"{name}: is not in _models.json"


def _inspected(path: Path, problems: list[str]) -> Report | None:
    """Return what `inspect` says; what it refuses is a problem."""
    if problems:
        return None
    try:
        return inspect_wheel(path)
    except AotiError as error:
        problems.append(printable(error))
        return None


def _check_platform(path: Path, report: Report) -> Iterator[str]:
    tag = path.stem.rpartition("-")[2]
    if report.platform_tag != tag:
        yield f"_models.json: is for {printable(report.platform_tag)}, and the file's name says {tag}"


def _check_debug_marks(report: Report, accessor: str) -> Iterator[str]:
    """Yield where `_models.py` says something else about a debug build than the manifest does."""
    variables = ", ".join(f"{name}={value}" for name, value in sorted(report.debug.items()))
    said = re.findall(r"^A DEBUG BUILD \((.*)\), not for release\.$", accessor, re.MULTILINE)
    if said != ([variables] if variables else []):
        yield "_models.py and _models.json do not say the same about a debug build"


def _check_archives(path: Path, inside: str, names: list[str]) -> Iterator[str]:
    """Yield the archives whose id is not that of their contents."""
    with open_wheel(path) as wheel, tempfile.TemporaryDirectory(prefix="hatch-aoti-") as scratch:
        for name in names:
            if name.endswith(".pt2"):
                unpacked = Path(scratch) / "archive.pt2"
                with wheel.open(inside + name) as source, unpacked.open("wb") as target:
                    while chunk := source.read(_CHUNK):
                        target.write(chunk)
                try:
                    check_identity(unpacked)
                except AotiError as error:
                    yield f"{inside}{name}: {printable(error)}"
