"""What goes into a job and what comes out of it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hatch_aoti.codec import LEFT_OUT
from hatch_aoti.compiler.gpu import BuilderGpu, GpuRecord
from hatch_aoti.compiler.target import Target
from hatch_aoti.compiler.toolchain import ToolchainRecord
from hatch_aoti.job.dependencies import ExportDependencies
from hatch_aoti.runtime.contract import Signature
from hatch_aoti.settings.debugging import Debugging
from hatch_aoti.settings.model import ModelSettings

if TYPE_CHECKING:
    from collections.abc import Mapping


__all__ = [
    "Artifact",
    "ArtifactRecord",
    "JobResult",
    "Measured",
    "ModelFailure",
    "ModelJob",
    "ModelRequest",
    "ModelResult",
    "NotVerified",
    "Verified",
]


@dataclasses.dataclass(frozen=True)
class Verified:
    """On how many calls a compiled model was compared with eager; the tolerances are those that the project set."""

    calls: int
    rtol: float | None
    atol: float | None
    enabled: Literal[True] = True


@dataclasses.dataclass(frozen=True)
class NotVerified:
    """The project has `verify = false`."""

    enabled: Literal[False] = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArtifactRecord:
    """What an artifact was made from, for what and with what, as the manifest says it: the same on every machine.

    `program` and `constants` are hashes of the exported program, and of its constants alone; `options` are inductor's;
    `folded_on` are features of the builder's CPU, where weights were folded by them.
    """

    program: str
    constants: str
    target: Target
    toolchain: ToolchainRecord
    options: dict[str, Any]
    folded_on: tuple[str, ...] | None = None
    seed: int
    verified: Verified | NotVerified


@dataclasses.dataclass(frozen=True)
class ModelRequest:
    """What is to be made of one model; nothing of it depends on where the project lies."""

    entry: ModelSettings
    import_paths: tuple[str, ...]  # relative to the project
    import_packages: dict[str, str]
    targets: tuple[Target, ...]  # best first
    file_names: tuple[str, ...]  # of the `.pt2` for each target
    include_sources: bool
    device: str  # `cpu` or `cuda`: what the setting `device` comes to on this machine
    gpu: BuilderGpu | None  # that it is compiled on, if the device is one
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
    trust_cache: bool = False
    # Of the worker, before any code of the project has run: it has its own, so none is sent.
    environ: Mapping[str, str] = dataclasses.field(default_factory=dict, metadata=LEFT_OUT)


@dataclasses.dataclass(frozen=True)
class Measured:
    """What differs from machine to machine, so it stays out of the wheel.

    `max_error` is the largest difference from eager at the build that made the artifact, None if it was not checked;
    `undefined_on` are the calls for which compiled code gives numbers where eager gives NaN,
    or other integers: all have infinity or NaN in them, and which of these comes of them may depend on the CPU;
    `vacuous` says of which outputs a wrong answer could have passed.
    """

    max_error: float | None
    undefined_on: tuple[str, ...] = ()
    vacuous: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Artifact:
    """One `.pt2` in the cache."""

    target: str
    key: str  # of the cache entry that has it
    path: Path
    constants: Path | None  # the file with the constants that are not in it
    size: int  # bytes, of the `.pt2`
    cached: bool
    record: ArtifactRecord
    measured: Measured


@dataclasses.dataclass(frozen=True)
class ModelResult:
    """What came of a model: its contract and its artifacts, best target first."""

    name: str
    device: str
    signature: Signature
    artifacts: tuple[Artifact, ...]
    gpu: GpuRecord | None = None
    operators: tuple[str, ...] = ()  # custom operators that the compiled code calls
    trace: ExportDependencies | None = None  # what the export read; None if that cannot be told
    unset: tuple[str, ...] = ()  # environment variables that the export looked up, and that were not set
    sources: dict[str, str] = dataclasses.field(default_factory=dict)  # SHA-256 of weights and saved program, by name
    notes: tuple[str, ...] = ()  # what to say of it to people


@dataclasses.dataclass(frozen=True)
class ModelFailure:
    """Why nothing came of a model: the parts of a `ModelError`."""

    stage: str
    reason: str
    hint: str = ""
    details: str = ""
    killed: bool = False  # whether the system killed a compiler, for want of memory
    unset: tuple[str, ...] = ()  # see `ModelResult`


@dataclasses.dataclass(frozen=True)
class JobResult:
    """What a worker answers: what came of the model, or why nothing did."""

    result: ModelResult | ModelFailure
