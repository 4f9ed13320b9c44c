"""The files of a wheel that have models and constants in them: their names, and those that several models share.

The archive of a bundle and the file with external constants are put together from what the cache has of each model,
byte for byte and without running anything. They are kept in the cache, too, under a key of their parts.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from functools import partial
from typing import TYPE_CHECKING

from hatch_aoti.artifact.archive import ENTRY, join_packages
from hatch_aoti.artifact.cache import file_digest
from hatch_aoti.artifact.constants_file import merge_constants
from hatch_aoti.own_code import code_digest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from hatch_aoti.artifact.cache import Cache
    from hatch_aoti.compiler.target import Target
    from hatch_aoti.job.values import ModelResult
    from hatch_aoti.settings.model import ModelSettings

__all__ = ["CONSTANTS", "Location", "artifact_name", "constants_of", "locate_models", "merged_constants"]

CONSTANTS = "_models.safetensors"


@dataclasses.dataclass(frozen=True)
class Location:
    """Where a compiled model is: in the archive `path`, called there as in the wheel, under the name `entry`."""

    path: Path
    entry: str


def artifact_name(stem: str, target: Target, targets: Sequence[Target]) -> str:
    """Return the file name of a `.pt2` for one of `targets`; the target is part of it where there are several.

    `stem` is the name of the model, or of the bundle that it belongs to.
    """
    return f"{stem}.pt2" if len(targets) == 1 else f"{stem}.{target.name}.pt2"


def locate_models(
    results: Sequence[ModelResult], entries: Mapping[str, ModelSettings], targets: Sequence[Target], cache: Cache
) -> dict[tuple[str, str], Location]:
    """Return where each model is for each target, by their names, and put bundles together.

    A model without a bundle is alone in its artifact, one with a bundle in an archive with the others of that bundle.
    """
    locations: dict[tuple[str, str], Location] = {}
    for target in targets:
        bundles: dict[str, dict[str, Path]] = {}
        for result in results:
            [path] = [artifact.path for artifact in result.artifacts if artifact.target == target.name]
            bundle = entries[result.name].bundle
            if bundle is None:
                locations[result.name, target.name] = Location(path, ENTRY)
            else:
                bundles.setdefault(bundle, {})[result.name] = path
        for bundle, parts in bundles.items():
            make = partial(join_packages, parts=parts)
            path = _shared_file(artifact_name(bundle, target, targets), parts, make, cache)
            locations.update({(name, target.name): Location(path, name) for name in parts})
    return locations


def constants_of(result: ModelResult) -> Path | None:
    """Return the file with a model's external constants. Its variants have equal ones: they are not yet compiled in."""
    [file, *others] = {artifact.constants for artifact in result.artifacts} or {None}
    del others
    return file


def merged_constants(results: Sequence[ModelResult], cache: Cache) -> Path | None:
    """Return a file in the cache with the external constants of all models, each distinct tensor once."""
    parts = {result.name: file for result in results if (file := constants_of(result)) is not None}
    if not parts:
        return None
    make = partial(merge_constants, files=[file for _, file in sorted(parts.items())])
    return _shared_file(CONSTANTS, parts, make, cache)


def _shared_file(name: str, parts: Mapping[str, Path], make: Callable[[Path], None], cache: Cache) -> Path:
    """Return a file of this name in the cache that was made of `parts`; `make` writes it to the path it is given."""
    digests = sorted((part, file_digest(path)) for part, path in parts.items())
    key = hashlib.sha256(json.dumps([name, digests, code_digest(__name__)]).encode()).hexdigest()
    with cache.lock(key):
        found = cache.get(key)
        if found is None:
            with cache.scratch("shared") as directory:
                (directory / "entry").mkdir()
                make(directory / "entry" / name)
                found = cache.put(key, directory / "entry")
    return found / name
