"""What an export read, so that a later build can know, without importing torch, that nothing of it has changed.

While a model is imported, built and exported, this records every file that is opened, every folder that is listed,
every path that is asked about, every module that is searched for, and every environment variable that is looked at;
also what was not there. The next build compares these with what is there now (`Trace.holds`), and takes the finished
result if all are the same: milliseconds, where exporting again takes seconds.

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
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hatch_aoti.artifact.cache import file_digest

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
    from types import ModuleType

__all__ = ["Recorder", "Trace", "recording"]

# Extension modules that read no files by themselves, or only such as are recorded some other way. Any other makes a
# model untraceable: its author may call it to load anything.
_HARMLESS = frozenset({"torch", "numpy", "safetensors", "yaml", "markupsafe", "functorch", "charset_normalizer"})

# What a build's own workers and frontends set anew each time, and no model depends on.
_VOLATILE = frozenset({
    "TMPDIR", "TORCHINDUCTOR_CACHE_DIR", "TORCH_COMPILE_DEBUG_DIR", "PWD", "OLDPWD", "SHLVL", "_", "PYTHONPATH", "PATH",
    "VIRTUAL_ENV", "PEP517_BUILD_BACKEND", "PEP517_BACKEND_PATH", "PYPROJECT_HOOKS_BUILD_BACKEND",
    "PYPROJECT_HOOKS_BACKEND_PATH", "_PYPROJECT_HOOKS_BUILD_BACKEND", "_PYPROJECT_HOOKS_BACKEND_PATH",
    "PYTEST_CURRENT_TEST", "PIP_BUILD_TRACKER",
})  # fmt: skip
_OURS = "HATCH_AOTI_"  # settings, which have their say in what is asked for, and not in what the project's code does

# Things happened that no comparison of files can account for.
_UNTRACEABLE = (
    "socket.connect",
    "socket.send",  # sendto, sendmsg
    "sqlite3.connect",
    "subprocess.Popen",
    "os.system",
    "os.posix_spawn",
    "os.fork",
    "os.exec",
    "ctypes.dlopen",
)


_MISSING = "missing"
_KEPT = 32  # digits of each digest, 128 bits: a model that imports a large library has thousands
_ANY_NAME = "*"  # stands for the names of all variables: no variable is called so


@dataclasses.dataclass(frozen=True)
class Trace:
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
        seen = _Answers(root, search_path, digest)
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

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON data."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Trace:
        """Read what `to_json` returned."""
        packages = {name: tuple(places) for name, places in value["packages"].items()}
        return cls(**{**value, "packages": packages})


class _Answers:
    """What is there now, as a keyed digest for each question; a file that cannot be read is missing."""

    def __init__(self, root: Path, search_path: Sequence[str], digest: Callable[[bytes], str]) -> None:
        self._root, self._search_path, self._digest = root, search_path, digest
        self._importable: dict[str, dict[str, list[str]]] = {}

    def file(self, place: str) -> str:
        try:
            content = file_digest(self._resolve(place))
        except OSError:
            content = _MISSING
        return self._keyed("file", content)

    def folder(self, place: str) -> str:
        try:
            names = os.listdir(self._resolve(place))  # noqa: PTH208
        except OSError as error:
            return self._keyed("no folder", type(error).__name__)
        return self._keyed("folder", *sorted(name for name in names if name != "__pycache__"))

    def state(self, place: str) -> str:
        try:
            return self.described(_describe(_stat(self._resolve(place))))
        except (OSError, ValueError):
            return self.described(_MISSING)

    def described(self, state: str) -> str:
        return self._keyed("state", state)

    def variable(self, name: str, environ: Mapping[str, str]) -> str:
        if name == _ANY_NAME:
            return self._keyed("variables", *sorted(filter(_counts, environ)))
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
                place = _place(f"{folder}{os.sep}{entries[0]}", self._root, self._search_path)
                return self._keyed("module", place, *entries)
        return self._keyed("module", _MISSING)

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


class Recorder:
    """Collects while `recording` is active; `finish` makes the `Trace`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.opened: set[str] = set()
        self.listed: set[str] = set()
        self.asked: dict[str, str] = {}  # paths, with the first answer
        self.modules: set[str] = set()
        self.search_path = tuple(sys.path)  # the project's code may change it
        self.variables: dict[str, str | None] = {}
        self.own: set[str] = set()  # variables that the project's code has set itself
        self.names: frozenset[str] | None = None  # of all variables, if it was asked which there are
        self.untraceable: str = ""
        self.before = frozenset(sys.modules)
        self.scratch = [
            folder
            for folder in (tempfile.gettempdir(), os.environ.get("TORCHINDUCTOR_CACHE_DIR"))
            if folder and not root.is_relative_to(folder)
        ]

    def finish(self, digest: Callable[[bytes], str]) -> Trace | None:
        """Return the trace; None when something happened that it cannot account for.

        `digest` is the keyed digest under which it is kept.
        """
        for name, module in list(sys.modules.items()):
            if name in self.before:
                continue
            file = getattr(module, "__file__", None)
            if not file:
                continue
            if not file.endswith(".py") and name.partition(".")[0] not in _HARMLESS and not _in_stdlib(file):
                self.untraceable = self.untraceable or f"the extension module {name}"
            self.opened.add(file)
        if self.untraceable:
            return None
        seen = _Answers(self.root, self.search_path, digest)
        packages, modules = self._searched()
        environ: dict[str, str | None] = dict(self.variables)
        if self.names is not None:
            environ[_ANY_NAME] = None
        known = {name: value for name, value in environ.items() if value is not None}
        opened = self._places(file for file in self.opened if self.asked.get(file) != _MISSING)
        return Trace(
            files={place: seen.file(place) for place in opened},
            folders={place: seen.folder(place) for place in self._places(self.listed)},
            states=self._states(seen, opened),
            environ={
                name: seen.variable(name, known if name != _ANY_NAME else dict.fromkeys(self.names or (), ""))
                for name in sorted(environ)
            },
            modules={name: seen.module(name, packages.get(name.rpartition(".")[0])) for name in modules},
            packages=packages,
        )

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Take note of what Python does; called for every audit event (`sys.addaudithook`)."""
        if event == "open":
            path, mode, flags = arguments
            writes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            if isinstance(path, (str, bytes)) and not writes and not (isinstance(mode, str) and "r" not in mode):
                self.open(path)
        elif event in {"os.listdir", "os.scandir"}:
            if sys._getframe(2).f_code.co_filename.startswith("<frozen importlib"):  # noqa: SLF001 - the search for modules, which are recorded themselves
                return
            [path] = arguments
            folder = os.path.abspath(os.fsdecode(path)) if isinstance(path, (str, bytes)) else os.getcwd()  # noqa: PTH100, PTH109
            self.listed.add(folder)
        elif event.startswith(_UNTRACEABLE):
            self.untraceable = self.untraceable or event

    def open(self, path: Any) -> None:
        """Take note of a file that is about to be read, or found missing."""
        file = os.path.abspath(os.fsdecode(path))  # noqa: PTH100 (no symlinks resolved)
        if file.endswith(".pyc"):
            with contextlib.suppress(ValueError):  # the cached code of a source
                file = importlib.util.source_from_cache(file)
        self.opened.add(file)
        try:
            _stat(file)
        except (OSError, ValueError):
            self.asked.setdefault(file, _MISSING)

    def ask(self, path: Any, state: str) -> None:
        """Take note of a question about a path, and its answer."""
        if isinstance(path, (str, bytes, os.PathLike)):
            self.asked.setdefault(os.path.abspath(os.fsdecode(path)), state)  # noqa: PTH100

    def look_up(self, name: str, value: str | None) -> None:
        """Take note of an environment variable that is looked at, and its value."""
        if _counts(name) and name not in self.own:
            self.variables.setdefault(name, value)

    def list_variables(self, names: Iterable[str]) -> None:
        """Take note that it was asked which environment variables there are."""
        if self.names is None:
            self.names = frozenset(filter(_counts, names)) - self.own

    def set_variable(self, name: str) -> None:
        """Take note that the project's code sets or removes a variable, so that the outer value is no longer seen."""
        if name not in self.variables:
            self.own.add(name)

    def _places(self, files: Iterable[str]) -> list[str]:
        """Return where files are, in terms that hold in the next build, without those that do not count."""
        places = set()
        for file in files:
            path = Path(file)
            if (
                not file.startswith(("/proc/", "/sys/", "/dev/"))
                and not any(path.is_relative_to(folder) for folder in self.scratch)
                and not _stands_for_itself(file)
                and not (path.name.startswith("<") and path.name.endswith(">"))  # torch's name for code without a file
            ):
                places.add(_place(file, self.root, self.search_path))
        return sorted(places)

    def _states(self, seen: _Answers, opened: Collection[str]) -> dict[str, str]:
        # Where the project and the environment are is no concern of a model's.
        places = (os.fspath(self.root), sys.prefix, *filter(None, sys.path))
        above = {parent for place in places for parent in Path(place).parents}
        asked = {path: state for path, state in sorted(self.asked.items()) if Path(path) not in above}
        states = {place: state for path, state in asked.items() for place in self._places([path])}
        return {place: seen.described(state) for place, state in states.items() if place not in opened}

    def _searched(self) -> tuple[dict[str, tuple[str, ...]], list[str]]:
        """Return the packages whose modules were searched for, with their folders, and the modules that count."""
        packages: dict[str, tuple[str, ...]] = {}
        modules = []
        for name in sorted(self.modules):
            parent = name.rpartition(".")[0]
            if not parent:
                modules.append(name)
                continue
            package = sys.modules.get(parent)
            with contextlib.suppress(Exception):  # a package may be anything
                folders = [os.path.abspath(folder) for folder in package.__path__]  # type: ignore[union-attr] # noqa: PTH100
                if folders and not any(map(_stands_for_itself, folders)):
                    packages[parent] = tuple(_place(folder, self.root, self.search_path) for folder in folders)
                    modules.append(name)
        return packages, modules


