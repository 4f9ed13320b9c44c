"""From settings to a bundle: resolves targets, runs a job for each model, and reads what the results need."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import platform
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from hatch_aoti.errors import AotiError, ModelError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hatch_aoti.accessor.contract import Signature
    from hatch_aoti.bundle import Bundle
    from hatch_aoti.cache import Cache
    from hatch_aoti.job import ModelResult
    from hatch_aoti.layout import Layout
    from hatch_aoti.platform_tag import TagChoice
    from hatch_aoti.progress import Reporter
    from hatch_aoti.settings import ModelSettings, Settings
    from hatch_aoti.target import Target
    from hatch_aoti.workers import Job, Outcome

__all__ = ["Built", "build_models"]

# Modules of hatch-aoti that shape what an artifact's bytes are, so that an artifact made by other code is not reused.
_SHAPING = ("archive", "compiler", "job", "signature", "source", "target", "verify")


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
    torch_version: str,
    environ: Mapping[str, str],
) -> Built:
    """Compile all models of a project, or take them from the cache, and bundle them.

    Raises `AotiError`; models that fail are reported together, after the others have been finished and cached.
    """
    from hatch_aoti.bundle import make_bundle
    from hatch_aoti.target import builder_cpu_features, resolve_targets

    targets = resolve_targets(
        settings.target,
        system=platform.system().lower(),
        machine=platform.machine(),
        builder_features=builder_cpu_features(),
    )
    results = _run(settings, layout, targets, cache, reporter, root=root, environ=environ)
    tag = _choose_tag(results, settings.platform_tag)
    bundle = make_bundle(
        results, settings.models, targets, package=layout.package, torch_version=torch_version, tag=tag
    )
    _report(results, reporter, tag)
    return Built(bundle, tag)


def _run(
    settings: Settings,
    layout: Layout,
    targets: Sequence[Target],
    cache: Cache,
    reporter: Reporter,
    *,
    root: Path,
    environ: Mapping[str, str],
) -> list[ModelResult]:
    from hatch_aoti.workers import default_job_count, run_jobs

    with cache.scratch("build") as scratch:
        jobs = [
            _job(entry, settings, layout, targets, cache, scratch, root=root, environ=environ)
            for _, entry in sorted(settings.models.items())
        ]
        with reporter:
            outcomes = run_jobs(
                jobs,
                at_once=settings.jobs or default_job_count(len(jobs)),
                on_stage=lambda job, stage: reporter.stage(job.name, stage),
            )
        results, errors = [], []
        for outcome in outcomes:
            try:
                results.append(_result(outcome, cache))
            except ModelError as error:
                errors.append(error)
    if errors:
        count = f"{len(errors)} of {len(jobs)} models" if len(jobs) > 1 else "the model"
        raise AotiError(f"{count} could not be built\n\n" + "\n\n".join(str(error) for error in errors))
    return results


def _job(
    entry: ModelSettings,
    settings: Settings,
    layout: Layout,
    targets: Sequence[Target],
    cache: Cache,
    scratch: Path,
    *,
    root: Path,
    environ: Mapping[str, str],
) -> Job:
    from hatch_aoti.bundle import artifact_name
    from hatch_aoti.job import ModelJob
    from hatch_aoti.workers import Job

    directory = scratch / entry.name
    (directory / "tmp").mkdir(parents=True)
    payload = ModelJob(
        entry=entry.to_json(),
        root=os.fspath(root),
        import_paths=layout.import_paths,
        import_packages=layout.import_packages,
        targets=tuple(dataclasses.asdict(target) for target in targets),
        file_names=tuple(artifact_name(entry.name, target, targets) for target in targets),
        cache=os.fspath(cache.root),
        include_sources=settings.include_sources,
        code_digest=_code_digest(),
    )
    return Job(
        entry.name,
        "hatch_aoti.job:run",
        dataclasses.asdict(payload),
        directory,
        directory / "log.txt",
        {
            **{name: value for name, value in environ.items() if not name.startswith("TORCHINDUCTOR_")},
            # Everything that inductor writes goes where it is swept away.
            "TORCHINDUCTOR_CACHE_DIR": os.fspath(directory / "inductor"),
            "TMPDIR": os.fspath(directory / "tmp"),
            "PYTHONHASHSEED": "0",
            "PYTHONUNBUFFERED": "1",
            "LC_ALL": "C.UTF-8",  # compiler messages in English, whatever the user's language
            "SOURCE_DATE_EPOCH": "315532800",  # for __DATE__ and __TIME__; 1980-01-01, as in the archives
        },
        root,
    )


def _result(outcome: Outcome, cache: Cache) -> ModelResult:
    """Read a job's outcome; a failure is a `ModelError` whose log outlives the build's scratch directory."""
    from hatch_aoti.job import ModelResult

    name = outcome.job.name
    if outcome.crashed:
        log = outcome.job.log.read_text(encoding="utf-8", errors="replace")
        raise ModelError(
            name,
            outcome.stage,
            outcome.describe_crash(),
            hint="the end of its output is above; run the model in plain PyTorch to see whether it crashes there too",
            details="\n".join(log.splitlines()[-15:]),
            log=_keep_log(outcome, cache),
        )
    result = ModelResult.from_json(outcome.result)
    if result.error is not None:
        raise ModelError(name, **result.error, log=_keep_log(outcome, cache))
    return result


def _keep_log(outcome: Outcome, cache: Cache) -> str:
    kept = cache.root / "logs" / f"{outcome.job.name}.txt"
    kept.parent.mkdir(exist_ok=True)
    shutil.copyfile(outcome.job.log, kept)
    return os.fspath(kept)


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


def _report(results: Sequence[ModelResult], reporter: Reporter, tag: TagChoice) -> None:
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
    reporter.note(f"platform tag {tag.tag}: {tag.reason}")


def _inputs(signature: Signature) -> str:
    """Say in one line what a model takes: `x: float32[batch, 10], batch = 1…1024`."""
    tensors = [f"{leaf.path}: {leaf}" for leaf in signature.inputs]
    return ", ".join([*tensors, *map(str, signature.dims)]) or "none"


def _code_digest() -> str:
    """Return a hash of hatch-aoti's own code that shapes artifacts."""
    home = Path(__file__).parent
    digest = hashlib.sha256()
    for name in _SHAPING:
        digest.update((home / f"{name}.py").read_bytes())
    for path in sorted((home / "accessor").glob("*.py")):  # verification calls models through the accessor
        digest.update(path.read_bytes())
    return digest.hexdigest()
