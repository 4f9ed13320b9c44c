"""Content-addressed storage of finished artifacts, safe under concurrency and kills. Knows not what an artifact is.

Layout below the cache's root:

    CACHEDIR.TAG            says that this directory is a cache of ours, and of which format
    artifacts/ab/abcdef…/   one finished entry: its files, and `SHA256SUMS.json` over them
    headers/ab/abcdef…/     the same, for precompiled headers
    notes/ab/abcdef….json   what is known about earlier results, only ever a hint
    debug/<…>/<model>/      what a failed or debugged compilation left for reading: the latest of each model
    locks/abcdef….lock      held while one process makes that entry
    scratch/…/              work in progress; the owner holds a lock on it, so a dead owner's is recognised and swept
    secret                  the key of `keyed_digest`, readable by the owner alone

An entry appears by a rename of its finished directory, so it is either whole or absent, whatever is killed and when.

Nothing is believed without proof: checksums cover the content and what it is (kind, key, format), and what is not
sound counts as absent and is made again. They find accidents. Whoever can write to the cache could replace them, too,
so a cache that others can write to is refused (`trusted` takes it all the same).

Nothing outside is reached: a key is a digest, symbolic links are not followed, and only what is in the directories
above is ever removed.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import hmac
import json
import os
import re
import secrets
import shlex
import stat
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hatch_aoti.artifact.own_directory import FORMAT, OwnDirectory, checked_key, children
from hatch_aoti.artifact.plain_files import digest, is_private, read_plain
from hatch_aoti.errors import AotiError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Cache", "default_cache_dir", "file_digest", "open_cache"]

_KINDS = ("artifacts", "headers", "notes", "debug")
_NAME = re.compile(r"\w[\w.-]*")  # of a package or a model
_SUMS = "SHA256SUMS.json"
_MOST_SUMS = 1 << 24  # bytes
_MOST_NOTES = 1 << 28
_NOTES_KEPT = 8
_SECRET_BYTES = 32
_IN_USE = 3600  # seconds

_Kind = Literal["artifacts", "headers"]


def default_cache_dir() -> Path:
    """Return the platform's cache directory for hatch-aoti (`~/.cache/hatch-aoti` on Linux)."""
    from platformdirs import user_cache_path

    return user_cache_path("hatch-aoti", appauthor=False)


def open_cache(directory: Path | None, *, trusted: bool = False) -> Cache:
    """Open the cache in `directory` (default: `default_cache_dir`), by way of a path without spaces.

    torch's C++ builder splits its commands at spaces, and compiling happens inside the cache; so a directory with
    spaces or quotes in its path gets a symbolic link in the system's temporary directory, always the same one.
    What this process uses of it from now on stays until it ends (see `Cache.trim`). Raises `AotiError` as `Cache`
    does, and if the cache cannot get such a link.
    """
    root = directory or default_cache_dir()
    cache = Cache(root, trusted=trusted)
    if shlex.split(os.fspath(root)) != [os.fspath(root)]:
        cache = Cache(_stand_in(root), trusted=trusted)
    cache.hold()
    return cache


