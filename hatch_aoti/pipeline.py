"""From settings to a bundle: resolves targets, runs a job for each model, and reads what the results need."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hatch_aoti.debugging import relocated, settle
from hatch_aoti.environment import compose
from hatch_aoti.errors import AotiError, CompileError, ModelError, Problem, SettingsError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from hatch_aoti.accessor.contract import Signature
    from hatch_aoti.bundle import Bundle
    from hatch_aoti.cache import Cache
    from hatch_aoti.device import BuilderGpu
    from hatch_aoti.environment import WorkerEnvironment
    from hatch_aoti.job import ModelRequest, ModelResult
    from hatch_aoti.layout import Layout
    from hatch_aoti.platform_tag import TagChoice
    from hatch_aoti.progress import Reporter
    from hatch_aoti.settings import ModelSettings, Settings
    from hatch_aoti.target import Target
    from hatch_aoti.workers import Job, Outcome

__all__ = ["Built", "build_models"]

# In the directory of a job: what it leaves for people to read, with its log.
_FOR_READING = "for-reading"
_LOG = "log.txt"

# What indexes admit by default: PyPI's limit for one file, in bytes.
_INDEX_LIMIT = 100 << 20

# From this size on, in bytes, it is worth saying that an artifact has the weights of another one.
_WORTH_SHARING = 1 << 20
_NO_CONSTANTS = hashlib.sha256().hexdigest()  # what `constants_digest` says of a program without any


@dataclasses.dataclass(frozen=True)
class Built:
    """The outcome of a build: what to put into the wheel, and the wheel's platform."""

    bundle: Bundle
    tag: TagChoice


def build_models(
    settings: Settings,
    layout: Layout,
    cache: Cache,
    reporter: Reporter,
    *,
    root: Path,
    version: str,
    torch_version: str,
    environ: Mapping[str, str],
) -> Built:
    """Compile all models of a project, or take them from the cache, and bundle them.

    `version` is the project's, `torch_version` that of the torch that compiles. Raises `AotiError`; models that fail
    are reported together, after the others have been finished and cached.
    """
    from hatch_aoti.bundle import make_bundle
    from hatch_aoti.device import find_gpu, resolve_devices
    from hatch_aoti.settings import shaping_variables
    from hatch_aoti.target import builder_cpu_features, resolve_targets

    targets = resolve_targets(
        settings.target,
        system=platform.system().lower(),
        machine=platform.machine(),
        builder_features=builder_cpu_features(),
    )
    environment = compose(environ, settings.pass_environment)
    devices, gpu = resolve_devices(settings.models, lambda: find_gpu(environment.variables))
    _explain_devices(settings.models, devices, gpu, reporter)
    requests = {
        name: _request(
            entry, settings, layout, targets, devices[name], gpu if devices[name] == "cuda" else None, root=root
        )
        for name, entry in sorted(settings.models.items())
    }
    _announce_debugging(settings, reporter)
    results = _run(requests, settings, layout, cache, reporter, root=root, environment=environment)
    tag = _choose_tag(results, settings.platform_tag)
    bundle = make_bundle(
        results,
        settings.models,
        targets,
        package=layout.package,
        version=version,
        torch_version=torch_version,
        tag=tag,
        cache=cache,
        debug=settings.debugging.changes,
        environment=shaping_variables(environ),
    )
    _report(results, reporter)
    _note_undefined(results, reporter)
    _explain_tag(tag, reporter)
    _warn_of_tuning(settings.models, reporter)
    _note_equal_weights(results, settings.models, reporter)
    _warn_of_size(bundle, reporter)
    cache.trim(settings.cache_size)
    return Built(bundle, tag)


def _run(
    requests: Mapping[str, ModelRequest],
    settings: Settings,
    layout: Layout,
    cache: Cache,
    reporter: Reporter,
    *,
    root: Path,
    environment: WorkerEnvironment,
) -> list[ModelResult]:
    anew = _compiles_anew(settings)
    known = {} if anew else _known_results(requests, cache, root=root, environ=environment.variables)
    results, errors = list(known.values()), []
    with cache.scratch("build") as scratch:
        _check_logs(settings, scratch, root=root, environment=environment)

        def jobs_for(names: Iterable[str], folder: Path) -> list[Job]:
            return [
                _job(requests[name], settings, layout, cache, folder, root=root, environment=environment)
                for name in names
            ]

        with reporter:
            outcomes = _outcomes(
                [name for name in requests if name not in known], jobs_for, settings, scratch, reporter
            )
        for outcome in outcomes:
            try:
                results.append(_result(outcome, cache, layout.package, environment))
            except ModelError as error:
                errors.append(error)
            else:
                if anew:
                    reporter.note(f"{outcome.job.name}: for reading: {_keep(outcome, cache, layout.package)}")
    if errors:
        count = f"{len(errors)} of {len(requests)} models" if len(requests) > 1 else "the model"
        raise AotiError(f"{count} could not be built\n\n" + "\n\n".join(str(error) for error in errors))
    for result in results:
        if advice := environment.advice(result.unset):
            reporter.note(f"{result.name}: {advice}")
    if not anew:
        _remember(results, requests, cache, environ=environment.variables)
    return sorted(results, key=lambda result: result.name)


