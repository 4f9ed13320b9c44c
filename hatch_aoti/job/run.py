"""What a worker does for one model: export, compile for every target, package, verify. Plain values in and out."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib
import json
import os
import shutil
import sys
import traceback
from typing import TYPE_CHECKING, Any

from hatch_aoti.artifact.archive import ENTRY, write_package
from hatch_aoti.artifact.cache import Cache, file_digest
from hatch_aoti.artifact.constants_file import write_constants
from hatch_aoti.codec import encode, pack, unpack
from hatch_aoti.compiler import compilation as compiler
from hatch_aoti.compiler.compilation import all_options, compile_program, one_thread
from hatch_aoti.compiler.gpu import GpuRecord, architectures, gpu_options
from hatch_aoti.compiler.optimize import make_plan
from hatch_aoti.compiler.options import check_options, whole_tables
from hatch_aoti.compiler.reproduce import PROGRAM, dump_minifier, save_program, write_script
from hatch_aoti.compiler.serialise import inductor_options
from hatch_aoti.compiler.target import folding_features
from hatch_aoti.compiler.toolchain import find_toolchain
from hatch_aoti.errors import MAKE_ROOM, AotiError, CompileError, ModelError, UnsupportedModelError, full_disk
from hatch_aoti.export.digests import constants_digest, program_digest
from hatch_aoti.export.failures import raised, user_traceback
from hatch_aoti.export.importing import ImportRoots
from hatch_aoti.export.operators import called_operators, random_operators, registered_operators
from hatch_aoti.export.program import export_model, load_program
from hatch_aoti.export.signature import read_signature
from hatch_aoti.job.recording import recording
from hatch_aoti.job.values import Artifact, ArtifactRecord, JobResult, Measured, ModelFailure, ModelJob, ModelResult
from hatch_aoti.job.verify import verify_artifact
from hatch_aoti.own_code import modules_of
from hatch_aoti.stages import last_stage, notes, report_stage

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from hatch_aoti.compiler.gpu import BuilderGpu
    from hatch_aoti.compiler.optimize import Plan
    from hatch_aoti.compiler.target import Target
    from hatch_aoti.compiler.toolchain import Toolchain
    from hatch_aoti.export.program import ExportedModel
    from hatch_aoti.job.dependencies import ExportDependencies
    from hatch_aoti.job.values import ModelRequest
    from hatch_aoti.runtime.contract import Signature
    from hatch_aoti.settings.model import ModelSettings

__all__ = ["preload", "preload_for", "read_artifact", "run"]

_RECORD = "artifact.json"
CONSTANTS = "constants.safetensors"
_MEASURED = "measured.json"


def preload_for(requests: Iterable[ModelRequest]) -> str:
    """Return what workers for these requests may have done before they are forked (see `workers.run_jobs`).

    Nothing where one of them uses a GPU, whose driver does not survive a fork, nor on macOS.
    """
    forkable = sys.platform != "darwin" and all(request.device == "cpu" for request in requests)
    return "hatch_aoti.job.run:preload" if forkable else ""


def preload() -> None:
    """Import what every job needs, and nothing of any project's."""
    for module in modules_of(__name__):
        importlib.import_module(module)
    compiler.preload()


def run(payload: Mapping[str, Any]) -> dict[str, Any]:
    """Do one `ModelJob`, given packed; return a `JobResult`, packed, expected failures included."""
    job = dataclasses.replace(unpack(ModelJob, payload), environ=dict(os.environ))
    unset: list[str] = []
    result: ModelResult | ModelFailure
    try:
        result = _run(job, unset)
    except BaseException as error:  # a model may raise anything, and each must be heard of
        traceback.print_exc()  # for the log
        failure = _failure(error)
        if failure is None:
            raise
        result = failure
    return pack(JobResult(dataclasses.replace(result, unset=tuple(unset))))


def _failure(error: BaseException) -> ModelFailure | None:
    """Return why a job ended with an error; None if it is a fault of ours."""
    killed = isinstance(error.__cause__, CompileError) and error.__cause__.killed
    if full := full_disk(error):
        return ModelFailure(last_stage(), full, MAKE_ROOM, killed=killed)
    if isinstance(error, ModelError):
        return ModelFailure(error.stage, error.reason, error.hint, error.details, killed=killed)
    if isinstance(error, Exception):
        return None
    return ModelFailure(
        last_stage(),
        f"its code {raised(error)}",
        "take that out of what runs when the model is imported, built or called",
        user_traceback(error),
        killed=killed,
    )


