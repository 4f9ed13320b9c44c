"""What an export read, so that a later build can know, without importing torch, that nothing of it has changed.

While a model is imported, built and exported, `recording` notes every file that is opened, every folder that is
listed, every path that is asked about, every module that is searched for, and every environment variable that is looked
at; also what was not there. The next build compares these with what is there now (`ExportDependencies.holds`), and
takes the finished result if all are the same: milliseconds, where exporting again takes seconds.

Nothing of what was read is kept, only keyed digests of it (`Cache.keyed_digest`): a plain hash of a password can be
guessed by trying.

Some readings leave no mark: files that a native library opens by itself, the network, other processes. A model that
may have used any of these has no trace, and is exported in every build (and still not compiled again, see `job`). When
a file was changed, asked of it by `os.stat`, leaves no mark either: only whether it is there, what it is, and its size.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import os
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hatch_aoti.artifact.cache import file_digest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

__all__ = [
    "ANY_NAME",
    "MISSING",
    "Answers",
    "ExportDependencies",
    "counts",
    "describe",
    "in_stdlib",
    "lasting_place",
    "stands_for_itself",
]


# What a build's own workers and frontends set anew each time, and no model depends on.
_VOLATILE = frozenset({
    "TMPDIR", "TORCHINDUCTOR_CACHE_DIR", "TORCH_COMPILE_DEBUG_DIR", "PWD", "OLDPWD", "SHLVL", "_", "PYTHONPATH", "PATH",
    "VIRTUAL_ENV", "PEP517_BUILD_BACKEND", "PEP517_BACKEND_PATH", "PYPROJECT_HOOKS_BUILD_BACKEND",
    "PYPROJECT_HOOKS_BACKEND_PATH", "_PYPROJECT_HOOKS_BUILD_BACKEND", "_PYPROJECT_HOOKS_BACKEND_PATH",
    "PYTEST_CURRENT_TEST", "PIP_BUILD_TRACKER",
})  # fmt: skip
_OURS = "HATCH_AOTI_"  # settings, which have their say in what is asked for, and not in what the project's code does


MISSING = "missing"
_KEPT = 32  # digits of each digest, 128 bits: a model that imports a large library has thousands
ANY_NAME = "*"  # stands for the names of all variables: no variable is called so


@dataclasses.dataclass(frozen=True)
class ExportDependencies:
    """What was read and asked, by where it is, with keyed digests of the answers.

    Places are `root:…`, relative to the project; `entry:…`, the number of an entry of `sys.path`, and `path:…`,
    relative to any; `prefix:…`, to Python's own environment (these come and go); and `file:…`, absolute.

    `files` are those that were opened, by content; `folders` those that were listed, by the names in them; `states` is
    what other paths are (a file and its size, a folder, or missing). `environ` has the variables, set or not; `*` are
    the names of all. `modules` are those that were searched for, found or not, each with where its search ends, and
    `packages` the places in which a package's own are searched.
    """

    files: Mapping[str, str]
    folders: Mapping[str, str]
    states: Mapping[str, str]
    environ: Mapping[str, str]
    modules: Mapping[str, str]
    packages: Mapping[str, tuple[str, ...]]

    def holds(
        self,
        root: Path,
        environ: Mapping[str, str],
        search_path: Sequence[str],
        digest: Callable[[bytes], str],
    ) -> bool:
        """Say whether an export of the project at `root` would read the very same now.

        `environ` and `search_path` (`sys.path`) are what the export would have, `digest` is the one it was made with.
        """
        return next(self.changes(root, environ, search_path, digest), None) is None

    def changes(
        self,
        root: Path,
        environ: Mapping[str, str],
        search_path: Sequence[str],
        digest: Callable[[bytes], str],
    ) -> Iterator[str]:
        """Yield what is not as it was, in words; the arguments are those of `holds`."""
        seen = Answers(root, search_path, digest)
        for name, value in self.environ.items():
            if seen.variable(name, environ) != value:
                yield f"the environment variable {name}"
        for place, value in self.states.items():
            if seen.state(place) != value:
                yield f"the path {place}"
        for place, value in self.folders.items():
            if seen.folder(place) != value:
                yield f"the folder {place}"
        for name, value in self.modules.items():
            if seen.module(name, self.packages.get(name.rpartition(".")[0])) != value:
                yield f"where the module {name} is found"
        for place, value in self.files.items():  # last: these may be large
            if seen.file(place) != value:
                yield f"the file {place}"


class Answers:
    """What is there now, as a keyed digest for each question; a file that cannot be read is missing."""

    def __init__(self, root: Path, search_path: Sequence[str], digest: Callable[[bytes], str]) -> None:
        self._root, self._search_path, self._digest = root, search_path, digest
        self._importable: dict[str, dict[str, list[str]]] = {}

    def file(self, place: str) -> str:
        """Return a file's content."""
        try:
            content = file_digest(self._resolve(place))
        except OSError:
            content = MISSING
        return self._keyed("file", content)

    def folder(self, place: str) -> str:
        """Return the names in a folder."""
        try:
            names = os.listdir(self._resolve(place))  # noqa: PTH208
        except OSError as error:
            return self._keyed("no folder", type(error).__name__)
        return self._keyed("folder", *sorted(name for name in names if name != "__pycache__"))

    def state(self, place: str) -> str:
        """Return what a path is."""
        try:
            return self.described(describe(self._resolve(place).stat()))
        except (OSError, ValueError):
            return self.described(MISSING)

    def described(self, state: str) -> str:
        """Return `state`, as `describe` says it."""
        return self._keyed("state", state)

    def variable(self, name: str, environ: Mapping[str, str]) -> str:
        """Return a variable's value, or the names of all."""
        if name == ANY_NAME:
            return self._keyed("variables", *sorted(filter(counts, environ)))
        value = environ.get(name)
        return self._keyed("variable", name, *([] if value is None else [value]))

    def module(self, name: str, places: Sequence[str] | None) -> str:
        """Return where the search for a module ends, in the folders of its package, or on the search path."""
        last = name.rpartition(".")[2]
        if places is None:
            folders = [entry for entry in self._search_path if entry]
        else:
            folders = [os.fspath(self._resolve(place, must_exist=False)) for place in places]
        for folder in folders:
            if entries := self._entries(folder).get(last):
                place = lasting_place(f"{folder}{os.sep}{entries[0]}", self._root, self._search_path)
                return self._keyed("module", place, *entries)
        return self._keyed("module", MISSING)

    def _entries(self, folder: str) -> dict[str, list[str]]:
        """Return the names in a folder that can be imported, each with the entries that it may be."""
        known = self._importable.get(folder)
        if known is None:
            known = self._importable[folder] = {}
            with contextlib.suppress(OSError):
                for entry in sorted(os.listdir(folder)):  # noqa: PTH208
                    name, dot, _ = entry.partition(".")
                    if not dot or entry.endswith(_SUFFIXES):
                        known.setdefault(name, []).append(entry)
        return known

    def _resolve(self, place: str, *, must_exist: bool = True) -> Path:
        kind, _, rest = place.partition(":")
        if kind == "root":
            return self._root / rest
        if kind == "prefix":
            return Path(sys.prefix) / rest
        if kind == "entry":
            return Path(self._search_path[int(rest)]) if int(rest) < len(self._search_path) else Path(os.devnull)
        if kind == "path":
            for entry in filter(None, self._search_path):
                if not must_exist or os.path.lexists(os.path.join(entry, rest)):  # noqa: PTH118
                    return Path(entry) / rest
            raise FileNotFoundError(rest)
        return Path(rest)

    def _keyed(self, *parts: str) -> str:
        return self._digest("\0".join(parts).encode("utf-8", "surrogateescape"))[:_KEPT]