def _outcomes(
    names: Sequence[str],
    jobs_for: Callable[[Iterable[str], Path], list[Job]],
    settings: Settings,
    scratch: Path,
    reporter: Reporter,
) -> list[Outcome]:
    """Run the jobs of the models called `names`: several at once, and one at a time from where memory does not do.

    `jobs_for(names, folder)` makes their jobs, each with a new directory in `folder`.
    """
    from hatch_aoti.job import preload_for
    from hatch_aoti.resources import choose_job_count, read_resources
    from hatch_aoti.workers import run_jobs

    def run(names: Iterable[str], folder: Path, at_once: int) -> list[Outcome]:
        jobs = jobs_for(names, folder)
        return run_jobs(
            jobs,
            at_once=at_once,
            # When debugging, each worker imports torch itself: it reads on import where its output goes.
            preload="" if settings.debugging else preload_for([job.payload for job in jobs]),
            on_stage=lambda job, stage: reporter.stage(job.name, stage),
            stop_after=lambda outcome: at_once > 1 and _lacked_memory(outcome),
        )

    chosen = choose_job_count(len(names), read_resources())
    if settings.jobs is None and chosen.reason:
        reporter.note(f"{chosen.count} of {len(names)} models at once: {chosen.reason}")
    outcomes = run(names, scratch, settings.jobs or chosen.count)
    again = [outcome.job.name for outcome in outcomes if _lacked_memory(outcome) or not outcome.begun]
    if again and len(names) > 1 and (settings.jobs or chosen.count) > 1:
        killed = " and ".join(outcome.job.name for outcome in outcomes if _lacked_memory(outcome))
        reporter.warn(
            f"the system killed {killed}, most likely because memory ran out; what is left is built one at a time: "
            f"{', '.join(again)}. To have it so from the start, write `jobs = 1` under [tool.aoti]"
        )
        later = {outcome.job.name: outcome for outcome in run(again, scratch / "again", 1)}
        outcomes = [later.get(outcome.job.name, outcome) for outcome in outcomes]
    return outcomes


def _lacked_memory(outcome: Outcome) -> bool:
    """Whether a model failed because the system killed its worker, or a compiler, for want of memory."""
    return outcome.killed or bool(outcome.result and outcome.result["killed"])


def _request(
    entry: ModelSettings,
    settings: Settings,
    layout: Layout,
    targets: Sequence[Target],
    device: str,
    gpu: BuilderGpu | None,
    *,
    root: Path,
) -> ModelRequest:
    from hatch_aoti.job import ModelRequest
    from hatch_aoti.model_files import artifact_name
    from hatch_aoti.own_code import code_digest

    return ModelRequest(
        # The bundle is put together from the finished artifacts: a model that changes to another is as it was.
        entry=dataclasses.replace(entry, bundle=None).to_json(),
        import_paths=tuple(os.path.relpath(path, root) for path in layout.import_paths),
        import_packages={name: os.path.relpath(path, root) for name, path in layout.import_packages.items()},
        targets=tuple(dataclasses.asdict(target) for target in targets),
        file_names=tuple(artifact_name(entry.name, target, targets) for target in targets),
        include_sources=settings.include_sources,
        device=device,
        gpu=None if gpu is None else dataclasses.asdict(gpu),
        code_digest=code_digest("hatch_aoti.job"),
    )


