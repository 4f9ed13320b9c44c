"""What goes into a job and what comes out of it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hatch_aoti.settings.debugging import Debugging

if TYPE_CHECKING:
    from collections.abc import Mapping


__all__ = ["Artifact", "ModelJob", "ModelRequest", "ModelResult"]


@dataclasses.dataclass(frozen=True)
class ModelRequest:
    """What is to be made of one model, as JSON-ready data that does not depend on where the project lies."""

    entry: dict[str, Any]  # ModelSettings.to_json()
    import_paths: tuple[str, ...]  # relative to the project
    import_packages: dict[str, str]
    targets: tuple[dict[str, Any], ...]  # Target fields, best first
    file_names: tuple[str, ...]  # of the `.pt2` for each target
    include_sources: bool
    device: str  # `cpu` or `cuda`: what the setting `device` comes to on this machine
    gpu: dict[str, str] | None  # the fields of the `BuilderGpu` that it is compiled on, if that is one
    code_digest: str  # of hatch-aoti's own code that shapes artifacts


@dataclasses.dataclass(frozen=True)
class ModelJob:
    """A request and the places where it is worked on: the project's root, the cache's, and a folder for this job.

    What is in `folder` afterwards is for people to read; it will then be found at `final_debug_dir`. With
    `bypass_cache`, nothing is taken from the cache, and nothing put where a release build would find it. `trust_cache`
    takes a cache that others can write to.
    """

    request: ModelRequest
    root: Path
    cache: Path
    folder: Path
    final_debug_dir: Path
    debugging: Debugging
    bypass_cache: bool
    environ: Mapping[str, str]  # of this process before any code of the project has run
    trust_cache: bool = False

    @classmethod
    def from_json(cls, value: Mapping[str, Any], environ: Mapping[str, str]) -> ModelJob:
        """Read the payload of a job: this class as plain data, but for the environment that it is to run in."""
        return cls(
            request=ModelRequest(**value["request"]),
            root=Path(value["root"]),
            cache=Path(value["cache"]),
            folder=Path(value["folder"]),
            final_debug_dir=Path(value["final_debug_dir"]),
            debugging=Debugging(**value["debugging"]),
            bypass_cache=value["bypass_cache"],
            environ=environ,
            trust_cache=value["trust_cache"],
        )


@dataclasses.dataclass(frozen=True)
class Artifact:
    """One `.pt2` in the cache. `record` is what the manifest says about it."""

    target: str
    key: str  # of the cache entry that has it
    path: str
    constants: str | None  # the file with the constants that are not in it
    size: int  # bytes, of the `.pt2`
    cached: bool
    record: dict[str, Any]
    max_error: float | None  # largest difference from eager at the build that made it; None if not checked
    undefined_on: tuple[str, ...] = ()  # see `Verification`


@dataclasses.dataclass(frozen=True)
class ModelResult:
    """What became of a model: its contract and its artifacts, best target first; or the error that stopped it."""

    name: str
    device: str
    signature: dict[str, Any]
    artifacts: tuple[Artifact, ...]
    gpu: dict[str, Any] | None = None  # what the manifest says of the GPU that it was compiled on
    error: dict[str, str] | None = None
    operators: tuple[str, ...] = ()  # custom operators that the compiled code calls
    trace: dict[str, Any] | None = None  # a `Trace`: what the export read; None if that cannot be told
    unset: tuple[str, ...] = ()  # environment variables that the export looked up, and that were not set
    killed: bool = False  # whether it failed because the system killed a compiler, for want of memory
    sources: dict[str, str] = dataclasses.field(default_factory=dict)  # SHA-256 of weights and saved program, by name

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> ModelResult:
        """Read what `run` returned."""
        artifacts = tuple(Artifact(**artifact) for artifact in value["artifacts"])
        tuples = {name: tuple(value[name]) for name in ("operators", "unset")}
        return cls(**{**value, **tuples, "artifacts": artifacts})
