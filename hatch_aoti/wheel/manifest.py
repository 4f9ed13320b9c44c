"""The manifest `_models.json`: one schema for writing and reading it (docs/manifest.md says what each key means).

A wheel may be of an older version of hatch-aoti, whose manifest has fewer keys, or of a newer one of the same format,
which has more: what came later has a default here, and what is not known is passed over.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from hatch_aoti.artifact.archive import ENTRY
from hatch_aoti.artifact.untrusted import LARGEST_TEXT, is_safe_name, parse_json, printable
from hatch_aoti.codec import LEFT_OUT, decode, encode
from hatch_aoti.compiler.gpu import GpuRecord
from hatch_aoti.job.values import ArtifactRecord
from hatch_aoti.runtime.contract import Signature

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "MANIFEST",
    "SCHEMA",
    "ConstantsFile",
    "FileRecord",
    "Generator",
    "Manifest",
    "ManifestError",
    "ModelRecord",
    "PackedArtifact",
    "parse_manifest",
]

MANIFEST: Final = "_models.json"
SCHEMA: Final = 1


class ManifestError(ValueError):
    """A text that is no manifest which this version reads: a sentence to put behind its name, without a full stop."""


@dataclass(frozen=True)
class Generator:
    """What wrote the manifest."""

    name: str
    version: str


@dataclass(frozen=True)
class FileRecord:
    """A file beside the manifest."""

    sha256: str
    bytes: int


@dataclass(frozen=True, kw_only=True)
class ConstantsFile(FileRecord):
    """The file with the constants of all models that keep theirs outside the compiled objects."""

    file: str


@dataclass(frozen=True, kw_only=True)
class PackedArtifact(ArtifactRecord):
    """A model compiled for one CPU baseline: the `.pt2` that has it, its name in there, and what it was made from."""

    file: str
    entry: str = ENTRY
    id: str = ""
    sha256: str
    bytes: int

    @classmethod
    def of(cls, record: ArtifactRecord, **places: Any) -> PackedArtifact:
        """Return an artifact with this record; `places` are the fields that the record does not have."""
        return cls(**{field.name: getattr(record, field.name) for field in dataclasses.fields(record)}, **places)


@dataclass(frozen=True, kw_only=True)
class ModelRecord:
    """A model, and its artifacts with the best CPU baseline first. `sources` is None where it is not recorded."""

    model: str | None
    exported: str | None = None
    weights: str | None = None
    bundle: str | None = None
    external_constants: bool = False
    device: str
    gpu: GpuRecord | None = None
    signature: Signature
    operators: tuple[str, ...] = ()
    sources: dict[str, str] | None = None
    artifacts: tuple[PackedArtifact, ...]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """All of it. `environment` is None and `files` is empty where an older version did not record them."""

    schema: int
    generator: Generator
    package: str
    platform_tag: str
    python: str
    environment: dict[str, str] | None = None
    files: dict[str, FileRecord] = field(default_factory=dict)
    models: dict[str, ModelRecord]
    debug: dict[str, str] = field(default_factory=dict, metadata=LEFT_OUT)
    constants_file: ConstantsFile | None = field(default=None, metadata=LEFT_OUT)

    def render(self) -> str:
        """Return the text of the file: the same for equal manifests."""
        return json.dumps(encode(self), indent=2, sort_keys=True) + "\n"

    def model_files(self) -> dict[str, FileRecord]:
        """Return the files with models and constants, by name."""
        return {file.file: FileRecord(file.sha256, file.bytes) for file in self._packed()}

    def all_files(self) -> dict[str, FileRecord]:
        """Return the generated files, too. Raises `ManifestError` for an older manifest that does not have them."""
        if not self.files:
            raise ManifestError("is of a version of hatch-aoti that did not record the hashes of all files (`files`)")
        return {**self.model_files(), **self.files}

    def _packed(self) -> Iterator[PackedArtifact | ConstantsFile]:
        for model in self.models.values():
            yield from model.artifacts
        if self.constants_file is not None:
            yield self.constants_file


def parse_manifest(data: bytes) -> Manifest:
    """Read a manifest that may be anything. Raises `ManifestError`, in words that can be printed."""
    try:
        if len(data) > LARGEST_TEXT:
            raise ValueError(f"it has more than {LARGEST_TEXT} bytes")
        value = parse_json(data)
        _check_schema(value)
        manifest = decode(Manifest, value, lenient=True)
        for name in (*manifest.model_files(), *manifest.files):
            if not is_safe_name(name):
                raise ValueError(f"{name!r} is no file name")
    except ManifestError:
        raise
    except (ValueError, OverflowError, RecursionError) as error:
        raise ManifestError(f"is not a manifest of hatch-aoti, or it is damaged: {printable(error)}") from error
    return manifest


def _check_schema(value: Any) -> None:
    schema = value.get("schema", SCHEMA) if isinstance(value, dict) else SCHEMA
    if schema != SCHEMA:
        raise ManifestError(
            f"has format {printable(schema)}, and this hatch-aoti reads format {SCHEMA}: use the version that wrote "
            "it, or a newer one"
        )
