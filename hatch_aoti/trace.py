"""What an export read, so that a later build can know, without importing torch, that nothing of it has changed.

While a model is imported, built and exported, this records every file that is opened, every module that is imported
and every environment variable that is looked at. The next build compares these with what is there (`Trace.holds`),
and takes the finished result if all are the same: milliseconds, where exporting again takes seconds.

Some readings leave no mark: files that a native library opens by itself, the network, other processes. A model that
may have used any of these has no trace, and is exported in every build (and still not compiled again, see `job`).
Nor does a question whether a file exists leave a mark; code that only asks is taken to be unchanged.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hatch_aoti.cache import file_digest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = ["Recorder", "Trace", "recording"]

# Extension modules that read no files by themselves, or only such as are recorded some other way. Any other makes a
# model untraceable: its author may call it to load anything.
_HARMLESS = frozenset({"torch", "numpy", "safetensors", "yaml", "markupsafe", "functorch", "charset_normalizer"})

# What a build's own workers and frontends set anew each time, and no model depends on.
_VOLATILE = frozenset({
    "TMPDIR", "TORCHINDUCTOR_CACHE_DIR", "PWD", "OLDPWD", "SHLVL", "_", "PYTHONPATH", "PATH", "VIRTUAL_ENV",
    "PEP517_BUILD_BACKEND", "PEP517_BACKEND_PATH", "PYPROJECT_HOOKS_BUILD_BACKEND", "PYPROJECT_HOOKS_BACKEND_PATH",
    "PYTEST_CURRENT_TEST", "PIP_BUILD_TRACKER", "HATCH_AOTI_CACHE_DIR", "HATCH_AOTI_JOBS",
})  # fmt: skip

# Things happened that no comparison of files can account for.
_UNTRACEABLE = (
    "socket.connect",
    "subprocess.Popen",
    "os.system",
    "os.posix_spawn",
    "os.fork",
    "os.exec",
    "ctypes.dlopen",
)


@dataclasses.dataclass(frozen=True)
class Trace:
    """Files and environment variables, with the hashes and values they had.

    `files` maps a place to the SHA-256 of the content: `root:…` is relative to the project, `path:…` to an entry of
    `sys.path` (environments come and go), `file:…` is absolute. `folders` has the hashes of the names in folders that
    were listed. `environ` has None for a variable that was not set.
    """

    files: Mapping[str, str]
    folders: Mapping[str, str]
    environ: Mapping[str, str | None]

    def holds(self, root: Path, environ: Mapping[str, str], search_path: Sequence[str]) -> bool:
        """Say whether everything is still as it was, for a project at `root`."""
        if any(environ.get(name) != value for name, value in self.environ.items()):
            return False
        try:
            return all(
                file_digest(_resolve(place, root, search_path)) == digest for place, digest in self.files.items()
            ) and all(
                _names_digest(_resolve(place, root, search_path)) == digest for place, digest in self.folders.items()
            )
        except OSError:
            return False

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON data."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Trace:
        """Read what `to_json` returned."""
        return cls(value["files"], value["folders"], value["environ"])


class Recorder:
    """Collects while `recording` is active; `finish` makes the `Trace`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.opened: set[str] = set()
        self.listed: set[str] = set()
        self.variables: dict[str, str | None] = {}
        self.untraceable: str = ""
        self.before = frozenset(sys.modules)
        self.scratch = [
            folder
            for folder in (tempfile.gettempdir(), os.environ.get("TORCHINDUCTOR_CACHE_DIR"))
            if folder and not root.is_relative_to(folder)
        ]

    def finish(self) -> Trace | None:
        """Return the trace; None when something happened that it cannot account for."""
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
        files, folders = {}, {}
        try:
            for file in sorted(self.opened):
                place = self._place(file)
                if place is not None:
                    files[place] = file_digest(Path(file))
            for folder in sorted(self.listed):
                place = self._place(folder)
                if place is not None:
                    folders[place] = _names_digest(Path(folder))
        except OSError:  # read and removed again
            return None
        return Trace(files, folders, dict(sorted(self.variables.items())))

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Take note of what Python does; called for every audit event (`sys.addaudithook`)."""
        if event == "open":
            path, mode, flags = arguments
            writes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            if isinstance(path, (str, bytes)) and not writes and not (isinstance(mode, str) and "r" not in mode):
                self.opened.add(os.path.abspath(os.fsdecode(path)))  # noqa: PTH100 (no symlinks resolved)
        elif event in {"os.listdir", "os.scandir"}:
            if "importlib" in sys._getframe(2).f_code.co_filename:  # noqa: SLF001 - the search for modules, which are recorded themselves
                return
            [path] = arguments
            self.listed.add(os.path.abspath(os.fsdecode(path)) if isinstance(path, (str, bytes)) else os.getcwd())  # noqa: PTH100, PTH109
        elif event.startswith(_UNTRACEABLE):
            self.untraceable = self.untraceable or event

    def _place(self, file: str) -> str | None:
        """Return where a file is, in terms that hold in the next build; None for what does not count."""
        path = Path(file)
        if _in_stdlib(file) or file.startswith(("/proc/", "/sys/", "/dev/")) or not path.exists():
            return None
        if path.suffix == ".pyc" or any(path.is_relative_to(folder) for folder in self.scratch):
            return None
        if path.is_relative_to(self.root):
            return f"root:{path.relative_to(self.root).as_posix()}"
        if _torch_home() in path.parents:  # its version is part of every key
            return None
        for entry in sys.path:
            if entry and path.is_relative_to(entry):
                return f"path:{path.relative_to(entry).as_posix()}"
        return f"file:{path}"


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
    plain = type(os.environ)
    _active = recorder
    os.environ.__class__ = _RecordedEnviron
    try:
        with _native_readers(recorder):
            yield recorder
    finally:
        os.environ.__class__ = plain
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

    def __getitem__(self, key: str) -> str:
        recorder = _active
        if recorder is not None and key not in _VOLATILE:
            recorder.variables.setdefault(key, self._data_get(key))
        return super().__getitem__(key)  # type: ignore[no-any-return]

    def __iter__(self) -> Iterator[str]:
        recorder = _active
        for key in super().__iter__():
            if recorder is not None and key not in _VOLATILE:
                recorder.variables.setdefault(key, self._data_get(key))
            yield key

    def _data_get(self, key: str) -> str | None:
        try:
            return super().__getitem__(key)  # type: ignore[no-any-return]
        except KeyError:
            return None


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
                recorder.opened.add(os.path.abspath(os.fsdecode(path)))  # noqa: PTH100
            return original(path, *args, **kwargs)

        undo.callback(setattr, owner, name, original)
        setattr(owner, name, watched)

    with undo:
        watch(safetensors, "safe_open")
        watch(safetensors.torch, "safe_open")
        watch(torch._C, "PyTorchFileReader")  # noqa: SLF001
        watch(torch, "from_file")
        yield


def _resolve(place: str, root: Path, search_path: Sequence[str]) -> Path:
    kind, _, rest = place.partition(":")
    if kind == "root":
        return root / rest
    if kind == "path":
        for entry in search_path:
            if entry and (Path(entry) / rest).exists():
                return Path(entry) / rest
        raise FileNotFoundError(rest)
    return Path(rest)


def _names_digest(folder: Path) -> str:
    """Return a hash of the names in a folder, leaving out what Python itself writes there."""
    names = sorted(name for name in os.listdir(folder) if name != "__pycache__")  # noqa: PTH208
    return hashlib.sha256("\0".join(names).encode("utf-8", "surrogateescape")).hexdigest()


def _in_stdlib(file: str) -> bool:
    home = os.path.dirname(os.__file__)  # noqa: PTH120
    return file.startswith(home + os.sep) and "site-packages" not in file[len(home) :]


def _torch_home() -> Path:
    import torch

    return Path(torch.__file__).parent
