"""How large what a contender loads is, read from a wheel's files."""

from __future__ import annotations

import json
import zipfile
from typing import TYPE_CHECKING

from hatch_aoti.benchmark.contenders import CONTENDERS
from hatch_aoti.benchmark.figures import OURS
from hatch_aoti.wheel.manifest import MANIFEST, parse_manifest

if TYPE_CHECKING:
    from pathlib import Path

    from hatch_aoti.benchmark.bench import Bench, Subject
    from hatch_aoti.wheel.manifest import Manifest

__all__ = ["artifact_bytes", "read_manifest"]


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of the models in a package's folder."""
    return parse_manifest((folder / MANIFEST).read_bytes())


def artifact_bytes(bench: Bench, subject: Subject, key: str) -> int | None:
    """Return the size of what a contender loads; None if that is the source. Models share the file of constants."""
    if key == OURS or not subject.project:
        manifest = read_manifest(subject.folder)
        model = manifest.models[subject.name]
        size = sum(_entry_bytes(subject.folder / item.file, item.entry) for item in model.artifacts)
        if model.external_constants and manifest.constants_file is not None:
            size += _constants_bytes(subject.folder / manifest.constants_file.file, subject.name)
        return size
    suffix = CONTENDERS[key].artifact
    files = [
        path
        for path in (bench.scratch / "artifacts" / key).glob(f"{subject.name}{suffix}*")
        if path.suffix not in {".json", ".npz"}
    ]
    return sum(path.stat().st_size for path in files) or None


def _entry_bytes(path: Path, entry: str) -> int:
    """Return the size of a `.pt2`, or of what is one model's where it has several."""
    with zipfile.ZipFile(path) as archive:
        places = [(info.filename.partition("/data/aotinductor/")[2], info.compress_size) for info in archive.infolist()]
    models = [(name, size) for name, size in places if name]
    mine = [size for name, size in models if name.startswith(f"{entry}/")]
    return path.stat().st_size if len(mine) == len(models) else sum(mine)


def _constants_bytes(path: Path, name: str) -> int:
    """Return how much of a file with external constants is one model's (see `artifact.constants_file`)."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    tensors = {entry["tensor"] for entry in json.loads(header["__metadata__"][name]).values()}
    spans = [header[tensor]["data_offsets"] for tensor in tensors]
    return int(sum(end - begin for begin, end in spans))