def _stand_in(root: Path) -> Path:
    """Return a symbolic link to `root` whose path has no spaces."""
    place = Path(tempfile.gettempdir())
    link = place / f"hatch-aoti-{hashlib.sha256(os.fsencode(root)).hexdigest()[:16]}-{os.geteuid()}"
    try:
        with contextlib.suppress(FileExistsError):
            link.symlink_to(root, target_is_directory=True)
        # Others may be able to write there, but in a sticky directory as /tmp is they cannot replace what is ours.
        found = place.stat()
        safe = is_private(found) or bool(found.st_mode & stat.S_ISVTX and found.st_uid in {os.geteuid(), 0})
        ours = safe and link.is_symlink() and link.lstat().st_uid == os.geteuid() and link.readlink() == root
    except OSError:
        ours = False
    if not ours or shlex.split(os.fspath(link)) != [os.fspath(link)]:
        raise AotiError(
            f"the artifact cache {root} has a space or a quote in its path, which torch's C++ builder cannot handle, "
            f"and {link} cannot stand in for it; choose another directory with `tool.aoti.cache-dir` or the "
            "environment variable HATCH_AOTI_CACHE_DIR"
        )
    return link


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal. Raises `OSError`, also for what is no file: a FIFO never ends."""
    return digest(Path(os.path.realpath(path)))


class Cache(OwnDirectory):
    """A directory of entries, each a few files under a key that covers all they depend on.

    A key is a SHA-256 in hexadecimal; methods raise `ValueError` for anything else, and `AotiError` where the cache
    cannot be written.
    """

    folders = (*_KINDS, "locks", "scratch")

    def place(self, key: str, kind: _Kind = "artifacts") -> Path:
        """Return where an entry is, or will be."""
        return self._place(kind, key)

    def get(self, key: str, kind: _Kind = "artifacts") -> Path | None:
        """Return the directory of a finished entry, or None when there is none.

        An entry that is not exactly what was stored there is removed and counts as absent.
        """
        entry = self._place(kind, key)
        try:
            inode = entry.lstat().st_ino
        except FileNotFoundError:
            return None
        except OSError:
            inode = None
        if not self._is_sound(entry, kind):
            self._discard(entry, inode)
            return None
        with contextlib.suppress(OSError):
            os.utime(entry)  # used now: see `trim`
        return entry

    def put(self, key: str, directory: Path, kind: _Kind = "artifacts") -> Path:
        """Make the files of `directory` the entry `key`, by a rename; return the entry's directory.

        `directory` must be in one from `scratch`, which removes it if it is not taken: when another process was
        faster, its entry stays, as equal keys mean equal content.
        """
        entry = self._place(kind, key)
        with self._writing():
            files, folders = _contents(directory)
            if not files:
                raise ValueError(f"nothing to keep for {key}")
            # Not as an unusual umask wants it: what others can write is not believed.
            for name in files:
                path = directory / name
                path.chmod(stat.S_IMODE(path.stat().st_mode) & 0o755)
            for folder in ("", *folders):
                (directory / folder).chmod(0o700)
            sums = {**_identity(kind, key), "files": {name: digest(directory / name) for name in sorted(files)}}
            handle = os.open(directory / _SUMS, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(sums, file, indent=1, sort_keys=True)
            self._directory(entry.parent)
            try:
                directory.rename(entry)
            except OSError:
                if self.get(key, kind) is None:
                    directory.rename(entry)
        return entry

    def keep_texts(self, texts: Mapping[str, str]) -> Path:
        """Store texts under a key made of themselves; return the directory that has them as files (mode 644).

        Their names may have folders (`cmake/Config.cmake`).
        """
        key = hashlib.sha256(json.dumps(dict(texts), sort_keys=True).encode()).hexdigest()
        found = self.get(key)
        if found is not None:
            return found
        with self.scratch("texts") as directory:
            entry = directory / "entry"
            entry.mkdir()
            for name, text in texts.items():
                (entry / name).parent.mkdir(parents=True, exist_ok=True)
                (entry / name).write_text(text, encoding="utf-8", newline="\n")
                (entry / name).chmod(0o644)
            return self.put(key, entry)

    def notes(self, key: str) -> list[dict[str, Any]]:
        """Return the notes kept under `key`, the latest first: small JSON data that is only a hint.

        Notes that are not exactly what was stored there count as none.
        """
        path = self._place("notes", key)
        try:
            if not (self._is_ours(path.parent, stat.S_ISDIR) and self._is_ours(path)):
                return []
            seal, _, text = read_plain(path, _MOST_NOTES).partition(b"\n")
            if not hmac.compare_digest(seal, _seal(key, text)):
                return []
            notes = json.loads(text)
        except (OSError, ValueError, RecursionError):
            return []
        with contextlib.suppress(OSError):
            os.utime(path)  # used now: see `trim`
        return [note for note in notes if isinstance(note, dict)] if isinstance(notes, list) else []

    def add_note(self, key: str, note: Mapping[str, Any]) -> None:
        """Keep a note under `key`, and the latest few before it. Where that cannot be, there is none."""
        path = self._place("notes", key)
        notes = [note, *(other for other in self.notes(key) if other != note)][:_NOTES_KEPT]
        text = json.dumps(notes).encode()
        with contextlib.suppress(OSError, AotiError), self.scratch("note") as directory:
            (directory / "note").write_bytes(_seal(key, text) + b"\n" + text)
            (directory / "note").chmod(0o600)
            self._directory(path.parent)
            if not self._is_ours(path):
                self._discard(path)
            (directory / "note").replace(path)

    def keyed_digest(self, data: bytes) -> str:
        """Return an HMAC-SHA256 of `data`, in hexadecimal: the same for equal data in this cache, and in no other.

        What is kept in notes are such digests: a plain hash of a password or a token can be guessed by trying, by
        whoever gets to see it. Raises `AotiError` if the secret that this takes cannot be kept.
        """
        return hmac.digest(self._secret, data, "sha256").hex()

    @functools.cached_property
    def _secret(self) -> bytes:
        path = self.root / "secret"

        def read() -> bytes:
            with contextlib.suppress(OSError):
                if self._is_ours(path) and len(found := read_plain(path, _SECRET_BYTES)) == _SECRET_BYTES:
                    return found
            return b""

        if found := read():
            return found
        with self.scratch("secret") as directory, self.lock(hashlib.sha256(b"secret").hexdigest()), self._writing():
            if not (found := read()):  # of many processes that start at once, one makes it
                handle = os.open(directory / "new", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                with os.fdopen(handle, "wb") as file:
                    file.write(found := secrets.token_bytes(_SECRET_BYTES))
                self._discard(path)
                (directory / "new").rename(path)
        return found

    def debug_folder(self, project: str, model: str) -> Path:
        """Return where the folder is, or will be, with what a compilation of a project's model left for reading."""
        for name in (project, model):
            if not _NAME.fullmatch(name):
                raise ValueError(f"{name!r} is not the name of a package or a model")
        return self.root / "debug" / project / model

    def keep_folder(self, directory: Path, project: str, model: str) -> Path:
        """Make `directory` the `debug_folder` of a model, by a rename, in place of the one before; return its path.

        `directory` must be on the cache's file system (see `scratch`) and is gone afterwards.
        """
        place = self.debug_folder(project, model)
        with self.lock(hashlib.sha256(f"{project}/{model}".encode()).hexdigest()), self._writing():
            self._directory(place.parent)
            self._discard(place)
            directory.rename(place)
            os.utime(place)  # made now: see `trim`
        return place

    def size(self) -> int:
        """Return how much the cache holds, in bytes."""
        return sum(_size(self.root / kind) for kind in _KINDS)

    def clear(self) -> int:
        """Remove everything but what is being worked on; return how many bytes that freed.

        A build that runs at the same time may miss what it has already found.
        """
        before = self.size()
        for kind in _KINDS:
            for path in children(self.root / kind):
                self._discard(path)
        return before - self.size()

    def trim(self, limit: int) -> int:
        """Remove what has not been used for the longest time until the cache has at most `limit` bytes.

        Returns how many bytes that freed. What was used within the last hour stays, or since an hour before the first
        of the builds that still run began: one of them may be about to ship it.
        """
        entries = []
        for group in (path for kind in _KINDS for path in children(self.root / kind)):
            # What is no folder of ours is an entry of its own: it can only go.
            for path in children(group) if self._is_ours(group, stat.S_ISDIR) else [group]:
                with contextlib.suppress(OSError):
                    entries.append((path.lstat().st_mtime, _size(path), path))
        in_use = min([time.time(), *self._running_since()]) - _IN_USE
        excess = sum(size for _, size, _ in entries) - limit
        freed = 0
        for used, size, path in sorted(entries):
            if freed >= excess or used > in_use:
                break
            self._discard(path)
            freed += size if not os.path.lexists(path) else 0
        return freed

    # --- What is in it ----------------------------------------------------------------------------------------------

    def _place(self, kind: str, key: str) -> Path:
        name = f"{checked_key(key)}.json" if kind == "notes" else checked_key(key)
        return self.root / kind / key[:2] / name

    def _is_sound(self, entry: Path, kind: str) -> bool:
        """Whether an entry has the files that were stored under its key, and nothing else."""
        try:
            if not (self._is_ours(entry.parent, stat.S_ISDIR) and self._is_ours(entry, stat.S_ISDIR)):
                return False
            files, folders = _contents(entry)
            sums = json.loads(read_plain(entry / _SUMS, _MOST_SUMS))
            if not isinstance(sums, dict) or not isinstance(wanted := sums.pop("files", None), dict):
                return False
            return (
                sums == _identity(kind, entry.name)
                and bool(wanted)
                and {*wanted, _SUMS} == files
                and folders == {parent.as_posix() for name in wanted for parent in Path(name).parents} - {"."}
                and all(self._is_ours(entry / name) for name in files)
                and all(self._is_ours(entry / name, stat.S_ISDIR) for name in folders)
                and all(digest(entry / name) == want for name, want in wanted.items())
            )
        except (OSError, ValueError, RecursionError):
            return False


def _identity(kind: str, key: str) -> dict[str, Any]:
    return {"format": FORMAT, "kind": kind, "key": key}


def _seal(key: str, text: bytes) -> bytes:
    """Return the checksum of notes, over what they say and what they are."""
    identity = json.dumps(_identity("notes", key), sort_keys=True).encode()
    return hashlib.sha256(identity + b"\n" + text).hexdigest().encode()


def _contents(directory: Path) -> tuple[set[str], set[str]]:
    """Return the files and the folders below `directory`, by relative path. Raises `OSError` for anything else."""
    files, folders = set(), set()
    for path in directory.iterdir():
        mode = path.lstat().st_mode
        if stat.S_ISDIR(mode):
            inner = _contents(path)
            folders |= {path.name, *(f"{path.name}/{name}" for name in inner[1])}
            files |= {f"{path.name}/{name}" for name in inner[0]}
        elif stat.S_ISREG(mode):
            files.add(path.name)
        else:
            raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
    return files, folders


def _size(path: Path) -> int:
    """Return the bytes of a file, or of all those below a directory."""
    with contextlib.suppress(OSError):  # another process may be at it
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode):
            return found.st_size
    return sum(map(_size, children(path)))
