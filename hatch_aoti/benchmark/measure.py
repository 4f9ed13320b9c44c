"""What is run when: builds first, then one model after another."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hatch_aoti import __version__
from hatch_aoti.benchmark.bench import Bench, Subject, scratch_directory
from hatch_aoti.benchmark.builds import build_wheels, prepare_artifacts, unpacked
from hatch_aoti.benchmark.figures import Machine, Report
from hatch_aoti.benchmark.measure_model import measure_model
from hatch_aoti.benchmark.sizes import read_manifest
from hatch_aoti.benchmark.tasks import ProjectModel
from hatch_aoti.errors import AotiError, did_you_mean
from hatch_aoti.export.importing import ImportRoots
from hatch_aoti.wheel.manifest import MANIFEST

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from hatch_aoti.benchmark.options import Options
    from hatch_aoti.build.progress import Reporter
    from hatch_aoti.plugin.project import Project

__all__ = ["measure_package", "measure_project"]


def measure_project(
    project: Project, options: Options, reporter: Reporter, *, command: str, environ: Mapping[str, str]
) -> Report:
    """Build a project's wheel, make the other contenders' artifacts, and measure. Raises `AotiError`.

    Nothing is written into the project; everything temporary is removed, and no process is left, however this ends.
    """
    settings = project.settings
    names = _chosen(options.models, settings.models)
    with scratch_directory() as scratch:
        bench = Bench(scratch, options, reporter, dict(environ), project.root)
        builds, wheel = build_wheels(bench, project, names)
        site = unpacked(wheel, scratch / "site")
        folder = site.joinpath(*project.layout.package.split("."))
        if not (folder / MANIFEST).is_file():
            raise AotiError(
                "the wheel has no compiled models: turn the build hook on with [tool.hatch.build.targets.wheel.hooks."
                "aoti] in pyproject.toml"
            )
        roots = ImportRoots(project.layout.import_paths, project.layout.import_packages)
        sources = {name: ProjectModel(entry, project.root, roots) for name, entry in settings.models.items()}
        models = []
        for name in names:
            _require_cpu(folder, name)
            reference = bench.reference(name, sources[name])
            models.append(Subject(name, project.layout.package, folder, sources[name], reference, site))
        # The script of the comparison compiles what the wheel has; otherwise only what is measured is needed.
        failures, scripts = prepare_artifacts(bench, [sources[name] for name in (sources if options.builds else names)])
        report = _measure(bench, project.root.name, command, models, failures)
        if builds is not None:
            builds = dataclasses.replace(builds, script_cold=scripts[0], script_warm=scripts[1])
        return dataclasses.replace(report, builds=builds, wheel_bytes=wheel.stat().st_size)


def measure_package(
    package: str, options: Options, reporter: Reporter, *, command: str, environ: Mapping[str, str]
) -> Report:
    """Measure the models of an installed package: the wheel's call against its `load()`. Raises `AotiError`."""
    try:
        module = importlib.import_module(f"{package}._models")
        folder, available = Path(module.__file__ or "").parent, module.MODELS
    except (ImportError, AttributeError) as error:
        raise AotiError(
            f"{package}._models cannot be imported here ({error}): name the import package of an installed wheel that "
            "hatch-aoti built, in the environment that hatch-aoti runs in"
        ) from error
    names = _chosen(options.models, available)
    with scratch_directory() as scratch:
        bench = Bench(scratch, options, reporter, dict(environ), Path.cwd())
        models = []
        for name in names:
            _require_cpu(folder, name)
            models.append(Subject(name, package, folder, None, bench.reference(name, package=package)))
        return _measure(bench, package, command, models, {})


def _measure(
    bench: Bench, subject: str, command: str, models: Iterable[Subject], failures: Mapping[tuple[str, str], str]
) -> Report:
    measured = tuple(measure_model(bench, model, failures) for model in models)
    return Report(subject, command, _machine(bench.options.threads), measured)


def _chosen(asked: Sequence[str], available: Mapping[str, Any]) -> list[str]:
    for name in asked:
        if name not in available:
            raise AotiError(
                f"there is no model `{name}`.{did_you_mean(name, available)} There are: {', '.join(available)}"
            )
    return [name for name in available if not asked or name in asked]


def _require_cpu(folder: Path, name: str) -> None:
    device = read_manifest(folder).models[name].device
    if device != "cpu":
        raise AotiError(
            f"`{name}` is compiled for {device}, and bench measures models for the CPU; leave it out with --model"
        )


def _machine(threads: int) -> Machine:
    from importlib.metadata import version

    name = platform.processor()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    system = f"{platform.system()} {platform.machine()}"
    python = platform.python_version()
    cores = os.cpu_count() or 1
    return Machine(name or "unknown", cores, threads, system, python, version("torch"), __version__)
