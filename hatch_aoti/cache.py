"""Content-addressed storage of finished artifacts, safe under concurrency and kills. Knows not what an artifact is.

Layout below the cache's root:

    artifacts/ab/abcdef…/   one finished entry: its files, and `SHA256SUMS.json` over them
    notes/ab/abcdef….json   what is known about earlier results, only ever a hint
    locks/abcdef….lock      held while one process makes that entry
    debug/<…>/<model>/      what a failed or debugged compilation left for reading: the latest of each model
    scratch/…/              work in progress; the owner holds a lock on it, so a dead owner's is recognised and swept
    secret                  the key of `keyed_digest`, readable by the owner alone

An entry appears by a rename of its finished directory, so it is either whole or absent, whatever is killed and when.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import hmac
import json
import os
import secrets
import shlex
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hatch_aoti.errors import AotiError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from filelock import BaseFileLock

__all__ = ["Cache", "default_cache_dir", "file_digest", "open_cache"]

_SUMS = "SHA256SUMS.json"
_NOTES_KEPT = 8
_SECRET_BYTES = 32
_IN_USE = 3600  # seconds


def default_cache_dir() -> Path:
    """Return the platform's cache directory for hatch-aoti (`~/.cache/hatch-aoti` on Linux)."""
    from platformdirs import user_cache_path

    return user_cache_path("hatch-aoti", appauthor=False)


