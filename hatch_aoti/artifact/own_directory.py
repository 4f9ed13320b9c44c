"""A directory that is this program's own, and safe to write to and to remove from: what a cache is kept in.

Whatever is killed and when, a lock says whether an owner lives, so what the dead left behind is swept. Nothing outside
is reached: symbolic links are not followed, and a directory with anything else in it is not touched. What others can
write to is refused (`trusted` takes it all the same).
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shlex
import stat
import tempfile
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from hatch_aoti.artifact.plain_files import acquire, is_private, read_plain, release, remove
from hatch_aoti.errors import AotiError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["FORMAT", "OwnDirectory", "checked_key", "children", "is_vacant"]

FORMAT = 1
_TAG = "CACHEDIR.TAG"  # https://bford.info/cachedir/: backups and searches leave such a directory out
_TAG_HEAD = "Signature: 8a477f597d28d172789f06886806bc55\n# This directory is a cache of hatch-aoti, format "
_SCRATCH = re.compile(r"[a-z]+-[0-9a-f]{16}")
_FULL = (errno.ENOSPC, errno.EDQUOT)
_KEY = re.compile(r"[0-9a-f]{64}")


def is_vacant(root: Path) -> bool:
    """Whether there is nothing at `root` yet, or an empty directory: a place for a new cache. Raises `OSError`."""
    try:
        return not any(not name.startswith(f".{_TAG}.") for name in os.listdir(root))  # noqa: PTH208 - one less to close
    except FileNotFoundError:
        return not root.is_symlink()


class OwnDirectory:
    """The directory `root` with `folders` in it; methods raise `AotiError` where it cannot be written."""

    folders: ClassVar[tuple[str, ...]] = ("locks", "scratch")

    def __init__(self, root: Path, *, trusted: bool = False) -> None:
        """Open the cache at `root`, creating it if there is nothing, or an empty directory.

        Raises `AotiError` if the directory has something else in it, if others than this user can write to it (which
        `trusted` allows), or if it cannot be written, naming the ways to choose another.
        """
        self.root = root
        self.trusted = trusted
        with self._writing():
            self._adopt()
            for name in self.folders:
                self._directory(root / name)
            with tempfile.TemporaryFile(dir=root / "scratch"):
                pass
        self._sweep()

    def hold(self) -> None:
        """Keep what is used from now on safe from `trim`, in whichever process, until this one ends."""
        with self._writing():
            lock, handle = self._take_scratch("session")
        process = os.getpid()
        weakref.finalize(self, lambda: release(lock, handle) if os.getpid() == process else None)

    @contextlib.contextmanager
    def lock(self, key: str) -> Iterator[None]:
        """Hold the lock of `key`: whoever waits for it finds the entry made by the one before."""
        path = self.root / "locks" / f"{checked_key(key)}.lock"
        with self._writing():
            handle = acquire(path)
        try:
            yield
        finally:
            if handle is not None:
                release(path, handle)

    @contextlib.contextmanager
    def scratch(self, prefix: str) -> Iterator[Path]:
        """Yield a private directory on the cache's file system; it is removed afterwards, or by the next sweep.

        Raises `AotiError` also when the disk is full for what is done inside.
        """
        with self._writing():
            lock, handle = self._take_scratch(prefix)
        directory = lock.with_suffix("")
        try:
            with self._writing():
                directory.mkdir(mode=0o700)
            yield directory
        except OSError as error:
            if error.errno not in _FULL:
                raise
            raise self._cannot_write(error) from error
        finally:
            with contextlib.suppress(OSError):
                remove(directory)
            release(lock, handle)

    def _adopt(self) -> None:
        """Make sure that `root` is a cache of ours, or make it one."""
        self.root.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            self.root.mkdir(mode=0o700)
        found = self.root.stat()
        if not stat.S_ISDIR(found.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), os.fspath(self.root))
        tag = self._read_tag()
        # Another process may make it one just now, beginning with the tag.
        if tag is None and not is_vacant(self.root) and (tag := self._read_tag()) is None:
            raise AotiError(
                f"{self.root} is not a cache of hatch-aoti, but has other files in it, so nothing there is touched; "
                "choose a new or an empty directory with `tool.aoti.cache-dir`, HATCH_AOTI_CACHE_DIR or --cache-dir"
            )
        if tag not in {None, FORMAT}:
            raise AotiError(
                f"the artifact cache {self.root} is of another version of hatch-aoti (it has format {tag}, this one "
                f"uses {FORMAT}); remove it, or choose another directory with `tool.aoti.cache-dir` or the "
                "environment variable HATCH_AOTI_CACHE_DIR"
            )
        if not self.trusted:
            # An empty directory has nothing in it that others could have changed.
            writable = 0 if tag is None else stat.S_IWGRP | stat.S_IWOTH
            self._refuse_others(self.root, found, writable)
            if found.st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) != 0o700:
                self.root.chmod(0o700)
        if tag is None:
            handle, partial = tempfile.mkstemp(prefix=f".{_TAG}.", dir=self.root)
            with os.fdopen(handle, "w", encoding="ascii") as file:
                file.write(f"{_TAG_HEAD}{FORMAT}.\n# See https://bford.info/cachedir/ for what this file is for.\n")
            Path(partial).chmod(0o644)
            Path(partial).replace(self.root / _TAG)

    def _read_tag(self) -> int | None:
        """Return the format of the cache at `root`; None if that is not known to be one."""
        try:
            text = read_plain(self.root / _TAG, 1 << 12).decode("ascii")
        except (OSError, ValueError):
            return None
        found = re.match(re.escape(_TAG_HEAD) + r"([0-9]{1,9})\.\n", text)
        return int(found[1]) if found else None

    def _refuse_others(self, path: Path, found: os.stat_result, writable: int = stat.S_IWGRP | stat.S_IWOTH) -> None:
        """Raise `AotiError` if a directory is someone else's, or others can write to it."""
        if found.st_uid not in {os.geteuid(), 0}:
            wrong = f"belongs to another user (number {found.st_uid})"
            remedy = f"chown -R {os.geteuid()} {shlex.quote(str(self.root))}"
        elif found.st_mode & writable:
            wrong = f"can be written by others (mode {stat.S_IMODE(found.st_mode):o})"
            remedy = f"chmod -R go-w {shlex.quote(str(self.root))}"
        else:
            return
        raise AotiError(
            f"the artifact cache is not safe: {path} {wrong}, and what is in it gets into wheels. Remove it; or make "
            f"it yours alone (`{remedy}`) if nobody can have changed it; or, where all who can write to it are "
            "trusted, as in the image of a CI system, set HATCH_AOTI_TRUST_CACHE=1"
        )

    def _is_ours(self, path: Path, is_type: Callable[[int], bool] = stat.S_ISREG) -> bool:
        """Whether `path` is a file (or what `is_type` says), no link to one, and nobody else can have changed it."""
        try:
            found = path.lstat()
        except OSError:
            return False
        return is_type(found.st_mode) and (self.trusted or is_private(found))

    def _directory(self, path: Path) -> None:
        """Have a directory, and those above it up to the root. What is in its place and no directory of ours goes.

        Except for those right below the root: whoever made them others has to say what they are for.
        """
        for folder in reversed([path, *path.parents][: len(path.relative_to(self.root).parts)]):
            with contextlib.suppress(FileExistsError):
                folder.mkdir(mode=0o700)
            if self._is_ours(folder, stat.S_ISDIR):
                continue
            if folder.parent != self.root:
                self._discard(folder)
                folder.mkdir(mode=0o700)
            elif stat.S_ISDIR((found := folder.lstat()).st_mode):
                self._refuse_others(folder, found)
            else:
                raise AotiError(f"{folder} must be a directory, for the artifact cache, and is not one; remove it")

    def _discard(self, path: Path, inode: int | None = None) -> None:
        """Take something away in one step, so that no reader sees it half removed; with `inode`, only if it is that.

        Where it cannot be reached without leaving the cache, the link on the way goes.
        """
        for folder in reversed(list(path.parents)[: len(path.relative_to(self.root).parts) - 1]):
            if not self._is_ours(folder, stat.S_ISDIR):
                path, inode = folder, None
                break
        if not os.path.lexists(path):
            return
        with contextlib.suppress(OSError), self.scratch("discarded") as away:
            path.rename(away / "entry")
            if inode is not None and (away / "entry").lstat().st_ino != inode:
                (away / "entry").rename(path)  # another process has made it anew

    def _take_scratch(self, prefix: str) -> tuple[Path, int]:
        """Take a lock in `scratch`; return its path, which without suffix is the name of a directory, and descriptor.

        The lock comes before the directory, so that a directory without one has no living owner.
        """
        while True:
            lock = self.root / "scratch" / f"{prefix}-{secrets.token_hex(8)}.lock"
            handle = acquire(lock, wait=False)
            if handle is not None:
                return lock, handle

    def _running_since(self) -> list[float]:
        """Return when those began that work with the cache at present, in seconds since the epoch."""
        began = []
        for path in children(self.root / "scratch"):
            if path.suffix != ".lock" or not _SCRATCH.fullmatch(path.stem):
                continue
            with contextlib.suppress(OSError):
                since = path.lstat().st_mtime
                handle = acquire(path, wait=False)
                if handle is None:
                    began.append(since)
                else:
                    release(path, handle)
        return began

    def _sweep(self) -> None:
        """Remove what is in `scratch` and whose owners are gone."""
        scratch = self.root / "scratch"
        owned = set()
        for path in children(scratch):
            name = path.name.removesuffix(".lock")
            if _SCRATCH.fullmatch(name):
                owned.add(name)
            else:
                with contextlib.suppress(OSError):
                    remove(path)
        for name in sorted(owned):
            with contextlib.suppress(OSError):
                lock = scratch / f"{name}.lock"
                handle = acquire(lock, wait=False)
                if handle is not None:
                    try:
                        remove(scratch / name)
                    finally:
                        release(lock, handle)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise self._cannot_write(error) from error

    def _cannot_write(self, error: OSError) -> AotiError:
        if error.errno in _FULL:
            return AotiError(
                f"the disk with the artifact cache {self.root} is full ({error.strerror}); free some space there, for "
                "example with `hatch-aoti cache --trim`, or choose another directory with `tool.aoti.cache-dir` or the "
                "environment variable HATCH_AOTI_CACHE_DIR"
            )
        return AotiError(
            f"the artifact cache {self.root} cannot be written ({error.strerror or error}); choose another directory "
            "with `tool.aoti.cache-dir` or the environment variable HATCH_AOTI_CACHE_DIR"
        )


def checked_key(key: str) -> str:
    """Return `key`, a SHA-256 in hexadecimal. Raises `ValueError` for anything else: keys are parts of paths."""
    if not isinstance(key, str) or not _KEY.fullmatch(key):
        raise ValueError(f"{key!r} is not a key of the cache")
    return key


def children(directory: Path) -> list[Path]:
    """Return what is in a directory, sorted; nothing if it has just gone."""
    with contextlib.suppress(OSError):
        return sorted(directory.iterdir())
    return []