def counts(name: str) -> bool:
    """Whether a model may depend on an environment variable."""
    return name not in _VOLATILE and not name.startswith(_OURS)


# What Python's search for modules takes a file by.
_SUFFIXES = tuple(importlib.machinery.all_suffixes())


def describe(result: os.stat_result) -> str:
    """Say what a path is; the size of a folder is the system's own business."""
    if stat.S_ISDIR(result.st_mode):
        return "folder"
    return f"file of {result.st_size} bytes" if stat.S_ISREG(result.st_mode) else "other"


def lasting_place(file: str, root: Path, search_path: Sequence[str]) -> str:
    """Return where a file is, in terms that hold in the next build (see `ExportDependencies`)."""
    path = Path(file)
    if file in search_path and path != root:
        return f"entry:{search_path.index(file)}"
    if path.is_relative_to(root):
        return f"root:{path.relative_to(root).as_posix()}"
    for entry in filter(None, search_path):
        if path.is_relative_to(entry):
            return f"path:{path.relative_to(entry).as_posix()}"
    if path.is_relative_to(sys.prefix):
        return f"prefix:{path.relative_to(sys.prefix).as_posix()}"
    return f"file:{path}"


def stands_for_itself(file: str) -> bool:
    """Whether a file is Python's or torch's: their versions are part of every key."""
    return in_stdlib(file) or _torch_home() in Path(file).parents or _torch_home() == Path(file)


def in_stdlib(file: str) -> bool:
    """Whether a file is of Python's standard library."""
    home = os.path.dirname(os.__file__)  # noqa: PTH120
    return file.startswith(home + os.sep) and "site-packages" not in file[len(home) :]


@functools.cache
def _torch_home() -> Path:
    import torch

    return Path(torch.__file__).parent