@contextlib.contextmanager
def recording(root: Path) -> Iterator[Recorder]:
    """Record what the block reads. torch and its exporter are imported before: their version stands for them."""
    global _active  # noqa: PLW0603 - audit hooks cannot be removed, only silenced
    import torch._dynamo
    import torch.export._trace  # noqa: F401

    recorder = Recorder(root)
    if not _hooked:
        _hooked.append(True)
        sys.addaudithook(_audit)
    searches = _Searches(recorder)
    environments: list[Any] = [os.environ, *([os.environb] if hasattr(os, "environb") else [])]
    plain = type(os.environ)
    with _native_readers(recorder), _questions(recorder):
        _active = recorder
        for environment in environments:
            environment.__class__ = _RecordedEnviron
        sys.meta_path.insert(0, searches)
        try:
            yield recorder
        finally:
            with contextlib.suppress(ValueError):
                sys.meta_path.remove(searches)
            for environment in environments:
                environment.__class__ = plain
            _active = None


_active: Recorder | None = None
_hooked: list[bool] = []


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    recorder = _active
    if recorder is not None:
        with contextlib.suppress(Exception):  # an audit hook that raises would stop the program
            recorder.audit(event, arguments)


class _RecordedEnviron(type(os.environ)):  # type: ignore[misc] # the class is private, and other on each system
    """`os.environ` that notes which variables are looked at."""

    def __getitem__(self, key: Any) -> Any:
        recorder = _active
        if recorder is None:
            return super().__getitem__(key)
        try:
            value = super().__getitem__(key)
        except KeyError:
            recorder.look_up(os.fsdecode(key), None)
            raise
        recorder.look_up(os.fsdecode(key), os.fsdecode(value))
        return value

    def __iter__(self) -> Iterator[Any]:
        names = list(super().__iter__())
        if _active is not None:
            _active.list_variables(map(os.fsdecode, names))
        return iter(names)

    def __setitem__(self, key: Any, value: Any) -> None:
        if _active is not None:
            _active.set_variable(os.fsdecode(key))
        super().__setitem__(key, value)

    def __delitem__(self, key: Any) -> None:
        if _active is not None:
            _active.set_variable(os.fsdecode(key))
        super().__delitem__(key)