def open_cache(directory: Path | None) -> Cache:
    """Open the cache in `directory` (default: `default_cache_dir`), by way of a path without spaces.

    torch's C++ builder splits its commands at spaces, and compiling happens inside the cache; so a directory with
    spaces or quotes in its path gets a symbolic link in the system's temporary directory, always the same one.
    Raises `AotiError` if the cache cannot be written, or cannot get such a link.
    """
    root = directory or default_cache_dir()
    if shlex.split(os.fspath(root)) == [os.fspath(root)]:
        return Cache(root)
    Cache(root)  # creates it, or says why it cannot
    name = f"hatch-aoti-{hashlib.sha256(os.fspath(root).encode()).hexdigest()[:16]}-{os.getuid()}"
    link = Path(tempfile.gettempdir()) / name
    with contextlib.suppress(FileExistsError):
        link.symlink_to(root, target_is_directory=True)
    ours = link.is_symlink() and link.lstat().st_uid == os.getuid() and link.readlink() == root
    if not ours or " " in os.fspath(link):
        raise AotiError(
            f"the artifact cache {root} has a space or a quote in its path, which torch's C++ builder cannot handle, "
            f"and {link} cannot stand in for it; choose another directory with `tool.aoti.cache-dir` or the "
            "environment variable HATCH_AOTI_CACHE_DIR"
        )
    return Cache(link)


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Cache:
    """A directory of entries, each a few files under a key that covers all they depend on."""

    def __init__(self, root: Path) -> None:
        """Open the cache at `root`, creating it if need be.

        Raises `AotiError` if the directory cannot be written, naming the ways to choose another.
        """
        self.root = root
        try:
            for name in ("artifacts", "locks", "scratch"):
                (root / name).mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=root / "scratch"):
                pass
        except OSError as error:
            raise AotiError(
                f"the artifact cache {root} cannot be written ({error.strerror or error}); choose another directory "
                "with `tool.aoti.cache-dir` or the environment variable HATCH_AOTI_CACHE_DIR"
            ) from error
        self._sweep()

    def get(self, key: str) -> Path | None:
        """Return the directory of a finished entry, or None when there is none.

        A damaged entry (a file missing, or not what was stored) is removed and counts as absent.
        """
        entry = self._entry(key)
        try:
            sums = json.loads((entry / _SUMS).read_text(encoding="utf-8"))
        except FileNotFoundError:
            if entry.exists():
                self._discard(entry)
            return None
        except (OSError, ValueError):
            self._discard(entry)
            return None
        try:
            sound = isinstance(sums, dict) and all(file_digest(entry / name) == want for name, want in sums.items())
        except OSError:
            sound = False
        if not sound:
            self._discard(entry)
            return None
        with contextlib.suppress(OSError):
            os.utime(entry)  # used now: see `trim`
        return entry

    def put(self, key: str, directory: Path) -> Path:
        """Make the files of `directory` the entry `key`, by a rename; return the entry's directory.

        `directory` must be on the cache's file system (see `scratch`) and is gone afterwards. When another process
        was faster, its entry stays: equal keys mean equal content.
        """
        files = [path for path in sorted(directory.rglob("*")) if path.is_file()]
        sums = {path.relative_to(directory).as_posix(): file_digest(path) for path in files}
        (directory / _SUMS).write_text(json.dumps(sums, indent=1, sort_keys=True), encoding="utf-8")
        entry = self._entry(key)
        entry.parent.mkdir(parents=True, exist_ok=True)
        try:
            directory.rename(entry)
        except OSError:
            found = self.get(key)
            if found is None:
                directory.rename(entry)
            else:
                shutil.rmtree(directory, ignore_errors=True)
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
        """Return the notes kept under `key`, the latest first: small JSON data that is only a hint."""
        try:
            notes = json.loads(self._notes(key).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return []
        return notes if isinstance(notes, list) else []

    def add_note(self, key: str, note: Mapping[str, Any]) -> None:
        """Keep a note under `key`, and the latest few before it."""
        path = self._notes(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        notes = [note, *(other for other in self.notes(key) if other != note)][:_NOTES_KEPT]
        handle, partial = tempfile.mkstemp(dir=self.root / "scratch")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(notes, file)
        Path(partial).replace(path)

    def keyed_digest(self, data: bytes) -> str:
        """Return an HMAC-SHA256 of `data`, in hexadecimal: the same for equal data in this cache, and in no other.

        What is kept in notes are such digests: a plain hash of a password or a token can be guessed by trying, by
        whoever gets to see it. Raises `AotiError` if the secret that this takes cannot be kept.
        """
        return hmac.digest(self._secret, data, "sha256").hex()

    @functools.cached_property
    def _secret(self) -> bytes:
        path = self.root / "secret"
        with contextlib.suppress(OSError):
            if len(found := path.read_bytes()) == _SECRET_BYTES:
                return found
        try:
            with self.scratch("secret") as directory:
                new = directory / "secret"
                with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                    file.write(secrets.token_bytes(_SECRET_BYTES))
                with self.lock(hashlib.sha256(b"secret").hexdigest()):  # one of many that start at once makes it
                    with contextlib.suppress(OSError):
                        if len(found := path.read_bytes()) == _SECRET_BYTES:
                            return found
                    new.replace(path)
                    return path.read_bytes()
        except OSError as error:
            raise AotiError(f"the artifact cache {self.root} cannot be written ({error.strerror or error})") from error

    def debug_folder(self, project: str, model: str) -> Path:
        """Return where the folder is, or will be, with what a compilation of a project's model left for reading."""
        return self.root / "debug" / project / model

    def keep_folder(self, directory: Path, project: str, model: str) -> Path:
        """Make `directory` the `debug_folder` of a model, by a rename, in place of the one before; return its path.

        `directory` must be on the cache's file system (see `scratch`) and is gone afterwards.
        """
        place = self.debug_folder(project, model)
        with self.lock(hashlib.sha256(os.fsencode(place)).hexdigest()):
            place.parent.mkdir(parents=True, exist_ok=True)
            if place.exists():
                self._discard(place)
            directory.rename(place)
        os.utime(place)  # made now: see `trim`
        return place

    @contextlib.contextmanager
    def lock(self, key: str) -> Iterator[None]:
        """Hold the lock of `key`: whoever waits for it finds the entry made by the one before."""
        with _file_lock(self.root / "locks" / f"{key}.lock"):
            yield

    def size(self) -> int:
        """Return how much the cache holds, in bytes."""
        sizes = 0
        for path in self.root.rglob("*"):
            with contextlib.suppress(OSError):  # another process may be at it
                sizes += path.stat().st_size if path.is_file() else 0
        return sizes

    def clear(self) -> int:
        """Remove everything but what is being worked on; return how many bytes that freed.

        A build that runs at the same time may miss what it has already found.
        """
        before = self.size()
        for path in self.root.iterdir():
            if path.name not in {"locks", "scratch"}:
                self._discard(path)
        (self.root / "artifacts").mkdir(exist_ok=True)
        return before - self.size()

    def trim(self, limit: int) -> int:
        """Remove what has not been used for the longest time until the cache has at most `limit` bytes.

        Returns how many bytes that freed. What was used within the last hour stays, as a build may be at it.
        """
        found = [
            path
            for pattern in ("artifacts/*/*", "notes/*/*.json", "headers/*/", "debug/*/*/")
            for path in self.root.glob(pattern)
        ]
        entries = []
        for path in found:
            with contextlib.suppress(OSError):
                files = list(path.rglob("*")) if path.is_dir() else [path]
                entries.append((path.stat().st_mtime, sum(file.stat().st_size for file in files), path))
        excess = sum(size for _, size, _ in entries) - limit
        freed = 0
        for used, size, path in sorted(entries):
            if freed >= excess or used > time.time() - _IN_USE:
                break
            self._discard(path)
            freed += size
        return freed

    @contextlib.contextmanager
    def scratch(self, prefix: str) -> Iterator[Path]:
        """Yield a private directory on the cache's file system; it is removed afterwards, or by the next sweep."""
        base = self.root / "scratch"
        directory = Path(tempfile.mkdtemp(prefix=f"{prefix}-", dir=base))
        lock = _file_lock(base / f"{directory.name}.lock")
        try:
            with lock:
                yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)
            Path(lock.lock_file).unlink(missing_ok=True)

    def _entry(self, key: str) -> Path:
        return self.root / "artifacts" / key[:2] / key

    def _notes(self, key: str) -> Path:
        return self.root / "notes" / key[:2] / f"{key}.json"

    def _discard(self, entry: Path) -> None:
        """Take an entry away in one step, so that no reader sees it half removed."""
        away = Path(tempfile.mkdtemp(prefix="discarded-", dir=self.root / "scratch"))
        with contextlib.suppress(OSError):
            entry.rename(away / "entry")
        shutil.rmtree(away, ignore_errors=True)

    def _sweep(self) -> None:
        """Remove the scratch directories whose owners are gone."""
        from filelock import Timeout

        base = self.root / "scratch"
        for lock_file in base.glob("*.lock"):
            lock = _file_lock(lock_file)
            try:
                with lock.acquire(timeout=0):
                    shutil.rmtree(base / lock_file.stem, ignore_errors=True)
                    lock_file.unlink(missing_ok=True)
            except (Timeout, OSError):
                continue


def _file_lock(path: Path) -> BaseFileLock:
    from filelock import FileLock

    # An advisory lock of the operating system: it goes away with its process, also by SIGKILL.
    return FileLock(os.fspath(path))
