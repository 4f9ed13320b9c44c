r"""Reading and writing `.pt2` archives byte for byte, without executing anything in them.

The layout is that of `torch/export/pt2_archive` (torch 2.13): a zip of uncompressed members, all under one folder:

    <stem>/data/aotinductor/<model>/<file>      what the compiler made: the object and its `*.wrapper_metadata.json`
    <stem>/archive_format, archive_version      "pt2", "0"
    <stem>/byteorder, .data/version             "little", "6\n" (of the zip container)
    <stem>/.data/serialization_id               40 digits; random in torch's writer, a hash of the contents here

For each model torch's loader needs one `.so`, under any name, and the `.json` named like it with `_metadata.json` in
place of `.so` (`load_metadata` in `model_package_loader.cpp`; the device is read from it). It needs no other file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import re
import stat
import zipfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import IO, TYPE_CHECKING, Final

from hatch_aoti.artifact.atomic_files import appearing_file
from hatch_aoti.errors import AotiError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "ENTRY",
    "Member",
    "ModelFiles",
    "Package",
    "archive_id",
    "check_identity",
    "extract_objects",
    "join_packages",
    "read_package",
    "write_package",
]

ENTRY: Final = "model"
"""The name of the model in an archive that has one: what `torch._inductor.aoti_load_package` looks for."""


@dataclasses.dataclass(frozen=True)
class Member:
    """A file of a model in an archive that exists: contents of another one."""

    package: Package
    model: str
    name: str


Content = bytes | Path | Member
ModelFiles = Mapping[str, Content]
"""The files of one model: name inside the model's folder → contents, or the file or archive that has them."""

_MODELS: Final = "data/aotinductor/"
_FORMAT: Final = {"archive_format": b"pt2", "archive_version": b"0"}
_BOOKKEEPING: Final = {**_FORMAT, "byteorder": b"little", ".data/version": b"6\n"}
_SERIALIZATION_ID: Final = ".data/serialization_id"
_DATE: Final = (1980, 1, 1, 0, 0, 0)
_ALIGNMENT: Final = 64
_CHUNK: Final = 1 << 20


def write_package(path: Path, models: Mapping[str, ModelFiles], *, stem: str | None = None) -> None:
    """Write the files of `models` as a `.pt2` archive to `path`, replacing what is there only when all went well.

    The bytes depend on `models` and `stem` alone (the name of the folder inside, by default the name of the file
    without its suffix), not on times, permissions, order or where the contents come from. Contents in files and
    archives are copied in pieces. Raises `AotiError` for names that cannot be in an archive and for a file that cannot
    be read or written.
    """
    stem = path.stem if stem is None else stem
    members = _members(path, stem, models)
    try:
        with appearing_file(path) as file:
            _write_members(file, stem, members)
    except OSError as error:
        raise AotiError(f"cannot write {path}: {error.strerror or error} ({error.filename or path}).") from error


def join_packages(path: Path, parts: Mapping[str, Path]) -> None:
    """Write one archive with the models of several, byte for byte.

    `parts` are archives with one model each, by the names that the models get. Raises `AotiError` as `read_package` and
    `write_package` do, and for a part with another number of models.
    """
    models: dict[str, dict[str, Content]] = {}
    for entry, part in parts.items():
        package = read_package(part)
        if len(package.models) != 1:
            raise AotiError(f"{part} should have one model; it has {len(package.models)}.")
        [(model, files)] = package.models.items()
        models[entry] = {name: Member(package, model, name) for name in files}
    write_package(path, models)


def _members(path: Path, stem: str, models: Mapping[str, ModelFiles]) -> dict[str, Content]:
    members: dict[str, Content] = {}
    for model, files in models.items():
        for name, content in files.items():
            members[f"{_MODELS}{model}/{name}"] = content
    for part in (stem, *models):
        if "/" in part or not _is_safe(part):
            raise AotiError(f"cannot write {path}: `{part}` cannot be the name of a folder in an archive.")
    for member in members:
        if not _is_safe(member):
            raise AotiError(f"cannot write {path}: `{member}` cannot be the name of a file in an archive.")
    return dict(sorted(members.items()))


