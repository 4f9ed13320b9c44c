"""What a worker does for one model: export, compile for every target, package, verify. Plain values in and out."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hatch_aoti.errors import ModelError
from hatch_aoti.workers import report_stage

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hatch_aoti.cache import Cache
    from hatch_aoti.compiler import Toolchain
    from hatch_aoti.settings import ModelSettings
    from hatch_aoti.signature import Signature
    from hatch_aoti.source import Source
    from hatch_aoti.target import Target

__all__ = ["Artifact", "ModelJob", "ModelResult", "run"]

_RECORD = "artifact.json"
_MEASURED = "measured.json"  # differs from machine to machine, so it stays out of the wheel


@dataclasses.dataclass(frozen=True)
class ModelJob:
    """One model of one build: everything a worker needs, as JSON-ready data and paths."""

    entry: dict[str, Any]  # ModelSettings.to_json()
    root: str  # the project directory
    import_paths: tuple[str, ...]
    import_packages: dict[str, str]
    targets: tuple[dict[str, Any], ...]  # Target fields, best first
    file_names: tuple[str, ...]  # of the `.pt2` for each target
    cache: str
    include_sources: bool
    code_digest: str  # of hatch-aoti's own code that shapes artifacts


@dataclasses.dataclass(frozen=True)
class Artifact:
    """One `.pt2` in the cache. `record` is what the manifest says about it."""

    target: str
    path: str
    size: int  # bytes
    cached: bool
    record: dict[str, Any]
    max_error: float | None  # largest difference from eager at the build that made it; None if not checked


@dataclasses.dataclass(frozen=True)
class ModelResult:
    """What became of a model: its contract and its artifacts, best target first; or the error that stopped it."""

    name: str
    device: str
    signature: dict[str, Any]
    artifacts: tuple[Artifact, ...]
    error: dict[str, str] | None = None

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> ModelResult:
        """Read what `run` returned."""
        artifacts = tuple(Artifact(**artifact) for artifact in value["artifacts"])
        return cls(value["name"], value["device"], value["signature"], artifacts, value["error"])


def run(payload: Mapping[str, Any]) -> dict[str, Any]:
    """Do one `ModelJob`, given as a dict; return a `ModelResult` as a dict, expected failures included."""
    from hatch_aoti.settings import ModelSettings

    job = ModelJob(**payload)
    entry = ModelSettings.from_json(job.entry)
    try:
        result = _run(job, entry)
    except ModelError as error:
        traceback.print_exc()  # for the log
        failure = {
            "stage": error.stage, "reason": error.reason, "hint": error.hint, "details": error.details
        }  # fmt: skip
        result = ModelResult(entry.name, "", {}, (), failure)
    return dataclasses.asdict(result)


def _run(job: ModelJob, entry: ModelSettings) -> ModelResult:
    from hatch_aoti.cache import Cache
    from hatch_aoti.compiler import CompileError, find_toolchain, program_digest
    from hatch_aoti.signature import UnsupportedModelError, read_signature
    from hatch_aoti.source import ImportRoots, export_model
    from hatch_aoti.target import Target

    # Importing the project's modules must not write into its tree, which may be read-only or shared.
    sys.dont_write_bytecode = True
    ImportRoots(tuple(job.import_paths), job.import_packages).install()
    device = _device(entry)
    source = export_model(entry, root=Path(job.root), device=device)
    try:
        signature = read_signature(
            source.program,
            forward=source.module.forward,
            args=source.args,
            kwargs=source.kwargs,
            output=source.output,
            dynamic_shapes=source.dynamic_shapes,
        )
    except UnsupportedModelError as error:
        raise ModelError(entry.name, "export", str(error)) from error
    cache = Cache(Path(job.cache))
    try:
        toolchain = find_toolchain()
        program = program_digest(source.program)
        targets = [Target(**{**target, "features": tuple(target["features"])}) for target in job.targets]
        artifacts = tuple(
            _artifact(job, entry, source, signature, target, file_name, toolchain, program, cache)
            for target, file_name in zip(targets, job.file_names, strict=True)
        )
    except CompileError as error:
        raise ModelError(entry.name, "compile", error.reason, hint=error.hint, details=error.details) from error
    return ModelResult(entry.name, device, signature.to_json(), artifacts)


def _device(entry: ModelSettings) -> str:
    import torch

    if entry.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if entry.device == "cuda" and not torch.cuda.is_available():
        raise ModelError(
            entry.name,
            "build",
            'the model is to be compiled for `device = "cuda"`, but torch finds no CUDA device on this machine',
            hint='build on a machine with a GPU and a CUDA build of torch, or write `device = "auto"` or "cpu"',
        )
    return entry.device


def _artifact(
    job: ModelJob,
    entry: ModelSettings,
    source: Source,
    signature: Signature,
    target: Target,
    file_name: str,
    toolchain: Toolchain,
    program: str,
    cache: Cache,
) -> Artifact:
    """Take the artifact for one target from the cache, or make it and put it there."""
    depends_on = {
        "program": program,
        "signature": signature.to_json(),
        "toolchain": toolchain.record(),
        "target": dataclasses.asdict(target),
        "inductor_configs": entry.inductor_configs,
        "seed": entry.seed,
        "verify": {"enabled": entry.verify, "rtol": entry.rtol, "atol": entry.atol},
        "include_sources": job.include_sources,
        "file_name": file_name,
        "hatch_aoti": job.code_digest,
    }
    key = hashlib.sha256(json.dumps(depends_on, sort_keys=True).encode()).hexdigest()
    made = False
    with cache.lock(key):  # another build that makes the same artifact is waited for, not repeated
        found = cache.get(key)
        if found is None:
            made = True
            with cache.scratch("artifact") as directory:
                _make(job, entry, source, signature, target, file_name, toolchain, program, directory)
                found = cache.put(key, directory / "entry")
    path = found / file_name
    record = json.loads((found / _RECORD).read_text(encoding="utf-8"))
    measured = json.loads((found / _MEASURED).read_text(encoding="utf-8"))
    return Artifact(target.name, os.fspath(path), path.stat().st_size, not made, record, measured["max_error"])


def _needed_options(source: Source, signature: Signature) -> dict[str, Any]:
    """Return the options without which the compiled code would not do what eager does."""
    from hatch_aoti.signature import inductor_options
    from hatch_aoti.verify import random_operators

    # Random numbers from eager's generator, in eager's order.
    drawn = {"fallback_random": True} if random_operators(source.program) else {}
    return {**inductor_options(signature), **drawn}


def _make(
    job: ModelJob,
    entry: ModelSettings,
    source: Source,
    signature: Signature,
    target: Target,
    file_name: str,
    toolchain: Toolchain,
    program: str,
    directory: Path,
) -> None:
    """Compile, package and verify one artifact into `directory / "entry"`."""
    from hatch_aoti.archive import write_package
    from hatch_aoti.compiler import compile_program
    from hatch_aoti.verify import verify_artifact

    report_stage("compile" if len(job.targets) == 1 else f"compile for {target.name}")
    work, finished = directory / "work", directory / "entry"
    work.mkdir()
    finished.mkdir()
    files = compile_program(
        source.program,
        target,
        toolchain,
        options={**entry.inductor_configs, **_needed_options(source, signature)},
        directory=work,
        headers=Path(job.cache) / "headers",
        seed=entry.seed,
        include_sources=job.include_sources,
    )
    package = finished / file_name
    write_package(package, {"model": files})
    verification = verify_artifact(package, source, signature, entry)
    record = {
        "program": program,
        "target": dataclasses.asdict(target),
        "toolchain": toolchain.record(),
        "inductor_configs": entry.inductor_configs,
        "seed": entry.seed,
        "verified": verification.record,
    }
    (finished / _MEASURED).write_text(json.dumps({"max_error": verification.max_error}), encoding="utf-8")
    (finished / _RECORD).write_text(json.dumps(record, sort_keys=True), encoding="utf-8")
