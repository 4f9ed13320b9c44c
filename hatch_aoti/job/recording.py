"""Watching what an export reads, while it does."""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hatch_aoti.job.dependencies import (
    ANY_NAME,
    MISSING,
    Answers,
    ExportDependencies,
    counts,
    describe,
    in_stdlib,
    lasting_place,
    stands_for_itself,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
    from types import ModuleType

__all__ = ["Recorder", "recording"]


# Extension modules that read no files by themselves, or only such as are recorded some other way. Any other makes a
# model untraceable: its author may call it to load anything.
_HARMLESS = frozenset({"torch", "numpy", "safetensors", "yaml", "markupsafe", "functorch", "charset_normalizer"})


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


class Recorder:
    """Collects while `recording` is active; `finish` makes the `ExportDependencies`."""

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

    def finish(self, digest: Callable[[bytes], str]) -> ExportDependencies | None:
        """Return the trace; None when something happened that it cannot account for.

        `digest` is the keyed digest under which it is kept.
        """
        for name, module in list(sys.modules.items()):
            if name in self.before:
                continue
            file = getattr(module, "__file__", None)
            if not file:
                continue
            if not file.endswith(".py") and name.partition(".")[0] not in _HARMLESS and not in_stdlib(file):
                self.untraceable = self.untraceable or f"the extension module {name}"
            self.opened.add(file)
        if self.untraceable:
            return None
        seen = Answers(self.root, self.search_path, digest)
        packages, modules = self._searched()
        environ: dict[str, str | None] = dict(self.variables)
        if self.names is not None:
            environ[ANY_NAME] = None
        known = {name: value for name, value in environ.items() if value is not None}
        opened = self._places(file for file in self.opened if self.asked.get(file) != MISSING)
        return ExportDependencies(
            files={place: seen.file(place) for place in opened},
            folders={place: seen.folder(place) for place in self._places(self.listed)},
            states=self._states(seen, opened),
            environ={
                name: seen.variable(name, known if name != ANY_NAME else dict.fromkeys(self.names or (), ""))
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
            self.asked.setdefault(file, MISSING)

    def ask(self, path: Any, state: str) -> None:
        """Take note of a question about a path, and its answer."""
        if isinstance(path, (str, bytes, os.PathLike)):
            self.asked.setdefault(os.path.abspath(os.fsdecode(path)), state)  # noqa: PTH100

    def look_up(self, name: str, value: str | None) -> None:
        """Take note of an environment variable that is looked at, and its value."""
        if counts(name) and name not in self.own:
            self.variables.setdefault(name, value)

    def list_variables(self, names: Iterable[str]) -> None:
        """Take note that it was asked which environment variables there are."""
        if self.names is None:
            self.names = frozenset(filter(counts, names)) - self.own

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
                and not stands_for_itself(file)
                and not (path.name.startswith("<") and path.name.endswith(">"))  # torch's name for code without a file
            ):
                places.add(lasting_place(file, self.root, self.search_path))
        return sorted(places)

    def _states(self, seen: Answers, opened: Collection[str]) -> dict[str, str]:
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
                if folders and not any(map(stands_for_itself, folders)):
                    packages[parent] = tuple(lasting_place(folder, self.root, self.search_path) for folder in folders)
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
                    state = describe(_stat(path))
                except OSError:
                    state = MISSING
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
