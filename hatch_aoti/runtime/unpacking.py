"""Archives of compiled code, unpacked for as long as it takes to map the code, and nothing left behind."""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import shutil
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from .integrity import check_id

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .declarations import Declaration, Variant

__all__ = ["alone", "cache_folder", "temporary_folder", "unpacked", "utf8_name"]


def temporary_folder() -> Path:
    """Return the folder for temporary files, whether or not it can be written to."""
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError:  # none is writable; the attempt below says so about this one
        return Path(os.environ.get("TMPDIR") or os.sep + "tmp")


def cache_folder() -> Path:
    """Return the folder for the caches of this user."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path(os.path.expanduser("~")) / ".cache")  # noqa: PTH111  (never raises)


def utf8_name(path: Path) -> str:
    """Return a path as a text for PyTorch's C++ code, which takes it for UTF-8. Raises OSError if Python does not."""
    name = str(path)
    if name.encode("utf-8", "surrogatepass") != os.fsencode(name):
        raise OSError(
            f"its name is not ASCII, and Python takes it for {sys.getfilesystemencoding()}, but PyTorch for UTF-8: set "
            "PYTHONUTF8=1, or a UTF-8 locale"
        )
    return name


def _members(archive: zipfile.ZipFile, entry: str) -> list[str]:
    """Return the names of an archive's members, without those of other models: `<stem>/data/aotinductor/<model>/…`."""
    parts = {name: name.split("/") for name in archive.namelist()}
    return [name for name, part in parts.items() if part[1:3] != ["data", "aotinductor"] or part[3] == entry]


@contextlib.contextmanager
def alone(model: Declaration, variant: Variant) -> Iterator[Path]:
    """Yield an archive with one model of a variant's file, under the name that `aoti_load_package` looks for.

    That function, like `load_package` with another name, loads all models of an archive before it returns one.
    """
    path, entry = model.folder / variant.file, variant.entry
    with zipfile.ZipFile(path) as archive:
        check_id(model, variant, path, archive)
        members = _members(archive, entry)
        if entry == "model" and len(members) == len(archive.namelist()):
            yield path
            return
        with _Folder(temporary_folder()) as folder:
            reduced = folder / path.name
            with zipfile.ZipFile(reduced, "w") as copy:
                for name in members:
                    info = zipfile.ZipInfo(name.replace(f"/data/aotinductor/{entry}/", "/data/aotinductor/model/", 1))
                    info.file_size = archive.getinfo(name).file_size  # above 2 GB it takes another header
                    with archive.open(name) as source, copy.open(info, "w") as target:
                        shutil.copyfileobj(source, target)
            yield reduced


class _Folder:
    """A folder of this process in `place`, removed on leaving; `path` if that is given and free, else a new one.

    What a killed process left goes when another one makes its first folder in the same place. A folder is locked as
    long as its owner lives: the system drops the lock when the process ends, however it does, and whatever container
    it is in. With `keep` the folder stays until the process ends.
    """

    _PREFIX = "hatch-aoti-"
    _FRESH = 60  # seconds in which a folder may not be locked yet
    _swept: ClassVar[set[Path]] = set()

    def __init__(self, place: Path, path: Path | None = None, *, keep: bool = False) -> None:
        import fcntl

        if place not in self._swept:
            self._swept.add(place)
            self._sweep(place)
        self.keep, self.owner = keep, os.getpid()
        try:
            if path is not None:
                path.mkdir(mode=0o700)
        except FileExistsError:  # not ours any more
            path = None
        self.path = path or Path(tempfile.mkdtemp(prefix=self._PREFIX, dir=place))
        self.lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None and self.keep:
            atexit.register(self._remove)
        else:
            self._remove()

    def _remove(self) -> None:
        if os.getpid() == self.owner:  # a forked child must not remove what its parent uses
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self.lock)

    @classmethod
    def _sweep(cls, place: Path) -> None:
        """Remove what killed processes left in `place`: our own folders, private to this user, that nobody locks."""
        with contextlib.suppress(OSError), os.scandir(place) as found:
            for entry in found:
                if re.fullmatch(cls._PREFIX + r"[a-z0-9_]{8}", entry.name):
                    with contextlib.suppress(OSError):
                        cls._remove_stale(entry.path)

    @classmethod
    def _remove_stale(cls, path: str) -> None:
        import fcntl

        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)  # no link
        try:
            found = os.fstat(descriptor)
            ours = found.st_uid == os.geteuid() and found.st_mode & 0o777 == 0o700
            if ours and found.st_mtime < time.time() - cls._FRESH:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # OSError: its owner lives
                shutil.rmtree(path)
        finally:
            os.close(descriptor)


_unpacked_before: dict[tuple[Path, str, Path, int, int], Path] = {}


@contextlib.contextmanager
def unpacked(model: Declaration, variant: Variant, place: Path, *, again: bool, keep: bool) -> Iterator[Path]:
    """Yield a folder in `place` with the content of a variant's file, but for other models than the variant's.

    It is removed on leaving, or, with `keep`, when the process ends: kernels for GPUs are read on their first launch.
    PyTorch never unmaps the code that it loads. With `again` every load of an archive in this process takes the same
    folder: the system then recognises the code by its path, and does not map it once more for each load. Code that has
    state must be mapped anew, as its state lies in it.
    """
    path = model.folder / variant.file
    found = path.stat()
    key = (path, variant.entry, place, found.st_mtime_ns, found.st_size)
    with zipfile.ZipFile(path) as archive:
        check_id(model, variant, path, archive)
        with _Folder(place, _unpacked_before.get(key) if again else None, keep=keep) as folder:
            _unpacked_before[key] = folder
            archive.extractall(folder, _members(archive, variant.entry))
            yield folder
