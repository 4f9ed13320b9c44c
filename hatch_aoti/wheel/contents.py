"""What goes into the wheel: `_models.py`, the `.pt2` files, the manifest `_models.json`, and what C++ needs.

`WheelContents` is all of that. The setting `bundle`, one `.pt2` for several models, is the business of `model_files`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hatch_aoti import __version__
from hatch_aoti.artifact.archive import archive_id
from hatch_aoti.artifact.atomic_files import replace_file
from hatch_aoti.artifact.cache import file_digest
from hatch_aoti.artifact.constants_file import header_digest
from hatch_aoti.runtime.declarations import Gpu, Variant
from hatch_aoti.wheel.accessor import AccessorModel, render, runtime_files
from hatch_aoti.wheel.cmake import render_cmake
from hatch_aoti.wheel.manifest import (
    MANIFEST,
    SCHEMA,
    ConstantsFile,
    FileRecord,
    Generator,
    Manifest,
    ModelRecord,
    PackedArtifact,
)
from hatch_aoti.wheel.model_files import CONSTANTS, constants_of, locate_models, merged_constants

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from hatch_aoti.artifact.cache import Cache
    from hatch_aoti.compiler.target import Target
    from hatch_aoti.job.values import ModelResult
    from hatch_aoti.settings.model import ModelSettings
    from hatch_aoti.wheel.model_files import Location
    from hatch_aoti.wheel.platform_tag import TagChoice

__all__ = ["ACCESSOR", "DEVICES", "WheelContents", "make_contents", "skipped_accessor", "write_contents"]

ACCESSOR = "_models.py"
DEVICES = "hatch_aoti/devices.json"  # below `extra_metadata` in the wheel's `.dist-info`
_DEVICES_SCHEMA = 1


@dataclasses.dataclass(frozen=True)
class WheelContents:
    """The files for the package's directory: texts to write and artifacts to copy, by name (`cmake/x` in a folder).

    `metadata` are texts for the wheel's own metadata, by their names in its folder `extra_metadata`.
    """

    texts: Mapping[str, str]
    artifacts: Mapping[str, Path]
    metadata: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """All file names, sorted."""
        return sorted([*self.texts, *self.artifacts])


def make_contents(
    results: Sequence[ModelResult],
    entries: Mapping[str, ModelSettings],
    targets: Sequence[Target],
    *,
    package: str,
    version: str,
    torch_version: str,
    tag: TagChoice,
    cache: Cache,
    debug: Mapping[str, str],
    environment: Mapping[str, str],
) -> WheelContents:
    """Put together what the wheel gets for `results` (sorted by name), compiled for `targets` (best first).

    `debug` has the environment variables that made this a debug build; none in a release build.
    `environment` has those that changed settings.
    """
    constants = merged_constants(results, cache)
    locations = locate_models(results, entries, targets, cache)
    paths = {location.path for location in locations.values()}
    digests = {path: file_digest(path) for path in paths}
    ids = {path: archive_id(path) for path in paths}
    by_name = {target.name: target for target in targets}
    models = [
        AccessorModel(
            name=result.name,
            signature=result.signature,
            variants=tuple(
                Variant(
                    target=artifact.target,
                    file=locations[result.name, artifact.target].path.name,
                    features=by_name[artifact.target].features,
                    description=by_name[artifact.target].description,
                    entry=locations[result.name, artifact.target].entry,
                    id=ids[locations[result.name, artifact.target].path],
                )
                for artifact in result.artifacts
            ),
            source=entries[result.name].model,
            device=result.device,
            gpu=None if result.gpu is None else Gpu(result.gpu.cuda, result.gpu.architectures),
            num_runners=entries[result.name].num_runners,
            operators=result.operators,
            constants="" if constants is None or constants_of(result) is None else CONSTANTS,
            constants_id="" if constants is None or constants_of(result) is None else header_digest(constants),
        )
        for result in results
    ]
    accessor = render(
        models,
        package=package,
        torch_version=torch_version,
        system=platform.system(),
        machine=platform.machine(),
        hatch_aoti_version=__version__,
        debug=tuple(f"{name}={value}" for name, value in sorted(debug.items())),
    )
    texts = {ACCESSOR: accessor, **runtime_files()}
    texts |= render_cmake(
        models, package=package, version=version, torch_version=torch_version, hatch_aoti_version=__version__
    )
    manifest = Manifest(
        schema=SCHEMA,
        generator=Generator("hatch-aoti", __version__),
        package=package,
        platform_tag=tag.tag,
        python=f"{sys.version_info.major}.{sys.version_info.minor}",
        environment=dict(environment),
        files={name: _digest_of_text(text) for name, text in texts.items()},
        models={result.name: _describe(result, entries[result.name], locations, digests, ids) for result in results},
        debug=dict(debug),
        constants_file=None if constants is None else _describe_constants(constants),
    )
    artifacts = {location.path.name: location.path for location in locations.values()}
    if constants is not None:
        artifacts[CONSTANTS] = constants
    return WheelContents({**texts, MANIFEST: manifest.render()}, artifacts, _metadata(results))


def _digest_of_text(text: str) -> FileRecord:
    data = text.encode()
    return FileRecord(hashlib.sha256(data).hexdigest(), len(data))


def _describe_constants(path: Path) -> ConstantsFile:
    return ConstantsFile(file=CONSTANTS, sha256=file_digest(path), bytes=path.stat().st_size)


def _metadata(results: Sequence[ModelResult]) -> dict[str, str]:
    """Return what the wheel's metadata says about the GPUs that it needs; nothing where it needs none.

    A wheel's tag cannot say it, nor can a requirement. This file can be read without knowing, or importing, the package
    that has the models, before and after the wheel is installed.
    """
    gpus = {result.name: result.gpu for result in results if result.gpu is not None}
    if not gpus:
        return {}
    models = {name: {"cuda": gpu.cuda, "architectures": list(gpu.architectures)} for name, gpu in gpus.items()}
    return {DEVICES: json.dumps({"schema": _DEVICES_SCHEMA, "models": models}, indent=2, sort_keys=True) + "\n"}


def _describe(
    result: ModelResult,
    entry: ModelSettings,
    locations: Mapping[tuple[str, str], Location],
    digests: Mapping[Path, str],
    ids: Mapping[Path, str],
) -> ModelRecord:
    """Return the manifest's part about one model."""
    artifacts = []
    for artifact in result.artifacts:
        location = locations[result.name, artifact.target]
        artifacts.append(
            PackedArtifact.of(
                artifact.record,
                file=location.path.name,
                entry=location.entry,
                id=ids[location.path],
                sha256=digests[location.path],
                bytes=location.path.stat().st_size,
            )
        )
    return ModelRecord(
        model=entry.model or None,
        exported=entry.exported,
        weights=entry.weights,
        bundle=entry.bundle,
        external_constants=constants_of(result) is not None,
        device=result.device,
        gpu=result.gpu,
        signature=result.signature,
        operators=result.operators,
        sources=result.sources,
        artifacts=tuple(artifacts),
    )


def skipped_accessor(package: str) -> str:
    """Return the `_models.py` of a build that was told to skip compiling: importing it says so."""
    return f'''"""No compiled models: this distribution of {package} was built with HATCH_AOTI_SKIP set."""

raise ImportError(
    "{package} was built with HATCH_AOTI_SKIP set, so it has no compiled models; "
    "install a wheel that was built without it"
)
'''


def write_contents(contents: WheelContents, directory: Path) -> None:
    """Write the files into a directory, creating it and those inside. Raises `OSError`."""
    files: dict[str, str | Path] = {**contents.texts, **contents.artifacts}
    for name, content in sorted(files.items()):
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        replace_file(directory / name, content)
