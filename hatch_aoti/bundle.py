"""What goes into the wheel: `_models.py`, the `.pt2` files, the manifest `_models.json`, and what C++ needs."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hatch_aoti import __version__
from hatch_aoti.accessor import AccessorModel, Gpu, Variant, render
from hatch_aoti.cache import file_digest
from hatch_aoti.cmake import render_cmake
from hatch_aoti.constants import merge_constants
from hatch_aoti.signature import Signature

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hatch_aoti.cache import Cache
    from hatch_aoti.job import ModelResult
    from hatch_aoti.platform_tag import TagChoice
    from hatch_aoti.settings import ModelSettings
    from hatch_aoti.target import Target

__all__ = [
    "ACCESSOR",
    "CONSTANTS",
    "DEVICES",
    "MANIFEST",
    "Bundle",
    "artifact_name",
    "make_bundle",
    "skipped_accessor",
]

ACCESSOR = "_models.py"
MANIFEST = "_models.json"
CONSTANTS = "_models.safetensors"
DEVICES = "hatch_aoti/devices.json"  # below `extra_metadata` in the wheel's `.dist-info`
_SCHEMA = 1


@dataclasses.dataclass(frozen=True)
class Bundle:
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


def artifact_name(model: str, target: Target, targets: Sequence[Target]) -> str:
    """Return the file name of a model's `.pt2`; the target is part of it where there are several."""
    return f"{model}.pt2" if len(targets) == 1 else f"{model}.{target.name}.pt2"


def make_bundle(
    results: Sequence[ModelResult],
    entries: Mapping[str, ModelSettings],
    targets: Sequence[Target],
    *,
    package: str,
    version: str,
    torch_version: str,
    tag: TagChoice,
    cache: Cache,
) -> Bundle:
    """Put together what the wheel gets for `results` (sorted by name), compiled for `targets` (best first)."""
    constants = _merged_constants(results, cache)
    by_name = {target.name: target for target in targets}
    models = [
        AccessorModel(
            name=result.name,
            signature=Signature.from_json(result.signature),
            variants=tuple(
                Variant(
                    target=artifact.target,
                    file=Path(artifact.path).name,
                    features=by_name[artifact.target].features,
                    description=by_name[artifact.target].description,
                )
                for artifact in result.artifacts
            ),
            source=entries[result.name].model,
            device=result.device,
            gpu=None if result.gpu is None else Gpu(result.gpu["cuda"], tuple(result.gpu["architectures"])),
            num_runners=entries[result.name].num_runners,
            operators=result.operators,
            constants=CONSTANTS if _constants(result) is not None else "",
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
    )
    cpp = render_cmake(
        models, package=package, version=version, torch_version=torch_version, hatch_aoti_version=__version__
    )
    manifest = {
        "schema": _SCHEMA,
        "generator": {"name": "hatch-aoti", "version": __version__},
        "package": package,
        "platform_tag": tag.tag,
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "models": {result.name: _describe(result, entries[result.name]) for result in results},
    }
    artifacts = {Path(artifact.path).name: Path(artifact.path) for result in results for artifact in result.artifacts}
    if constants is not None:
        artifacts[CONSTANTS] = constants
        manifest["constants_file"] = {
            "file": CONSTANTS,
            "sha256": file_digest(constants),
            "bytes": constants.stat().st_size,
        }
    return Bundle(
        {ACCESSOR: accessor, MANIFEST: json.dumps(manifest, indent=2, sort_keys=True) + "\n", **cpp},
        artifacts,
        _metadata(results),
    )


def _metadata(results: Sequence[ModelResult]) -> dict[str, str]:
    """Return what the wheel's metadata says about the GPUs that it needs; nothing where it needs none.

    A wheel's tag cannot say it, nor can a requirement. This file can be read without knowing, or importing, the package
    that has the models, before and after the wheel is installed.
    """
    gpus = {result.name: result.gpu for result in results if result.gpu is not None}
    if not gpus:
        return {}
    models = {name: {"cuda": gpu["cuda"], "architectures": gpu["architectures"]} for name, gpu in gpus.items()}
    return {DEVICES: json.dumps({"schema": _SCHEMA, "models": models}, indent=2, sort_keys=True) + "\n"}


def _constants(result: ModelResult) -> Path | None:
    """Return the file with a model's external constants. Its variants have equal ones: they are not yet compiled in."""
    [file, *others] = {artifact.constants for artifact in result.artifacts} or {None}
    del others
    return None if file is None else Path(file)


def _merged_constants(results: Sequence[ModelResult], cache: Cache) -> Path | None:
    """Return a file in the cache with the external constants of all models, each distinct tensor once."""
    files = {result.name: file for result in results if (file := _constants(result)) is not None}
    if not files:
        return None
    digests = sorted((name, file_digest(file)) for name, file in files.items())
    key = hashlib.sha256(json.dumps(["constants", digests]).encode()).hexdigest()
    with cache.lock(key):
        found = cache.get(key)
        if found is None:
            with cache.scratch("constants") as directory:
                (directory / "entry").mkdir()
                merge_constants(directory / "entry" / CONSTANTS, [file for _, file in sorted(files.items())])
                found = cache.put(key, directory / "entry")
    return found / CONSTANTS


def _describe(result: ModelResult, entry: ModelSettings) -> dict[str, Any]:
    """Return the manifest's part about one model."""
    artifacts = []
    for artifact in result.artifacts:
        path = Path(artifact.path)
        artifacts.append({**artifact.record, "file": path.name, "sha256": file_digest(path), "bytes": artifact.size})
    return {
        "model": entry.model or None,
        "exported": entry.exported,
        "weights": entry.weights,
        "external_constants": _constants(result) is not None,
        "device": result.device,
        "gpu": result.gpu,
        "signature": result.signature,
        "operators": list(result.operators),
        "artifacts": artifacts,
    }


def skipped_accessor(package: str) -> str:
    """Return the `_models.py` of a build that was told to skip compiling: importing it says so."""
    return f'''"""No compiled models: this distribution of {package} was built with HATCH_AOTI_SKIP set."""

raise ImportError(
    "{package} was built with HATCH_AOTI_SKIP set, so it has no compiled models; "
    "install a wheel that was built without it"
)
'''
