"""From settings to what goes into a wheel: targets, a job for each model, and what their results need."""

from __future__ import annotations

import dataclasses
import os
import platform
from typing import TYPE_CHECKING

from hatch_aoti.artifact.archive import extract_objects
from hatch_aoti.artifact.shared_object import read_object
from hatch_aoti.build.kept import FOR_READING, LOG, keep, kept_for, relocated
from hatch_aoti.build.known import known_results, remember
from hatch_aoti.build.report import (
    announce_debugging,
    bypasses_cache,
    explain_devices,
    explain_tag,
    note_equal_weights,
    note_undefined,
    report_models,
    warn_of_size,
    warn_of_tuning,
    warn_of_vacuous_checks,
)
from hatch_aoti.build.resources import choose_job_count, read_resources
from hatch_aoti.build.workers import Job, run_jobs
from hatch_aoti.codec import DecodeError, pack, unpack
from hatch_aoti.compiler.gpu import find_gpu, resolve_devices
from hatch_aoti.compiler.target import builder_cpu_features, resolve_targets
from hatch_aoti.errors import AotiError, ModelError, Problem, SettingsError
from hatch_aoti.job.run import preload_for
from hatch_aoti.job.values import JobResult, ModelFailure, ModelJob, ModelRequest, ModelResult
from hatch_aoti.own_code import code_digest
from hatch_aoti.settings.environment import compose
from hatch_aoti.settings.reader import shaping_variables
from hatch_aoti.wheel.contents import make_contents
from hatch_aoti.wheel.model_files import artifact_name
from hatch_aoti.wheel.platform_tag import choose_tag, torch_platform_floor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from hatch_aoti.artifact.cache import Cache
    from hatch_aoti.build.progress import Reporter
    from hatch_aoti.build.workers import Outcome
    from hatch_aoti.compiler.gpu import BuilderGpu
    from hatch_aoti.compiler.target import Target
    from hatch_aoti.layout import Layout
    from hatch_aoti.settings.environment import WorkerEnvironment
    from hatch_aoti.settings.model import ModelSettings, Settings
    from hatch_aoti.wheel.contents import WheelContents
    from hatch_aoti.wheel.platform_tag import TagChoice

__all__ = ["Built", "build_models"]