def _write_members(file: IO[bytes], stem: str, members: Mapping[str, Content]) -> None:
    digest = hashlib.sha256()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in [*members.items(), *sorted(_BOOKKEEPING.items())]:
            digest.update(f"{len(name)}:{name}".encode())
            digest.update(_write_member(archive, f"{stem}/{name}", content))
        _write_member(archive, f"{stem}/{_SERIALIZATION_ID}", _serialization_id(digest.digest()))


def _serialization_id(digest: bytes) -> bytes:
    # torch makes it 20 digits for the names and 20 for the contents; nothing reads them but people and caches.
    return f"{int.from_bytes(digest) % 10**40:040d}".encode()


def check_identity(path: Path) -> None:
    """Check that the archive at `path` has the id that `write_package` gives to its contents, which are read for it.

    Raises `AotiError` where it has not, for members that `write_package` does not write, and as `read_package` does.
    """
    package = read_package(path)
    members = {f"{_MODELS}{model}/{name}" for model, files in package.models.items() for name in files}
    found, digest = b"", hashlib.sha256()
    with _reading(path), zipfile.ZipFile(path) as archive:
        if {*package.other} == {*_BOOKKEEPING, _SERIALIZATION_ID}:
            for name in [*sorted(members), *sorted(_BOOKKEEPING)]:
                content = hashlib.sha256()
                with archive.open(f"{package.stem}/{name}") as member:
                    while chunk := member.read(_CHUNK):
                        content.update(chunk)
                digest.update(f"{len(name)}:{name}".encode() + content.digest())
            with archive.open(f"{package.stem}/{_SERIALIZATION_ID}") as member:
                found = member.read(41)
    if found != _serialization_id(digest.digest()):
        raise AotiError("it is not as hatch-aoti writes archives, or its id is not that of its contents.")


def _write_member(archive: zipfile.ZipFile, name: str, content: Content) -> bytes:
    """Append one member, aligned as torch's own writer does it, and return the SHA-256 of its contents."""
    info = zipfile.ZipInfo(name, _DATE)
    info.create_system = 3  # Unix, on every system
    info.external_attr = (stat.S_IFREG | 0o644) << 16
    info.file_size = _size(content)
    large = info.file_size * 1.05 > zipfile.ZIP64_LIMIT  # zipfile's own rule
    # The contents follow the fixed header, the name, the 64-bit sizes and an extra field: "FB", its length, padding.
    padding = -(archive.start_dir + 30 + len(name.encode()) + (20 if large else 0) + 4) % _ALIGNMENT
    info.extra = b"FB" + padding.to_bytes(2, "little") + b"Z" * padding
    digest = hashlib.sha256()
    with archive.open(info, "w", force_zip64=large) as target, _opened(content) as source:
        while chunk := source.read(_CHUNK):
            digest.update(chunk)
            target.write(chunk)
    return digest.digest()


def _size(content: Content) -> int:
    match content:
        case bytes():
            return len(content)
        case Path():
            return content.stat().st_size
        case Member(package, model, name):
            return package.models[model][name]


def _opened(content: Content) -> contextlib.AbstractContextManager[IO[bytes]]:
    match content:
        case bytes():
            return io.BytesIO(content)
        case Path():
            return content.open("rb")
        case Member(package, model, name):
            return package.open(model, name)


@dataclasses.dataclass(frozen=True)
class Package:
    """A `.pt2` archive that was checked but not read: contents come when asked for.

    `models` are the sizes in bytes of the files of each compiled model, by name inside its folder; `other` are those of
    all other members, by name inside the archive's folder, which is called `stem`.
    """

    path: Path
    stem: str
    models: Mapping[str, Mapping[str, int]]
    other: Mapping[str, int]

    def read(self, model: str, name: str) -> bytes:
        """Return the contents of one file of a model. Raises `AotiError` when they are damaged (CRC-32)."""
        with self.open(model, name) as member:
            return member.read()

    @contextlib.contextmanager
    def open(self, model: str, name: str) -> Iterator[IO[bytes]]:
        """Open one file of a model for reading in pieces. Raises `AotiError` when it is damaged or not there."""
        if name not in self.models.get(model, {}):
            raise AotiError(f"{self.path} has no file `{name}` of a model `{model}`.")
        inside = f"{self.stem}/{_MODELS}{model}/{name}"
        with _reading(self.path), zipfile.ZipFile(self.path) as archive, archive.open(inside) as member:
            yield member