def _run(job: ModelJob, unset: list[str]) -> ModelResult:
    """Do the job; add to `unset` which variables that are not set the export looked up, also where it fails."""
    request, entry = job.request, job.request.entry
    try:
        check_options(whole_tables(entry.inductor_configs))  # an export may take minutes
    except CompileError as error:
        raise ModelError(entry.name, "compile", error.reason, hint=error.hint, details=error.details) from error
    exported, trace = _export(job, unset)
    try:
        artifacts = tuple(
            _artifact(job, exported, target, file_name)
            for target, file_name in zip(request.targets, request.file_names, strict=True)
        )
    except CompileError as error:
        raise ModelError(entry.name, "compile", error.reason, hint=error.hint, details=error.details) from error
    except ModelError:
        raise
    except AotiError as error:  # the cache's
        raise ModelError(entry.name, "compile", str(error)) from error
    return ModelResult(
        entry.name,
        request.device,
        exported.signature,
        artifacts,
        gpu=_gpu_record(request.gpu, artifacts),
        operators=exported.operators,
        trace=trace,
        sources=_source_digests(entry, job.root),
        notes=notes(),
    )


def _source_digests(entry: ModelSettings, root: Path) -> dict[str, str]:
    """Return the SHA-256 of the files that the settings `weights` and `exported` name, by those names."""
    return {file: file_digest(root / file) for file in entry.files(root)}


def _gpu_record(gpu: BuilderGpu | None, artifacts: tuple[Artifact, ...]) -> GpuRecord | None:
    if gpu is None:
        return None
    # Baselines are about the code for the CPU: the kernels of all artifacts are for the same GPUs.
    return GpuRecord(**dataclasses.asdict(gpu), architectures=architectures(gpu, artifacts[0].record.options))


@dataclasses.dataclass(frozen=True)
class _Exported:
    """A model on its way to the compiler."""

    entry: ModelSettings
    source: ExportedModel
    signature: Signature
    digest: str  # of the exported program
    plan: Plan
    operators: tuple[str, ...]  # those that torch alone does not have


def _export(job: ModelJob, unset: list[str]) -> tuple[_Exported, ExportDependencies | None]:
    """Import, build and export the model; return what came of it, and what that read."""
    entry = job.request.entry
    # Importing the project's modules must not write into its tree, which may be read-only or shared.
    sys.dont_write_bytecode = True
    ImportRoots(
        tuple(os.path.normpath(job.root / path) for path in job.request.import_paths),
        {name: os.path.normpath(job.root / path) for name, path in job.request.import_packages.items()},
    ).install()
    builtin = frozenset(registered_operators())
    # One thread: weights that the model computes must be the same on every number of cores.
    with recording(job.root) as recorder, one_thread():
        make = export_model if entry.exported is None else load_program
        try:
            source = make(entry, root=job.root, device=job.request.device)
        finally:
            unset += sorted(name for name, value in recorder.variables.items() if value is None)
    trace = recorder.finish(_cache(job).keyed_digest)
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
    plan = make_plan(source.program, signature, entry, device=job.request.device)
    operators = tuple(sorted(called_operators(source.program) & frozenset(registered_operators()) - builtin))
    exported = _Exported(entry, source, signature, program_digest(source.program), plan, operators)
    return exported, trace


def _artifact(job: ModelJob, exported: _Exported, target: Target, file_name: str) -> Artifact:
    """Take the artifact for one target from the cache, or make it and put it there."""
    entry, cache, toolchain = exported.entry, _cache(job), find_toolchain(job.environ)
    options = {
        **exported.plan.preferred_options(),
        **entry.inductor_configs,
        **_needed_options(exported.source, exported.signature),
        **exported.plan.inductor_options(),
        **gpu_options(job.request.gpu, entry.inductor_configs),
        **job.debugging.inductor_options(),
    }
    depends_on = {
        "program": exported.digest,
        "signature": exported.signature,
        "toolchain": toolchain.record(),
        "target": target,
        "gpu": job.request.gpu,  # Triton tunes kernels for it
        "options": options,
        "inline_products": exported.plan.inline,
        "folded_on": folding_features() if exported.plan.freeze else None,
        "seed": entry.seed,
        "verify": {"enabled": entry.verify, "rtol": entry.rtol, "atol": entry.atol},
        "include_sources": job.request.include_sources,
        "file_name": file_name,
        "hatch_aoti": job.request.code_digest,
    }
    if job.bypass_cache:
        depends_on["debugging"] = job.debugging.changes
    key = hashlib.sha256(json.dumps(encode(depends_on), sort_keys=True).encode()).hexdigest()
    made = False
    with cache.lock(key):  # another build that makes the same artifact is waited for, not repeated
        found = None if job.bypass_cache else cache.get(key)
        if found is None:
            made = True
            with cache.scratch("artifact") as directory:
                _make(job, exported, target, toolchain, options, file_name, directory)
                found = cache.put(key, directory / "entry")
    return read_artifact(found, target.name, key, file_name, cached=not made)


