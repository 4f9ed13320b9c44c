"""What is built before anything is measured: the project's wheel, and the artifacts of the other contenders."""

from __future__ import annotations

import compileall
import shutil
import zipfile
from typing import TYPE_CHECKING

from hatch_aoti.benchmark.bench import log_tail
from hatch_aoti.benchmark.contenders import CONTENDERS
from hatch_aoti.benchmark.figures import Builds
from hatch_aoti.benchmark.processes import run_job
from hatch_aoti.benchmark.tasks import PreparationTask, WheelTask
from hatch_aoti.errors import AotiError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from hatch_aoti.benchmark.bench import Bench
    from hatch_aoti.benchmark.tasks import ProjectModel
    from hatch_aoti.plugin.project import Project

__all__ = ["build_wheels", "prepare_artifacts", "unpacked"]


def build_wheels(bench: Bench, project: Project, names: Sequence[str]) -> tuple[Builds | None, Path]:
    """Build the wheel; with `builds`, from an empty cache, then changed and unchanged, each timed."""

    def build(say: str, changed: str | None = None) -> tuple[Path, float]:
        bench.reporter.note(say)
        directory = bench.directory("wheel")
        cache = {"HATCH_AOTI_CACHE_DIR": str(bench.scratch / "cache")} if bench.options.builds else {}
        task = WheelTask(directory, changed)
        outcome, seconds = run_job("wheel:build", task, directory, environ={**bench.environ, **cache}, cwd=project.root)
        if outcome.crashed:
            raise AotiError(f"the wheel of {project.root} cannot be built:\n{log_tail(directory)}")
        return directory / outcome.result, seconds

    if not bench.options.builds:
        return None, build("building the wheel")[0]
    wheel, cold = build("building the wheel, with an empty cache")
    _, one_changed = build(f"building the wheel again, with another seed for {names[0]}", names[0])
    _, unchanged = build("building the wheel again, unchanged")
    return Builds(len(project.settings.models), names[0], cold, one_changed, unchanged, None, None), wheel


def prepare_artifacts(
    bench: Bench, models: Sequence[ProjectModel]
) -> tuple[dict[tuple[str, str], str], list[float | None]]:
    """Make the artifacts of the contenders that need some.

    Returns why that failed, by contender and model, and how long stock AOTInductor's script took, with cold caches and
    with warm ones.
    """
    failures: dict[tuple[str, str], str] = {}
    times: list[float | None] = [None, None]
    keys = [key for key in bench.options.contenders if CONTENDERS[key].artifact]
    if bench.options.builds and "aotinductor" not in keys:
        keys.append("aotinductor")
    for key in keys:
        directory, artifacts = bench.directory(key), bench.scratch / "artifacts" / key
        artifacts.mkdir(parents=True)
        task = PreparationTask(key, tuple(models), artifacts)
        timed = bench.options.builds and key == "aotinductor"
        for number, caches in enumerate(("cold", "warm") if timed else ("",)):
            name = CONTENDERS[key].name
            bench.reporter.note(f"{name}: compiling {len(models)} in one script{caches and f', {caches} caches'}")
            outcome, seconds = run_job("preparation:prepare_all", task, directory, environ=bench.environ, cwd=bench.cwd)
            reasons = (
                dict.fromkeys([model.entry.name for model in models], outcome.describe_crash())
                if outcome.crashed
                else outcome.result
            )
            failed = {(key, model): reason for model, reason in reasons.items() if reason is not None}
            failures |= failed
            if timed and not failed:
                times[number] = seconds
        shutil.rmtree(directory, ignore_errors=True)
    return failures, times


def unpacked(wheel: Path, directory: Path) -> Path:
    """Unpack a wheel as installers do, bytecode included."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(directory)
    compileall.compile_dir(directory, quiet=2)
    return directory
