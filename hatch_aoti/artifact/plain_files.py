"""Files and directories that are what they should be: plain, and nobody else's. Nothing here follows a symbolic link.

What others may have put in the place of a file is never opened: a FIFO would be waited for, opening a device can do
things, and a symbolic link leads elsewhere.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import stat
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["acquire", "digest", "is_private", "read_plain", "release", "remove"]


def is_private(found: os.stat_result) -> bool:
    """Whether nobody but this user and root can have changed what is in a file or directory."""
    return found.st_uid in {os.geteuid(), 0} and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def read_plain(path: Path, limit: int) -> bytes:
    """Return the content of a regular file. Raises `OSError`, also if there are more than `limit` bytes."""
    with os.fdopen(_open(path), "rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), os.fspath(path))
    return data


def digest(path: Path) -> str:
    """Return the SHA-256 of a regular file, in hexadecimal. Raises `OSError`, also for anything else."""
    with os.fdopen(_open(path), "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def remove(path: Path) -> None:
    """Remove a file, a symbolic link (not what it names) or a whole directory, if it is there. Raises `OSError`."""
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISDIR(path.lstat().st_mode):
            shutil.rmtree(path)
        else:
            path.unlink()


def acquire(path: Path, *, wait: bool = True) -> int | None:
    """Take the lock file at `path`, made if need be; return its descriptor, or None if another has it and not `wait`.

    It is an advisory lock of the operating system: it goes away with its process, also by SIGKILL. Whatever is at
    `path` and no file is removed. Raises `OSError`.
    """
    import fcntl  # not on Windows, where only messages are made

    while True:
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISREG(path.lstat().st_mode):
                remove(path)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        handle = os.open(path, flags, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            # Whoever had it has removed it (see `release`): then this is the lock of nothing.
            if os.path.samestat(os.fstat(handle), path.lstat()):
                return handle
        except FileNotFoundError:
            pass
        except BlockingIOError:
            os.close(handle)
            return None
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def release(path: Path, handle: int) -> None:
    """Give back what `acquire` returned. The file goes, so that a directory of locks does not grow for ever."""
    with contextlib.suppress(OSError):
        path.unlink()
    os.close(handle)


def _open(path: Path) -> int:
    """Open a regular file; return its descriptor. Raises `OSError`, also for anything that is not one."""
    if not stat.S_ISREG(path.lstat().st_mode):  # before it is opened, as that alone can block or do something
        raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
    return handle