def _known_results(
    requests: Mapping[str, ModelRequest], cache: Cache, *, root: Path, environ: Mapping[str, str]
) -> dict[str, ModelResult]:
    """Return the results of an earlier build for the models whose export would read the very same things again."""
    known = {}
    for name, request in requests.items():
        roots = (os.path.normpath(root / path) for path in request.import_paths)
        search_path = [*(path for path in roots if path not in sys.path), *sys.path]
        for note in cache.notes(_request_key(request, environ)):
            # A note is a hint: one that a build of ours would not write is none.
            with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError):
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
    from hatch_aoti.accessor.contract import Signature
    from hatch_aoti.job import ModelResult, read_artifact
    from hatch_aoti.trace import Trace

    if not Trace.from_json(note["trace"]).holds(root, environ, search_path, cache.keyed_digest):
        return None
    result = ModelResult.from_json(note)
    Signature.from_json(result.signature)  # raises if it is none
    if (result.name, result.device, result.error) != (name, request.device, None):
        return None
    artifacts = []
    for artifact, target, file_name in zip(result.artifacts, request.targets, request.file_names, strict=True):
        entry = cache.get(artifact.key)
        if entry is None:
            return None
        artifacts.append(read_artifact(entry, target["name"], artifact.key, file_name, cached=True))
    return dataclasses.replace(result, artifacts=tuple(artifacts))


def _remember(
    results: Sequence[ModelResult],
    requests: Mapping[str, ModelRequest],
    cache: Cache,
    *,
    environ: Mapping[str, str],
) -> None:
    """Note what the exports of this build read, for the next one."""
    for result in results:
        if result.trace is not None:
            cache.add_note(_request_key(requests[result.name], environ), dataclasses.asdict(result))


def _request_key(request: ModelRequest, environ: Mapping[str, str]) -> str:
    """Return a hash over everything that a result depends on and that no trace records."""
    from hatch_aoti.target import folding_features
    from hatch_aoti.toolchain import find_toolchain

    try:
        toolchain = find_toolchain(environ).record()
    except CompileError:  # every model's worker will say so
        toolchain = {}
    numpy = importlib.util.find_spec("numpy")
    known = {
        "request": dataclasses.asdict(request),
        "toolchain": toolchain,
        "cpu": folding_features(),
        "python": sys.version,
        "numpy": metadata.version("numpy") if numpy is not None else None,
        "system": [platform.system(), platform.machine()],
    }
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()


def _job(
    request: ModelRequest,
    settings: Settings,
    layout: Layout,
    cache: Cache,
    scratch: Path,
    *,
    root: Path,
    environment: WorkerEnvironment,
) -> Job:
    from hatch_aoti.workers import Job

    name = request.entry["name"]
    directory = scratch / name
    (directory / "tmp").mkdir(parents=True)
    (directory / _FOR_READING).mkdir()
    payload = {
        "request": dataclasses.asdict(request),
        "root": os.fspath(root),
        "cache": os.fspath(cache.root),
        "trust_cache": cache.trusted,
        "folder": os.fspath(directory / _FOR_READING),
        "folder_later": os.fspath(cache.debug_folder(layout.package, name)),
        "debugging": dataclasses.asdict(settings.debugging),
        "anew": _compiles_anew(settings),
    }
    variables = {**_variables(environment, directory), **settings.debugging.environ(directory / _FOR_READING)}
    function, timeout = "hatch_aoti.job:run", settings.build_timeout
    return Job(name, function, payload, directory, directory / _LOG, variables, root, timeout)


def _variables(environment: WorkerEnvironment, directory: Path) -> dict[str, str]:
    return environment.for_job(temporary=os.fspath(directory / "tmp"), inductor=os.fspath(directory / "inductor"))


def _result(outcome: Outcome, cache: Cache, project: str, environment: WorkerEnvironment) -> ModelResult:
    """Read a job's outcome; a failure is a `ModelError` that names what outlives the build's scratch directory."""
    from hatch_aoti.job import ModelResult

    name = outcome.job.name
    if outcome.crashed:
        log = outcome.job.log.read_text(encoding="utf-8", errors="replace")
        error = {
            "stage": outcome.stage,
            "reason": outcome.describe_crash(),
            "hint": _after_a_crash(outcome),
            "details": "\n".join(log.splitlines()[-15:]),
        }
    else:
        result = ModelResult.from_json(outcome.result)
        if result.error is None:
            return result
        error = result.error
        advice = [environment.advice(result.unset)]
        if error["stage"].startswith("compile"):
            advice.append(environment.advice_for_the_compiler())
        error = {**error, "hint": "; ".join(text for text in (error["hint"], *advice) if text)}
    folder, place = outcome.job.directory / _FOR_READING, cache.debug_folder(project, name)
    error = {part: relocated(text, folder, place) for part, text in error.items()}
    raise ModelError(name, **error, **_kept_for(outcome, cache, project))


