"""Whether a model's files are there, and are those of the build that `_models.py` is of."""

from __future__ import annotations

import hashlib
import json
import zipfile
from typing import TYPE_CHECKING

from .declarations import Declaration, LoadError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from .declarations import Variant

__all__ = ["another_file", "check_id", "check_present", "wrong_files"]


def check_present(model: Declaration, path: Path) -> None:
    """Raise LoadError for a file that is missing, or that is no file of its own."""
    if path.is_file():
        return
    if packed := next((parent for parent in path.parents if parent.is_file()), None):
        raise LoadError(
            f"{model.name}: {path.name} is in the zip file {packed}, and compiled code is loaded only from a file of "
            "its own. Unpack it (python -m zipfile -e), or install the package with pip."
        )
    raise LoadError(f"{model.name}: {path} is missing. Reinstall the package that contains it.")


def another_file(model: str, path: Path) -> str:
    """Return what to say of a file of another build."""
    return (
        f"{model}: {path} is not the file that this _models.py was built with: it is of another build, or of another "
        "model. Reinstall the package."
    )


def check_id(model: Declaration, variant: Variant, path: Path, archive: zipfile.ZipFile) -> None:
    """Refuse an archive of another model or build, before any of its code is loaded."""
    found = [archive.read(name) for name in archive.namelist() if name.endswith("/.data/serialization_id")]
    if variant.id and found != [variant.id.encode()]:
        raise LoadError(another_file(model.name, path))


def wrong_files(models: Sequence[Declaration]) -> list[str]:
    """Say which files of `models` differ from those that the build made; `_models.json` has the SHA-256 of each."""
    manifest_path = Declaration.folder / "_models.json"
    expected: dict[str, str] = {}
    seen: set[str] = set()
    wrong = []
    try:
        manifest = json.loads(manifest_path.read_text(encoding="utf-8"))
        for described in manifest["models"].values():
            expected |= {artifact["file"]: artifact["sha256"] for artifact in described["artifacts"]}
        if "constants_file" in manifest:
            expected[manifest["constants_file"]["file"]] = manifest["constants_file"]["sha256"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return [f"{manifest_path} is missing or damaged ({error}). Reinstall the package that contains it."]
    for model in models:
        for file in [*(variant.file for variant in model.variants), *([model.constants] if model.constants else [])]:
            path = model.folder / file
            try:
                check_present(model, path)
                for variant in model.variants:
                    if variant.file == file:
                        with zipfile.ZipFile(path) as archive:
                            check_id(model, variant, path, archive)
                if file not in seen and _sha256(path) != expected.get(file):
                    wrong.append(f"{path} is damaged: its SHA-256 is not the build's. Reinstall the package.")
                seen.add(file)
            except LoadError as error:
                wrong.append(str(error))
            except (OSError, EOFError, zipfile.BadZipFile) as error:
                wrong.append(f"{model.name}: {path} is damaged ({error}). Reinstall the package.")
    return wrong


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
