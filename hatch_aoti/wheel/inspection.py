"""What is inside a wheel, a folder or a `.pt2`, read without executing or importing anything of it."""

from __future__ import annotations

import dataclasses
import re
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hatch_aoti.artifact.archive import extract_objects
from hatch_aoti.artifact.cache import file_digest
from hatch_aoti.artifact.shared_object import read_object
from hatch_aoti.artifact.untrusted import LARGEST_TEXT, check_regular, open_wheel, printable
from hatch_aoti.errors import AotiError
from hatch_aoti.runtime.contract import Signature
from hatch_aoti.wheel.manifest import MANIFEST, ManifestError, parse_manifest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hatch_aoti.artifact.shared_object import ObjectNeeds
    from hatch_aoti.wheel.manifest import ModelRecord, PackedArtifact

__all__ = [
    "ArtifactReport",
    "FileReport",
    "GpuReport",
    "ModelReport",
    "ObjectReport",
    "Report",
    "inspect_path",
    "inspect_wheel",
]


@dataclasses.dataclass(frozen=True)
class ObjectReport:
    """What the shared object of a model asks of the system.

    `versions` has the highest version of each kind of symbol (`GLIBC` → `2.34`), and `libraries` what it links to.
    """

    model: str
    machine: str
    libraries: tuple[str, ...]
    versions: Mapping[str, str]
    executable_stack: bool
    stripped: bool


@dataclasses.dataclass(frozen=True)
class FileReport:
    """A file with models or constants.

    `state` is `as recorded`, `differs` (from the SHA-256 in the manifest), `missing`, or `not recorded` where there is
    no manifest. `bytes` is 0 where it is missing.
    """

    name: str
    bytes: int
    state: str
    objects: tuple[ObjectReport, ...] = ()


@dataclasses.dataclass(frozen=True)
class ArtifactReport:
    """A model compiled for one CPU baseline: its file, its name in there, and what it was compiled for and with."""

    file: str
    entry: str
    target: str
    description: str
    torch: str
    compiler: str
    verified: bool


@dataclasses.dataclass(frozen=True)
class GpuReport:
    """The GPU that a model was compiled on, and what its kernels are for (`sm_80`, `compute_80`)."""

    name: str
    cuda: str
    architectures: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class ModelReport:
    """A model as the manifest describes it; `signature` is for people (`(x: float32[n, 4]) -> float32[n, 4]`).

    `bundle` is what the file is called that it shares with other models, None if it has one of its own.
    """

    name: str
    bundle: str | None
    signature: str
    device: str
    gpu: GpuReport | None
    source: str
    artifacts: tuple[ArtifactReport, ...]


