"""Results of earlier builds that this one would reach again: their notes are in the cache."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.util
import json
import os
import platform
import sys
from importlib import metadata
from typing import TYPE_CHECKING, Any

from hatch_aoti.codec import encode, pack, unpack
from hatch_aoti.compiler.target import folding_features
from hatch_aoti.compiler.toolchain import find_toolchain
from hatch_aoti.errors import CompileError
from hatch_aoti.job.run import read_artifact
from hatch_aoti.job.values import ModelResult

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from hatch_aoti.artifact.cache import Cache
    from hatch_aoti.job.values import ModelRequest

__all__ = ["known_results", "remember"]


def known_results(
    requests: Mapping[str, ModelRequest], cache: Cache, *, root: Path, environ: Mapping[str, str]
) -> dict[str, ModelResult]:
    """Return the results of an earlier build for the models whose export would read the very same things again."""
    known = {}
    for name, request in requests.items():
        roots = (os.path.normpath(root / path) for path in request.import_paths)
        search_path = [*(path for path in roots if path not in sys.path), *sys.path]
        for note in cache.notes(_request_key(request, environ)):
            # A note is a hint: one that a build of ours would not write is none.
            with contextlib.suppress(ValueError):
                result = _known_result(name, request, note, cache, root=root, environ=environ, search_path=search_path)
                if result is not None:
                    known[name] = result
                    break
    return known


def _known_result(
    name: str,
    request: ModelRequest,
    note: Mapping[str, Any],
    cache: Cache,
    *,
    root: Path,
    environ: Mapping[str, str],
    search_path: Sequence[str],
) -> ModelResult | None:

    result = unpack(ModelResult, note)
    if (result.name, result.device) != (name, request.device) or result.trace is None:
        return None
    if not result.trace.holds(root, environ, search_path, cache.keyed_digest):
        return None
    artifacts = []
    for artifact, target, file_name in zip(result.artifacts, request.targets, request.file_names, strict=True):
        entry = cache.get(artifact.key)
        if entry is None:
            return None
        artifacts.append(read_artifact(entry, target.name, artifact.key, file_name, cached=True))
    return dataclasses.replace(result, artifacts=tuple(artifacts))


def remember(
    results: Sequence[ModelResult],
    requests: Mapping[str, ModelRequest],
    cache: Cache,
    *,
    environ: Mapping[str, str],
) -> None:
    """Note what the exports of this build read, for the next one."""
    for result in results:
        if result.trace is not None:
            cache.add_note(_request_key(requests[result.name], environ), pack(result))


def _request_key(request: ModelRequest, environ: Mapping[str, str]) -> str:
    """Return a hash over everything that a result depends on and that no trace records."""
    try:
        toolchain = find_toolchain(environ).record()
    except CompileError:  # every model's worker will say so
        toolchain = None
    numpy = importlib.util.find_spec("numpy")
    known = {
        "request": request,
        "toolchain": toolchain,
        "cpu": folding_features(),
        "python": sys.version,
        "numpy": metadata.version("numpy") if numpy is not None else None,
        "system": [platform.system(), platform.machine()],
    }
    return hashlib.sha256(json.dumps(encode(known), sort_keys=True).encode()).hexdigest()
