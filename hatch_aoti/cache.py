"""Content-addressed storage of finished artifacts, safe under concurrency and kills. Knows not what an artifact is.

Layout below the cache's root:

    artifacts/ab/abcdef…/   one finished entry: its files, and `SHA256SUMS.json` over them
    locks/abcdef….lock      held while one process makes that entry
    scratch/…/              work in progress; the owner holds a lock on it, so a dead owner's is recognised and swept

An entry appears by a rename of its finished directory, so it is either whole or absent, whatever is killed and when.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from hatch_aoti.errors import AotiError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from filelock import BaseFileLock

__all__ = ["Cache", "default_cache_dir", "file_digest"]

_SUMS = "SHA256SUMS.json"


def default_cache_dir() -> Path:
    """Return the platform's cache directory for hatch-aoti (`~/.cache/hatch-aoti` on Linux)."""
    from platformdirs import user_cache_path

    return user_cache_path("hatch-aoti", appauthor=False)


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
        return entry

    def put(self, key: str, directory: Path) -> Path:
        """Make the files of `directory` the entry `key`, by a rename; return the entry's directory.

        `directory` must be on the cache's file system (see `scratch`) and is gone afterwards. When another process
        was faster, its entry stays: equal keys mean equal content.
        """
        sums = {path.name: file_digest(path) for path in sorted(directory.iterdir())}
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
        """Store texts under a key made of themselves; return the directory that has them as files (mode 644)."""
        key = hashlib.sha256(json.dumps(dict(texts), sort_keys=True).encode()).hexdigest()
        found = self.get(key)
        if found is not None:
            return found
        with self.scratch("texts") as directory:
            entry = directory / "entry"
            entry.mkdir()
            for name, text in texts.items():
                (entry / name).write_text(text, encoding="utf-8", newline="\n")
                (entry / name).chmod(0o644)
            return self.put(key, entry)

    @contextlib.contextmanager
    def lock(self, key: str) -> Iterator[None]:
        """Hold the lock of `key`: whoever waits for it finds the entry made by the one before."""
        with _file_lock(self.root / "locks" / f"{key}.lock"):
            yield

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