def _after_a_crash(outcome: Outcome) -> str:
    if outcome.timed_out:
        return (
            "see what it waits for; if it only needs more time, raise `build-timeout` under [tool.aoti], or the "
            "variable HATCH_AOTI_BUILD_TIMEOUT"
        )
    if outcome.killed:
        return "build on a machine, or in a container, with more memory, and close what else uses it"
    return "the end of its output is above; see whether the model crashes in plain PyTorch, too"


def _kept_for(outcome: Outcome, cache: Cache, project: str) -> dict[str, str]:
    """Keep what a failed job left; return the parts of a `ModelError` that say where.

    Never raises: what failed must be heard of, also on a full disk.
    """
    from hatch_aoti.compiler.reproduce import PROGRAM, SCRIPT

    try:
        folder = _keep(outcome, cache, project)
        # The latest is that of the target that failed.
        scripts = sorted(folder.glob(f"*/{SCRIPT}"), key=lambda path: path.stat().st_mtime_ns)
    except (OSError, AotiError) as error:
        return {"log": f"could not be kept ({error})"}
    kept = {"log": os.fspath(folder / _LOG)}
    if scripts and (folder / PROGRAM).is_file():
        kept |= {"folder": os.fspath(folder), "script": os.fspath(scripts[-1])}
    return kept


def _keep(outcome: Outcome, cache: Cache, project: str) -> Path:
    """Move what a job left for people to read to its place in the cache, with its log; return that."""
    folder, name = outcome.job.directory / _FOR_READING, outcome.job.name
    shutil.copyfile(outcome.job.log, folder / _LOG)
    settle(folder, cache.debug_folder(project, name))
    return cache.keep_folder(folder, project, name)


def _compiles_anew(settings: Settings) -> bool:
    return bool(settings.debugging) or settings.keep_intermediates


def _announce_debugging(settings: Settings, reporter: Reporter) -> None:
    if not _compiles_anew(settings):
        return
    asked = [str(settings.debugging)] if settings.debugging else []
    asked += ["keep-intermediates"] if settings.keep_intermediates else []
    reporter.note(f"every model is compiled anew, because of {' and '.join(asked)}")
    if settings.debugging.changes:
        changes = ", ".join(f"{name}={value}" for name, value in settings.debugging.changes.items())
        reporter.warn(f"this is a DEBUG BUILD ({changes}): its compiled code is not what a release has")


def _check_logs(settings: Settings, scratch: Path, *, root: Path, environment: WorkerEnvironment) -> None:
    """Refuse a value of TORCH_LOGS that would make every worker fail when it imports torch."""
    from hatch_aoti.workers import Job, run_jobs

    value = settings.debugging.output.get("TORCH_LOGS")
    if value is None:
        return
    directory = scratch / "check-logs"
    (directory / "tmp").mkdir(parents=True)
    variables = _variables(environment, directory)
    task = ("hatch_aoti.debugging:check_logs", {"value": value})
    [outcome] = run_jobs([Job("check-logs", *task, directory, directory / _LOG, variables, root)], at_once=1)
    if outcome.result:
        raise SettingsError([Problem("TORCH_LOGS", outcome.result)])


def _choose_tag(results: Sequence[ModelResult], override: str | None) -> TagChoice:
    from hatch_aoti.archive import extract_objects
    from hatch_aoti.elf import read_object
    from hatch_aoti.platform_tag import choose_tag, torch_platform_floor

    objects = [
        read_object(data, name=f"{Path(artifact.path).name} ({model})")
        for result in results
        for artifact in result.artifacts
        for model, data in extract_objects(Path(artifact.path)).items()
    ]
    return choose_tag(
        objects,
        system=platform.system().lower(),
        machine=platform.machine(),
        torch_floor=torch_platform_floor(),
        override=override,
    )


def _report(results: Sequence[ModelResult], reporter: Reporter) -> None:
    from hatch_aoti.progress import Row
    from hatch_aoti.signature import Signature

    reporter.table(
        Row(
            model=result.name,
            target=artifact.target,
            inputs=_inputs(Signature.from_json(result.signature)),
            size=artifact.size,
            origin="from the cache" if artifact.cached else "compiled",
            error="not checked" if artifact.max_error is None else f"{artifact.max_error:.1e}",
            seconds=reporter.seconds(result.name),
        )
        for result in results
        for artifact in result.artifacts
    )


