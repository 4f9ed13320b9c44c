"""What goes into the wheel: `_models.py`, the `.pt2` files, and the manifest `_models.json`."""

from __future__ import annotations

import dataclasses
import json
import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hatch_aoti import __version__
from hatch_aoti.accessor import AccessorModel, Variant, render
from hatch_aoti.cache import file_digest
from hatch_aoti.signature import Signature

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hatch_aoti.job import ModelResult
    from hatch_aoti.platform_tag import TagChoice
    from hatch_aoti.settings import ModelSettings
    from hatch_aoti.target import Target

__all__ = ["ACCESSOR", "MANIFEST", "Bundle", "artifact_name", "make_bundle", "skipped_accessor"]

ACCESSOR = "_models.py"
MANIFEST = "_models.json"
_SCHEMA = 1


@dataclasses.dataclass(frozen=True)
class Bundle:
    """The files for the package's directory: texts to write and artifacts to copy, by name."""

    texts: Mapping[str, str]
    artifacts: Mapping[str, Path]

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
    torch_version: str,
    tag: TagChoice,
) -> Bundle:
    """Put together what the wheel gets for `results` (sorted by name), compiled for `targets` (best first)."""
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
            num_runners=entries[result.name].num_runners,
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
    manifest = {
        "schema": _SCHEMA,
        "generator": {"name": "hatch-aoti", "version": __version__},
        "package": package,
        "platform_tag": tag.tag,
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "models": {result.name: _describe(result, entries[result.name]) for result in results},
    }
    return Bundle(
        {ACCESSOR: accessor, MANIFEST: json.dumps(manifest, indent=2, sort_keys=True) + "\n"},
        {Path(artifact.path).name: Path(artifact.path) for result in results for artifact in result.artifacts},
    )


def _describe(result: ModelResult, entry: ModelSettings) -> dict[str, Any]:
    """Return the manifest's part about one model."""
    artifacts = []
    for artifact in result.artifacts:
        path = Path(artifact.path)
        artifacts.append({**artifact.record, "file": path.name, "sha256": file_digest(path), "bytes": artifact.size})
    return {
        "model": entry.model,
        "weights": entry.weights,
        "device": result.device,
        "signature": result.signature,
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
