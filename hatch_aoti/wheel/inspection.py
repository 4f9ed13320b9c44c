"""What is inside a wheel, a folder or a `.pt2`, read without executing or importing anything of it."""

from __future__ import annotations

import dataclasses
import re
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hatch_aoti.artifact.archive import ENTRY, extract_objects
from hatch_aoti.artifact.cache import file_digest
from hatch_aoti.artifact.shared_object import read_object
from hatch_aoti.artifact.untrusted import LARGEST_TEXT, check_regular, is_safe_name, open_wheel, parse_json, printable
from hatch_aoti.errors import AotiError
from hatch_aoti.runtime.contract import Signature

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hatch_aoti.artifact.shared_object import ObjectNeeds

__all__ = [
    "ArtifactReport",
    "FileReport",
    "GpuReport",
    "ModelReport",
    "ObjectReport",
    "Report",
    "described_files",
    "inspect_path",
    "inspect_wheel",
]

_MANIFEST = "_models.json"
_SCHEMA = 1


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
    if path.name == _MANIFEST:
        return _folder(path.parent)
    if path.suffix == ".whl":
        return inspect_wheel(path)
    if path.suffix == ".pt2":
        return Report(str(path), None, None, None, (), (_file(path, path.name, None),))
    raise AotiError(f"{printable(path)} is neither a wheel (.whl) nor a .pt2, a {_MANIFEST}, or a folder with one.")


def _folder(folder: Path) -> Report:
    manifest = folder / _MANIFEST
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
        manifest = wheel.the(rf"(.*/)?{re.escape(_MANIFEST)}", _MANIFEST)
        if wheel.problems:
            raise AotiError(f"{printable(path)} is not a sound wheel: {wheel.problems[0]}.")
        inside = manifest.removesuffix(_MANIFEST)

        def read(name: str, digest: str | None) -> FileReport:
            unpacked = Path(scratch) / name.rpartition("/")[2]
            if inside + name in wheel.members:
                with wheel.open(inside + name) as source, unpacked.open("wb") as target:
                    shutil.copyfileobj(source, target)
            report = _file(unpacked, name, digest)
            unpacked.unlink(missing_ok=True)
            return report

        return _report(str(path), wheel.read(manifest), read)


def _report(source: str, manifest: bytes, read: Callable[[str, str | None], FileReport]) -> Report:
    """Make the report of a manifest; `read` reports on the file with a name, whose SHA-256 is known."""
    try:
        if len(manifest) > LARGEST_TEXT:
            raise ValueError(f"it has more than {LARGEST_TEXT} bytes")
        data = parse_json(manifest)
        if data["schema"] != _SCHEMA:
            raise AotiError(
                f"{printable(source)}: {_MANIFEST} has format {printable(data['schema'])}, and this hatch-aoti reads "
                f"format {_SCHEMA}: use the version that wrote it, or a newer one."
            )
        models = tuple(
            ModelReport(
                name,
                model.get("bundle"),
                str(Signature.from_json(_printable(model["signature"]))),
                model["device"],
                _gpu(model.get("gpu")),
                model["model"] or model.get("exported"),
                tuple(_artifact(artifact) for artifact in model["artifacts"]),
            )
            for name, model in data["models"].items()
        )
        described = [artifact for model in data["models"].values() for artifact in model["artifacts"]]
        described += [data["constants_file"]] if "constants_file" in data else []
        digests = {_file_name(item["file"]): str(item["sha256"]) for item in described}
        generator = f"{data['generator']['name']} {data['generator']['version']}"
        package, tag = data["package"], data["platform_tag"]
        debug = {str(name): str(value) for name, value in data.get("debug", {}).items()}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else printable(error)
        raise AotiError(
            f"{printable(source)}: {_MANIFEST} is not a manifest of hatch-aoti, or it is damaged: {reason}."
        ) from error
    return Report(source, package, tag, generator, models, tuple(read(*item) for item in digests.items()), debug)


def described_files(manifest: Mapping[str, Any]) -> dict[str, tuple[str, int]]:
    """Return the SHA-256 and the size of every file that a manifest describes, by name.

    Raises `ValueError`, `KeyError`, `TypeError` or `AttributeError` for what is no manifest.
    """
    items = {str(item["file"]): item for model in manifest["models"].values() for item in model["artifacts"]}
    items |= manifest["files"]
    if "constants_file" in manifest:
        items[manifest["constants_file"]["file"]] = manifest["constants_file"]
    return {_file_name(name): (str(item["sha256"]), int(item["bytes"])) for name, item in items.items()}


def _file_name(name: str) -> str:
    """Return a file name of the manifest, which must not lead anywhere else."""
    if not is_safe_name(name):
        raise ValueError(f"{name!r} is no file name")
    return name


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


def _gpu(gpu: Mapping[str, Any] | None) -> GpuReport | None:
    return None if gpu is None else GpuReport(gpu["name"], gpu["cuda"], tuple(gpu["architectures"]))


def _artifact(artifact: Mapping[str, Any]) -> ArtifactReport:

    return ArtifactReport(
        artifact["file"],
        artifact.get("entry", ENTRY),
        artifact["target"]["name"],
        artifact["target"]["description"],
        artifact["toolchain"]["torch"],
        artifact["toolchain"]["compiler"],
        artifact["verified"]["enabled"],
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