def _counts(name: str) -> bool:
    return name not in _VOLATILE and not name.startswith(_OURS)


class _Searches(importlib.abc.MetaPathFinder):
    """Finds nothing, and notes which modules are searched for; those that are loaded already are not."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        del path, target
        self.recorder.modules.add(fullname)
        return None


_stat, _lstat, _access = os.stat, os.lstat, os.access


@contextlib.contextmanager
def _questions(recorder: Recorder) -> Iterator[None]:
    """Note what is asked about paths, by way of the functions that `os.path` and `pathlib` ask with.

    No audit event tells of these. The search for modules asks the system by itself, so it is not noted here.
    """
    undo = contextlib.ExitStack()

    def watch(name: str, original: Any) -> None:
        def watched(path: Any, *args: Any, **kwargs: Any) -> Any:
            if _active is recorder and kwargs.get("dir_fd") is None:
                try:
                    state = _describe(_stat(path))
                except OSError:
                    state = _MISSING
                except (ValueError, TypeError):  # the original will say so
                    return original(path, *args, **kwargs)
                recorder.ask(path, state)
            return original(path, *args, **kwargs)

        undo.callback(setattr, os, name, original)
        setattr(os, name, watched)
        for supporting in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks, os.supports_effective_ids):
            if original in supporting:  # `shutil` looks functions up there
                functions: set[Any] = supporting
                functions.add(watched)
                undo.callback(functions.discard, watched)

    with undo:
        for name, original in (("stat", _stat), ("lstat", _lstat), ("access", _access)):
            watch(name, original)
        yield


@contextlib.contextmanager
def _native_readers(recorder: Recorder) -> Iterator[None]:
    """Note the files that torch and safetensors open without Python knowing."""
    import safetensors
    import safetensors.torch
    import torch

    undo = contextlib.ExitStack()

    def watch(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def watched(path: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(path, (str, bytes, os.PathLike)):
                recorder.open(path)
            return original(path, *args, **kwargs)

        undo.callback(setattr, owner, name, original)
        setattr(owner, name, watched)

    with undo:
        watch(safetensors, "safe_open")
        watch(safetensors.torch, "safe_open")
        watch(torch._C, "PyTorchFileReader")  # noqa: SLF001
        watch(torch, "from_file")
        watch(torch.UntypedStorage, "from_file")
        yield


# What Python's search for modules takes a file by.
_SUFFIXES = tuple(importlib.machinery.all_suffixes())


def _describe(result: os.stat_result) -> str:
    """Say what a path is; the size of a folder is the system's own business."""
    if stat.S_ISDIR(result.st_mode):
        return "folder"
    return f"file of {result.st_size} bytes" if stat.S_ISREG(result.st_mode) else "other"


def _place(file: str, root: Path, search_path: Sequence[str]) -> str:
    """Return where a file is, in terms that hold in the next build (see `Trace`)."""
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


def _stands_for_itself(file: str) -> bool:
    """Whether a file is Python's or torch's: their versions are part of every key."""
    return _in_stdlib(file) or _torch_home() in Path(file).parents or _torch_home() == Path(file)


def _in_stdlib(file: str) -> bool:
    home = os.path.dirname(os.__file__)  # noqa: PTH120
    return file.startswith(home + os.sep) and "site-packages" not in file[len(home) :]


@functools.cache
def _torch_home() -> Path:
    import torch

    return Path(torch.__file__).parent