@dataclasses.dataclass(frozen=True)
class Built:
    """The outcome of a build: what to put into the wheel, and the wheel's platform."""

    contents: WheelContents
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
    """Compile all models of a project, or take them from the cache, and put together what goes into the wheel.

    `version` is the project's, `torch_version` that of the torch that compiles. Raises `AotiError`; models that fail
    are reported together, after the others have been finished and cached.
    """
    targets = resolve_targets(
        settings.target,
        system=platform.system().lower(),
        machine=platform.machine(),
        builder_features=builder_cpu_features(),
    )
    environment = compose(environ, settings.pass_environment)
    devices, gpu = resolve_devices(settings.models, lambda: find_gpu(environment.variables))
    explain_devices(settings.models, devices, gpu, reporter)
    requests = {
        name: _request(
            entry, settings, layout, targets, devices[name], gpu if devices[name] == "cuda" else None, root=root
        )
        for name, entry in sorted(settings.models.items())
    }
    announce_debugging(settings, reporter)
    results = _run(requests, settings, layout, cache, reporter, root=root, environment=environment)
    tag = _choose_tag(results, settings.platform_tag)
    contents = make_contents(
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
    report_models(results, reporter)
    note_undefined(results, reporter)
    warn_of_vacuous_checks(results, reporter)
    explain_tag(tag, reporter)
    warn_of_tuning(settings.models, reporter)
    note_equal_weights(results, settings.models, reporter)
    warn_of_size(contents, reporter)
    cache.trim(settings.cache_size)
    return Built(contents, tag)


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
    bypass_cache = bypasses_cache(settings)
    known = {} if bypass_cache else known_results(requests, cache, root=root, environ=environment.variables)
    results, errors = list(known.values()), []
    with cache.scratch("build") as scratch:
        _check_logs(settings, scratch, root=root, environment=environment)

        def jobs_for(names: Iterable[str], folder: Path) -> list[Job]:
            return [
                _job(requests[name], settings, layout, cache, folder, root=root, environment=environment)
                for name in names
            ]

        with reporter:
            left = {name: request for name, request in requests.items() if name not in known}
            outcomes = _outcomes(left, jobs_for, settings, scratch, reporter)
        for outcome in outcomes:
            try:
                results.append(_result(outcome, cache, layout.package, environment))
            except ModelError as error:
                errors.append(error)
            else:
                if bypass_cache:
                    reporter.note(f"{outcome.job.name}: for reading: {keep(outcome, cache, layout.package)}")
    if errors:
        count = f"{len(errors)} of {len(requests)} models" if len(requests) > 1 else "the model"
        raise AotiError(f"{count} could not be built\n\n" + "\n\n".join(str(error) for error in errors))
    for result in results:
        for note in result.notes:
            reporter.note(f"{result.name}: {note}")
        if advice := environment.advice(result.unset):
            reporter.note(f"{result.name}: {advice}")
    if not bypass_cache:
        remember(results, requests, cache, environ=environment.variables)
    return sorted(results, key=lambda result: result.name)


def _outcomes(
    requests: Mapping[str, ModelRequest],
    jobs_for: Callable[[Iterable[str], Path], list[Job]],
    settings: Settings,
    scratch: Path,
    reporter: Reporter,
) -> list[Outcome]:
    """Run the jobs of the models in `requests`: several at once, and one at a time from where memory does not do.

    `jobs_for(names, folder)` makes their jobs, each with a new directory in `folder`.
    """

    def run(names: Sequence[str], folder: Path, at_once: int) -> list[Outcome]:
        return run_jobs(
            jobs_for(names, folder),
            at_once=at_once,
            # When debugging, each worker imports torch itself: it reads on import where its output goes.
            preload="" if settings.debugging else preload_for([requests[name] for name in names]),
            on_stage=lambda job, stage: reporter.stage(job.name, stage),
            stop_after=lambda outcome: at_once > 1 and _lacked_memory(outcome),
        )

    chosen = choose_job_count(len(requests), read_resources())
    if settings.jobs is None and chosen.reason:
        reporter.note(f"{chosen.count} of {len(requests)} models at once: {chosen.reason}")
    outcomes = run(list(requests), scratch, settings.jobs or chosen.count)
    again = [outcome.job.name for outcome in outcomes if _lacked_memory(outcome) or not outcome.begun]
    if again and len(requests) > 1 and (settings.jobs or chosen.count) > 1:
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
    return outcome.killed or (isinstance(result := _answer(outcome), ModelFailure) and result.killed)


def _answer(outcome: Outcome) -> ModelResult | ModelFailure | None:
    """Return what a worker answered; None if it did not. What is no answer of ours counts as none."""
    try:
        return None if outcome.crashed else unpack(JobResult, outcome.result).result
    except DecodeError as error:
        return ModelFailure(outcome.stage, f"its worker left something else than a result: {error}")


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

    return ModelRequest(
        # The bundle is put together from the finished artifacts: a model that changes to another is as it was.
        entry=dataclasses.replace(entry, bundle=None),
        import_paths=tuple(os.path.relpath(path, root) for path in layout.import_paths),
        import_packages={name: os.path.relpath(path, root) for name, path in layout.import_packages.items()},
        targets=tuple(targets),
        file_names=tuple(artifact_name(entry.name, target, targets) for target in targets),
        include_sources=settings.include_sources,
        device=device,
        gpu=gpu,
        code_digest=code_digest("hatch_aoti.job.run"),
    )


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

    name = request.entry.name
    directory = scratch / name
    (directory / "tmp").mkdir(parents=True)
    (directory / FOR_READING).mkdir()
    job = ModelJob(
        request=request,
        root=root,
        cache=cache.root,
        trust_cache=cache.trusted,
        folder=directory / FOR_READING,
        final_debug_dir=cache.debug_folder(layout.package, name),
        debugging=settings.debugging,
        bypass_cache=bypasses_cache(settings),
    )
    variables = {**_variables(environment, directory), **settings.debugging.environ(directory / FOR_READING)}
    function, timeout = "hatch_aoti.job.run:run", settings.build_timeout
    return Job(name, function, pack(job), directory, directory / LOG, variables, root, timeout)


def _variables(environment: WorkerEnvironment, directory: Path) -> dict[str, str]:
    return environment.for_job(temporary=os.fspath(directory / "tmp"), inductor=os.fspath(directory / "inductor"))


def _result(outcome: Outcome, cache: Cache, project: str, environment: WorkerEnvironment) -> ModelResult:
    """Read a job's outcome; a failure is a `ModelError` that names what outlives the build's scratch directory."""
    name = outcome.job.name
    result = _answer(outcome)
    if isinstance(result, ModelResult):
        return result
    if result is None:
        log = outcome.job.log.read_text(encoding="utf-8", errors="replace")
        details = "\n".join(log.splitlines()[-15:])
        result = ModelFailure(outcome.stage, outcome.describe_crash(), _after_a_crash(outcome), details)
    else:
        advice = [environment.advice(result.unset)]
        if result.stage.startswith("compile"):
            advice.append(environment.advice_for_the_compiler())
        result = dataclasses.replace(result, hint="; ".join(text for text in (result.hint, *advice) if text))
    folder, place = outcome.job.directory / FOR_READING, cache.debug_folder(project, name)
    stage, reason, hint, details = (
        relocated(text, folder, place) for text in (result.stage, result.reason, result.hint, result.details)
    )
    kept = kept_for(outcome, cache, project)
    raise ModelError(
        name, stage, reason, hint=hint, details=details, log=kept.log, folder=kept.folder, script=kept.script
    )


def _after_a_crash(outcome: Outcome) -> str:
    if outcome.timed_out:
        return (
            "see what it waits for; if it only needs more time, raise `build-timeout` under [tool.aoti], or the "
            "variable HATCH_AOTI_BUILD_TIMEOUT"
        )
    if outcome.killed:
        return "build on a machine, or in a container, with more memory, and close what else uses it"
    return "the end of its output is above; see whether the model crashes in plain PyTorch, too"


def _check_logs(settings: Settings, scratch: Path, *, root: Path, environment: WorkerEnvironment) -> None:
    """Refuse a value of TORCH_LOGS that would make every worker fail when it imports torch."""
    value = settings.debugging.output.get("TORCH_LOGS")
    if value is None:
        return
    directory = scratch / "check-logs"
    (directory / "tmp").mkdir(parents=True)
    variables = _variables(environment, directory)
    task = ("hatch_aoti.settings.debugging:check_logs", {"value": value})
    [outcome] = run_jobs([Job("check-logs", *task, directory, directory / LOG, variables, root)], at_once=1)
    if outcome.result:
        raise SettingsError([Problem("TORCH_LOGS", outcome.result)])


def _choose_tag(results: Sequence[ModelResult], override: str | None) -> TagChoice:

    objects = [
        read_object(data, name=f"{artifact.path.name} ({model})")
        for result in results
        for artifact in result.artifacts
        for model, data in extract_objects(artifact.path).items()
    ]
    return choose_tag(
        objects,
        system=platform.system().lower(),
        machine=platform.machine(),
        torch_floor=torch_platform_floor(),
        override=override,
    )
