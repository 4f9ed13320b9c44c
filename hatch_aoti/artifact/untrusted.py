"""Reading what strangers wrote: wheels, names and JSON that may have been made to harm whoever looks at them.

Nothing is unpacked before its name and its size have been checked, and nothing is shown as it is.
"""

from __future__ import annotations

import contextlib
import json
import re
import stat
import struct
import zipfile
import zlib
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING, Any, Final

from hatch_aoti.errors import AotiError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = [
    "DAMAGE",
    "LARGEST_TEXT",
    "WheelFile",
    "check_regular",
    "is_safe_name",
    "open_wheel",
    "parse_json",
    "printable",
]

LARGEST_TEXT: Final = 16 << 20
"""The most bytes of a manifest, a RECORD or another text of a wheel; that of a hundred models has a tenth of it."""

# Weights hardly shrink, and zeros do by 1032 at most: this is between wheels and bombs. In bytes, and as a ratio.
_SURELY_FINE: Final = 256 << 20
_MOST_INFLATION: Final = 200

DAMAGE: Final = (
    zipfile.BadZipFile, zlib.error, struct.error,
    NotImplementedError, EOFError, ValueError, RuntimeError, OverflowError, IndexError,
)  # fmt: skip
"""What zipfile raises for damaged archives and members."""


def printable(text: object, *, lines: bool = False) -> str:
    """Return a text for a terminal: what would move the cursor, change colours or hide text is escaped.

    `lines` keeps the ends of lines, for a text whose lines are ours.
    """
    return "".join(
        character
        if character.isprintable() or (lines and character == "\n")
        else character.encode("unicode_escape", "surrogatepass").decode("ascii")
        for character in str(text)
    )


def is_safe_name(name: str) -> bool:
    """Say whether a file name, with folders or without, stays where it is put, on every system, and can be printed."""
    if not name or not name.isprintable() or re.search(r'[\\:"*<>?|]', name):
        return False
    parts = name.split("/")
    return str(PurePosixPath(name)) == name and not name.startswith("/") and not {"", ".", ".."} & set(parts)


def parse_json(data: bytes) -> Any:
    """Return what a JSON text in UTF-8 says. Raises `ValueError`, also for keys that come twice and endless nesting."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            raise ValueError("a key comes twice")
        return result

    def refuse(constant: str) -> Any:
        raise ValueError(f"{constant} is no number")

    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=unique, parse_constant=refuse)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def check_regular(path: Path) -> None:
    """Raise `AotiError` for what is no plain file: reading a pipe or a device would never end. Links are followed.

    A missing file is left for whoever opens it.
    """
    try:
        mode = path.stat().st_mode
    except ValueError as error:
        raise AotiError(f"{printable(path)} is no file name: {error}.") from error
    except OSError:
        return
    if not stat.S_ISREG(mode):
        what = "a directory" if stat.S_ISDIR(mode) else "not a plain file"
        raise AotiError(f"cannot read {printable(path)}: it is {what}.")


class WheelFile:
    """An open wheel whose members have been checked by their names and sizes, and not been read.

    `members` are the files by name. `problems` says what is not as it should be with the archive: then nothing may be
    unpacked, but `digest` can be asked for all that is in `members`.
    """

    def __init__(self, path: Path, archive: zipfile.ZipFile) -> None:
        self.path = path
        self._archive = archive
        self.members: Mapping[str, zipfile.ZipInfo]
        self.problems: tuple[str, ...]
        self.members, problems = _checked(archive, path.stat().st_size)
        self.problems = tuple(problems)

    def open(self, name: str) -> contextlib.AbstractContextManager[IO[bytes]]:
        """Open a member for reading in pieces; at most as many bytes come as were checked (`file_size`)."""
        return self._archive.open(self.members[name])

    def read(self, name: str, limit: int = LARGEST_TEXT) -> bytes:
        """Return the contents of a member. Raises `AotiError` where they are larger than `limit`."""
        if self.members[name].file_size > limit:
            size = self.members[name].file_size
            raise AotiError(f"{printable(self.path)}: {printable(name)} has {size} bytes, more than {limit}.")
        return self._archive.read(self.members[name])

    def find(self, pattern: str) -> list[str]:
        """Return the names of the members that match a regular expression as a whole."""
        return [name for name in self.members if re.fullmatch(pattern, name)]

    def the(self, pattern: str, what: str) -> str:
        """Return the name of the only member that matches. Raises `AotiError` where there is another number."""
        found = self.find(pattern)
        if len(found) != 1:
            count = len(found) or "no"
            raise AotiError(
                f"{printable(self.path)} has {count} {what}, so it is no wheel that hatch-aoti put models into."
            )
        return found[0]


@contextlib.contextmanager
def open_wheel(path: Path) -> Iterator[WheelFile]:
    """Open a wheel that may be anything. Raises `AotiError`, also for what turns out to be damaged inside the block."""
    try:
        check_regular(path)
        with zipfile.ZipFile(path) as archive:
            yield WheelFile(path, archive)
    except OSError as error:
        raise AotiError(f"cannot read {printable(path)}: {printable(error.strerror or error)}.") from error
    except DAMAGE as error:
        raise AotiError(
            f"{printable(path)} is not a zip archive, or it is damaged or cut off: {printable(error)}."
        ) from error


def _checked(archive: zipfile.ZipFile, room: int) -> tuple[dict[str, zipfile.ZipInfo], list[str]]:
    """Return the members that can be read without danger, and what is wrong with the others or with the whole."""
    members: dict[str, zipfile.ZipInfo] = {}
    problems: list[str] = []
    entries = archive.infolist()
    most = max(_SURELY_FINE, _MOST_INFLATION * room)
    packed = 0
    for entry in entries:
        if entry.is_dir() and not entry.file_size and is_safe_name(entry.orig_filename[:-1]):
            continue
        packed += entry.compress_size
        most -= entry.file_size
        problem = _member_problem(entry, members)
        if problem or most < 0:
            problems.append(f"{printable(entry.orig_filename)}: {problem or 'would unpack to more than any wheel has'}")
        else:
            members[entry.filename] = entry
    if packed > room:
        problems.append("its members are larger than the file: they overlap")
        members = {}
    if entries and min(entry.header_offset for entry in entries) != 0:
        problems.append("it has bytes in front of its first member")
    if archive.comment:
        problems.append("it has bytes after its last member")
    folded: dict[str, str] = {}
    for name in members:
        other = folded.setdefault(name.casefold(), name)
        if other != name:
            problems.append(f"{name}: is called like {other} on systems that take no notice of case")
    return members, problems


def _member_problem(entry: zipfile.ZipInfo, seen: Mapping[str, zipfile.ZipInfo]) -> str:
    # `orig_filename` is what the file says; `filename` is cut at a NUL byte
    if not is_safe_name(entry.orig_filename):
        return "is no name that may be unpacked"
    if entry.filename in seen:
        return "appears twice"
    if entry.flag_bits & 0x1:
        return "is encrypted"
    if entry.compress_type not in {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}:
        return "is compressed in another way than wheels are"
    kind = stat.S_IFMT(entry.external_attr >> 16) if entry.create_system == 3 else 0
    if kind not in {0, stat.S_IFREG}:
        return "is no plain file (a link, or something rarer)"
    return ""
