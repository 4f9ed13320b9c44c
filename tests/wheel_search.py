"""Looks through everything in a wheel, inside the `.pt2` files too."""

from __future__ import annotations

import io
import re
import zipfile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

__all__ = ["contents", "find_traces", "objects"]


def contents(wheel: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the name and the bytes of every member, at every depth, and the bytes of the archives themselves."""
    yield from _inside(wheel.name, wheel.read_bytes())


def _inside(name: str, data: bytes) -> Iterator[tuple[str, bytes]]:
    yield name, data
    if data.startswith(b"PK\x03\x04"):
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            for member in archive.namelist():
                yield from _inside(f"{name}: {member}", archive.read(member))


def objects(wheel: Path) -> dict[str, bytes]:
    """Return the shared objects in a wheel, by where they are."""
    return {name: data for name, data in contents(wheel) if data.startswith(b"\x7fELF")}


def find_traces(wheel: Path, words: Iterable[str]) -> list[str]:
    """Return where any of `words` stands by itself, not as a part of a longer word, with what is around it."""
    pattern = re.compile(
        rb"(?<![\w.-])(" + b"|".join(re.escape(word.encode()) for word in words) + rb")(?![\w-])"
    )  # fmt: skip
    return [
        f"{name}: {data[max(0, found.start() - 20) : found.end() + 40]!r}"
        for name, data in contents(wheel)
        for found in pattern.finditer(data)
    ]