def read_artifact(entry: Path, target: str, key: str, file_name: str, *, cached: bool) -> Artifact:
    """Return the artifact in the cache entry `key`, whose directory is `entry`."""
    path, constants = entry / file_name, entry / CONSTANTS
    return Artifact(
        target=target,
        key=key,
        path=path,
        constants=constants if constants.is_file() else None,
        size=path.stat().st_size,
        cached=cached,
        record=unpack(ArtifactRecord, json.loads((entry / _RECORD).read_text(encoding="utf-8"))),
        measured=unpack(Measured, json.loads((entry / _MEASURED).read_text(encoding="utf-8"))),
    )


def _cache(job: ModelJob) -> Cache:

    return Cache(job.cache, trusted=job.trust_cache)


def _make(
    job: ModelJob,
    exported: _Exported,
    target: Target,
    toolchain: Toolchain,
    options: Mapping[str, Any],
    file_name: str,
    directory: Path,
) -> None:
    """Compile, package and verify one artifact into `directory / "entry"`."""
    entry, source = exported.entry, exported.source
    report_stage("compile" if len(job.request.targets) == 1 else f"compile for {target.name}")
    work, finished = job.folder / target.name, directory / "entry"
    work.mkdir()
    finished.mkdir()
    # Before it is compiled: the compiler may crash, and changes the program.
    _keep_for_reproduction(job, exported, target, toolchain, options, work)
    dump_minifier(source.program, all_options(target, options), "before", job.folder)
    try:
        with _environment(job.environ):  # not what the project's code has made of it, which no key knows of
            compiled = compile_program(
                source.program,
                target,
                toolchain,
                options=options,
                directory=work,
                cache=_cache(job),
                seed=entry.seed,
                inline_products=exported.plan.inline,
                include_sources=job.request.include_sources,
                symbols_for=job.final_debug_dir / target.name if job.debugging.symbols else None,
                sanitizers=job.debugging.sanitizers,
            )
    except CompileError:
        dump_minifier(source.program, all_options(target, options), "compile", job.folder)
        raise
    package = finished / file_name
    write_package(package, {ENTRY: compiled.files})
    constants = None
    if exported.plan.external:
        constants = finished / CONSTANTS
        write_constants(constants, entry.name, compiled.constants)
    try:
        with contextlib.chdir(job.folder) if job.debugging.saves_values else contextlib.nullcontext():
            verification = verify_artifact(
                package,
                constants,
                source,
                exported.signature,
                dataclasses.replace(entry, verify=False) if job.debugging.sanitizers else entry,
                device=job.request.device,
            )
    except ModelError:
        dump_minifier(source.program, all_options(target, options), "verify", job.folder)
        raise
    record = ArtifactRecord(
        program=exported.digest,
        constants=constants_digest(source.program),
        target=target,
        toolchain=toolchain.record(),
        options=all_options(target, options),
        folded_on=folding_features() if exported.plan.freeze else None,
        seed=entry.seed,
        verified=verification.record,
    )
    (finished / _MEASURED).write_text(json.dumps(pack(verification.measured)), encoding="utf-8")
    (finished / _RECORD).write_text(json.dumps(pack(record), sort_keys=True), encoding="utf-8")
    if not job.bypass_cache:
        shutil.rmtree(work)


@contextlib.contextmanager
def _environment(environ: Mapping[str, str]) -> Iterator[None]:
    """Have this process's environment be `environ` inside the block."""
    before = dict(os.environ)

    def have(variables: Mapping[str, str]) -> None:
        for name in os.environ.keys() - variables.keys():
            del os.environ[name]
        os.environ.update(variables)

    have(environ)
    try:
        yield
    finally:
        have(before)


def _keep_for_reproduction(
    job: ModelJob,
    exported: _Exported,
    target: Target,
    toolchain: Toolchain,
    options: Mapping[str, Any],
    work: Path,
) -> None:
    """Write what compiling again in plain torch takes: should this fail, the build tells people where it is."""
    if not (job.folder / PROGRAM).exists():
        save_program(exported.source.program, job.folder)
    write_script(
        work,
        model=exported.entry.name,
        options=all_options(target, options),
        seed=exported.entry.seed,
        toolchain=toolchain,
        operators_from=exported.entry.model.partition(":")[0] if exported.operators else "",
        import_from=[job.root / path for path in job.request.import_paths],
    )


def _needed_options(source: ExportedModel, signature: Signature) -> dict[str, Any]:
    """Return the options without which the compiled code would not do what eager does."""
    # Random numbers from eager's generator, in eager's order.
    drawn = {"fallback_random": True} if random_operators(source.program) else {}
    return {**inductor_options(signature), **drawn}