def read_package(path: Path) -> Package:
    """Check the archive at `path` and return what is in it, without reading the models.

    Refused, with an `AotiError` that names the file: what is not a zip or is cut off; members that are compressed or
    encrypted, that are larger than the file, that appear twice, or whose name leaves the archive's folder; what is not
    a PT2 archive of version 0.
    """
    with _reading(path), zipfile.ZipFile(path) as archive:
        entries = [entry for entry in archive.infolist() if not entry.is_dir()]
        _check_entries(path, entries)
        stem = entries[0].filename.partition("/")[0]
        sizes = {entry.filename.removeprefix(f"{stem}/"): entry.file_size for entry in entries}
        for name, expected in _FORMAT.items():
            found = archive.read(f"{stem}/{name}") if sizes.get(name, 0) == len(expected) else b""
            if found != expected:
                raise AotiError(
                    f"{path} is not a PT2 archive of version 0: `{name}` should say {expected.decode()!r}. Build it "
                    "again with this version of hatch-aoti."
                )
    models: dict[str, dict[str, int]] = {}
    for name in [name for name in sizes if name.startswith(_MODELS) and name.count("/") > 2]:
        model, _, file = name.removeprefix(_MODELS).partition("/")
        models.setdefault(model, {})[file] = sizes.pop(name)
    frozen = {model: MappingProxyType(files) for model, files in models.items()}
    return Package(path, stem, MappingProxyType(frozen), MappingProxyType(sizes))


def archive_id(path: Path) -> str:
    """Return the id that `write_package` gave the archive at `path`: a hash of its contents, 40 digits."""
    package = read_package(path)
    with _reading(path), zipfile.ZipFile(path) as archive:
        return archive.read(f"{package.stem}/{_SERIALIZATION_ID}").decode()


def extract_objects(path: Path) -> dict[str, bytes]:
    """Return the shared object of each compiled model in the archive at `path`."""
    package = read_package(path)
    return {model: package.read(model, _object_of(package, model)) for model in package.models}


def _object_of(package: Package, model: str) -> str:
    objects = [name for name in package.models[model] if name.endswith(".so")]
    if len(objects) != 1:
        found = ", ".join(objects) or "none"
        raise AotiError(f"model `{model}` in {package.path} should have one shared object (.so); found: {found}.")
    return objects[0]


def _check_entries(path: Path, entries: list[zipfile.ZipInfo]) -> None:
    if not entries:
        raise AotiError(f"{path} is an empty archive. Build it again.")
    seen: set[str] = set()
    stem = entries[0].filename.partition("/")[0]
    room = path.stat().st_size
    for entry in entries:
        room -= entry.compress_size
        problem = _entry_problem(entry, stem, seen)
        if problem:
            raise AotiError(f"{path} is not a sound PT2 archive: member `{entry.filename}` {problem}. Do not load it.")
        if room < 0:
            raise AotiError(f"{path} is not a sound PT2 archive: its members are larger than the file. Do not load it.")
        seen.add(entry.filename)


def _entry_problem(entry: zipfile.ZipInfo, stem: str, seen: set[str]) -> str:
    # `orig_filename` is what the file says; `filename` is cut at a NUL byte
    if not _is_safe(entry.orig_filename) or "/" not in entry.filename:
        return "has a name that leaves the archive's folder"
    if not entry.filename.startswith(f"{stem}/"):
        return f"is outside the folder `{stem}` of the others"
    if entry.filename in seen:
        return "appears twice"
    if entry.flag_bits & 0x1:
        return "is encrypted"
    if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
        return "is compressed, which torch never writes"
    return ""


def _is_safe(name: str) -> bool:
    """Say whether a member name is relative, in normal form and free of characters that systems read differently."""
    if not name or re.search(r'[\\:\x00-\x1f\x7f"*<>?|]', name):
        return False
    return not name.startswith("/") and str(PurePosixPath(name)) == name and ".." not in name.split("/")


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn what zipfile raises for missing and damaged files into errors that name the file."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise AotiError(f"{path} is damaged: {error}. Build it again.") from error
        raise AotiError(f"cannot read {path}: {error.strerror}.") from error
    except (zipfile.BadZipFile, NotImplementedError, EOFError, ValueError, RuntimeError, OverflowError) as error:
        raise AotiError(
            f"{path} is not a zip archive, or it is damaged or cut off: {error}. Build it again."
        ) from error