@dataclasses.dataclass(frozen=True)
class Report:
    """Everything that was found. A bare `.pt2` has no manifest: then only `source` and `files` say something.

    `debug` has the variables that made it a debug build.
    """

    source: str
    package: str | None
    platform_tag: str | None
    generator: str | None
    models: tuple[ModelReport, ...]
    files: tuple[FileReport, ...]
    debug: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON-ready data."""
        return dataclasses.asdict(self)


def inspect_path(path: Path) -> Report:
    """Read a wheel, a folder with a `_models.json`, that file itself, or a `.pt2`.

    Raises `AotiError` for anything else, and for what is damaged.
    """
    if path.is_dir():
        return _folder(path)
    if path.name == MANIFEST:
        return _folder(path.parent)
    if path.suffix == ".whl":
        return inspect_wheel(path)
    if path.suffix == ".pt2":
        return Report(str(path), None, None, None, (), (_file(path, path.name, None),))
    raise AotiError(f"{printable(path)} is neither a wheel (.whl) nor a .pt2, a {MANIFEST}, or a folder with one.")


def _folder(folder: Path) -> Report:
    manifest = folder / MANIFEST
    check_regular(manifest)
    try:
        with manifest.open("rb") as file:
            data = file.read(LARGEST_TEXT + 1)
    except OSError as error:
        raise AotiError(
            f"cannot read {printable(manifest)}: {error.strerror}. Name the folder of a package that hatch-aoti put "
            "models into."
        ) from error
    return _report(str(folder), data, lambda name, digest: _file(folder / name, name, digest))


def inspect_wheel(path: Path) -> Report:
    """Read a wheel, as `inspect_path` does."""
    with open_wheel(path) as wheel, tempfile.TemporaryDirectory(prefix="hatch-aoti-") as scratch:
        manifest = wheel.the(rf"(.*/)?{re.escape(MANIFEST)}", MANIFEST)
        if wheel.problems:
            raise AotiError(f"{printable(path)} is not a sound wheel: {wheel.problems[0]}.")
        inside = manifest.removesuffix(MANIFEST)

        def read(name: str, digest: str | None) -> FileReport:
            unpacked = Path(scratch) / name.rpartition("/")[2]
            if inside + name in wheel.members:
                with wheel.open(inside + name) as source, unpacked.open("wb") as target:
                    shutil.copyfileobj(source, target)
            report = _file(unpacked, name, digest)
            unpacked.unlink(missing_ok=True)
            return report

        return _report(str(path), wheel.read(manifest), read)


def _report(source: str, data: bytes, read: Callable[[str, str | None], FileReport]) -> Report:
    """Make the report of a manifest; `read` reports on the file with a name, whose SHA-256 is known."""
    try:
        manifest = parse_manifest(data)
        models = tuple(_model(name, model) for name, model in manifest.models.items())
    except ManifestError as error:
        raise AotiError(f"{printable(source)}: {MANIFEST} {error}.") from error
    return Report(
        source,
        manifest.package,
        manifest.platform_tag,
        f"{manifest.generator.name} {manifest.generator.version}",
        models,
        tuple(read(name, file.sha256) for name, file in manifest.model_files().items()),
        manifest.debug,
    )


def _model(name: str, model: ModelRecord) -> ModelReport:
    gpu = model.gpu
    return ModelReport(
        name,
        model.bundle,
        _shown(model.signature),
        model.device,
        None if gpu is None else GpuReport(gpu.name, gpu.cuda, gpu.architectures),
        model.model or model.exported or "",
        tuple(_artifact(artifact) for artifact in model.artifacts),
    )


def _shown(signature: Signature) -> str:
    """Return a signature for people. It is read without checks, so it may be no signature, only made like one."""
    try:
        return str(Signature.from_json(_printable(signature.to_json())))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise ManifestError(f"has a signature that is none: {printable(error)}") from error


def _printable(value: Any) -> Any:
    """Return JSON data whose texts can be shown as they are; what is made of it has lines of its own."""
    match value:
        case str():
            return printable(value)
        case list():
            return [_printable(item) for item in value]
        case dict():
            return {printable(key): _printable(item) for key, item in value.items()}
    return value


def _artifact(artifact: PackedArtifact) -> ArtifactReport:
    return ArtifactReport(
        artifact.file,
        artifact.entry,
        artifact.target.name,
        artifact.target.description,
        artifact.toolchain.torch,
        artifact.toolchain.compiler,
        artifact.verified.enabled,
    )


def _file(path: Path, name: str, digest: str | None) -> FileReport:

    check_regular(path)
    try:
        size = path.stat().st_size
        actual = file_digest(path)
    except FileNotFoundError:
        if digest is None:
            raise AotiError(f"{printable(path)} does not exist.") from None
        return FileReport(name, 0, "missing")
    except OSError as error:
        raise AotiError(f"cannot read {printable(path)}: {error.strerror}.") from error
    if digest is not None and actual != digest:
        return FileReport(name, size, "differs")  # whatever it is: not what was built
    objects = extract_objects(path) if path.suffix == ".pt2" else {}
    return FileReport(
        name,
        size,
        "not recorded" if digest is None else "as recorded",
        tuple(
            _object(model, read_object(data, name=f"{name} ({model})", symbols=False))
            for model, data in objects.items()
        ),
    )


def _object(model: str, needs: ObjectNeeds) -> ObjectReport:
    highest: dict[str, tuple[int, ...]] = {}
    for version in needs.versions:
        kind, _, number = version.version.partition("_")
        if re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9}){0,9}", number):
            highest[kind] = max(highest.get(kind, ()), tuple(map(int, number.split("."))))
    versions = {kind: ".".join(map(str, number)) for kind, number in sorted(highest.items())}
    return ObjectReport(model, needs.machine, needs.needed, versions, needs.executable_stack, needs.stripped)