def _explain_devices(
    entries: Mapping[str, ModelSettings], devices: Mapping[str, str], gpu: BuilderGpu | None, reporter: Reporter
) -> None:
    """Say what `device = "auto"` came to, and which GPUs will run what is compiled for one."""
    from hatch_aoti.device import architectures, gpu_options

    for name, entry in sorted(entries.items()):
        if devices[name] == "cuda" and gpu is not None:
            options = {**gpu_options(gpu, entry.inductor_configs), **entry.inductor_configs}
            reporter.note(
                f"{name}: for cuda, compiled on {gpu.name}; its kernels are {', '.join(architectures(gpu, options))}"
                + ("" if gpu.toolkit else " (fatbinary or nvcc, not found here, would keep PTX for newer GPUs)")
            )
        elif entry.device == "auto":
            reporter.note(f'{name}: `device = "auto"` is cpu here')


def _explain_tag(tag: TagChoice, reporter: Reporter) -> None:
    """Say which platform the wheel is for, why, what would make it fit older systems, and what it takes for granted."""
    reporter.note(f"platform tag {tag.tag}: {_demangled(tag.reason)}")
    if tag.lower:
        reporter.note(f"for older systems: {_demangled(tag.lower)}")
    if tag.foreign:
        reporter.warn(
            f"the compiled objects need {', '.join(tag.foreign)}, which neither {tag.tag} nor torch provides: whoever "
            "installs the wheel must have it, in the version of this machine"
        )


def _demangled(text: str) -> str:
    """Replace C++ symbols by what people call them, where binutils' `c++filt` is installed, as it is with most g++."""
    if shutil.which("c++filt") is None:
        return text
    return re.sub(r"\b_Z\w+", lambda symbol: _demangle(symbol[0]), text)


def _demangle(symbol: str) -> str:
    done = subprocess.run(["c++filt", symbol], capture_output=True, text=True, check=False)
    return done.stdout.strip() or symbol


def _warn_of_tuning(entries: Mapping[str, ModelSettings], reporter: Reporter) -> None:
    for name, entry in sorted(entries.items()):
        tuned = sorted(
            option for option, value in entry.inductor_configs.items() if option.startswith("max_autotune") and value
        )
        if tuned and not entry.inductor_configs.get("deterministic"):
            reporter.note(
                f"{name}: `{tuned[0]}` chooses kernels by measuring them here, so another build may choose others and "
                "give another wheel"
            )


def _note_undefined(results: Sequence[ModelResult], reporter: Reporter) -> None:
    """Say where a model answers with numbers what eager answers with NaN: no fault, but worth knowing."""
    for result in results:
        calls = dict.fromkeys(call for artifact in result.artifacts for call in artifact.undefined_on)
        if calls:
            reporter.note(
                f"{result.name}: with {' and '.join(calls)}, eager gives NaN, or other integers, where the compiled "
                "model gives numbers"
            )


def _note_equal_weights(
    results: Sequence[ModelResult], entries: Mapping[str, ModelSettings], reporter: Reporter
) -> None:
    """Say which models of a bundle have the same weights compiled into each of them, if it is worth the words."""
    owners: dict[tuple[str, str], list[str]] = {}
    for result in results:
        bundle, artifact = entries[result.name].bundle, result.artifacts[0]
        if bundle is not None and artifact.constants is None and artifact.size >= _WORTH_SHARING:
            owners.setdefault((bundle, artifact.record["constants"]), []).append(result.name)
    for (bundle, constants), names in owners.items():
        if len(names) > 1 and constants != _NO_CONSTANTS:
            reporter.note(
                f"bundle {bundle}: {' and '.join(names)} have the same weights, compiled into each of them; "
                '`constants = "external"` in their tables stores them once (and leaves prepacking out)'
            )


def _warn_of_size(bundle: Bundle, reporter: Reporter) -> None:
    from hatch_aoti.progress import human_size

    size = sum(path.stat().st_size for path in bundle.artifacts.values()) + sum(map(len, bundle.texts.values()))
    if size > _INDEX_LIMIT:
        reporter.warn(
            f"the models take {human_size(size)} in the wheel (before compression, which gains little on weights); "
            f"PyPI, and most other indexes by default, take files up to {_INDEX_LIMIT >> 20} MiB. Ask the index for a "
            "higher limit, or split the models over several distributions"
        )


def _inputs(signature: Signature) -> str:
    """Say in one line what a model takes: `x: float32[batch, 10], batch = 1…1024`."""
    tensors = [f"{leaf.path}: {leaf}" for leaf in signature.inputs]
    return ", ".join([*tensors, *map(str, signature.dims)]) or "none"
